"""Which server answers, who it is, what its limits are and how many tokens it counts: asked before anything is sent."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec.structs import replace

from loadgen.servers.auth import NO_AUTH, Access, require_no_credentials
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.backends.base import Backend, GetJson, ServerFacts, as_dict, model_cards
from loadgen.servers.backends.dialect import Dialect, ResultT, Route, round_up_to_pieces
from loadgen.servers.backends.error_messages import error_text, one_line
from loadgen.servers.errors import (
    ClientLimitError,
    EndpointError,
    LimitError,
    ModelError,
    UnauthorizedError,
    UncountableError,
    UnreachableError,
    VersionError,
    WrongServerError,
)
from loadgen.servers.marks import Mark
from loadgen.workloads.request import Request

CONNECT_TIMEOUT_S = 0.2
MODELS_LISTED = 20
"""Names of models that a message lists."""


def resolve(
    server: str,
    url: str | None,
    environ: Mapping[str, str],
    *,
    real: bool = False,
    model: str | None = None,
    access: Access = NO_AUTH,
) -> ServerFacts | None:
    """Find the server, or None: then the simulated one is meant. `url` wins, then LOADGEN_<SERVER>_URL; what answers
    there must be the server named. Then the usual port on this machine, if the server named answers there. `real` makes
    finding none an error. Raises what `probe` raises."""
    kind = BACKENDS[server]
    if given := url or environ.get(kind.url_variable):
        return probe(given, server, model=model, access=access)
    if not kind.port:
        raise UnreachableError(f"--server {server} has no usual port", f"pass --url, or set {kind.url_variable}")
    # A plain connect keeps the common case, no server, below a millisecond: no HTTP client is imported for it.
    here = f"http://127.0.0.1:{kind.port}"
    try:
        socket.create_connection(("127.0.0.1", kind.port), CONNECT_TIMEOUT_S).close()
        return probe(here, server, model=model, access=access)
    except ClientLimitError:
        raise
    except (UnreachableError, WrongServerError):
        if real:
            raise
    except OSError as error:
        if not isinstance(error, ConnectionRefusedError | TimeoutError):
            from loadgen.servers.json_client import raise_if_local_limit

            raise_if_local_limit(here, "127.0.0.1", kind.port, error)
    if real or not kind.simulated:
        raise UnreachableError(
            f"no {kind.title} answers on port {kind.port} of this machine",
            f"start it, pass --url, or set {kind.url_variable}",
        )
    return None


def probe(url: str, server: str = "", *, model: str | None = None, access: Access = NO_AUTH) -> ServerFacts:
    """Ask the server at `url` who it is. `server` is a key of KINDS; without it any of them will do. `model` is the one
    to ask for, if not its first. Raises UnreachableError, UnauthorizedError, WrongServerError when it is not the server
    named, or none that is known, and ModelError when it lists other models only."""
    from loadgen.servers.json_client import JsonClient  # 15 ms that finding no server at all must not cost

    base = base_url(url)
    with closing(JsonClient(base, access)) as ask:
        facts = _recognised(ask, base, [BACKENDS[server]] if server else _surest_first())
        if facts is None and model and server and not BACKENDS[server].port:
            facts = ServerFacts(server, base)  # a protocol, which takes no more than the model's name
        if facts is None:
            raise _wrong_server(ask, base, BACKENDS.get(server))
        kind = BACKENDS[facts.name]
        facts = replace(facts, title=kind.title, notes={**kind.notes, **facts.notes}, model=_listed(ask, facts, model))
        # Hosted servers answer 401 to any path that they do not know, and gateways may not answer at all.
        with suppress(UnauthorizedError, UnreachableError):
            status, answer = ask("/simulated/status")
            speed = as_dict(answer).get("speed")
            if status == 200 and isinstance(speed, int | float):
                hardware = as_dict(as_dict(answer).get("hardware"))
                return replace(facts, simulated=True, speed=float(speed), hardware=hardware)
        return apply_mark(facts, ask.mark)


def apply_mark(facts: ServerFacts, mark: Mark | None) -> ServerFacts:
    """The facts of a server, which is simulated if something that it said has the mark."""
    return facts if mark is None or facts.simulated else replace(facts, simulated=True, speed=mark.speed)


def docker_proxy_target(url: str, proc: Path = Path("/proc")) -> str:
    """Where Docker's docker-proxy forwards what is sent to this URL: the container's own; empty where none is found.
    The engine starts one for each published port, and what comes from loopback passes through it, byte by byte."""
    requested = urlsplit(url)
    if requested.hostname not in ("localhost", "127.0.0.1", "::1"):
        return ""
    for process in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, KeyError):
            words = (process / "cmdline").read_text("utf-8", errors="replace").split("\0")
            given = dict(pairwise(words))
            if not words[0].endswith("docker-proxy") or given.get("-host-port") != str(requested.port):
                continue
            listens, forwards = (ipaddress.ip_address(given[f"-{end}-ip"]) for end in ("host", "container"))
            with suppress(PermissionError):  # of another user: taken to be in this network
                if (process / "ns/net").stat().st_ino != (proc / "self/ns/net").stat().st_ino:
                    continue
            if listens.is_loopback or listens.is_unspecified:
                address = f"[{forwards}]" if forwards.version == 6 else forwards
                return f"{requested.scheme}://{address}:{given['-container-port']}"
    return ""


def base_url(url: str) -> str:
    """The URL that a server's paths are appended to: many people paste one that ends in `/v1`."""
    parts = urlsplit(require_no_credentials(url))
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def endpoint_dialect(server: str, endpoint: str | None) -> Dialect:
    """The server's dialect on this endpoint, or on its native one. Raises EndpointError where it has none."""
    kind = BACKENDS[server]
    result = kind.dialects.get(endpoint or kind.native)
    if result is None:
        raise EndpointError(
            f"--endpoint {endpoint}: {server} has no such endpoint", f"It has: {', '.join(kind.dialects)}."
        )
    return result


