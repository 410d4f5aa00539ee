"""Finds the server under test, and reads its version, model and limits before the run sends requests.

The module also compares the planned load with the server's limits, and counts prompt tokens on the server.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from loadgen.servers.auth import NO_AUTH, Access
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.backends.base import Backend, GetJson, ServerFacts, as_dict, model_cards
from loadgen.servers.backends.dialect import Dialect, ResultT, Route, round_up_to_pieces
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.errors import (
    ClientLimitError,
    EndpointError,
    LimitError,
    ServerError,
    UnauthorizedError,
    UncountableError,
    UnreachableError,
    VersionError,
    WrongServerError,
)
from loadgen.servers.marks import Mark
from loadgen.servers.server_url import API_PATH, ServerUrl, azure_deployment, parse_server_url
from loadgen.servers.side_by_side import CONNECTIONS, map_side_by_side

if TYPE_CHECKING:
    from loadgen.servers.json_client import JsonClient, JsonResponse

CONNECT_TIMEOUT_S = 0.2
MODELS_PATH = f"{API_PATH}/models"
MODELS_BELOW_BASE = "/models"
SIMULATED_STATUS_PATH = "/simulated/status"
FAR_S = 0.03
"""Duration of the first request, in seconds, above which a server counts as far away."""
ANY_MODEL = "default"
"""Name of the model in requests to a server that has no list of models."""
OK = 200
INTERNAL_SERVER_ERROR = 500


def resolve(
    server: str,
    url: str | None,
    environ: Mapping[str, str],
    *,
    real: bool = False,
    model: str | None = None,
    access: Access = NO_AUTH,
    say: Callable[[str], None] | None = None,
) -> ServerFacts | None:
    """Find the requested server and return its facts, or None if a simulated server should replace it.

    The URL of the server is `url`, or the value of the environment variable LOADGEN_<SERVER>_URL if `url` is empty. If
    there is a URL, the requested server must answer at this URL. Without a URL, the backend's default port on this
    machine is tried. The result is None if no such server answers on this port.

    Raises the errors of `probe`. Raises UnreachableError instead of returning None if `real` is set, or if the backend
    has no simulated server."""
    backend = BACKENDS[server]
    requested_url = url or environ.get(backend.url_variable)
    if requested_url:
        return probe(requested_url, server, model=model, access=access, say=say)
    if not backend.port:
        raise UnreachableError(f"--server {server} has no default port", f"pass --url, or set {backend.url_variable}")
    # Usually no server runs. A plain connect detects this within a millisecond, without importing an HTTP client.
    local_url = f"http://127.0.0.1:{backend.port}"
    try:
        socket.create_connection(("127.0.0.1", backend.port), CONNECT_TIMEOUT_S).close()
        return probe(local_url, server, model=model, access=access, say=say)
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


class _ProbeClient:
    """A client for the GET requests of a probe. Each request is sent only once, because the responses are cached.

    The OpenAI routes of a server usually begin with `/v1`. Some hosted servers have them directly below the base URL,
    for example `/api/v3/chat/completions`. If the server has no list of models at `/v1/models`, but one at `/models`,
    all OpenAI routes are requested without `/v1`.

    If a request takes more than FAR_S seconds, the server is far away. To save time, the other likely requests are then
    sent at the same time, over separate connections.
    """

    def __init__(self, client: JsonClient, open_client: Callable[[], JsonClient], likely_paths: Iterable[str]) -> None:
        """Prepare a client that sends its requests with `client`. No request is sent yet.

        `likely_paths` are the paths that a probe usually requests. If the server is far away, these paths are requested
        at the same time. `open_client` opens the separate connection that each of these requests needs.
        """
        self.client = client
        self.api_path = API_PATH
        self._responses: dict[str, JsonResponse] = {}
        self._open_client = open_client
        self._likely_paths = {*likely_paths}
        self._prefetched: dict[str, JsonResponse] = {}

    def __call__(self, path: str) -> tuple[int, Any]:
        """Return the HTTP status and the JSON of GET `path`. Raises the errors of `JsonClient`."""
        response = self.response(path)
        if response.status in (401, 403):
            raise self.client.unauthorized(path, response)
        return response.status, response.value

    def response(self, path: str) -> JsonResponse:
        """Return the response to GET `path`."""
        if path not in self._responses:
            self._responses[path] = self._get(path)
            self.client.note_mark(self._responses[path].value)
        return self._responses[path]

    def _get(self, path: str) -> JsonResponse:
        response = self._request(path)
        if path == MODELS_PATH and response.status in (404, 405):
            below_base = self._request(MODELS_BELOW_BASE)
            if below_base.status == OK and model_cards(below_base.value):
                self.api_path = ""
                return below_base
        return response

    def _request(self, path: str) -> JsonResponse:
        if path in self._prefetched:
            return self._prefetched.pop(path)
        started_s = monotonic()
        response = self.client.request(path)
        if monotonic() - started_s > FAR_S:
            self._prefetch(self._likely_paths - {path} - self._responses.keys())
        return response

    def _prefetch(self, paths: Collection[str]) -> None:
        """Request all paths at the same time, and store the responses until they are needed.

        If a request fails, nothing is stored for its path, which is then requested again when it is needed.
        """
        from loadgen.servers.json_client import BUSY_STATUSES

        def request(path: str) -> JsonResponse | None:
            with closing(self._open_client()) as client, suppress(ServerError):
                return client.request(path)
            return None

        self._likely_paths = set()
        responses = map_side_by_side([request] * len(paths), [*paths])
        for path, response in zip(paths, responses, strict=True):
            if response is not None and response.status not in BUSY_STATUSES:
                self._prefetched[path] = response


def probe(
    url: str,
    server: str = "",
    *,
    model: str | None = None,
    access: Access = NO_AUTH,
    say: Callable[[str], None] | None = None,
) -> ServerFacts:
    """Identify the server at `url`, and return its version, model and limits.

    `server` is a key of BACKENDS, or "" to accept any backend. `model` is the model to request, by default the
    deployment in an Azure URL, or the first model that the server lists. A model that the server does not list is
    accepted, because it may be an alias. The field `listed` of the result is then False. `say` is called with a line
    whenever the probe waits for a busy server.

    This function raises:

    - UnreachableError if no server answers.
    - UnauthorizedError if the server requires an API key, or refuses the key that was sent.
    - WrongServerError if the server is not the requested one, or not a server of any known backend.
    """
    from loadgen.servers.json_client import JsonClient  # the import takes 15 ms, so it waits until a server answers

    address = server_address(url)
    deployment = azure_deployment(address.base)
    model = model or deployment or None
    backends = [BACKENDS[server]] if server else _most_specific_first()
    likely_paths = [MODELS_PATH, MODELS_BELOW_BASE, SIMULATED_STATUS_PATH]
    likely_paths += [path for backend in backends for path in backend.probe_paths]
    with closing(JsonClient(address.url, access, say=say)) as client:
        get_json = _ProbeClient(client, lambda: JsonClient(address.url, access, retry=False), likely_paths)
        if deployment:
            get_json.api_path = ""  # the routes of a deployment are directly below the base URL
        generic = _most_specific_first()[-1]
        # For the generic backend, a model name is enough, even if a gateway does not publish the list of models.
        model_is_enough = bool(model) and server in ("", generic.name)
        facts = None
        try:
            facts = _identify(get_json, address.base, backends)
        except UnauthorizedError:
            if not model_is_enough:
                raise
        if facts is None and model_is_enough and not get_json.response(MODELS_PATH).location:
            facts = ServerFacts(generic.name, address.base)
        if facts is None and not model and server in ("", generic.name):
            facts = _without_model_list(get_json, generic, address)
        if facts is None:
            raise _wrong_server(get_json, address.base, BACKENDS.get(server))
        backend = BACKENDS[facts.name]
        facts = replace(
            facts,
            title=backend.title,
            notes={**backend.notes, **facts.notes},
            model=model or facts.model,
            listed=facts.listed and _is_listed(get_json, facts, model),
            api_path=facts.api_path and get_json.api_path,
            query=address.query,
        )
        facts = _with_tested_count(client, facts)
        # Hosted servers answer 401 to any unknown path, and gateways may not answer at all.
        with suppress(UnauthorizedError, UnreachableError):
            status, answer = get_json(SIMULATED_STATUS_PATH)
            speed = as_dict(answer).get("speed")
            if status == OK and isinstance(speed, int | float):
                hardware = as_dict(as_dict(answer).get("hardware"))
                return replace(facts, simulated=True, speed=float(speed), hardware=hardware)
        return apply_mark(facts, client.mark)


def apply_mark(facts: ServerFacts, mark: Mark | None) -> ServerFacts:
    """Return a copy of `facts` which states that the server is simulated, if `mark` is not None.

    Simulated servers add a mark to their responses. `mark` is this mark, or None if no response contained one. The mark
    usually states the speed of the server's clock, which then becomes part of the copy.

    If `mark` is None, or if `facts` already describe a simulated server, `facts` are returned unchanged.
    """
    if mark is None or facts.simulated:
        return facts
    return replace(facts, simulated=True, speed=mark.speed)


def docker_proxy_target(url: str, proc: Path = Path("/proc")) -> str:
    """Return the direct URL of the Docker container that serves `url`, or "" if there is none.

    A container may publish a port on this machine. Docker then starts a process `docker-proxy`, which copies every byte
    of a local connection to this port. The direct URL avoids this process. `proc` is the path of the proc file system.
    """
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
            # The network namespace of another user's process cannot be read. It is assumed to be that of this process.
            with suppress(PermissionError):
                if (process / "ns/net").stat().st_ino != (proc / "self/ns/net").stat().st_ino:
                    continue
            if host_address.is_loopback or host_address.is_unspecified:
                address = f"[{container_address}]" if container_address.version == 6 else container_address
                return f"{requested.scheme}://{address}:{options['-container-port']}"
    return ""


def server_address(url: str) -> ServerUrl:
    """Split a server's URL, in any form that users paste, into its base, query and endpoint.

    Raises UnreachableError for an invalid URL, and SecretError for a URL with credentials."""
    try:
        return parse_server_url(url)
    except ValueError as error:
        raise UnreachableError(f"{url}: {error}", "write http://HOST:PORT") from None


def endpoint_dialect(server: str, endpoint: str | None) -> Dialect:
    """Return the dialect (the request and response format) of a server's endpoint, by default of its native endpoint.

    Raises EndpointError if the server does not have the endpoint."""
    backend = BACKENDS[server]
    dialect = backend.dialects.get(endpoint or backend.native)
    if dialect is None:
        raise EndpointError(
            f"--endpoint {endpoint}: {server} has no such endpoint", f"It has: {', '.join(backend.dialects)}."
        )
    return dialect


def check_endpoint(facts: ServerFacts, endpoint: str | None) -> None:
    """Raise EndpointError if the server's model does not support `endpoint`.

    If `endpoint` is None, a run uses the default endpoint of the model, so no error is raised. If `facts.endpoints` is
    empty, the model supports every endpoint of its backend.
    """
    if endpoint is None or not facts.endpoints or endpoint in facts.endpoints:
        return
    raise EndpointError(
        f"--endpoint {endpoint}: the model {facts.model} at {facts.url} does not support it",
        f"Use --endpoint {join_or(facts.endpoints)}.",
    )


def check_version(dialect: Dialect, facts: ServerFacts) -> None:
    """Raise VersionError if measurements of this server version on the dialect's endpoint are known to be misleading.

    A dialect is the request and response format of an endpoint."""
    reason = dialect.misleading_reason(facts.version)
    if reason:
        native = BACKENDS[dialect.server].native
        raise VersionError(
            f"{facts.url} gives misleading figures on {dialect.endpoint}: {reason}",
            f"use its native endpoint (--endpoint {native}), or measure it anyway: --force",
        )


def dialect_for_version(dialect: Dialect, facts: ServerFacts, say: Callable[[str], None]) -> Dialect:
    """Return the dialect (the request and response format), adapted to the version of the server.

    `say` is called with a line if measurements of this version may be misleading."""
    reason = dialect.misleading_reason(facts.version)
    if reason:
        say(f"FORCED: {reason}")
    caution = dialect.caution(facts.version)
    if caution:
        say(f"{BACKENDS[facts.name].display_name} at {facts.url}: {caution}")
    return dialect.variant(facts.version)


def check_limits(
    facts: ServerFacts,
    n: int,
    input_tokens: int,
    output_tokens: int,
    *,
    batch_size: int = 1,
    over_limit: bool = False,
) -> None:
    """Raise LimitError if a burst of `n` requests of `batch_size` inputs exceeds the server's limits.

    The message lists every exceeded limit. The burst is refused before it is sent, because servers do not report the
    problem clearly: vLLM, LightLLM and SGLang shorten the output, and TGI answers 200 with an error inside the stream.
    With `over_limit`, the number of requests is not checked, because the user wants to see which requests the server
    rejects."""
    load = f"{input_tokens} prompt + {output_tokens} output tokens"
    exceeded = _exceeded(facts, "total", input_tokens + output_tokens, load)
    exceeded += _exceeded(facts, "prompt", input_tokens, f"{input_tokens} prompt tokens")
    exceeded += _exceeded(facts, "batch", batch_size, f"{batch_size} inputs per request")
    too_long = bool(exceeded)
    if not over_limit:
        exceeded += _exceeded_at_once(facts, n, batch_size)
    if not exceeded:
        return
    flags = ", ".join(flag for _, flag in exceeded if flag)
    hint = f"request less, or restart the server with a higher {flags}" if flags else "request less"
    if not too_long:
        hint += "; or send every request and see which are rejected: --over-limit"
    sentences = "; ".join(sentence for sentence, _ in exceeded)
    raise LimitError(f"{BACKENDS[facts.name].display_name} at {facts.url}: {sentences}", hint)


def fitting_output(facts: ServerFacts, input_tokens: int, output_tokens: int) -> int:
    """Return the number of output tokens that the server generates if a request asks for `output_tokens` tokens.

    Most servers generate `output_tokens` tokens. Some servers generate long responses in whole pieces of a fixed size.
    Such a response ends with the piece that reaches `output_tokens`, so it may be longer. It ends earlier if the next
    piece would exceed the server's limit on prompt and output tokens.
    """
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


def exceeded_request_limit(facts: ServerFacts, n: int, batch_size: int = 1) -> str:
    """Return a message if `n` concurrent requests of `batch_size` inputs exceed a limit of the server, otherwise ""."""
    return "; ".join(sentence for sentence, _ in _exceeded_at_once(facts, n, batch_size))


def _exceeded_at_once(facts: ServerFacts, n: int, batch_size: int) -> list[tuple[str, str]]:
    """Return the limits of the server that a burst of `n` requests exceeds, if each request has `batch_size` inputs.

    Two quantities are checked: the number of requests at the same time, and the total number of their inputs. Each
    limit is a pair of texts, as `_exceeded` returns it.
    """
    inputs = f"{n * batch_size} inputs at once" if batch_size > 1 else f"{n} requests at once"
    return [
        *_exceeded(facts, "requests", n, f"{n} requests at once"),
        *_exceeded(facts, "inputs", n * batch_size, inputs),
    ]


def _exceeded(facts: ServerFacts, bounds: str, value: int, load: str) -> list[tuple[str, str]]:
    """Return the limits of the server that `value` exceeds, as pairs of a message and a server option.

    The server option is the one that raises the limit.

    - `bounds` is the quantity that `value` counts, such as `total` or `requests` (see `ServerLimit.bounds`). Limits of
      other quantities are not checked.
    - `load` is the beginning of the message. For example, `100 requests at once` leads to the message `100 requests at
      once exceed its ...`.
    """
    exceeded: list[tuple[str, str]] = []
    for name, limit in BACKENDS[facts.name].limits.items():
        reported = facts.limits.get(name)
        if limit.bounds != bounds or reported is None or value <= reported - limit.reserved:
            continue
        reserved = f" ({limit.reserved} of them cannot be used)" if limit.reserved else ""
        exceeded.append((f"{load} exceed its {name} of {reported}{reserved}", limit.flag))
    return exceeded


class ServerTokenizer(msgspec.Struct, frozen=True):
    """Counts tokens with HTTP requests to the server under test.

    Several persistent connections are used, so that many texts are counted at the same time. Methods raise
    UncountableError if a response contains no count, and UnreachableError if a request fails."""

    client: JsonClient
    route: Route[int]
    model: str
    id_route: Route[list[int]] | None  # Route that returns token ids. None: the server has no such route.
    plain: ServerTokenizer | None = None
    """Counts the tokens of a text, without a chat template and without generating a response. None: the server cannot
    do this."""
    words: tuple[str, ...] = ()
    more_clients: Callable[[int], Sequence[JsonClient]] = lambda _: ()
    """Function that returns additional connections. Its argument is the requested number of connections."""

    @property
    def mark(self) -> Mark | None:
        """The mark that the server has sent because it is a simulated server. None for a real server."""
        return self.client.mark

    @property
    def counting_path(self) -> str:
        """Path of the route that counts tokens.

        If the server has no route that only counts, this is the path of a route that runs the model and reports the
        count."""
        return self.plain.route.path if self.plain else self.route.path

    @property
    def generates(self) -> bool:
        """True if the server must run the model on a text to count its tokens.

        The text is then stored in the server's prefix cache.
        """
        return self.route.generates

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of prompt tokens of each text, including special tokens and the chat template."""
        clients = [self.client, *self.more_clients(min(CONNECTIONS, len(texts)) - 1)]
        tokenizers = [replace(self, client=client) for client in clients]
        return map_side_by_side([partial(tokenizer._post, self.route) for tokenizer in tokenizers], texts)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens before or after them.

        The list is empty if the server does not return ids.
        """
        return self._post(self.id_route, text) if self.id_route else []

    def _post(self, route: Route[ResultT], text: str) -> ResultT:
        path, _, _ = route.path.partition("?")  # the client adds the query of the URL
        response = self.client.request(path, route.body(text, self.model))
        if response.status == OK:
            value = response.value
            self.client.note_mark(value)
            if route.header:
                value = response.headers.get(route.header)
            with suppress(KeyError, IndexError, TypeError, ValueError):
                return route.read(value)
        words = f"{OK}, {one_line(repr(response.value))}" if response.status == OK else response.words
        raise UncountableError(
            f"the server does not report the length of a prompt: {route.path} answers {words}",
            "use another --endpoint, or continue without its count: "
            "--lengths approximate, or --lengths tokenizer with --tokenizer",
        )


_NO_ROUTE: Route[int] = Route("", lambda _text, _model: {}, int)
"""Stands for the counting route of an endpoint whose prompts are not counted. It is never requested."""


@contextmanager
def open_tokenizer(
    facts: ServerFacts, dialect: Dialect, *, timeout_s: float | None = None, access: Access = NO_AUTH
) -> Iterator[ServerTokenizer]:
    """Connect to a server, and yield a ServerTokenizer, which counts the tokens of prompts with the server's API.

    - `facts`: the address and the properties of the server.
    - `dialect`: the API of the endpoint to which the prompts will be sent.
    - `timeout_s`: the time limit of a response in seconds. It applies only if the server has no API that counts tokens.
      In this case, the prompt is sent as a request that generates a token, and the response states the number of prompt
      tokens.
    - `access`: the credentials for the server.
    """
    from loadgen.servers.json_client import JsonClient

    def if_available(route: Route[ResultT] | None) -> Route[ResultT] | None:
        return route if route and route.path in facts.count_routes else None

    route = if_available(dialect.count) or dialect.count_by_running or _NO_ROUTE

    def open_client() -> JsonClient:
        limit_s = timeout_s if route.generates else None
        return stack.enter_context(closing(JsonClient(facts.full_url, access, limit_s)))

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


def _without_model_list(get_json: _ProbeClient, generic: Backend, address: ServerUrl) -> ServerFacts | None:
    """Return the facts of a server without a list of models, if the server accepts a request for the model ANY_MODEL.

    Servers of a single model often ignore the model name in a request. The result is None if the server has a list of
    models or refuses the request."""
    from loadgen.servers.endpoint_probe import accepts_request, relocated

    if get_json.response(MODELS_PATH).status not in (404, 405):
        return None
    for api_path in (API_PATH, ""):
        facts = ServerFacts(generic.name, address.base, model=ANY_MODEL, listed=False, api_path=api_path)
        for endpoint in (generic.native, "chat"):
            dialect = relocated(generic.dialects[endpoint], facts)
            with suppress(UnreachableError):
                if accepts_request(get_json.client, dialect, facts):
                    return facts
    return None


def _with_tested_count(client: JsonClient, facts: ServerFacts) -> ServerFacts:
    """Add the tokenize route to the facts, if a test request to this route returns a count.

    Without such a route, the facts are returned unchanged.
    """
    route = BACKENDS[facts.name].tested_count
    if route is None:
        return facts
    with suppress(UnreachableError, LookupError, TypeError, ValueError):
        response = client.request(route.path, route.body("Hello", facts.model))
        if response.status == OK and route.read(response.value) > 0:
            return replace(facts, count_routes=(*facts.count_routes, route.path))
    return facts


def _is_listed(get_json: GetJson, facts: ServerFacts, model: str | None) -> bool:
    """Return False if the server lists models and `model` is not one of them.

    A `model` of None stands for the server's first model, which is always listed."""
    known = {facts.model} - {""}
    with suppress(UnauthorizedError):
        known |= {str(card["id"]) for card in model_cards(get_json(MODELS_PATH)[1]) if "id" in card}
    return model is None or not known or model in known


