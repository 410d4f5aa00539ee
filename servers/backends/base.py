"""Defines `Backend`, the description of one server program.

A backend has one `Dialect` per endpoint. Backends consist of data and pure functions without I/O. Discovery, launching
and telemetry use these descriptions (`loadgen.servers.discovery`, `loadgen.servers.launch` and
`loadgen.servers.telemetry`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.servers.backends.dialect import Dialect, Route
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.errors import UnauthorizedError

GetJson = Callable[[str], tuple[int, Any]]
"""Function that sends GET for a path. It returns the HTTP status and the JSON (None if the response is not JSON)."""


VERSION_CHARACTERS = 100
"""Maximum length of a server's version. The middle of a longer one is cut out."""
LIMIT_MAX = 1 << 53
"""Largest limit of a server that counts as one. Every JSON parser reads integers up to this value exactly."""


class ServerLimit(msgspec.Struct, frozen=True):
    """A limit that a server reports about itself, such as the maximum number of concurrent requests."""

    flag: str  # The server option that raises the limit. Empty: there is none.
    bounds: Literal["total", "prompt", "requests", "inputs", "batch", ""] = ""
    """Limited quantity: prompt and output tokens, tokens of a prompt or input, concurrent requests, their inputs
    together, or inputs per request. Empty: another quantity."""
    reserved: int = 0  # Part of the limit that the server keeps, so that requests cannot use it


class MetricNames(msgspec.Struct, frozen=True):
    """The names under which a server's /metrics page reports the values that telemetry reads."""

    prefix: str  # Prefix of every name
    names: Mapping[str, tuple[str, ...]]
    """Maps the name of a value in loadgen.servers.telemetry to the server's names for the value, newest first.
    `name{label=a|b}` selects the samples whose label has the value a or b."""
    labels: tuple[str, Callable[[Sequence[Mapping[str, str]]], dict[str, float]]] | None = None
    """A metric whose labels contain values, and the function that reads these values from the labels."""
    kv_used: tuple[str, Callable[[Any], float]] | None = None
    """For a server without a gauge of KV-cache use: a route that returns JSON, and the function that reads the value
    from the JSON. The function may raise LookupError, TypeError or ValueError."""


class ProcessCommand(msgspec.Struct, frozen=True):
    """The command that starts a server from a Python environment.

    The placeholders `{model}`, `{name}`, `{host}`, `{port}` and `{tensor_parallel}` are replaced when the server
    starts."""

    module: tuple[str, ...]  # Module and first arguments after `python -m`
    arguments: tuple[str, ...]
    program: tuple[str, ...] = ()  # Equivalent program with its first arguments, preferred if it is installed
    parallel: tuple[str, ...] = ()  # Additional arguments if several GPUs share the model
    env: Mapping[str, str] = {}
    ladder: str = (
        ""  # PYTHONPATH entry that lets the server serve ladders (loadgen.servers.ladder). Empty: unsupported.
    )


class CacheReset(NamedTuple):
    """The route that empties the prefix cache of a server."""

    path: str  # Of a POST request without fields
    hint: str  # What to do if the server has no such route


class KnownFault(NamedTuple):
    """A known startup failure of a server, recognised by a pattern in the server's output."""

    pattern: str  # Regular expression, matched case-insensitively
    what: str  # Description. `{0}`, also in the hint, is the first group of the pattern that matched.
    hint: str


class ServerFacts(msgspec.Struct, frozen=True):
    """Facts about the server under test, such as its version, model and limits."""

    name: str  # A key of loadgen.servers.backends.BACKENDS
    url: str  # Base of all paths, without a trailing slash and without `/v1`
    version: str = ""  # As reported. LightLLM reports none, so it is inferred from its routes. Empty: unknown.
    model: str = ""  # Model to request, the first one that the server lists. Empty: unknown.
    limits: dict[str, int] = {}  # By the server's own names: max_model_len, max_total_tokens, ...
    count_routes: tuple[str, ...] = ()  # Routes that count tokens without a response
    listed: bool = True  # False: the server has a list of models, and `model` is not in it
    api_path: str = "/v1"  # Path of the OpenAI routes below `url`. Empty: they lie directly below it.
    endpoints: tuple[str, ...] = ()  # Endpoints that the model supports, the default first. Empty: all of the backend.
    query: str = ""  # Query of every request, from the URL that the user gave
    simulated: bool = False
    speed: float | None = None  # Clock speed of a simulated server relative to real time
    hardware: Mapping[str, Any] = {}  # Simulated gpu, model and tensor_parallel
    pids: tuple[int, ...] = ()  # Processes on this machine, if loadgen started the server
    title: str = ""
    notes: Mapping[str, Any] = {}  # Notes of the Backend and of this version

    @property
    def default_endpoint(self) -> str | None:
        """The endpoint to use if the user names none. If this is None, the native endpoint of the backend is used."""
        return self.endpoints[0] if self.endpoints else None

    @property
    def full_url(self) -> str:
        """The server's base URL, with the query that is sent with every request."""
        return f"{self.url}?{self.query}" if self.query else self.url


