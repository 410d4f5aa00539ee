"""Finds the server under test, and reads its version, model and limits before the run sends requests.

The module also compares the planned load with the server's limits, and counts prompt tokens on the server.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
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
from loadgen.servers.side_by_side import CONNECTIONS, map_side_by_side
from loadgen.workloads.request import Request

CONNECT_TIMEOUT_S = 0.2
MODELS_LISTED = 20
"""Maximum number of models that an error message names."""


def resolve(
    server: str,
    url: str | None,
    environ: Mapping[str, str],
    *,
    real: bool = False,
    model: str | None = None,
    access: Access = NO_AUTH,
) -> ServerFacts | None:
    """Find the requested server and return its facts, or None if a simulated server should replace it.

    The URL of the server is `url`, or else the environment variable LOADGEN_<SERVER>_URL. If there is a URL, the
    requested server must answer at this URL. Without a URL, the backend's default port on this machine is tried, and
    the result is None if no such server answers there.

    Raises the errors of `probe`. Raises UnreachableError instead of returning None if `real` is set, or if the backend
    has no simulated server."""
    backend = BACKENDS[server]
    requested_url = url or environ.get(backend.url_variable)
    if requested_url:
        return probe(requested_url, server, model=model, access=access)
    if not backend.port:
        raise UnreachableError(f"--server {server} has no default port", f"pass --url, or set {backend.url_variable}")
    # Usually no server runs. A plain connect finds that out within a millisecond, without importing an HTTP client.
    local_url = f"http://127.0.0.1:{backend.port}"
    try:
        socket.create_connection(("127.0.0.1", backend.port), CONNECT_TIMEOUT_S).close()
        return probe(local_url, server, model=model, access=access)
    except ClientLimitError:
        raise
    except (UnreachableError, WrongServerError):
        if real:
            raise
    except OSError as error:
        if not isinstance(error, ConnectionRefusedError | TimeoutError):
            from loadgen.servers.json_client import raise_if_local_limit

            raise_if_local_limit(local_url, "127.0.0.1", backend.port, error)
    if real or not backend.simulated:
        raise UnreachableError(
            f"no {backend.title} answers on port {backend.port} of this machine",
            f"start it, pass --url, or set {backend.url_variable}",
        )
    return None


def probe(url: str, server: str = "", *, model: str | None = None, access: Access = NO_AUTH) -> ServerFacts:
    """Identify the server at `url`, and return its version, model and limits.

    `server` is a key of BACKENDS, or "" to accept any backend. `model` is the model to request, by default the first
    model that the server lists. Raises

    - UnreachableError if no server answers.
    - UnauthorizedError if the server requires an API key, or refuses the one that was sent.
    - WrongServerError if the server is not the requested one, or not a server of any known backend.
    - ModelError if the server lists only other models.
    """
    from loadgen.servers.json_client import JsonClient  # the import takes 15 ms, so it waits until a server answers

    base = base_url(url)
    with closing(JsonClient(base, access)) as client:
        facts = _identify(client, base, [BACKENDS[server]] if server else _most_specific_first())
        if facts is None and model and server and not BACKENDS[server].port:
            facts = ServerFacts(server, base)  # for a generic protocol the name of the model is enough
        if facts is None:
            raise _wrong_server(client, base, BACKENDS.get(server))
        backend = BACKENDS[facts.name]
        notes = {**backend.notes, **facts.notes}
        facts = replace(facts, title=backend.title, notes=notes, model=_checked_model(client, facts, model))
        # Hosted servers answer 401 to any unknown path, and gateways may not answer at all.
        with suppress(UnauthorizedError, UnreachableError):
            status, answer = client("/simulated/status")
            speed = as_dict(answer).get("speed")
            if status == 200 and isinstance(speed, int | float):
                hardware = as_dict(as_dict(answer).get("hardware"))
                return replace(facts, simulated=True, speed=float(speed), hardware=hardware)
        return apply_mark(facts, client.mark)


def apply_mark(facts: ServerFacts, mark: Mark | None) -> ServerFacts:
    """Return the facts of a simulated server if `mark` is given, otherwise the unchanged facts.

    Every response of a simulated server says SIMULATED and states the server's clock speed. `mark` contains this
    information, or is None if the server is real."""
    if mark is None or facts.simulated:
        return facts
    return replace(facts, simulated=True, speed=mark.speed)


def docker_proxy_target(url: str, proc: Path = Path("/proc")) -> str:
    """Return the URL of the container behind a port that Docker publishes, or "" if `url` leads to no such port.

    Docker starts a `docker-proxy` process for each published port. Every byte from loopback passes through this
    process."""
    requested = urlsplit(url)
    if requested.hostname not in ("localhost", "127.0.0.1", "::1"):
        return ""
    for process in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, KeyError):
            words = (process / "cmdline").read_text("utf-8", errors="replace").split("\0")
            options = dict(pairwise(words))
            if not words[0].endswith("docker-proxy") or options.get("-host-port") != str(requested.port):
                continue
            host_address = ipaddress.ip_address(options["-host-ip"])
            container_address = ipaddress.ip_address(options["-container-ip"])
            # The namespace of another user's process cannot be read. The process is assumed to be in this one.
            with suppress(PermissionError):
                if (process / "ns/net").stat().st_ino != (proc / "self/ns/net").stat().st_ino:
                    continue
            if host_address.is_loopback or host_address.is_unspecified:
                address = f"[{container_address}]" if container_address.version == 6 else container_address
                return f"{requested.scheme}://{address}:{options['-container-port']}"
    return ""


def base_url(url: str) -> str:
    """Return the URL to which a server's paths are appended.

    A final `/v1` is removed, because many users paste it. Raises SecretError for a URL with credentials."""
    parts = urlsplit(require_no_credentials(url))
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def endpoint_dialect(server: str, endpoint: str | None) -> Dialect:
    """Return the dialect of a server for an endpoint, by default for the server's native endpoint.

    Raises EndpointError if the server does not have the endpoint."""
    backend = BACKENDS[server]
    dialect = backend.dialects.get(endpoint or backend.native)
    if dialect is None:
        raise EndpointError(
            f"--endpoint {endpoint}: {server} has no such endpoint", f"It has: {', '.join(backend.dialects)}."
        )
    return dialect


def dialect_for_version(dialect: Dialect, facts: ServerFacts, say: Callable[[str], None], *, force: bool) -> Dialect:
    """Return the dialect, adapted to the version of the server.

    Raises VersionError if measurements of this version are known to be misleading. With `force`, the reason is passed
    to `say` instead of raising the error."""
    reason = dialect.misleading_reason(facts.version)
    if reason:
        if not force:
            native = BACKENDS[dialect.server].native
            raise VersionError(
                f"{facts.url} gives misleading figures on {dialect.endpoint}: {reason}",
                f"use its native endpoint (--endpoint {native}), or measure it anyway: --force",
            )
        say(f"FORCED: {reason}")
    return dialect.variant(facts.version)


def drop_refused_fields(
    dialect: Dialect, facts: ServerFacts, say: Callable[[str], None], *, timeout_s: float, access: Access = NO_AUTH
) -> Dialect:
    """Return the dialect without the request fields that the server refuses.

    To find these fields, the function sends requests for one token until the server names no further field. Refusals
    for other reasons are ignored here, because the run records them."""
    from loadgen.servers.json_client import JsonClient

    with closing(JsonClient(facts.url, access, timeout_s)) as client:
        while dialect.drop_refused_field is not None:
            body = msgspec.Raw(dialect.encode(Request(0, "Hello", 0, 1), facts.model))
            status, answer = client(dialect.path, body)
            refusal = error_text(status, msgspec.json.encode(answer)) if 400 <= status < 500 else ""
            changed = dialect.drop_refused_field(refusal)
            if changed is None:
                break
            dialect = changed
    if dialect.dropped_fields:
        names = ", ".join(dialect.dropped_fields)
        say(f"{facts.url} refuses {names} on {dialect.endpoint}: left out, or sent under a newer name")
    return dialect


def check_limits(
    facts: ServerFacts, n: int, input_tokens: int, output_tokens: int, *, over_limit: bool = False
) -> None:
    """Raise LimitError if a burst of `n` requests exceeds the server's limits.

    The message lists every exceeded limit. The burst is refused before it is sent, because servers do not report the
    problem clearly: vLLM and LightLLM shorten the output, and TGI answers 200 with an error inside the stream. With
    `over_limit`, the number of requests is not checked, because the user wants to see which requests the server
    rejects."""
    load = f"{input_tokens} prompt + {output_tokens} output tokens"
    exceeded = _exceeded(facts, "total", input_tokens + output_tokens, load)
    exceeded += _exceeded(facts, "prompt", input_tokens, f"{input_tokens} prompt tokens")
    too_long = bool(exceeded)
    if not over_limit:
        exceeded += _exceeded(facts, "requests", n, f"{n} requests at once")
    if not exceeded:
        return
    hint = f"request less, or restart the server with a higher {', '.join(flag for _, flag in exceeded)}"
    if not too_long:
        hint += "; or send every request and see which are rejected: --over-limit"
    sentences = "; ".join(sentence for sentence, _ in exceeded)
    raise LimitError(f"{BACKENDS[facts.name].display_name} at {facts.url}: {sentences}", hint)


def fitting_output(facts: ServerFacts, input_tokens: int, output_tokens: int) -> int:
    """Return the number of output tokens that the server generates for a request of `output_tokens` tokens.

    Some servers generate long responses in pieces of fixed size. Such a response ends with the piece that reaches
    `output_tokens`. The response ends earlier if the next piece would exceed a limit of the server. The prompt and the
    tokens generated so far count toward this limit."""
    piece_tokens = facts.notes.get("prompt_piece_tokens", 0)
    tokens = round_up_to_pieces(output_tokens, piece_tokens)
    if tokens <= piece_tokens:
        return tokens
    total_limit = facts.limits.get("max_total_tokens")
    prompt_limit = facts.limits.get("max_input_tokens")
    while tokens > piece_tokens and total_limit is not None and input_tokens + tokens > total_limit:
        tokens -= piece_tokens
    while tokens > piece_tokens and prompt_limit is not None and input_tokens + tokens - piece_tokens > prompt_limit:
        tokens -= piece_tokens
    return tokens


def exceeded_request_limit(facts: ServerFacts, n: int) -> str:
    """Return a message if `n` concurrent requests exceed the server's limit, otherwise ""."""
    return "; ".join(sentence for sentence, _ in _exceeded(facts, "requests", n, f"{n} requests at once"))


