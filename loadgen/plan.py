"""The Plan: one validated, complete description of a run.

Each option of a run is one field of `Plan`. The docstring of a field is its help text on the command line, in the web
form and in the generated documentation. `loadgen.cli.options` turns the fields into command-line options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import msgspec

from loadgen import traffic
from loadgen.errors import PlanError
from loadgen.load_shorthand import expand, split_urls
from loadgen.plan_fields import (
    CONFIDENCE,
    JSON_OBJECT,
    NOTHING_SENT,
    POSITIVE,
    TUPLE,
    Preprocess,
    RunOption,
    canonical,
    existing_tokenizer,
    fields_of,
    image_sizes,
    in_range,
    keyword_signature,
    known_gpu,
    one_of,
    require,
    validate_fields,
)
from loadgen.servers.auth import (
    check_ca_file,
    check_headers,
    client_certificate_mistake,
    normalise_url,
    redact_commands,
    redact_fields,
    redact_header,
    register_commands,
    register_fields,
    require_one_url,
)
from loadgen.servers.backends import BACKENDS, join_or, simulated_backends
from loadgen.servers.proxy import normalise_proxy_url
from loadgen.servers.server_url import check_server_url, fixed_number
from loadgen.servers.session_identity import check_captures, check_header_name, check_session_headers
from loadgen.servers.wire.timestamp_sources import AUTO, SOURCES
from loadgen.timed_commands import check_timed_commands, late_command
from loadgen.workloads import arrivals, cancellation, lengths, model_mix, workload
from loadgen.workloads.arrival_facts import Arrivals
from loadgen.workloads.canaries import MAX_CANARIES
from loadgen.workloads.cancellation import Cancellation
from loadgen.workloads.datasets import user_fields
from loadgen.workloads.lengths import LengthDistribution, OutputLengths
from loadgen.workloads.model_mix import ModelMix
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.recordings import SECONDS_DEFAULT, parse_seconds_of_audio
from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.token_counter import CountingMethod
from loadgen.workloads.workload import Workload

FIXED_SEED = 0
"""Seed of runs on simulated servers and in virtual time, unless the user states another seed."""
SeedChoice = Literal["fixed", "stated", "random"]
"""How the seed of a run was chosen:

- fixed: The run uses FIXED_SEED, because the server is simulated or the run is in virtual time.
- stated: The user stated the seed.
- random: The command drew a new seed, so that no earlier run has sent the same prompts.
"""
SPEECH_TOKENS = 32
"""Default length of a text to speak, in tokens. It takes about ten seconds to speak."""
BURST_REQUESTS = 1000
"""Number of requests of `loadgen burst`, unless the user states another number or a file."""


def _default_output_tokens(settings: Mapping[str, Any]) -> int | str:
    """Return the default of `output_tokens` for a plan with these `settings`.

    If the workload reads its requests from a file, the default is the length of each recorded answer. Otherwise the
    default is DEFAULT_OUTPUT_TOKENS.
    """
    return lengths.ANSWERS if _workload_file(settings["workload"]) else lengths.DEFAULT_OUTPUT_TOKENS


def _default_seed(_settings: Mapping[str, Any]) -> int:
    """Return the default of the plan's field `seed`, which is the same number for every plan.

    If the server turns out to be real, `loadgen.engine.resolve_server.with_seed` later replaces this default by a
    random seed.
    """
    return FIXED_SEED


def default_input_tokens(settings: Mapping[str, Any]) -> int | str:
    """Return the default prompt length for a plan with these `settings`.

    For text to speech, the default is SPEECH_TOKENS, because such texts are usually short. For other endpoints, it is
    the default of the field `Plan.input_tokens`.
    """
    speaks = settings["endpoint"] == "speech" or str(settings["url"]).endswith("/audio/speech")
    return SPEECH_TOKENS if speaks else Plan.input_tokens


def _workload_file(text: str) -> Path | None:
    """Return the file from which a workload reads its requests, or None if the workload generates them."""
    return getattr(workload.parse(text), "path", None)


def names_file(text: str) -> bool:
    """Return True if the workload `text` reads its requests from a file. Return False for an invalid workload."""
    try:
        return _workload_file(text) is not None
    except WorkloadError:
        return False


def all_endpoints() -> Iterable[str]:
    """Return the names of the endpoints of all backends."""
    return dict.fromkeys(name for kind in BACKENDS.values() for name in kind.dialects)


def check_connection_use(value: Any) -> Any:
    """Return `value`, a value of the option --connections. Raises ValueError if it is a number.

    Other load testers have an option --connections that takes a number. The error message therefore recommends
    --concurrency.
    """
    if str(value).isdecimal():
        raise ValueError(
            f"states which requests share a connection: pooled, session or new; to keep {value} requests in flight, "
            f"write --concurrency {value}"
        )
    return value


def canonical_model(text: str) -> str:
    """Return the canonical text of the option --model: the name of a model, or several names with weights.

    For example, `a=70,b=30` sends 70% of the requests to the model a. Raises ValueError for an invalid text.
    """
    try:
        return str(model_mix.parse(text) or text)
    except WorkloadError as error:
        raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None


_ARRIVALS_SYNTAX = join_or(
    process.SYNTAX.partition(", such as")[0].replace(" or ", ", ") for process in arrivals.ARRIVAL_PROCESSES.values()
)


def check_more_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the URLs of the other replicas without surrounding spaces.

    An invalid URL raises the errors of `check_server_url`.
    """
    return tuple(check_server_url(require_one_url(url)) for url in urls)


