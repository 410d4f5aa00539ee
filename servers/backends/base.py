"""What a server kind is: one `Backend`, with a `Dialect` for each of its endpoints.

All of it is data and pure functions, without I/O: `loadgen.servers.discovery`, `loadgen.servers.launch` and
`loadgen.servers.telemetry` read the same entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.servers.backends.dialect import Dialect, Route
from loadgen.servers.errors import UnauthorizedError

GetJson = Callable[[str], tuple[int, Any]]  # GET a path: HTTP status, and JSON or None


class ServerLimit(msgspec.Struct, frozen=True):
    """A limit that a server states."""

    flag: str  # The option that raises it
    bounds: Literal["total", "prompt", "requests", ""] = ""  # Total: prompt and output. Empty: nothing of one plan


class MetricNames(msgspec.Struct, frozen=True):
    """How a server's /metrics name what telemetry reads."""

    prefix: str  # All its names begin so
    names: Mapping[str, tuple[str, ...]]
    """Word of loadgen.servers.telemetry to the names a server has had for it, newest first. `name{label=a|b}` takes
    only samples with such a label."""
    owner: str = ""  # Whose names they are, if not the kind's own
    labels: tuple[str, Callable[[Sequence[Mapping[str, str]]], dict[str, float]]] | None = None
    """A name whose labels tell something, and the words and figures that follow from them."""
    kv_used: tuple[str, Callable[[Any], float]] | None = None
    """Where the page has no gauge of the KV cache: the route whose JSON has it, and how to read that. May raise
    LookupError, TypeError or ValueError."""


class ProcessCommand(msgspec.Struct, frozen=True):
    """How a server that is a Python package is started. `{model}`, `{name}`, `{host}`, `{port}` and `{tensor_parallel}`
    are filled in."""

    module: tuple[str, ...]  # What follows `python -m`
    arguments: tuple[str, ...]
    program: tuple[str, ...] = ()  # A program that does the same, and its first arguments; taken where it is there
    parallel: tuple[str, ...] = ()  # More arguments where several GPUs share the model
    env: Mapping[str, str] = {}
    ladder: str = (
        ""  # Folder for its PYTHONPATH with which it serves ladders (loadgen.servers.ladder); empty: it cannot
    )


class KnownFault(NamedTuple):
    """A failure that is known by what was printed."""

    pattern: str  # Regular expression, small and capital letters alike
    what: str  # What it means; `{0}`, here and in the hint, is the first group of the pattern that matched
    hint: str


class ServerFacts(msgspec.Struct, frozen=True):
    """What a server says about itself."""

    name: str  # A key of loadgen.servers.backends.BACKENDS
    url: str  # Base of all its paths: no slash at the end, no `/v1`
    version: str = ""  # As the server states it. LightLLM states none: concluded from its routes. Empty when unknown.
    model: str = ""  # The name to ask for, which is the first one it lists; empty when it does not say
    limits: dict[str, int] = {}  # Under its own names: max_model_len, max_total_tokens, ...
    count_routes: tuple[str, ...] = ()  # Its routes that count the tokens of a text without running it
    endpoint: str = ""  # To measure on, where it lacks its kind's native one
    simulated: bool = False
    speed: float | None = None  # How many times faster than life a simulated server's clock runs
    hardware: Mapping[str, Any] = {}  # gpu, model and tensor_parallel that it simulates
    pids: tuple[int, ...] = ()  # Its processes on this machine, where we started it
    title: str = ""
    notes: Mapping[str, Any] = {}  # As in ServerKind, and what holds of this version


class Backend(msgspec.Struct, frozen=True):
    """Everything that loadgen knows about one server program. Entries of `loadgen.servers.backends.BACKENDS`."""

    name: str  # `--server NAME`; also its service in docker-compose.yml, and in capitals LOADGEN_NAME_URL
    title: str
    dialects: Mapping[str, Dialect]  # By endpoint
    native: str  # The endpoint it is measured on unless another is asked for
    identify: Callable[[GetJson, str], ServerFacts | None]  # (ask, url) to what it says; None when it is another server
    limits: Mapping[str, ServerLimit]  # By its own names for them
    port: int | None = None  # That docker-compose.yml publishes. None: nothing is started under this name.
    ids: Route[list[int]] | None = None  # Tells the token ids of a text, without special tokens
    metrics: MetricNames | None = None
    process: ProcessCommand | None = None  # How it is started without a container, where it can be
    faults: tuple[KnownFault, ...] = ()  # When it does not come up, beside those of all (servers/launch/faults.toml)
    simulated: str = ""  # `module:attribute` of the simulated one; empty: there is none
    simulated_versions: Mapping[str, str] = {}  # The same for other versions that it can speak as
    phrase: str = ""  # What a sentence calls it where the title alone reads badly
    notes: Mapping[str, Any] = {}
    """What its figures must be read with; stored with each run. `memory_option` and `memory_taken`: what part of a card
    it takes at its start, and what sets that. `prompt_piece_tokens`: a longer answer is run in pieces, each of which
    counts the prompt again, and ends with a whole piece. `split_endpoint`: where each text of a request may be run, and
    counted, by itself. `drops_counts`: its counters lose some under load. `ignores_eos`: False where no request can
    make the server go on past the end-of-text token, so that responses may be shorter than requested."""

    @property
    def display_name(self) -> str:
        """What a sentence calls it."""
        return self.phrase or self.title

    @property
    def url_variable(self) -> str:
        """The environment variable that says where it is."""
        return f"LOADGEN_{self.name.upper()}_URL"


def version_at_least(version: str, *numbers: int) -> bool:
    """Whether the first X.Y.Z in a version is this or later; one without numbers is not."""
    result = re.search(r"(\d+)\.(\d+)\.(\d+)", version)
    return result is not None and tuple(map(int, result.groups())) >= numbers


def route_exists(ask: GetJson, path: str) -> bool:
    """Whether a route that takes POST is there: then GET is answered with another error than 404."""
    try:
        return ask(path)[0] != 404
    except UnauthorizedError:  # gateways say so of a GET
        return True


def model_cards(models: object) -> list[dict[str, Any]]:
    """The models of an answer to /v1/models."""
    listed = as_dict(models).get("data")
    return [as_dict(card) for card in listed] if isinstance(listed, list) else []


def first_model_card(models: object) -> dict[str, Any]:
    """The first model of an answer to /v1/models; empty when there is none."""
    return next(iter(model_cards(models)), {})


def as_dict(answer: object) -> dict[str, Any]:
    """The answer where it is a JSON object, else an empty one."""
    return answer if isinstance(answer, dict) else {}


def known_limits(limits: Mapping[str, ServerLimit], facts: Mapping[str, Any]) -> dict[str, int]:
    """Those of these limits that the server's facts hold."""
    return {name: value for name in limits if type(value := facts.get(name)) is int and value > 0}