def _exceeded(facts: ServerFacts, bounds: str, value: int, load: str) -> list[tuple[str, str]]:
    """Return the limits that `value` exceeds, as pairs of a message and the server option that raises the limit.

    `bounds` is the type of the limits, as in ServerLimit. `load` is the description of `value` in the message."""
    return [
        (f"{load} exceed its {name} of {facts.limits[name]}", limit.flag)
        for name, limit in BACKENDS[facts.name].limits.items()
        if limit.bounds == bounds and value > facts.limits.get(name, value)
    ]


class ServerTokenizer(msgspec.Struct, frozen=True):
    """Counts tokens with HTTP requests to the server under test, over persistent connections.

    Many texts are counted side by side over several connections.

    Raises UncountableError if a response contains no count, and UnreachableError or UnauthorizedError if a request
    fails."""

    ask: Callable[[str, object], tuple[int, Any]]
    route: Route[int]
    model: str
    id_route: Route[list[int]] | None  # Route that returns token ids. None: the server has no such route.
    plain: ServerTokenizer | None = None
    """Counts the tokens of a text, without a chat template and without generating a response. None: the server cannot
    do this."""
    words: tuple[str, ...] = ()
    more_clients: Callable[[int], Sequence[Callable[[str, object], tuple[int, Any]]]] = lambda _: ()
    """Returns up to this number of further connections."""

    @property
    def mark(self) -> Mark | None:
        """The mark that says SIMULATED in the server's responses, or None for a real server."""
        return getattr(self.ask, "mark", None)

    @property
    def counting_path(self) -> str:
        """Path of the route that counts a prompt without running it, or of the route that runs it."""
        return self.plain.route.path if self.plain else self.route.path

    @property
    def generates(self) -> bool:
        """True if the server runs the model on a text to count its tokens.

        The text then stays in the server's prefix cache."""
        return self.route.generates

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of prompt tokens of each text, including special tokens and the chat template."""
        clients = [self.ask, *self.more_clients(min(CONNECTIONS, len(texts)) - 1)]
        tokenizers = [replace(self, ask=client) for client in clients]
        return map_side_by_side([partial(tokenizer._post, self.route) for tokenizer in tokenizers], texts)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, or an empty list if the server does not return ids."""
        return self._post(self.id_route, text) if self.id_route else []

    def _post(self, route: Route[ResultT], text: str) -> ResultT:
        status, answer = self.ask(route.path, route.body(text, self.model))
        if status == 200:
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return route.read(answer)
        raise UncountableError(
            f"the server does not report the length of a prompt: {status} from {route.path}, {one_line(str(answer))}",
            "use another --endpoint, or continue without its count: "
            "--lengths approximate, or --lengths tokenizer with --tokenizer",
        )