CONNECTION_USE = Preprocess(check_connection_use)
CANCELLATION = canonical(lambda text: cancellation.parse(text) if text else "")
ARRIVALS = canonical(arrivals.parse)
WORKLOAD = canonical(workload.parse)
INPUT_LENGTHS = canonical(lengths.parse)
AUDIO_LENGTHS = canonical(parse_seconds_of_audio)
OUTPUT_LENGTHS = canonical(lengths.parse_outputs)
KNOWN_BACKEND = one_of(lambda: BACKENDS)
KNOWN_ENDPOINT = one_of(all_endpoints)
KNOWN_TIMESTAMP_SOURCE = one_of(lambda: (AUTO, *SOURCES))
MAX_REQUESTS = 1_000_000
"""Maximum number of requests of a run, and of users in `loadgen ui`."""
URL = Annotated[str, normalise_url]
ONE_URL = Preprocess(require_one_url)
SERVER_URL = Annotated[str, check_server_url]
ROUTE = require(
    lambda path: re.fullmatch(r"(/[!-~]*)?", path, re.ASCII) is not None,
    "must begin with / and contain no spaces, such as /v2/generate; --url names the server",
)
FORWARD_INTERVAL = require(lambda ends: 0 <= ends[0] < ends[1], "must begin at 0 or later and end after it begins")
UP_TO_A_WEEK = require(lambda length_s: 0 < length_s <= 7 * 86_400, "must be more than 0 and at most one week")
SINGLE_WORD = require(
    lambda word: re.fullmatch(r"[\w.-]{1,60}", word, re.ASCII) is not None, "must be 1 to 60 letters, digits, . _ or -"
)
SHORT_TEXT = require(lambda text: len(text) <= 60, "must have at most 60 characters")
SAMPLING_INTERVAL = require(
    lambda every_s: every_s == 0 or every_s >= 1,
    "must be at least 1s, because frequent reads slow down a busy server; 0 turns them off",
)