def dialect_for_version(dialect: Dialect, facts: ServerFacts, say: Callable[[str], None], *, force: bool) -> Dialect:
    """The dialect as this version speaks it. Raises VersionError for one that is known to mislead, unless forced."""
    if why := dialect.misleading_reason(facts.version):
        if not force:
            raise VersionError(
                f"{facts.url} misleads on {dialect.endpoint}: {why}",
                f"use its native endpoint, --endpoint {BACKENDS[dialect.server].native}, or measure it anyway: --force",
            )
        say(f"FORCED: {why}")
    return dialect.variant(facts.version)


def drop_refused_fields(
    dialect: Dialect, facts: ServerFacts, say: Callable[[str], None], *, timeout_s: float, access: Access = NO_AUTH
) -> Dialect:
    """The dialect without the fields that this server refuses, which a request for one token finds out; as it is where
    its kind takes them all. What else the server refuses is left to the run to record."""
    from loadgen.servers.json_client import JsonClient

    with closing(JsonClient(facts.url, access, timeout_s)) as ask:
        while dialect.drop_refused_field is not None:
            status, answer = ask(dialect.path, msgspec.Raw(dialect.encode(Request(0, "Hello", 0, 1), facts.model)))
            words = error_text(status, msgspec.json.encode(answer)) if 400 <= status < 500 else ""
            if (changed := dialect.drop_refused_field(words)) is None:
                break
            dialect = changed
    if dialect.dropped_fields:
        say(
            f"{facts.url} refuses {', '.join(dialect.dropped_fields)} on {dialect.endpoint}: "
            "left out, or by a newer name"
        )
    return dialect


def check_limits(
    facts: ServerFacts, n: int, input_tokens: int, output_tokens: int, *, over_limit: bool = False
) -> None:
    """Compare a burst of `n` requests with the server's limits, and raise a LimitError that lists every limit exceeded.

    Servers answer too much work in quiet ways: vLLM and LightLLM shorten the output, TGI answers 200 with an error
    inside the stream. So the burst is refused here instead. With `over_limit` the number of requests is not compared:
    the caller wants to see which of them the server rejects.
    """
    total = f"{input_tokens} prompt + {output_tokens} output tokens"
    exceeded = _exceeded(facts, "total", input_tokens + output_tokens, total)
    exceeded += _exceeded(facts, "prompt", input_tokens, f"{input_tokens} prompt tokens")
    too_long = bool(exceeded)
    if not over_limit:
        exceeded += _exceeded(facts, "requests", n, f"{n} requests at once")
    if not exceeded:
        return
    hint = f"ask for less, or restart the server with a higher {', '.join(flag for _, flag in exceeded)}"
    if not too_long:
        hint += "; or send them all the same, and see which are rejected: --over-limit"
    raise LimitError(
        f"{BACKENDS[facts.name].display_name} at {facts.url}: {'; '.join(said for said, _ in exceeded)}", hint
    )


def fitting_output(facts: ServerFacts, input_tokens: int, output_tokens: int) -> int:
    """Return the output tokens that a request for `output_tokens` becomes on this server.

    A server that generates in pieces ends a longer response with the piece that reaches the number, or before a piece
    that does not fit behind the prompt and what was generated before.
    """
    piece = facts.notes.get("prompt_piece_tokens", 0)
    wanted = round_up_to_pieces(output_tokens, piece)
    if wanted <= piece:
        return wanted
    total, prompt = (facts.limits.get(f"max_{name}_tokens") for name in ("total", "input"))
    while wanted > piece and total is not None and input_tokens + wanted > total:
        wanted -= piece
    while wanted > piece and prompt is not None and input_tokens + wanted - piece > prompt:
        wanted -= piece
    return wanted


def exceeded_request_limit(facts: ServerFacts, n: int) -> str:
    """Say that `n` requests at once are more than the server takes; empty where they are not."""
    return "; ".join(said for said, _ in _exceeded(facts, "requests", n, f"{n} requests at once"))