@contextmanager
def open_tokenizer(
    facts: ServerFacts, dialect: Dialect, *, timeout_s: float | None = None, access: Access = NO_AUTH
) -> Iterator[ServerTokenizer]:
    """Connect to the server, and yield a tokenizer that counts prompt tokens for the dialect.

    `timeout_s` is the time limit of a response in seconds. It applies only if the server must generate a token to
    count."""
    from loadgen.servers.json_client import JsonClient

    def if_available(route: Route[ResultT] | None) -> Route[ResultT] | None:
        return route if route and route.path in facts.count_routes else None

    route = if_available(dialect.count) or dialect.count_by_running

    def open_client() -> JsonClient:
        return stack.enter_context(closing(JsonClient(facts.url, access, timeout_s if route.generates else None)))

    further: list[JsonClient] = []

    def more_clients(count: int) -> list[JsonClient]:
        further.extend(open_client() for _ in range(count - len(further)))
        return further[: max(0, count)]

    with ExitStack() as stack:
        id_route = if_available(BACKENDS[facts.name].ids)
        tokenizer = ServerTokenizer(open_client(), route, facts.model, id_route, more_clients=more_clients)
        text_route = if_available(dialect.count_text)
        if text_route:
            tokenizer = replace(tokenizer, plain=replace(tokenizer, route=text_route))
        yield tokenizer