class _KeywordSignature:
    """Descriptor that computes the signature of a Plan class when `inspect.signature` or an IDE reads it."""

    def __get__(self, _plan: Plan | None, cls: type[Plan]) -> Signature:
        return keyword_signature(cls)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The complete description of a run: load, server, prompts and output. Every run stores it in its header."""

    # Empty with --url until loadgen.engine.resolve_server.with_detected_server has detected the server.
    server: Annotated[
        str,
        KNOWN_BACKEND,
        RunOption(
            "Server",
            "start",
            f"Type of server, such as vllm. All: {join_or(BACKENDS)}. Detected by default if --url is given.",
        ),
    ] = ""
    endpoint: Annotated[
        str | None,
        KNOWN_ENDPOINT,
        RunOption(
            "Server",
            "start",
            f"API endpoint, such as chat. All: {join_or(all_endpoints())}. Default: the first that accepts requests.",
        ),
    ] = None
    path: Annotated[str, ROUTE, RunOption("Advanced", "start")] = ""
    """Path to send requests to, such as /v2/generate, for a server whose routes have other names. --endpoint says how
    the requests and responses look."""
    url: Annotated[SERVER_URL | None, ONE_URL, RunOption("Server", "start")] = None
    """Server URL, such as http://127.0.0.1:8000. A host:port and the full URL of an endpoint are accepted too. Repeat
    the option for several replicas of one server. Default: LOADGEN_<SERVER>_URL, then the port that docker-compose.yml
    publishes, then the built-in simulated server."""
    more_urls: Annotated[tuple[str, ...], TUPLE, check_more_urls] = ()
    """URLs of the further replicas, if `url` is a list."""
    balance: Annotated[Literal["even", "least-busy", "session"], RunOption("Advanced")] = "even"
    """How to choose the replica of each request if --url is repeated: even (default: in turn, the same number for
    each), least-busy (the one with the fewest requests in flight) or session (in turn, and a session stays on one)."""
    expect_replicas: Annotated[int, in_range(0, 10_000), RunOption("Advanced")] = 0
    """Number of replicas that must answer before the run starts: different --replica-header values, or different
    addresses of the URLs. Default 0: do not wait."""
    replicas_wait_s: Annotated[float, POSITIVE, RunOption("Advanced")] = 60.0
    """How long --expect-replicas waits (default 60s)."""
    model: Annotated[str | None, canonical_model, RunOption("Server", "start")] = None
    """Model, or models with weights: a=70,b=30. The names may be those of LoRA adapters. Default: the first model that
    the server lists."""
    # Canonical text, as loadgen.workloads.arrivals defines it.
    arrivals: Annotated[
        str, ARRIVALS, RunOption("Load", None, f"Load pattern, such as poisson:5. All forms: {_ARRIVALS_SYNTAX}.")
    ] = "burst"
    rate: InitVar[float | str | None] = None
    """Requests per second at random intervals. The plan stores it as `arrivals`: poisson:RATE."""
    # None if the duration or a trace determines the number.
    n: Annotated[int | None, in_range(1, MAX_REQUESTS), RunOption("Load")] = None
    """Number of requests. For multi-turn workloads, number of sessions."""
    duration_s: Annotated[float | None, UP_TO_A_WEEK, RunOption("Load")] = None
    """How long to send requests, such as 60s."""
    # Without arrivals, a concurrency becomes `closed:N` (loadgen.load_shorthand).
    concurrency: Annotated[int | None, in_range(1, MAX_REQUESTS), RunOption("Load")] = None
    """Requests in flight: further requests WAIT. When a request ends, the next one is sent at once. With --rate or
    --arrivals, N is a limit: a request that is due while N are in flight waits and is sent late. It keeps its due time,
    and is not dropped."""
    # None: 10,000, or the maximum number of requests that are due within one second if that is larger.
    max_in_flight: Annotated[int | None, in_range(1, MAX_REQUESTS), RunOption("Load")] = None
    """Limit in flight: further requests are DROPPED. A request that is due while N are in flight is never sent, and
    counts as dropped. With --concurrency such a request waits instead."""
    warmup: Annotated[int, in_range(0, 10_000), RunOption("Load")] = 0
    """Number of warm-up requests. They are sent before the run, and results do not include them."""
    cold: Annotated[bool, RunOption("Advanced")] = False
    """Empty the server's prefix cache before the run, and check that it is empty (vLLM and SGLang)."""
    verify: Annotated[int, in_range(0, MAX_CANARIES), RunOption("Advanced")] = 0
    """Number of canaries: prompts whose answers under load are compared with those without load (default 0). Up to 8
    further requests are then in flight."""
    workers: Annotated[int, in_range(1, 256), RunOption("Advanced")] = 1
    """Number of worker processes that share the load."""
    timeout_s: Annotated[float, POSITIVE, RunOption("Advanced", "start")] = 600.0
    """Timeout per request (default 600s)."""
    repeats: Annotated[int, in_range(1, 1000), RunOption("Load")] = 1
    """Number of times to run the plan. Each repeat uses the next seed."""
    repeat: Annotated[int, in_range(0, 1000)] = 0
    """Number of this repeat, from 1. It is 0 if the plan runs only once."""
    workload: Annotated[str, WORKLOAD, RunOption("Prompts", "form")] = "synthetic"
    """Source of prompts, such as sharegpt:FILE. With FILE alone, loadgen recognises the format. Other sources:
    synthetic (the default), jsonl:FILE, shared-prefix:groups=G,tokens=P, multi-turn:turns=K (sessions), ..."""
    repeat_file: Annotated[bool, RunOption("Prompts", "start")] = False
    """Repeat a file's prompts if the run needs more. A prefix cache of the server may make repeated prompts faster."""
    # A number, or canonical text, as loadgen.workloads.lengths defines it.
    input_tokens: Annotated[int | str, INPUT_LENGTHS, RunOption("Prompts", "form", default=default_input_tokens)] = 512
    """Prompt length (default 512) or uniform:A..B. Other forms: lognormal:mean=M,cv=C, empirical:FILE, ... Lengths
    count tokens of the server's tokenizer. Texts to speak have 32 tokens by default."""
    # None: loadgen.workloads.recordings.SECONDS_DEFAULT. A number, or canonical text of a length distribution.
    audio_seconds: Annotated[int | str | None, AUDIO_LENGTHS, RunOption("Advanced", "start")] = None
    """Seconds of audio per request (default 10). --endpoint transcriptions sends synthetic recordings of this length,
    or of lengths such as uniform:5..30. --workload audio:FOLDER sends files instead."""
    batch_size: Annotated[int, in_range(1, 10_000), RunOption("Advanced", "form")] = 1
    """Inputs per request for embeddings, rerank, score and classify (default 1). Each input has --input-tokens
    tokens."""
    output_tokens: Annotated[
        int | str, OUTPUT_LENGTHS, RunOption("Prompts", "form", default=_default_output_tokens)
    ] = lengths.DEFAULT_OUTPUT_TOKENS
    """Output length (default 128), or max:128. All forms of --input-tokens are possible. With max: in front of a
    length, responses may stop earlier. For a workload from a file the default is `answers`, the lengths of the recorded
    answers."""
    extra_body: Annotated[dict[str, Any], JSON_OBJECT, user_fields, register_fields, RunOption("Advanced", "start")] = (
        field(default_factory=dict)
    )
    """Fields to merge into the body of each request, as JSON or @FILE: '{"temperature": 0.7}'. null removes a field. A
    secret is read from the environment: '{"api_key": "$NAME"}'."""
    ignore_eos: Annotated[bool, RunOption("Advanced", "start")] = True
    """Generate the full output length by ignoring the end-of-sequence token, if the server can. With --no-ignore-eos
    the model may stop early."""
    image: Annotated[tuple[str, ...], TUPLE, image_sizes, RunOption("Advanced", "start")] = ()
    """Size of a synthetic image to add to each chat request, such as 512x512. Repeatable."""
    seed: Annotated[int, RunOption("Prompts", "form", default=_default_seed)] = FIXED_SEED
    """Random seed. The same seed gives byte-identical requests, scheduled for the same times. Default: a new seed for
    each command, so that no prefix cache holds the prompts; 0 on simulated servers."""
    seed_choice: SeedChoice = "fixed"
    """How the seed was chosen. `loadgen.engine.resolve_server.with_seed` replaces `fixed` by `random` if the server is
    real."""
    tokenizer: Annotated[Path | None, existing_tokenizer, RunOption("Advanced", "start")] = None
    """Tokenizer of the model, for building prompts: a file, a folder, or the name of a model in the local Hugging Face
    cache."""
    lengths: Annotated[CountingMethod | None, RunOption("Advanced", "start")] = None
    """How to count prompt tokens if the server cannot count them exactly: server (default: send it sample prompts),
    tokenizer (use only --tokenizer), approximate, or exact (refuse estimated lengths)."""
    api_key_env: Annotated[str, RunOption("Server", "start")] = "LOADGEN_API_KEY"
    """Environment variable that holds the API key. Default: LOADGEN_API_KEY, which may be unset."""
    session_header: Annotated[tuple[str, ...], TUPLE, check_session_headers, RunOption("Advanced", "start")] = ()
    """Request header with one value per session, such as X-Session-ID, so that a router keeps a session on one server.
    Or a router: vllm-router, dynamo, sglang or llm-d. Repeatable. Sub-agents send the same value, or with NAME=own a
    value of their own."""
    session_capture: Annotated[tuple[str, ...], TUPLE, check_captures, RunOption("Advanced", "start")] = ()
    """Response header, or cookie such as cookie:NAME, that later turns of the session send back. Repeatable."""
    replica_header: Annotated[str, check_header_name, RunOption("Advanced", "start")] = ""
    """Response header by which a balancer names the replica that answered, such as X-Served-By. Figures are then shown
    per replica."""
    server_timing: Annotated[bool, RunOption("Advanced", "start")] = False
    """Read the times that the server states about each request (Server-Timing, TGI's x-queue-time, vLLM's metrics,
    SGLang's meta_info), and split TTFT into queue, prefill and network."""
    connections: Annotated[Literal["pooled", "session", "new"], CONNECTION_USE, RunOption("Advanced")] = "pooled"
    """Which requests share a connection: pooled (default: any), session (those of one session) or new (none)."""
    cancel: Annotated[str, CANCELLATION, RunOption("Advanced")] = ""
    """Share of requests whose client gives up, such as '5% after 2s' or '5% after 20 tokens'. They count neither as
    failed nor in latencies."""
    header: Annotated[tuple[str, ...], TUPLE, check_headers, RunOption("Advanced", "start")] = ()
    """HTTP header to send with each request, as 'Name: value'. $NAME in the value is read from the environment.
    Repeatable."""
    proxy: Annotated[str | None, normalise_proxy_url, RunOption("Advanced", "start")] = None
    """HTTP proxy to connect through, such as http://proxy:3128. Its USER:PASSWORD is read from LOADGEN_PROXY_AUTH. The
    variables HTTPS_PROXY and HTTP_PROXY are ignored."""
    ca_file: Annotated[Path | None, check_ca_file, RunOption("Advanced", "start")] = None
    """PEM file of the certificate authorities to trust for https."""
    cert: Annotated[Path | None, RunOption("Advanced", "start")] = None
    """PEM file of a client certificate for https. It may contain the private key too."""
    key: Annotated[Path | None, RunOption("Advanced", "start")] = None
    """PEM file of the private key of --cert. A passphrase is read from LOADGEN_KEY_PASSPHRASE."""
    insecure: Annotated[bool, RunOption("Advanced", "start")] = False
    """Do not verify TLS certificates."""
    simulated: Annotated[bool, RunOption("Advanced", "start")] = False
    """Use the built-in simulated server, which needs no GPU. Without this option, it is used only if no server is
    found, and never for --assert or a sweep."""
    real: Annotated[bool, RunOption("Advanced", "start")] = False
    """Never fall back to the simulated server."""
    force: Annotated[bool, RunOption("Advanced", "start")] = False
    """Measure a server version that is known to give misleading results."""
    over_limit: Annotated[bool, RunOption("Advanced")] = False
    """Send more concurrent requests than the server's limit, to see how it treats the excess."""
    speed: Annotated[float, POSITIVE, RunOption("Advanced", "start")] = 1.0
    """Clock speed of the built-in simulated server, as a multiple of real time (default 1)."""
    window_s: Annotated[tuple[float, float] | None, FORWARD_INTERVAL, RunOption("Advanced")] = None
    """Measurement window, such as 10s..50s from the start. Default: the whole run, or the steady part of a long
    open-loop run."""
    stamps: Annotated[str, KNOWN_TIMESTAMP_SOURCE, RunOption("Advanced", "start")] = AUTO
    """Source of receive timestamps: ring (kernel timestamp of each packet), socket (kernel timestamp of each read),
    user (clock of this process, which may be late) or auto (the best source that works here)."""
    client_priority: Annotated[Literal["auto", "realtime", "normal"], RunOption("Advanced", "start")] = "auto"
    """CPU priority of the load generator during a run: auto raises it to nice -10 where permitted; realtime uses
    SCHED_RR; normal does not change it."""
    metrics_every_s: Annotated[float, SAMPLING_INTERVAL, RunOption("Advanced", "start")] = 1.0
    """Interval between reads of the server's /metrics, GPUs and memory: 1s (default) or longer. 0 turns them off."""
    dcgm_url: Annotated[URL | None, RunOption("Advanced", "start")] = None
    """URL of a DCGM exporter on the server's machine, such as http://gpu-host:9400, to read its GPUs."""
    gpu: Annotated[bool | None, RunOption("Advanced")] = None
    """Read this machine's GPUs through NVML. Default: only if the server runs on this machine."""
    server_pid: Annotated[tuple[int, ...], TUPLE, RunOption("Advanced")] = ()
    """PID of a server process on this machine, to record its memory and that of its children. Repeatable."""
    soak: Annotated[bool, RunOption("Advanced")] = False
    """For a run of hours or days: write Records to files of 64 MB, which are compressed during the run."""
    keep_records_s: Annotated[float | None, POSITIVE, RunOption("Advanced")] = None
    """With --soak: remove Records of requests that ended longer ago than this, such as 24h. Percentiles per time
    window and worker stay."""
    at: Annotated[tuple[str, ...], TUPLE, check_timed_commands, register_commands, RunOption("Advanced")] = ()
    """Run a shell command at a time of the run, such as --at 10m 'kubectl delete pod vllm-0'. Repeatable. The report
    shows the output and the time to recover. Commands that are still running at the end of the run are terminated."""
    objectives: Annotated[tuple[str, ...], TUPLE] = ()
    """Objectives of the run, as for --assert. `loadgen report` judges the run by them again."""
    confidence: Annotated[float | None, CONFIDENCE] = None
    """Confidence with which objectives must be met, as for --confidence. None: the measured figure decides."""
    goodput: Annotated[tuple[str, ...], TUPLE] = ()
    """Objectives of each request, as for --goodput."""
    traffic: tuple[dict[str, Any], ...] = ()
    """Classes of traffic that run at the same time: the [[traffic]] tables of a plan file."""
    only_class: str = ""
    """Name of the only class of traffic to run, as `--alone` does before the run. Empty: all classes."""
    label: Annotated[str, SINGLE_WORD, RunOption("Advanced", "start")] = "run"
    """Label of the run, used in its folder name and report: letters, digits, . _ or -."""
    platform: Annotated[str, SHORT_TEXT, RunOption("Advanced", "start")] = ""
    """Hardware of the server, such as A800. Reports show it next to the server's name."""
    gpu_model: Annotated[str, known_gpu, RunOption("Advanced", "start")] = ""
    """GPUs of the server, for the hardware limit: H100 or 4 x A100. Default: detected through NVML or DCGM."""

    if not TYPE_CHECKING:  # type checkers see the fields
        __signature__ = _KeywordSignature()

        def __init__(self, **values: Any) -> None:
            """Validate the values and store them. Raises PlanError with one line per mistake. Each line names the
            command-line option."""
            if "seed" in values:
                values.setdefault("seed_choice", "stated")
            if "traffic" in values:
                values["traffic"] = traffic.read_tables(values["traffic"], fields_of(type(self)))
            vars(self).update(validate_fields(type(self), split_urls(expand(values))))
            mistake = next(self._mistakes(), "")
            if mistake:
                raise PlanError(mistake, NOTHING_SENT)
            if self.traffic:
                objectives = dict.fromkeys((*self.objectives, *traffic.class_objectives(self.traffic)))
                vars(self)["objectives"] = tuple(objectives)

    def replaced(self, **changes: Any) -> Self:
        """Return a copy of the plan with some fields changed. The new values are not validated."""
        plan = object.__new__(type(self))
        vars(plan).update(vars(self) | changes)
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as the run file stores it: with JSON types and without secrets."""
        values = vars(self) | {
            "header": tuple(map(redact_header, self.header)),
            "at": redact_commands(self.at),
            "extra_body": redact_fields(self.extra_body),
            "traffic": tuple(map(traffic.redacted, self.traffic)),
        }
        return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(values, enc_hook=str)))

    def each_repeat(self) -> list[Plan]:
        """Return one plan per repeat. Each repeat has a different seed.

        With equal seeds, the server would find the prompts of the previous repeat in its prefix cache. Random lengths
        and intervals would also be equal in all repeats.
        """
        changes = ({"repeat": number, "seed": self.seed + number - 1} for number in range(1, self.repeats + 1))
        return [self.replaced(**change) for change in changes]

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URLs of all replicas that the plan names. Empty if it names no URL."""
        return (self.url, *self.more_urls) if self.url else ()

    @property
    def cancellation(self) -> Cancellation | None:
        """Return which share of the requests is abandoned and when (--cancel), or None if no request is abandoned."""
        return cancellation.parse(self.cancel) if self.cancel else None

    @property
    def model_mix(self) -> ModelMix | None:
        """Return the models over which the requests are split, or None if all requests go to one model."""
        return model_mix.parse(self.model) if self.model else None

    @property
    def models(self) -> list[str]:
        """Return the names of all models that the plan or its classes of traffic use. Each name appears once.

        A mix of models, such as `a=70,b=30`, contributes the name of each model in the mix.
        """
        names = [self.model, *(table.get("model") for table in self.traffic)]
        mixes = [(name, model_mix.parse(name)) for name in names if name]
        return [*dict.fromkeys(model for name, mix in mixes for model in (mix.models if mix else (name,)))]

    @property
    def first_model(self) -> str | None:
        """Return the model that the plan names, or None if the plan names no model.

        If the plan splits its requests over several models, return the first of these models.
        """
        mix = self.model_mix
        return self.model if mix is None else mix.models[0]

    @property
    def arrival_process(self) -> Arrivals:
        """Return the arrival process that the field `arrivals` describes."""
        return arrivals.parse(self.arrivals)

    @property
    def prompt_source(self) -> Workload:
        """Return the source of prompts that the field `workload` describes."""
        return workload.parse(self.workload)

    @property
    def input_lengths(self) -> LengthDistribution:
        """Return the distribution of prompt lengths that the field `input_tokens` describes."""
        return lengths.parse(str(self.input_tokens))

    @property
    def audio_lengths(self) -> LengthDistribution:
        """Return the distribution of the lengths of synthetic recordings, in seconds."""
        return lengths.parse(str(self.audio_seconds or SECONDS_DEFAULT))

    @property
    def output_lengths(self) -> OutputLengths:
        """Return the output lengths that the field `output_tokens` describes."""
        return lengths.parse_outputs(str(self.output_tokens))

    @property
    def uses_sessions(self) -> bool:
        """Return True if the workload consists of sessions.

        The load of such a plan is stated in sessions: `n` is the number of sessions, `arrivals` determines when
        sessions start, and each client of a closed loop has one session at a time.
        """
        return workload.has_sessions(self.prompt_source)

    @property
    def workload_file(self) -> Path | None:
        """Return the file from which the workload reads its requests, or None if it generates them."""
        return _workload_file(self.workload)

    @property
    def uses_file(self) -> bool:
        """Return True if the prompts or sessions come from a file."""
        return self.workload_file is not None

    @property
    def may_stop_early(self) -> bool:
        """Return True if responses may end before the requested length."""
        return not self.ignore_eos or self.output_lengths.may_end

    def _mistakes(self) -> Iterator[str]:
        """Yield a message for each mistake that involves more than one field."""
        process = self.arrival_process
        if not (self.server or self.url or self.simulated):
            yield f"--server is missing: name {join_or(BACKENDS)}, or give --url to detect the server"
        yield from self._traffic_mistakes()
        yield from self._simulated_mistakes()
        yield from self._replica_mistakes()
        yield from self._raw_mistakes()
        yield from self._end_mistakes()
        yield from self._command_mistakes()
        yield from self._soak_mistakes()
        if mistake := client_certificate_mistake(self.cert, self.key):
            yield mistake
        if self.n is not None and self.workers > self.n:
            yield f"{self.workers} workers for {self.n} requests: use --workers {self.n} or fewer"
        if self.image and self.uses_sessions:
            yield "--image: sessions cannot contain images; use single requests"
        if self.max_in_flight and self.max_in_flight < process.facts.clients:
            yield (
                f"--arrivals {self.arrivals} keeps {process.facts.clients} requests in flight, more than "
                f"--max-in-flight {self.max_in_flight}: write --arrivals closed:{self.max_in_flight}, or leave "
                "--max-in-flight out"
            )
        if self.extra_body.get("ignore_eos") and not self.ignore_eos:
            yield "--extra-body requests ignore_eos, but --no-ignore-eos forbids it: choose one"
        yield from self._concurrency_mistakes()
        yield from self._part_mistakes()
        if self.gpu and self.dcgm_url:
            yield "--gpu reads the GPUs of this machine, --dcgm-url those of another machine: choose one"
        if self.lengths and (self.lengths == "tokenizer") != bool(self.tokenizer):
            if self.tokenizer:
                yield f"--lengths {self.lengths} needs no tokenizer: leave --tokenizer out"
            else:
                yield f"--lengths {self.lengths} needs a tokenizer: name one with --tokenizer"

    def _soak_mistakes(self) -> Iterator[str]:
        """Yield a message for each mistake that involves --keep-records."""
        if self.keep_records_s is None:
            return
        if not self.soak:
            yield "--keep-records removes files of --soak: add --soak"
        elif self.keep_records_s < self.timeout_s:
            yield f"--keep-records {self.keep_records_s:,.12g}s is shorter than --timeout {self.timeout_s:,.12g}s"
        elif self.verify:
            yield (
                "--keep-records would remove the answers to canaries before the load, with which --verify compares: "
                "leave --keep-records or --verify out"
            )

    def _part_mistakes(self) -> Iterator[str]:
        """Yield a message for each objective that names a class of traffic or a model that the plan does not have.

        Objectives are not checked if some names are known only during the run. This is the case if the lines of a file
        may name further models, or if responses may name replicas.
        """
        plans = [traffic_class.plan for traffic_class in traffic.traffic_classes(self)] if self.traffic else [self]
        names_replicas = self.replica_header or self.more_urls
        unknown = any(plan.uses_file and plan.model_mix is None for plan in plans) or names_replicas
        if not self.objectives or unknown:
            return
        from loadgen.analysis.objectives import part_of

        names = [table["name"] for table in self.traffic]
        names += [model for plan in plans if plan.model_mix for model in plan.model_mix.models]
        for objective in self.objectives:
            part = part_of(objective)
            if part and part not in names:
                choices = f"choose {join_or(names)}" if names else f"write {objective.rpartition(':')[2].strip()!r}"
                yield f"--assert {objective!r}: the plan has no class of traffic and no model {part!r}; {choices}"

    def _raw_mistakes(self) -> Iterator[str]:
        """Yield a message for each setting that cannot be combined with the workload `requests:FILE`.

        The file of such a workload contains complete request bodies, which are sent unchanged. The settings in
        question, such as --extra-body, would change the bodies.
        """
        if not isinstance(self.prompt_source, RawRequests):
            return
        settings = {
            "--extra-body": bool(self.extra_body),
            "--image": bool(self.image),
            "--batch-size": self.batch_size != 1,
            "--input-tokens": self.input_tokens != default_input_tokens(vars(self)),
            "--output-tokens": self.output_tokens != lengths.ANSWERS,
            "--model": self.model_mix is not None,
        }
        for option, is_set in settings.items():
            if is_set:
                yield f"{option}: --workload {self.workload} sends each body as it is; leave {option} out"

    def _traffic_mistakes(self) -> Iterator[str]:
        """Yield a message if the plan states a load for all classes of traffic together, and no class uses it.

        A class uses this load if its `[[traffic]]` table has a weight. Raises PlanError for mistakes in the tables.
        """
        if not self.traffic:
            return
        weights = any(traffic_class.share for traffic_class in traffic.traffic_classes(self))
        if traffic.has_own_load(self) and not weights:
            load = f"n = {self.n}" if self.arrivals == type(self).arrivals else f"arrivals = {self.arrivals!r}"
            yield f"[[traffic]]: no table has a weight, so no class uses {load} of the whole plan: leave it out"

    def _command_mistakes(self) -> Iterator[str]:
        """Yield a message if a command of --at would start at the end of the load or later.

        At that time, no more requests are sent, so the command would have no effect. Nothing is yielded if a load has
        no planned duration, because its end is not known.
        """
        plans = [traffic_class.plan for traffic_class in traffic.traffic_classes(self)] if self.traffic else [self]
        durations_s = [plan.duration_s for plan in plans if plan.duration_s is not None]
        if not self.at or len(durations_s) < len(plans):
            return
        late = late_command(self.at, max(durations_s))
        if late:
            instant = late.strip().partition(" ")[0]
            yield f"--at {instant}: no requests are sent after {max(durations_s):g} s; name an earlier time"

    def _end_mistakes(self) -> Iterator[str]:
        """Yield a message if the load would never end, or if the workload cannot be combined with `--repeat-file`."""
        if self.traffic and not traffic.has_own_load(self):
            return
        if self.repeat_file and isinstance(self.prompt_source, SessionFile):
            yield f"--repeat-file: write loop=yes after the name of the file: --workload {self.workload},loop=yes"
        if self.repeat_file and not self.uses_file:
            yield f"--repeat-file: --workload {self.workload} reads no file"
        process = self.arrival_process
        if process.ends(self.n, self.duration_s) or (self.uses_file and not self.repeat_file):
            return
        if process.facts.burst:
            yield (
                "how many requests? Write --n 100 for 100 at once, --rate 5 --duration 60s for 5 per second, or "
                "--concurrency 8 --duration 60s to keep 8 in flight"
            )
        else:
            yield f"--arrivals {self.arrivals} would never end: limit it with --duration 60s or --n 100"

    def _simulated_mistakes(self) -> Iterator[str]:
        """Yield a message for each mistake that involves --simulated."""
        if not self.simulated:
            return
        if self.url or self.real:
            yield f"--simulated uses no other server: leave {'--url' if self.url else '--real'} out"
        if self.server and not BACKENDS[self.server].simulated:
            names = join_or(simulated_backends())
            yield f"--simulated: there is no simulated {self.server}; choose --server {names}"

    def _replica_mistakes(self) -> Iterator[str]:
        """Yield a message for each mistake that involves several replicas."""
        repeated = next((url for number, url in enumerate(self.urls) if url in self.urls[:number]), None)
        if repeated:
            yield f"--url {repeated} is given twice: name each replica once"
        if self.balance != "even" and not self.more_urls:
            yield f"--balance {self.balance}: repeat --url for each replica, or leave --balance out"
        if self.expect_replicas and self.simulated:
            yield "--expect-replicas: the built-in simulated server is one server; leave --simulated or this option out"
        if self.expect_replicas and not self.replica_header and self.urls:
            number = fixed_number(self.urls)
            if number is not None and number < self.expect_replicas:
                yield (
                    f"--expect-replicas {self.expect_replicas}: the URLs have only {number} "
                    f"address{'es' * (number > 1)}: repeat --url, or name a --replica-header"
                )
        if self.balance == "session" and not (self.uses_sessions or self.traffic):
            yield f"--balance session: --workload {self.workload} has no sessions; leave --balance out"

    def _concurrency_mistakes(self) -> Iterator[str]:
        """Yield a message for each setting that contradicts `concurrency`."""
        if self.concurrency is None:
            return
        clients = self.arrival_process.facts.clients
        if clients:
            yield (
                f"--arrivals {self.arrivals} keeps {clients} requests in flight, and --concurrency {self.concurrency} "
                f"states another number: write only --concurrency {self.concurrency}, or only --arrivals "
                f"{self.arrivals}"
            )
        if self.max_in_flight is not None:
            yield (
                f"beyond --concurrency {self.concurrency} requests wait, beyond --max-in-flight {self.max_in_flight} "
                "they are dropped: choose one"
            )
