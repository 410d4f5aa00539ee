"""The Plan: one validated, fully resolved description of a run. All its mistakes are reported at once.

An option of a run is one field here. Its docstring is the help of the command line, of the web form and of the
generated documentation: loadgen.cli.options makes the options of `loadgen burst`, `run` and `ui` from the fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import msgspec

from loadgen.errors import PlanError
from loadgen.plan_fields import (
    JSON_OBJECT,
    NOTHING_SENT,
    POSITIVE,
    TUPLE,
    RunOption,
    canonical,
    existing_tokenizer,
    image_sizes,
    in_range,
    known_gpu,
    one_of,
    require,
    validate_fields,
)
from loadgen.servers.auth import check_ca_file, check_headers, normalise_url, redact_header
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.wire.timestamp_sources import AUTO, SOURCES
from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads.datasets import user_fields
from loadgen.workloads.token_counter import CountingMethod


def _default_output_tokens(settings: Mapping[str, Any]) -> int | str:
    """Output lengths where none were named."""
    return lengths.ANSWERS if _workload_file(settings["workload"]) else lengths.DEFAULT_OUTPUT_TOKENS


def _workload_file(named: str) -> Path | None:
    """The file that a workload's requests are from."""
    return getattr(workload.parse(named), "path", None)


def all_endpoints() -> Iterable[str]:
    """Of any kind of server."""
    return dict.fromkeys(name for kind in BACKENDS.values() for name in kind.dialects)