def _exceeded(facts: ServerFacts, bounds: str, need: int, what: str) -> list[tuple[str, str]]:
    """Return the limits of this type that the load exceeds, as sentences, and the server's option that raises each."""
    return [
        (f"{what} exceed its {name} of {facts.limits[name]}", limit.flag)
        for name, limit in BACKENDS[facts.name].limits.items()
        if limit.bounds == bounds and need > facts.limits.get(name, need)
    ]


class ServerTokenizer(msgspec.Struct, frozen=True):
    """The server under test as a judge of lengths, through one kept connection. Raises UncountableError when the server
    answers anything but a count, UnreachableError and UnauthorizedError."""

    ask: Callable[[str, object], tuple[int, Any]]
    route: Route[int]
    model: str
    id_route: Route[list[int]] | None  # The route that gives token ids, where the server has one and its API takes ids
    plain: ServerTokenizer | None = None  # Where counting generates: the count of text alone, without running it
    words: tuple[str, ...] = ()

    @property
    def mark(self) -> Mark | None:
        """The mark of a simulated server in what it has answered here."""
        return getattr(self.ask, "mark", None)

    @property
    def generates(self) -> bool:
        """Whether counting makes the server run the text, and so leaves it in the server's prefix cache."""
        return self.route.generates

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text when it is sent as a prompt, special tokens and chat template included."""
        return [self._post(self.route, text) for text in texts]

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens; empty when the server does not tell them."""
        return self._post(self.id_route, text) if self.id_route else []

    def _post(self, route: Route[ResultT], text: str) -> ResultT:
        status, answer = self.ask(route.path, route.body(text, self.model))
        if status == 200:
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return route.read(answer)
        raise UncountableError(
            f"the server does not say how long a prompt is: {status} from {route.path}, {one_line(str(answer))}",
            "use another --endpoint, or go on without its count: --lengths approximate, or tokenizer with --tokenizer",
        )


@contextmanager
def open_tokenizer(
    facts: ServerFacts, dialect: Dialect, *, timeout_s: float | None = None, access: Access = NO_AUTH
) -> Iterator[ServerTokenizer]:
    """Open a connection on which the server counts prompts for this dialect. Where it has to generate to do so, an
    answer may take `timeout_s`."""
    from loadgen.servers.json_client import JsonClient

    kind = BACKENDS[facts.name]

    def known(route: Route[ResultT] | None) -> Route[ResultT] | None:
        return route if route and route.path in facts.count_routes else None

    route = known(dialect.count) or dialect.count_by_running
    with closing(JsonClient(facts.url, access, timeout_s if route.generates else None)) as ask:
        tokenizer = ServerTokenizer(ask, route, facts.model, known(kind.ids))
        if plain := known(dialect.count_text):
            tokenizer = replace(tokenizer, plain=replace(tokenizer, route=plain))
        yield tokenizer


def _surest_first() -> list[Backend]:
    """Most servers answer like the generic one as well, so it comes last."""
    return sorted(BACKENDS.values(), key=lambda kind: kind.port is None)


def _recognised(ask: GetJson, url: str, kinds: Iterable[Backend]) -> ServerFacts | None:
    """What the first of these kinds that knows the server read of it. A key that one of them lacked counts only where
    no other does."""
    refused = None
    for kind in kinds:
        try:
            if facts := kind.identify(ask, url):
                return facts
        except UnauthorizedError as error:
            refused = refused or error
    if refused:
        raise refused
    return None


def _listed(ask: GetJson, facts: ServerFacts, model: str | None) -> str:
    """The model to ask for. Raises ModelError for one that is not among those the server knows."""
    if model is None:
        return facts.model
    known = {facts.model} - {""}
    with suppress(UnauthorizedError):
        known |= {str(card["id"]) for card in model_cards(ask("/v1/models")[1]) if "id" in card}
    if known and model not in known:
        more = f" and {len(known) - MODELS_LISTED} more" if len(known) > MODELS_LISTED else ""
        raise ModelError(
            f"--model {model}: {facts.url} does not serve it",
            f"it has: {', '.join(sorted(known)[:MODELS_LISTED])}{more}; without --model its first is asked",
        )
    return model


def _wrong_server(ask: GetJson, url: str, named: Backend | None) -> WrongServerError:
    result = None
    with suppress(UnauthorizedError):
        result = _recognised(ask, url, _surest_first())
    if result and named:
        called = f"{BACKENDS[result.name].display_name} {result.version}".rstrip()
        return WrongServerError(f"this is {called}, not {named.display_name}: {url}", f"use --server {result.name}")
    wanted = named.display_name if named else join_or(kind.display_name for kind in BACKENDS.values())
    with suppress(UnauthorizedError):
        status, _ = ask("/v1/models")
        wanted += f": /v1/models {'lists no model' if status == 200 else f'answers {status}'}"
    generic = _surest_first()[-1].name
    return WrongServerError(
        f"something answers at {url}, but not as {wanted}",
        f"check host, port and path in --url; --server {generic} --model NAME goes on without /v1/models",
    )
