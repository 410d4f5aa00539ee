"""Which server answers, who it is, what its limits are and how many tokens it counts: asked before anything is sent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from servers.errors import (
    EndpointError,
    LimitError,
    UnauthorizedError,
    UncountableError,
    UnreachableError,
    VersionError,
    WrongServerError,
)
from servers.kinds import KINDS
from servers.kinds.base import Ask, Dialect, Route, ServerFacts, ServerKind, Told, as_dict

if TYPE_CHECKING:
    import ssl

CONNECT_TIMEOUT_S = 0.2


def resolve(
    server: str,
    url: str | None,
    environ: Mapping[str, str],
    *,
    real: bool = False,
    headers: Mapping[str, str] | None = None,
    verify: ssl.SSLContext | None = None,
) -> ServerFacts | None:
    """Find the server, or None: then the simulated one is meant. `url` wins, then LOADGEN_<SERVER>_URL; what answers
    there must be the server named. Then the usual port on this machine, if the server named answers there. `real` makes
    finding none an error. Raises what `probe` raises."""
    kind = KINDS[server]
    if given := url or environ.get(kind.url_variable):
        return probe(given, server, headers=headers, verify=verify)
    if not kind.port:
        raise UnreachableError(f"--server {server} has no usual port", f"pass --url, or set {kind.url_variable}")
    # A plain connect keeps the common case, no server, below a millisecond: no HTTP client is imported for it.
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", kind.port), CONNECT_TIMEOUT_S).close()
        try:
            return probe(f"http://127.0.0.1:{kind.port}", server, headers=headers, verify=verify)
        except (UnreachableError, WrongServerError):
            if real:
                raise
    if real or not kind.simulated:
        raise UnreachableError(
            f"no {kind.title} answers on port {kind.port} of this machine",
            f"start it, pass --url, or set {kind.url_variable}",
        )
    return None


def probe(
    url: str, server: str, *, headers: Mapping[str, str] | None = None, verify: ssl.SSLContext | None = None
) -> ServerFacts:
    """Ask the server at `url` who it is. `server` is a key of KINDS. Raises UnreachableError, UnauthorizedError, and
    WrongServerError when it is not the server named."""
    from servers.calls import Caller  # 15 ms that finding no server at all must not cost

    base, kind = base_url(url), KINDS[server]
    with closing(Caller(base, headers, verify)) as ask:
        facts = kind.recognise(ask, base)
        if facts is None:
            raise _wrong_server(ask, base, kind)
        status, answer = ask("/simulated/status")
        speed = as_dict(answer).get("speed")
        facts = replace(facts, title=kind.title, notes=kind.notes)
        if status == 200 and isinstance(speed, int | float):
            return replace(facts, simulated=True, speed=float(speed))
        return facts


def base_url(url: str) -> str:
    """The URL that a server's paths are appended to: many people paste one that ends in `/v1`."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def dialect_on(server: str, endpoint: str | None) -> Dialect:
    """The server's dialect on this endpoint, or on its native one. Raises EndpointError where it has none."""
    kind = KINDS[server]
    found = kind.dialects.get(endpoint or kind.native)
    if found is None:
        raise EndpointError(
            f"--endpoint {endpoint}: {server} has no such endpoint", f"It has: {', '.join(kind.dialects)}."
        )
    return found


def of_version(dialect: Dialect, facts: ServerFacts, say: Callable[[str], None], *, force: bool) -> Dialect:
    """The dialect as this version speaks it. Raises VersionError for one that is known to mislead, unless forced."""
    if why := dialect.misleads(facts.version):
        if not force:
            raise VersionError(
                f"{facts.url} misleads on {dialect.endpoint}: {why}",
                f"use its native endpoint (--endpoint {KINDS[dialect.server].native}), or measure it anyway: --force",
            )
        say(f"FORCED: {why}")
    return dialect.variant(facts.version)


def check_limits(facts: ServerFacts, n: int, input_tokens: int, output_tokens: int) -> None:
    """Compare a burst of `n` requests with the server's limits. Raises LimitError that lists every one exceeded.
    Servers answer too much work in quiet ways: vLLM and LightLLM shorten the output, TGI answers 200 with an error
    inside the stream, so the burst is refused here instead."""
    kind = KINDS[facts.name]
    needs = {
        "total": (input_tokens + output_tokens, f"{input_tokens} prompt + {output_tokens} output tokens"),
        "prompt": (input_tokens, f"{input_tokens} prompt tokens"),
        "requests": (n, f"{n} requests at once"),
    }
    exceeded = [
        (f"{said} exceed its {name} of {facts.limits[name]}", limit.flag)
        for bounds, (need, said) in needs.items()
        for name, limit in kind.limits.items()
        if limit.bounds == bounds and need > facts.limits.get(name, need)
    ]
    if exceeded:
        raise LimitError(
            f"{kind.called} at {facts.url}: {'; '.join(said for said, _ in exceeded)}",
            f"ask for less, or restart the server with a higher {', '.join(flag for _, flag in exceeded)}",
        )


@dataclass(frozen=True, slots=True)
class ServerTokenizer:
    """The server under test as a judge of lengths, through one kept connection. Raises UncountableError when the server
    answers anything but a count, UnreachableError and UnauthorizedError."""

    ask: Callable[[str, object], tuple[int, Any]]
    route: Route[int]
    model: str
    id_route: Route[list[int]] | None  # The route that gives token ids, where the server has one and its API takes ids
    plain: ServerTokenizer | None = None  # Where counting generates: the count of text alone, without running it
    words: tuple[str, ...] = ()

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

    def _post(self, route: Route[Told], text: str) -> Told:
        status, answer = self.ask(route.path, route.body(text, self.model))
        if status == 200:
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return route.read(answer)
        raise UncountableError(
            f"the server does not say how many tokens a prompt has: {status} from {route.path}, {str(answer)[:200]}",
            "use another --endpoint, or go on without its count: --lengths approximate, or tokenizer with --tokenizer",
        )


@contextmanager
def tokenizer_of(
    facts: ServerFacts,
    endpoint: str,
    *,
    headers: Mapping[str, str] | None = None,
    verify: ssl.SSLContext | None = None,
) -> Iterator[ServerTokenizer]:
    """Open a connection on which `facts.name` counts prompts for `endpoint`: completions, chat or generate."""
    from servers.calls import Caller

    kind = KINDS[facts.name]
    dialect = kind.dialects[endpoint]

    def known(route: Route[Told] | None) -> Route[Told] | None:
        return route if route and route.path in facts.count_routes else None

    with closing(Caller(facts.url, headers, verify)) as ask:
        route = known(dialect.count) or dialect.count_by_running
        tokenizer = ServerTokenizer(ask, route, facts.model, known(kind.ids))
        if plain := known(dialect.count_text):
            tokenizer = replace(tokenizer, plain=replace(tokenizer, route=plain))
        yield tokenizer


def _wrong_server(ask: Ask, url: str, named: ServerKind) -> WrongServerError:
    # Most servers answer like the generic one as well, so it is asked last.
    kinds = sorted(KINDS.values(), key=lambda kind: kind.port is None)
    try:
        found = next((facts for kind in kinds if (facts := kind.recognise(ask, url))), None)
    except UnauthorizedError:
        found = None
    if found is None:
        return WrongServerError(
            f"something answers at {url}, but it is not {named.called}", "check host, port and path in --url"
        )
    called = f"{KINDS[found.name].called} {found.version}".rstrip()
    return WrongServerError(f"this is {called}, not {named.called}: {url}", f"use --server {found.name}")