_ARRIVALS = join_or(
    each.SYNTAX.partition(", such as")[0].replace(" or ", ", ") for each in arrivals.ARRIVAL_PROCESSES.values()
)
ARRIVALS, WORKLOAD = canonical(arrivals.parse), canonical(workload.parse)
INPUT_LENGTHS, OUTPUT_LENGTHS = canonical(lengths.parse), canonical(lengths.parse_outputs)
KNOWN_BACKEND, KNOWN_ENDPOINT, KNOWN_TIMESTAMP_SOURCE = (
    one_of(lambda: BACKENDS),
    one_of(all_endpoints),
    one_of(lambda: (AUTO, *SOURCES)),
)
URL = Annotated[str, normalise_url]
FORWARD_INTERVAL = require(lambda ends: 0 <= ends[0] < ends[1], "must begin at 0 or later, and end after it begins")
UP_TO_A_WEEK = require(lambda length_s: 0 < length_s <= 7 * 86_400, "must be more than 0, and a week at most")
SINGLE_WORD = require(
    lambda word: re.fullmatch(r"[\w.-]{1,60}", word, re.ASCII) is not None, "must be 1 to 60 letters, digits, . _ or -"
)
SHORT_TEXT = require(lambda words: len(words) <= 60, "must have 60 characters at most")
SAMPLING_INTERVAL = require(
    lambda every_s: every_s == 0 or every_s >= 1,
    "at most once a second, or a server at its limit is measured while it answers us; 0 is off",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to ask, when, of whom, and how. Frozen; stored as it is in the run's header."""

    # Empty until loadgen.engine.resolve_server.with_detected_server has asked.
    server: Annotated[
        str,
        KNOWN_BACKEND,
        RunOption("Server", "start", f"Which server answers: {join_or(BACKENDS)}; with --url by default what it says."),
    ] = ""
    endpoint: Annotated[
        str | None,
        KNOWN_ENDPOINT,
        RunOption("Advanced", "start", f"{join_or(all_endpoints())}; the server's native one by default."),
    ] = None
    url: Annotated[URL | None, RunOption("Server", "start")] = None
    """Where it is, such as http://127.0.0.1:8002. Without it: LOADGEN_<SERVER>_URL, then the port that
    docker-compose.yml publishes, then the built-in simulated server."""
    model: Annotated[str | None, RunOption("Server", "start")] = None
    """Model name to ask for; the server's first one by default."""
    # Canonical text of loadgen.workloads.arrivals, as `workload` is of loadgen.workloads.workload.
    arrivals: Annotated[str, ARRIVALS, RunOption("Load", None, f"When requests are due: {_ARRIVALS}.")] = "burst"
    # None where the duration or the trace says.
    n: Annotated[int | None, in_range(1, 1_000_000), RunOption("Load")] = None
    """How many requests; or sessions, where these are asked."""
    duration_s: Annotated[float | None, UP_TO_A_WEEK, RunOption("Load")] = None
    """Nothing is due later than this."""
    # None: as many as the plan can have under way.
    max_in_flight: Annotated[int | None, in_range(1, 1_000_000), RunOption("Advanced")] = None
    """Past it a request that is due is dropped, and counted."""
    warmup: Annotated[int, in_range(0, 10_000), RunOption("Advanced")] = 0
    """Requests to send before the clock starts; in no figure."""
    workers: Annotated[int, in_range(1, 256), RunOption("Advanced")] = 1
    """Processes that share the load."""
    timeout_s: Annotated[float, POSITIVE, RunOption("Advanced", "start")] = 600.0
    """After which one request is given up; 600s by default."""
    repeats: Annotated[int, in_range(1, 1000), RunOption("Load")] = 1
    """Run it this many times, each with the next seed."""
    repeat: Annotated[int, in_range(0, 1000)] = 0
    """Which of the repeats this run is, from 1; 0 for a run by itself."""
    workload: Annotated[str, WORKLOAD, RunOption("Prompts", "form")] = "synthetic"
    """What is asked: synthetic, sharegpt:FILE, jsonl:FILE, shared-prefix:groups=G,tokens=P, multi-turn:turns=K
    (sessions), ..."""
    # A number, or the canonical text of loadgen.workloads.lengths.
    input_tokens: Annotated[int | str, INPUT_LENGTHS, RunOption("Prompts", "form")] = 512
    """Prompt length: 512 (default), uniform:A..B, lognormal:mean=M,cv=C, empirical:FILE, ...; exact by the server's
    own tokenizer."""
    output_tokens: Annotated[
        int | str, OUTPUT_LENGTHS, RunOption("Prompts", "form", default=_default_output_tokens)
    ] = lengths.DEFAULT_OUTPUT_TOKENS
    """Tokens to generate: 128 (default), uniform:A..B, ... as above; those of a file's own answers (answers, its
    default). max:128 and so on lets answers end early."""
    extra_body: Annotated[dict[str, Any], JSON_OBJECT, user_fields, RunOption("Advanced", "start")] = field(
        default_factory=dict
    )
    """Fields to merge into the body of each request, as JSON or @FILE: '{"temperature": 0.7}'. null takes one out."""
    ignore_eos: Annotated[bool, RunOption("Advanced", "start")] = True
    """Have each answer go on to the length asked for, where the server can; --no-ignore-eos lets the model end it."""
    image: Annotated[tuple[str, ...], TUPLE, image_sizes, RunOption("Advanced", "start")] = ()
    """A synthetic picture in each chat request, by its size: 512x512. Repeatable."""
    seed: Annotated[int, RunOption("Advanced", "form")] = 0
    """The same seed gives byte-identical requests and due instants."""
    tokenizer: Annotated[Path | None, existing_tokenizer, RunOption("Advanced", "start")] = None
    """The model's tokenizer, to build prompts with: a file, a folder, or the name of a model in the local Hugging Face
    cache."""
    lengths: Annotated[CountingMethod | None, RunOption("Advanced", "start")] = None
    """Who counts where prompts cannot be exact: server (by samples that it runs), tokenizer (alone) or approximate."""
    api_key_env: Annotated[str, RunOption("Advanced", "start")] = "LOADGEN_API_KEY"
    """Environment variable that holds the API key; LOADGEN_API_KEY by default, which may be unset."""
    header: Annotated[tuple[str, ...], TUPLE, check_headers, RunOption("Advanced", "start")] = ()
    """'Name: value', sent with each request; $NAME in the value is read from the environment. Repeatable."""
    ca_file: Annotated[Path | None, check_ca_file, RunOption("Advanced", "start")] = None
    """Certificate authorities for https, in PEM."""
    insecure: Annotated[bool, RunOption("Advanced", "start")] = False
    """Do not check certificates."""
    real: Annotated[bool, RunOption("Advanced", "start")] = False
    """Never fall back to the simulated server."""
    force: Annotated[bool, RunOption("Advanced", "start")] = False
    """Measure a version of a server that is known to mislead."""
    over_limit: Annotated[bool, RunOption("Advanced")] = False
    """Send more requests at once than the server says it takes, to see what it does with the rest."""
    speed: Annotated[float, POSITIVE, RunOption("Advanced", "start")] = 5.0
    """How many times faster the built-in simulated server's clock runs; 5 by default."""
    window_s: Annotated[tuple[float, float] | None, FORWARD_INTERVAL, RunOption("Advanced")] = None
    """Measuring window, such as 10s..50s from the start. Default: the whole run, or the steady part of a long open
    loop."""
    stamps: Annotated[str, KNOWN_TIMESTAMP_SOURCE, RunOption("Advanced", "start")] = AUTO
    """Where arrival instants come from: ring, the kernel's stamp of each packet; socket, that of each read; user, this
    process's clock, as late as it is; or auto, the best that works here."""
    client_priority: Annotated[Literal["auto", "realtime", "normal"], RunOption("Advanced", "start")] = "auto"
    """CPU priority of the load generator during a run: auto raises it to nice -10 where permitted; realtime uses
    SCHED_RR; normal leaves it as it is."""
    metrics_every_s: Annotated[float, SAMPLING_INTERVAL, RunOption("Advanced", "start")] = 1.0
    """How often the server's /metrics, GPUs and memory are read during the run: 1s by default, and at most; 0 is
    never."""
    dcgm_url: Annotated[URL | None, RunOption("Advanced", "start")] = None
    """A DCGM exporter on the server's machine, such as http://gpu-host:9400, for its GPUs."""
    gpu: Annotated[bool | None, RunOption("Advanced")] = None
    """Read this machine's GPUs through NVML; by default when the server is on it."""
    server_pid: Annotated[tuple[int, ...], TUPLE, RunOption("Advanced")] = ()
    """A server process on this machine, whose memory is read with that of its children; repeatable."""
    objectives: Annotated[tuple[str, ...], TUPLE] = ()
    """What the run must keep to, as for --assert. `loadgen report` judges the run by it again."""
    goodput: Annotated[tuple[str, ...], TUPLE] = ()
    """What makes one request good, as for --goodput."""
    label: Annotated[str, SINGLE_WORD, RunOption("Advanced", "start")] = "run"
    """A word for the run's folder and report."""
    platform: Annotated[str, SHORT_TEXT, RunOption("Advanced", "start")] = ""
    """What the server runs on, such as A800; stands by its name."""
    gpu_model: Annotated[str, known_gpu, RunOption("Advanced", "start")] = ""
    """The server's GPUs, for what they allow at most: H100, or 4 x A100; by default what NVML or DCGM says."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: Any) -> None:
            """Raises PlanError whose message has one line per mistake, named by its command-line option."""
            vars(self).update(validate_fields(type(self), values))
            if mistake := next(self._mistakes(), ""):
                raise PlanError(mistake, NOTHING_SENT)

    def replaced(self, **changes: Any) -> Self:
        """The plan with these changes, which are right."""
        plan = object.__new__(type(self))
        vars(plan).update(vars(self) | changes)
        return plan

    def to_dict(self) -> dict[str, Any]:
        """As it is kept, in types of JSON, without secrets."""
        retained = vars(self) | {"header": tuple(map(redact_header, self.header))}
        return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(retained, enc_hook=str)))

    def each_repeat(self) -> list[Plan]:
        """The plan of each repeat: another seed for each, or a server's prefix cache would know the prompts already,
        and chance in lengths and gaps would be the same each time."""
        changes = ({"repeat": index, "seed": self.seed + index - 1} for index in range(1, self.repeats + 1))
        return [self.replaced(**change) for change in changes]

    @property
    def uses_sessions(self) -> bool:
        """Whether `n`, clients and arrivals count sessions."""
        return self.workload.startswith("multi-turn")

    @property
    def uses_file(self) -> bool:
        """Whether prompts, or sessions of them, are those of a file."""
        return _workload_file(self.workload) is not None

    @property
    def may_stop_early(self) -> bool:
        """Whether answers may end before the requested length."""
        return not self.ignore_eos or lengths.parse_outputs(str(self.output_tokens)).may_end

    def _mistakes(self) -> Iterator[str]:
        """What no single field shows."""
        named = arrivals.parse(self.arrivals)
        if not (self.server or self.url):
            yield (f"--server is missing: name {join_or(BACKENDS)}; or --url, and who answers there is asked")
        if not named.ends(self.n, self.duration_s):
            yield (f"--arrivals {self.arrivals} would never end: say how many with --n, or --duration")
        if self.n is not None and self.workers > self.n:
            yield (f"{self.workers} workers for {self.n} requests: use --workers {self.n} or fewer")
        if self.image and self.uses_sessions:
            yield ("--image: the turns of sessions hold no pictures; ask single requests")
        if self.max_in_flight and self.max_in_flight < (clients := named.facts.clients):
            yield (
                f"--arrivals {self.arrivals} has {clients} under way, more than --max-in-flight {self.max_in_flight}: "
                f"write --arrivals closed:{self.max_in_flight}, or leave --max-in-flight out"
            )
        if self.gpu and self.dcgm_url:
            yield ("--gpu reads the GPUs of this machine and --dcgm-url those of another: choose one")
        if self.lengths and (self.lengths == "tokenizer") != bool(self.tokenizer):
            mend = "leave --tokenizer out" if self.tokenizer else "name one with --tokenizer"
            yield (f"--lengths {self.lengths} {'needs no' if self.tokenizer else 'needs a'} tokenizer: {mend}")