class Backend(msgspec.Struct, frozen=True):
    """The description of one server program. Instances are the entries of `loadgen.servers.backends.BACKENDS`."""

    name: str  # Value of `--server`, service in docker-compose.yml and, in capitals, part of LOADGEN_NAME_URL
    title: str
    dialects: Mapping[str, Dialect]  # By endpoint
    native: str  # The default endpoint for measurements
    identify: Callable[[GetJson, str], ServerFacts | None]  # (get_json, url) to facts; None for another server
    limits: Mapping[str, ServerLimit]  # By the server's own names
    port: int | None = None  # Port that docker-compose.yml publishes. None: loadgen cannot start this backend.
    probe_paths: tuple[str, ...] = ()
    """Paths that `identify` requests. If the server is far away, they are requested side by side beforehand."""
    tested_count: Route[int] | None = None
    """Route that counts tokens on some servers of this backend. A test request finds out whether a server has it."""
    ids: Route[list[int]] | None = None  # Returns the token ids of a text, without special tokens
    metrics: MetricNames | None = None
    process: ProcessCommand | None = None  # Command that starts the server without a container, if there is one
    cache_reset: CacheReset | None = None  # Route that empties the prefix cache, if there is one
    faults: tuple[KnownFault, ...] = ()  # Startup failures of this backend, in addition to servers/launch/faults.toml
    simulated: str = ""  # `module:attribute` of the simulated server. Empty: there is none.
    simulated_models: Mapping[str, str] = {}  # Default model names of the simulated server, by endpoint
    simulated_shapes: Mapping[str, str] = {}
    """Model shape of the built-in simulated server, by endpoint. It runs on one GPU. Other endpoints have a text model
    on several GPUs."""
    simulated_versions: Mapping[str, str] = {}  # `module:attribute` for other versions
    phrase: str = ""  # Name in sentences, if the title alone reads badly
    request_times: str = ""
    """Sentence that says how to make the server state the times of each request (loadgen.servers.server_timing). Empty
    if the server cannot, or if no way is known."""
    notes: Mapping[str, Any] = {}
    """Facts that matter for the interpretation of the figures, stored with each run:

    - `memory_taken` and `memory_option`: share of GPU memory that the server reserves, and the option that sets it.
    - `prompt_piece_tokens`: longer responses are generated in pieces. Each piece counts the prompt again, and a
      response ends with a whole piece.
    - `split_endpoint`: the server may run and count each text of a request separately on this endpoint.
    - `counts_prefill_steps`: the server's number of decode steps includes the prefill of each request.
    - `counts_inputs`: the server's counter of finished requests counts every input of a request.
    - `truncates_to`: the server cuts longer inputs to this number of tokens, and reports the shorter length.
    - `drops_counts`: the server's counters miss some requests under load.
    - `ignores_eos`: False if no request can make the server continue after the end-of-text token, so that responses may
      be shorter than requested.
    """

    @property
    def display_name(self) -> str:
        """The name of the backend for use in a sentence."""
        return self.phrase or self.title

    @property
    def url_variable(self) -> str:
        """The name of the environment variable that contains the server's URL."""
        return f"LOADGEN_{self.name.upper()}_URL"


def version_text(value: object) -> str:
    """Return a server's reported version as one short line, or "" if the value is not text or a number."""
    is_version = isinstance(value, str | float) or type(value) is int
    return one_line(str(value), VERSION_CHARACTERS) if is_version else ""


def version_at_least(version: str, *numbers: int) -> bool:
    """Return True if the first `X.Y.Z` in `version` is at least `numbers`.

    Return False if the version is lower, or if `version` contains no `X.Y.Z`.
    """
    result = re.search(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", version)  # int() refuses thousands of digits
    return result is not None and tuple(map(int, result.groups())) >= numbers


def route_exists(get_json: GetJson, path: str) -> bool:
    """Return True if the server has a POST route at `path`.

    The function sends a GET request. Only a server without the route answers it with the status 404.
    """
    try:
        return get_json(path)[0] != 404
    except UnauthorizedError:  # some gateways answer 401 or 403 to a GET
        return True


def model_cards(models: object) -> list[dict[str, Any]]:
    """Return the models in a response to /v1/models, or an empty list if the response has an unknown form.

    The list of models is the field `data`, the field `models`, or the whole response. Models without a name are left
    out.
    """
    answer = as_dict(models)
    listed = models if isinstance(models, list) else answer.get("data") or answer.get("models")
    cards = [_with_id(entry) for entry in listed] if isinstance(listed, list) else []
    return [card for card in cards if "id" in card]


def _with_id(entry: object) -> dict[str, Any]:
    """Return an entry of a list of models as a dict with the model's name in `id`.

    Some servers use `name` or `model` instead of `id`, or list only names. Return an empty dict if the entry has no
    name.
    """
    card = {"id": entry} if isinstance(entry, str) else as_dict(entry)
    name = next((card[key] for key in ("id", "name", "model") if isinstance(card.get(key), str)), "")
    return {**card, "id": name} if name.strip() else {}


def first_model_card(models: object) -> dict[str, Any]:
    """Return the first model in a response to /v1/models, or an empty dict if there is none."""
    return next(iter(model_cards(models)), {})


def as_dict(answer: object) -> dict[str, Any]:
    """Return the decoded response if it is a JSON object, otherwise an empty dict."""
    return answer if isinstance(answer, dict) else {}


def known_limits(limits: Mapping[str, ServerLimit], facts: Mapping[str, Any]) -> dict[str, int]:
    """Look up limits in the server's facts, and return their values by name.

    Limits that are missing, not positive integers or larger than LIMIT_MAX are omitted.
    """
    values = {name: facts.get(name) for name in limits}
    return {name: value for name, value in values.items() if type(value) is int and 0 < value <= LIMIT_MAX}