def _most_specific_first() -> list[Backend]:
    """Return every backend, with the generic OpenAI-style backend last.

    The generic backend would also recognise most servers of the other backends."""
    return sorted(BACKENDS.values(), key=lambda backend: backend.port is None)


def _identify(client: GetJson, url: str, backends: Iterable[Backend]) -> ServerFacts | None:
    """Return the server's facts from the first backend that recognises the server, or None if no backend does.

    Raises UnauthorizedError if no backend recognises the server and the server required an API key."""
    refusal = None
    for backend in backends:
        try:
            facts = backend.identify(client, url)
        except UnauthorizedError as error:
            refusal = refusal or error
            continue
        if facts:
            return facts
    if refusal:
        raise refusal
    return None


def _checked_model(client: GetJson, facts: ServerFacts, model: str | None) -> str:
    """Return the model to request: `model`, or by default the server's first model.

    Raises ModelError if the server lists only other models."""
    if model is None:
        return facts.model
    known = {facts.model} - {""}
    with suppress(UnauthorizedError):
        known |= {str(card["id"]) for card in model_cards(client("/v1/models")[1]) if "id" in card}
    if known and model not in known:
        more = f" and {len(known) - MODELS_LISTED} more" if len(known) > MODELS_LISTED else ""
        raise ModelError(
            f"--model {model}: {facts.url} does not serve it",
            f"it has: {', '.join(sorted(known)[:MODELS_LISTED])}{more}; without --model the first one is used",
        )
    return model


def _wrong_server(client: GetJson, url: str, requested: Backend | None) -> WrongServerError:
    """Return a WrongServerError that names the server at `url`, or says that no backend recognises the server."""
    facts = None
    with suppress(UnauthorizedError):
        facts = _identify(client, url, _most_specific_first())
    if facts and requested:
        name = f"{BACKENDS[facts.name].display_name} {facts.version}".rstrip()
        return WrongServerError(f"this is {name}, not {requested.display_name}: {url}", f"use --server {facts.name}")
    any_backend = join_or(backend.display_name for backend in BACKENDS.values())
    expected = requested.display_name if requested else any_backend
    with suppress(UnauthorizedError):
        status, _ = client("/v1/models")
        expected += ": /v1/models lists no model" if status == 200 else f": /v1/models answers {status}"
    generic = _most_specific_first()[-1].name
    return WrongServerError(
        f"a server answers at {url}, but not as {expected}",
        f"check host, port and path in --url; --server {generic} --model NAME works without /v1/models",
    )