def listed_models(facts: ServerFacts, access: Access) -> set[str]:
    """Return the names of the models that a server lists. The set is empty if the server publishes no list."""
    from loadgen.servers.json_client import JsonClient

    with closing(JsonClient(facts.full_url, access)) as client, suppress(UnauthorizedError, UnreachableError):
        cards = model_cards(client.request(f"{facts.api_path}/models").value)
        return {str(card["id"]) for card in cards if "id" in card}
    return set()


def _wrong_server(get_json: _ProbeClient, url: str, requested: Backend | None) -> WrongServerError:
    """Return a WrongServerError that names the server at `url`, or says that no backend recognises the server."""
    from loadgen.servers.json_client import BUSY_STATUSES

    facts = None
    with suppress(UnauthorizedError):
        facts = _identify(get_json, url, _most_specific_first())
    if facts and requested:
        name = f"{BACKENDS[facts.name].display_name} {facts.version}".rstrip()
        return WrongServerError(f"this is {name}, not {requested.display_name}: {url}", f"use --server {facts.name}")
    any_backend = join_or(backend.display_name for backend in BACKENDS.values())
    expected = requested.display_name if requested else any_backend
    response = get_json.response(MODELS_PATH)
    words = f"answers {response.words}"
    if response.status == OK:
        words = "answers 200 with a body that is not JSON" if response.value is None else "lists no model"
    generic = _most_specific_first()[-1].name
    named = f"--server {generic} " if requested else ""
    hint = f"check host, port and path in --url; {named}--model NAME works without {MODELS_PATH}"
    if response.status in BUSY_STATUSES:
        hint = "it may still be loading its model, or it limits requests: try again when it is ready"
    elif response.location:
        hint = "use the address to which it redirects; a login page needs credentials: --api-key-env, or --header"
    elif response.status >= INTERNAL_SERVER_ERROR:
        hint = f"is the server behind it running, or still loading? {hint}"
    return WrongServerError(f"a server answers at {url}, but not as {expected}: {MODELS_PATH} {words}", hint)
