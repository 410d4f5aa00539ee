"""Runs a Plan in virtual time. A simulated scheduler on modelled hardware handles the requests, and nothing is sent.

The result is a `Run`, as for a run on a real server.

    Plan ─ build_schedule ─> due times ─┐
         ─ Prompts ────────> requests  ─┴─> jobs ──> VirtualEngine ──> Records ──> run.jsonl
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from heapq import heapify, heappop, heappush
from importlib.metadata import version
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.analysis.cached_prompts import MARK as CACHED_MARK
from loadgen.analysis.format import percent
from loadgen.analysis.run.record import ErrorKind, Record, State, record_for, unsent_record
from loadgen.analysis.run.runfile import (
    Footer,
    Header,
    Run,
    RunWriter,
    StampFacts,
    Telemetry,
    TrafficFacts,
    append_lines,
)
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.prepare import (
    BYTES_PER_CHUNK,
    BYTES_PER_RECORD,
    OnProgress,
    announce_trace,
    build_schedule,
    scheduled_classes,
    traffic_facts,
    until_file_ends,
)
from loadgen.engine.raw_files import raw_requests_of
from loadgen.engine.request_queue import Schedule
from loadgen.engine.resolve_server import Say, max_length
from loadgen.engine.session_progress import SessionProgress
from loadgen.errors import OutputError, PlanError
from loadgen.folders import FolderClaim, check_room
from loadgen.plan import Plan
from loadgen.servers.backends import BACKENDS
from loadgen.servers.discovery import endpoint_dialect
from loadgen.servers.hardware import DEFAULT_FORMAT, SCALINGS, HardwareError, gpu
from loadgen.servers.hardware.disaggregation import transfer_s
from loadgen.servers.hardware.inference import PLAIN_SERVING, Deployment, ServingOptions
from loadgen.servers.hardware.technology import refuse_unused_networks
from loadgen.servers.hardware.validation import (
    TRANSFERRED,
    Accuracy,
    PredictedLoad,
    accuracies,
    describe,
    has_unmeasured_options,
)
from loadgen.servers.simulated.disaggregated_engine import DisaggregatedEngine, WorkerPools
from loadgen.servers.simulated.discrete_event import FOREVER_NS, FrontEnd, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import CURRENT, Engine, find_engine
from loadgen.servers.simulated.step_time import StepDurations
from loadgen.studies.twin import Twin, step_time_with, typical_host_s
from loadgen.studies.virtual_bodies import BodyReader, describe_counting
from loadgen.traffic import load_of_traffic, traffic_classes
from loadgen.workloads.arrival_facts import LoadFacts
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.cancellation import Cancellation
from loadgen.workloads.prompts import SharedSpan, load_tokenizer
from loadgen.workloads.raw_requests import RawRequests, RecordedSession
from loadgen.workloads.request import Request
from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.sessions import Conversation, Session
from loadgen.workloads.token_counter import approximate
from loadgen.workloads.workload import Prompts, WorkloadSpec
from loadgen.workloads.workload_facts import length_facts, workload_facts

DEFAULT_GPU = "A800"
DEFAULT_MODEL = "llama-2-7b"
STAMPS = StampFacts(name="virtual", title="virtual time", exact=True, error_s=0.0, by_read=False)
IDS_PER_SPAN = 1 << 32
"""Distance between the first token ids of two spans of prompts, so that different spans share no ids."""
MIN_ENDS, MAX_ENDS_PER_JOB = 1_000, 4
"""Limit on the number of times at which requests are to be ended: MIN_ENDS, and MAX_ENDS_PER_JOB for each request in
flight. A request in flight has one or two such times, and a request that has ended may have left some behind."""
LATENCIES = ("TTFT", "TPOT")
"""Figures of a simulated server whose accuracy is stated."""
PROGRESS_NS = 250_000_000
"""Virtual time in ns between two calls of a progress callback."""


class VirtualClock:
    """A clock that shows the virtual time of the current run. Progress callbacks use it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time since the start of the run, in s."""
        return self.now_s


@dataclass(frozen=True, slots=True)
class VirtualProgress:
    """A progress callback of a run in virtual time, and the clock from which the callback reads the time.

    The callback is called every PROGRESS_NS of virtual time. If it returns a reason, the run ends as if it had been
    interrupted.
    """

    show: OnProgress
    clock: VirtualClock


@dataclass(frozen=True, slots=True)
class ServerModel:
    """A server model: an engine version on given hardware, or a twin (a simulated server fitted to a measured one).

    A field that is None takes its value from the twin. Without a twin, the field has a default value.
    """

    gpu: str | None = None
    model: str | None = None
    tensor: int | None = None
    format: str | None = None
    vintage: str | None = None
    kv_tokens: int | None = None
    """Size of the KV cache in tokens. Default: the memory that remains after the weights are loaded."""
    running_limit: int | None = None
    """Maximum number of sequences per step. Default: the maximum of the engine."""
    step_tokens: int | None = None
    """Maximum number of tokens per step. Default: the maximum of the engine."""
    hardware: Path | None = None
    """TOML file with additional GPUs and models."""
    changes: tuple[str, ...] = ()
    """Values that replace those of the GPU's data sheet, in the syntax of loadgen.servers.hardware.with_changes."""
    serving: ServingOptions = PLAIN_SERVING
    """Parallel experts, pipeline stages, speculative decoding, prefix cache and chunked prefill."""
    workers: WorkerPools | None = None
    """Numbers of workers in disaggregated serving. None: each replica computes prompts and decodes."""
    twin: Twin | None = None

    @property
    def changed_settings(self) -> list[str]:
        """Names of the options with which the user has changed limits of the engine, such as `--kv-tokens`.

        The value of such an option replaces the default of the engine. If a twin is simulated (a fitted model of a real
        server), the value replaces that of the twin.
        """
        limits = {
            "--kv-tokens": self.kv_tokens,
            "--running-limit": self.running_limit,
            "--step-tokens": self.step_tokens,
        }
        return [option for option, value in limits.items() if value is not None]

    def policy(self, engine: Engine, kv_tokens: int, running_limit: int | None, step_tokens: int | None) -> Policy:
        """Return the batching policy of an engine with these limits and with the serving options of this model."""
        policy = engine.policy_for(kv_tokens, running_limit, step_tokens)
        return policy.with_serving(self.serving.cache_hit_rate, self.serving.chunked_prefill)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A complete model of a server, ready for a simulation: every value is known.

    It contains the limits of the server, the durations of its steps, and the facts about it for the header of the run
    file.
    """

    policy: Policy
    kv_tokens: int
    step_time: StepDurations
    request_s: float
    """Front-end time per request."""
    path_s: float
    """Time from the front end to the first step."""
    version: str
    model: str
    hardware: dict[str, Any]
    workers: WorkerPools | None = None
    transfer_s: Callable[[int], float] = lambda _: 0.0
    """Time in s to send the KV cache of a prompt with a number of tokens to a decode worker."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Errors of a twin's predictions by figure, as in `Twin.residual`. Empty without a twin."""

    def new_engine(self) -> VirtualEngine | DisaggregatedEngine:
        """Return a new simulated engine, without any jobs."""
        if self.workers is None:
            return VirtualEngine(Scheduler(self.policy, self.kv_tokens), self.step_time)
        return DisaggregatedEngine(self.workers, self.policy, self.kv_tokens, self.step_time, self.transfer_s)


@dataclass(slots=True)
class VirtualRequest:
    """A simulated request that is due or in flight."""

    part: VirtualClass
    """Class of traffic of the request."""
    request: Request
    due_ns: int
    conversation: Session | None = None
    """State of the session at this turn; None for a request without a session."""
    session_tokens: int = 0
    """Number of tokens in all questions and responses of the session so far."""
    progress: SessionProgress | None = None
    """Progress of the session if the session is a graph."""
    gives_up_ns: int | None = None
    """Time at which the client gives up (`--cancel`). None: it does not give up at a time."""
    gives_up_at_end: bool = False
    """True if the simulated response ends at the token after which the client gives up."""
    node: int = 0
    """Index of the request's node in the graph of its session."""
    released_ns: int | None = None
    """Time at which the request was sent, after it had waited for the end of another request. None if it did not
    wait."""

    @property
    def sent_ns(self) -> int:
        """Return the time at which the request is sent."""
        return self.due_ns if self.released_ns is None else self.released_ns

    def later_node(self, node: int, due_ns: int) -> VirtualRequest:
        """Return the request of another node in the graph of this request's session. The session must have a graph.

        `node` is the index of the other node, and its request is due at `due_ns`.
        """
        assert self.progress is not None
        return VirtualRequest(self.part, self.progress.request(node), due_ns, progress=self.progress, node=node)


@dataclass(slots=True, eq=False)
class VirtualClass:
    """A class of traffic in virtual time. A plan without `[[traffic]]` tables has one class, whose name is empty."""

    name: str
    plan: Plan
    """Plan of the class."""
    schedule: Schedule
    first_id: int
    """Id of the first request of the class."""
    cancellation: Cancellation | None
    timeout_ns: int
    upcoming: Iterator[VirtualRequest] = field(default_factory=lambda: iter(()))
    """Requests, and first requests of sessions, in the order of their due times."""
    live: int = 0
    """Number of requests in flight."""
    waiting: deque[VirtualRequest] = field(default_factory=deque)
    """Requests that are due but wait until another request of the class has ended, in order."""
    free_ns: list[int] = field(default_factory=list)
    """Heap of the times in ns at which requests of the class ended. Each time stands for one free place under the limit
    on requests in flight. Only used if requests beyond the limit wait."""


def run(
    plan: Plan,
    server_model: ServerModel,
    folder: Path,
    command: list[str],
    prediction: Sequence[Any] = (),
    take: Callable[[Record], object] = lambda _: None,
    say: Say = lambda _: None,
    *,
    progress: VirtualProgress | None = None,
) -> Run:
    """Simulate a run of `plan` in virtual time, and write its Records to `folder/run.jsonl`.

    - `folder` must be new or empty.
    - `command` is the command line, and `prediction` contains predicted figures. Both are stored in the header of the
      run file.
    - `take` is called with each Record. The caller needs it to see the Records, because the returned Run does not
      contain them.
    - `say` is called with each line for the user.
    - `progress` can end the run early.

    Raises LoadgenError or WorkloadError.
    """
    with FolderClaim(folder):
        return _run(plan, server_model, folder, command, prediction, take, say, progress=progress)


def _run(
    plan: Plan,
    server_model: ServerModel,
    folder: Path,
    command: list[str],
    prediction: Sequence[Any],
    take: Callable[[Record], object],
    say: Say,
    *,
    progress: VirtualProgress | None,
) -> Run:
    resolved = resolve_model(plan, server_model)
    load = _virtual_load(plan)
    record_bytes = 0
    for part in load.classes:
        tell = _with_name(say, part.name)
        announce_trace(part.plan, part.schedule, tell)
        if isinstance(part.plan.prompt_source, RawRequests):
            tell(describe_counting(part.plan))
        requests = part.schedule.count or part.schedule.clients
        record_bytes += requests * (BYTES_PER_RECORD + BYTES_PER_CHUNK * max_length(part.plan.output_tokens))
    check_room(folder, record_bytes)
    header = _header(load, server_model, resolved, command)
    if prediction:
        header.server["prediction"] = list(prediction)
    line = msgspec.json.encode(header)
    file = folder / "run.jsonl"
    append_lines(file, [line + b"\n"])
    writer = RunWriter(file)
    result = Run(file, msgspec.json.decode(line, type=Header), [], [], None)

    def keep(item: Record | Telemetry) -> None:
        writer.add(item)
        if isinstance(item, Record):
            take(item)
        else:
            result.telemetry.append(item)

    result.footer = VirtualRun(load, resolved, keep, progress).run()
    writer.add(result.footer)
    rescued = writer.close()
    if rescued:
        raise OutputError(
            f"cannot write {writer.path}: {writer.error}", f"Free some disk space and try again; remove {rescued}."
        )
    return result


def _with_name(say: Say, name: str) -> Say:
    """Return a function that calls `say` with each line, preceded by the name of a class of traffic, such as `chat: `.

    If the name is empty, the result is `say`.
    """
    return (lambda line: say(f"{name}: {line}")) if name else say


def run_in_memory(
    plan: Plan,
    server_model: ServerModel,
    draw: int | None = None,
    resolved: ResolvedModel | None = None,
    progress: VirtualProgress | None = None,
) -> Run:
    """Run the plan in virtual time and return the complete Run. No file is written.

    `draw` selects one of the bootstrap draws of a twin's constants (a twin is a simulated server fitted to a real one).
    `resolved` is an earlier result of `resolve_model`. `progress` can end the run early. Raises LoadgenError or
    WorkloadError.
    """
    resolved = resolved or resolve_model(plan, server_model, draw)
    load = _virtual_load(plan)
    result = Run(Path("simulated/run.jsonl"), _header(load, server_model, resolved, []), [], [], None)

    def keep(item: Record | Telemetry) -> None:
        if isinstance(item, Record):
            result.records.append(item)
        else:
            result.telemetry.append(item)

    result.footer = VirtualRun(load, resolved, keep, progress).run()
    return result


def resolve_model(plan: Plan, server_model: ServerModel, draw: int | None = None) -> ResolvedModel:
    """Return `server_model` with every value set.

    If the server model contains a twin (a simulated server that was fitted to a real one), `draw` selects one bootstrap
    draw of the twin's constants. Raises PlanError in these cases:

    - The hardware or the model is unknown.
    - The model does not fit into memory.
    - The endpoint of the plan generates no tokens.
    - The server model contains a twin and an option that this twin does not support.
    """
    dialect = endpoint_dialect(plan.server, plan.endpoint)
    if not dialect.has_output_length:
        hint = "Name an endpoint that does, or leave it out." if plan.endpoint else "Name another server."
        raise PlanError(f"--endpoint {dialect.endpoint} of {plan.server} generates no tokens from a prompt", hint)
    try:
        if server_model.twin and server_model.workers:
            raise PlanError("--prefill-workers: a twin has no separate workers", "Name the hardware instead of --twin.")
        if server_model.twin:
            return _resolve_twin(plan, server_model, server_model.twin, draw)
        return _resolve_hardware(plan, server_model)
    except HardwareError as error:
        raise PlanError(str(error)) from None


def _resolve_hardware(plan: Plan, server_model: ServerModel) -> ResolvedModel:
    """Resolve a server model that has no twin. Its values come from the hardware tables."""
    server = plan.server
    vintage = server_model.vintage or CURRENT
    engine = find_engine(server, vintage)
    deployment = engine.deployment(
        server_model.gpu or DEFAULT_GPU,
        server_model.model or DEFAULT_MODEL,
        format_name=server_model.format or DEFAULT_FORMAT,
        tensor=server_model.tensor or 1,
        file=server_model.hardware,
        changes=server_model.changes,
    )
    deployment = server_model.serving.apply(deployment)
    _refuse_unused_networks(server_model, deployment)
    kv_tokens = server_model.kv_tokens or engine.kv_tokens(deployment)
    return ResolvedModel(
        policy=server_model.policy(engine, kv_tokens, server_model.running_limit, server_model.step_tokens),
        kv_tokens=kv_tokens,
        step_time=engine.step_time(deployment),
        request_s=0.0,
        path_s=deployment.framework.server_s,
        version=engine.version,
        model=deployment.model.name,
        hardware={
            **_hardware_facts(deployment, server_model.workers),
            **_limit_facts(deployment, server_model),
            "vintage": vintage,
            **({"workers": asdict(server_model.workers)} if server_model.workers else {}),
            "accuracy": describe(
                model_accuracy(plan, server, vintage, deployment, server_model.workers, server_model.changed_settings)
            ),
        },
        workers=server_model.workers,
        transfer_s=partial(transfer_s, deployment),
    )


def _refuse_unused_networks(server_model: ServerModel, deployment: Deployment) -> None:
    """Raise HardwareError if the user names a network over which the simulated server sends nothing."""
    refuse_unused_networks(
        server_model.changes,
        in_machine=deployment.sends_in_machine,
        between_machines=deployment.far_hops > 0 or server_model.workers is not None,
    )


def _resolve_twin(plan: Plan, server_model: ServerModel, twin: Twin, draw: int | None) -> ResolvedModel:
    """Complete a server model with the values of a twin, and return the result.

    A value in `server_model` replaces the value of the twin. `draw` selects one bootstrap draw of the twin's constants.
    """
    engine = find_engine(twin.rules, server_model.vintage or twin.vintage)
    measured_deployment = twin.deployment(engine)
    if measured_deployment is None and server_model.serving.needs_hardware:
        raise PlanError(
            "this twin was fitted without hardware, so --pp, --ep, --dp-attention, --gpus-per-node and --draft-tokens "
            "have no effect",
            "Name the hardware when you fit it: loadgen twin fit RUN --gpu H100 --model llama-3.1-8b",
        )
    deployment = twin.deployment(
        engine,
        gpu=server_model.gpu,
        model=server_model.model,
        tensor=server_model.tensor,
        number_format=server_model.format,
        hardware=server_model.hardware,
        changes=server_model.changes,
    )
    if deployment:
        deployment = server_model.serving.apply(deployment)
        _refuse_unused_networks(server_model, deployment)
    elsewhere = _hardware_facts(deployment) != _hardware_facts(measured_deployment)
    values = twin.values(draw, elsewhere=elsewhere)
    if deployment and measured_deployment:
        values |= _host_constants(values, engine, measured_deployment, deployment)
    kv_tokens = server_model.kv_tokens or twin.kv_tokens
    if deployment and measured_deployment and not server_model.kv_tokens:
        kv_tokens = round(kv_tokens * engine.kv_tokens(deployment) / engine.kv_tokens(measured_deployment))
    running_limit = server_model.running_limit or twin.running_limit
    step_tokens = server_model.step_tokens or twin.step_tokens
    return ResolvedModel(
        policy=server_model.policy(engine, kv_tokens, running_limit, step_tokens),
        kv_tokens=kv_tokens,
        step_time=step_time_with(values, engine, deployment),
        request_s=values["request_s"],
        path_s=values["path_s"],
        version=twin.server_version,
        model=deployment.model.name if deployment else twin.served,
        hardware={
            **_hardware_facts(deployment),
            **_limit_facts(deployment, server_model),
            "twin": ", ".join(str(run["run"]) for run in twin.runs),
            "accuracy": _twin_accuracy(plan, server_model, twin, deployment, elsewhere=elsewhere),
        },
        errors=twin.errors(elsewhere=elsewhere),
    )


def _twin_accuracy(
    plan: Plan, server_model: ServerModel, twin: Twin, deployment: Deployment | None, *, elsewhere: bool
) -> str:
    """Return a text with the typical error of the twin's predictions, or `not validated`.

    If the twin predicts the server that was measured, the text states the error of the fit. If it predicts another
    server (`elsewhere`), the text states the error of such predictions in published measurements. The text is `not
    validated` in these cases:

    - The scheduler version, the serving options or the limits of the engine differ from those of the measured server.
    - For another server: the scheduler version is not the current one.
    - For another server: its options were never measured (see `has_unmeasured_options`).
    - For another server: prompts of the plan share prefixes.
    - No error is known.
    """
    vintage = server_model.vintage or twin.vintage
    if server_model.serving != PLAIN_SERVING or vintage != twin.vintage or server_model.changed_settings:
        return "not validated"
    if elsewhere and deployment is not None:
        if vintage != CURRENT or has_unmeasured_options(deployment) or _shares_prefixes(plan):
            return "not validated"
        figures = [f"{TRANSFERRED} {figure}" for figure in LATENCIES]
        known = accuracies(deployment, figures, load=_predicted_load(plan))
        return f"twin of another server, {describe(dict(zip(LATENCIES, known.values(), strict=True)))}"
    errors = [f"{name.upper()} {percent(twin.residual[name])}" for name in ("ttft", "tpot") if name in twin.residual]
    return f"fit off by {', '.join(errors)}" if errors else "not validated"


def _host_constants(
    values: Mapping[str, float], engine: Engine, measured: Deployment, predicted: Deployment
) -> dict[str, float]:
    """Return the host constants of a twin, converted from the deployment `measured` to the deployment `predicted`.

    The host constants are the times that the engine needs on the CPU: per step, and per sequence of a step. The
    hardware tables contain typical times for each kind of model, such as dense models and mixtures of experts. The
    twin's constants are multiplied by the ratio of the typical times of the two deployments.
    """
    before, after = (typical_host_s(engine, PLAIN_SERVING.apply(deployment)) for deployment in (measured, predicted))
    return {name: values[name] * after[name] / before[name] for name in before}


def _hardware_facts(deployment: Deployment | None, workers: WorkerPools | None = None) -> dict[str, Any]:
    """Return the hardware facts for the header of a run file, or an empty dictionary for unknown hardware.

    `loadgen.analysis.hardware_limit` reads these facts. `gpus` is the number of GPUs of all workers together.
    """
    if deployment is None:
        return {}
    weight_format = deployment.weights.name
    model = deployment.model.name
    if weight_format != DEFAULT_FORMAT:
        model += f"-{weight_format}"
    return {
        "gpu": deployment.gpu.name,
        "model": model,
        "tensor_parallel": deployment.tensor,
        "gpus": deployment.gpus * (workers.prefill + workers.decode if workers else 1),
        "format": weight_format,
    }


def _limit_facts(deployment: Deployment | None, server_model: ServerModel) -> dict[str, Any]:
    """Return the facts about a simulated server that are needed to judge its hardware limit, for the header of a run
    file.

    Facts that do not apply to the server are left out:

    - `changes`: the figures of the GPU that `--set` changed. Changes of the technology, the memory or the network are
      left out too, because they are part of the GPU's name.
    - `saves_work`: True if the server may be faster than the limit, because it drafts tokens or finds prompts in a
      cache.
    - `own_gpu`: True if the user's file (`--hardware`) describes the GPU.

    If `deployment` is None, there is no hardware model, and the result is empty.
    """
    if deployment is None:
        return {}
    changes = [change for change in server_model.changes if change.partition("=")[0] not in SCALINGS]
    saves_work = deployment.speculation is not None or deployment.cache_hit_rate > 0
    facts = {
        "changes": changes,
        "saves_work": saves_work,
        "own_gpu": _is_described_by_user(deployment.gpu.name, server_model.hardware),
    }
    return {name: value for name, value in facts.items() if value}


def _is_described_by_user(name: str, file: Path | None) -> bool:
    """Return True if the figures of a GPU come from a file of the user, and not from the hardware tables."""
    if file is None:
        return False
    try:
        return gpu(name, file) != gpu(name)
    except HardwareError:
        return True


def model_accuracy(
    plan: Plan,
    server: str,
    vintage: str,
    deployment: Deployment,
    workers: WorkerPools | None = None,
    changed_settings: Sequence[str] = (),
) -> dict[str, Accuracy]:
    """Return the errors of simulated latencies: by how much they differ from published measurements of the engine
    `server`.

    The errors come from validation.csv. A latency is "not validated" if no similar server was measured, or in one of
    these cases:

    - The generation of the engine (`vintage`) is not the current one.
    - The prompts of `plan` share prefixes.
    - Prefill and decode have separate workers (`workers`).
    - The user has changed a setting of the engine that was not changed in the measurements (`changed_settings`), such
      as `--kv-tokens`.
    - `deployment` has an option that was never measured (see `has_unmeasured_options`).
    - The load of `plan` is far outside of the measured loads, such as Poisson arrivals. The result then still contains
      the errors under the measured loads.
    """
    if vintage != CURRENT or deployment.framework.name.lower() != server or _shares_prefixes(plan):
        return dict.fromkeys(LATENCIES, Accuracy(validated=False))
    return accuracies(
        deployment,
        LATENCIES,
        load=_predicted_load(plan),
        separate_workers=workers is not None,
        changed_settings=changed_settings,
    )


def _predicted_load(plan: Plan) -> PredictedLoad:
    """Return the properties of a plan's load that decide whether similar loads were compared with measurements.

    If the plan has classes of traffic, only their arrivals are considered. Lengths in a file are not read.
    """
    if plan.traffic:
        plans = [traffic_class.plan for traffic_class in traffic_classes(plan)]
        closed = not any(part.arrival_process.facts.open_loop for part in plans)
        return PredictedLoad(None, None, None, closed)
    facts = plan.arrival_process.facts
    own_lengths = workload_facts(plan.workload).has_own_lengths
    return PredictedLoad(
        None if own_lengths else length_facts(plan.input_tokens).mean,
        length_facts(plan.output_tokens).mean,
        facts.clients or None,
        closed_loop=not facts.open_loop,
    )


def _shares_prefixes(plan: Plan) -> bool:
    """Return True if several prompts of a plan begin with the same tokens, so that the prefix cache saves work.

    If the plan has classes of traffic, the result is True if this is the case in any class.
    """
    plans = [traffic_class.plan for traffic_class in traffic_classes(plan)] if plan.traffic else [plan]
    return any(workload_facts(part.workload).shares_prefixes for part in plans)


def describe_server(plan: Plan, server_model: ServerModel) -> str:
    """Return a one-line description of the server model. Raises the errors of `resolve_model`."""
    resolved = resolve_model(plan, server_model)
    hardware = resolved.hardware
    origin = f"twin of {hardware['twin']}" if server_model.twin else hardware["vintage"]
    model = resolved.model
    if "gpu" in hardware:
        model = f"{hardware['gpus']} x {hardware['gpu']}: {model}, {hardware['format']}"
        if workers := hardware.get("workers"):
            model += f", {workers['prefill']} prefill and {workers['decode']} decode workers"
    if resolved.policy.cache_hit_rate:
        model += f", {percent(resolved.policy.cache_hit_rate)} of prompt tokens cached"
    if server_model.serving.chunked_prefill:
        model += f", chunked prefill {server_model.serving.chunked_prefill}"
    accurate = f"; model: {hardware['accuracy']}" if "accuracy" in hardware else ""
    return f"{plan.server} ({origin}) on {model}{accurate}"


def _header(load: VirtualLoad, server_model: ServerModel, resolved: ResolvedModel, command: list[str]) -> Header:
    plan = load.plan
    facts = {
        "name": plan.server,
        "title": BACKENDS[plan.server].title,
        "version": f"{resolved.version} ({'twin' if server_model.twin else 'modelled'})",
        "model": plan.model or resolved.model,
        "url": None,
        "simulated": True,
        "virtual": True,
        "speed": None,
        "limits": {"kv_tokens": resolved.kv_tokens, "step_tokens": resolved.policy.step_tokens},
        "hardware": resolved.hardware,
    }
    return Header(
        version=version("llm-loadgen"),
        command=command,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start_ns=0,
        plan=plan.to_dict() | {"endpoint": endpoint_dialect(plan.server, plan.endpoint).endpoint},
        server=facts,
        stamps=STAMPS,
        client={"stamps": STAMPS.name, "prompts": "lengths alone: nothing was sent"},
        telemetry={"every_s": plan.metrics_every_s},
        load=load_of_traffic({part.name: part.load for part in load.traffic}) if load.traffic else LoadFacts(),
        traffic=list(load.traffic),
    )


class VirtualLoad(NamedTuple):
    """The requests of a run in virtual time: the plan and its classes of traffic, each with its schedule."""

    plan: Plan
    classes: Sequence[VirtualClass]
    """Classes of traffic of the plan, by their first ids. A plan without classes has one, whose name is empty."""
    traffic: Sequence[TrafficFacts] = ()
    """Facts about the classes of traffic, for the header of the run file. Empty for a plan without classes."""


def _virtual_load(plan: Plan) -> VirtualLoad:
    """Return the load of a plan, with one VirtualClass for each class of its traffic."""
    classes: list[VirtualClass] = []
    traffic: list[TrafficFacts] = []
    for traffic_class, shared in scheduled_classes(plan):
        own = until_file_ends(traffic_class.plan)
        schedule = shared or build_schedule(own)
        part = VirtualClass(
            name=traffic_class.name,
            plan=own,
            schedule=schedule,
            first_id=traffic_class.first_id,
            cancellation=own.cancellation,
            timeout_ns=round(own.timeout_s * 1e9),
            free_ns=[0] * schedule.in_flight if schedule.queues else [],
        )
        part.upcoming = _virtual_requests(part)
        classes.append(part)
        if plan.traffic:
            facts = traffic_facts(
                own,
                part.name,
                part.first_id,
                traffic_class.share,
                endpoint=endpoint_dialect(own.server, own.endpoint).endpoint,
                model=own.first_model or "",
            )
            traffic.append(facts)
    return VirtualLoad(plan if plan.traffic else classes[0].plan, classes, traffic)


def planned_requests(plan: Plan) -> int | None:
    """Return the number of requests or sessions of a plan, or None if only a duration limits a closed loop.

    Raises LoadgenError or WorkloadError if the load of the plan is not possible.
    """
    counts = [part.schedule.count for part in _virtual_load(plan).classes]
    return None if None in counts else sum(count or 0 for count in counts)


def _virtual_requests(part: VirtualClass) -> Iterator[VirtualRequest]:
    """Yield the requests of a class of traffic with their due times.

    For sessions, only the first request of each session is yielded.
    """
    first_id = part.first_id
    prompts = _prompts(part.plan)
    bodies = BodyReader(part.plan) if isinstance(prompts.spec.workload, RawRequests) else None
    due_ns = repeat(0) if part.schedule.due_ns is None else part.schedule.due_ns
    if prompts.has_graphs:
        for graph, at_ns in zip(prompts.graphs(), due_ns, strict=False):
            progress = SessionProgress(graph.shifted(first_id))
            yield VirtualRequest(part, progress.request(0), at_ns, progress=progress)
    elif prompts.has_sessions:
        for conversation, at_ns in zip(prompts.conversations(), due_ns, strict=False):
            session = conversation
            if bodies is not None and isinstance(session, RecordedSession):
                session = replace(session, turns=tuple(map(bodies.counted, session.turns)))
            session = session.shifted(first_id)
            yield VirtualRequest(part, session.request(), at_ns, session)
    else:
        requests = prompts.requests() if bodies is None else map(bodies.counted, prompts.requests())
        for request, at_ns in zip(requests, due_ns, strict=False):
            yield VirtualRequest(part, replace(request, id=request.id + first_id) if first_id else request, at_ns)


def _prompts(plan: Plan) -> Prompts:
    """Return the prompts of the plan. They have lengths but no text.

    Prompts with a shared prefix also have token ids, by which the simulated prefix cache recognises the prefix.
    """
    process = plan.arrival_process
    if plan.cold:
        raise PlanError("--cold: the prefix cache of a run in virtual time is always empty", "Leave --cold out.")
    if plan.verify:
        raise PlanError("--verify: virtual time has no texts", "Leave --verify out, or use loadgen run --simulated.")
    if plan.soak:
        raise PlanError("--soak: a run in virtual time ends within minutes", "Leave --soak out, or use loadgen run.")
    if plan.at:
        raise PlanError("--at: virtual time runs no commands", "Leave --at out, or use loadgen run.")
    spec = WorkloadSpec(
        raw_requests_of(plan) or plan.prompt_source,
        plan.input_lengths,
        plan.output_lengths.lengths,
        plan.seed,
        n=plan.n,
        trace=process if isinstance(process, Trace) else None,
        repeat_file=plan.repeat_file,
    )
    tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None

    def count_tokens(text: str) -> int:
        counts = tokenizer.count([text]) if tokenizer else approximate([text])
        return counts[0]

    if isinstance(spec.workload, RawRequests):
        return Prompts(spec, _prompt_ids, count_tokens)
    return Prompts(spec, _prompt_ids, count_tokens, chat=isinstance(spec.workload, SessionFile))


def _prompt_ids(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
    """Return artificial token ids for a prompt of `input_tokens` tokens that shares its beginning with other prompts.

    `shared` describes the shared beginning as consecutive spans of tokens. If it is empty, the prompt shares nothing
    and needs no ids, so the result is "". `number` determines the ids that only this prompt has.
    """
    if not shared:
        return ""
    ids: list[int] = []
    for span, length in (*shared, (number, input_tokens)):
        first_id = IDS_PER_SPAN * span
        ids += range(first_id, first_id + min(length, input_tokens - len(ids)))
    return tuple(ids)


def _with_models(
    keep: Callable[[Record | Telemetry], None], classes: Sequence[VirtualClass]
) -> Callable[[Record | Telemetry], None]:
    """Return a function that sets the model of a Record if the Record has none, and then calls `keep` with the Record.

    A class of traffic may be divided among several models. Its plan then determines the model of each request.
    """
    first_ids = [part.first_id for part in classes]
    mixes = [(part.plan.model_mix, part.plan.seed) for part in classes]
    if not any(mix for mix, _ in mixes):
        return keep

    def keep_with_model(item: Record | Telemetry) -> None:
        if isinstance(item, Record) and not item.model:
            mix, seed = mixes[bisect_right(first_ids, item.id) - 1]
            if mix is not None:
                item.model = mix.choose(seed, item.id if item.session is None else item.session)
        keep(item)

    return keep_with_model


class VirtualRun:
    """The event loop of a run in virtual time.

    The loop handles arrivals, deadlines and telemetry samples. The simulated engine runs uninterrupted between these
    events.
    """

    def __init__(
        self,
        load: VirtualLoad,
        resolved: ResolvedModel,
        keep: Callable[[Record | Telemetry], None],
        progress: VirtualProgress | None = None,
    ) -> None:
        self._write = _with_models(keep, load.classes)
        self._progress = progress
        self._progress_ns = 0 if progress else FOREVER_NS
        self._sent = 0
        self._notes: list[str] = []
        """Reasons why the run was ended early."""
        self._classes = load.classes
        self._path_ns = round(1e9 * resolved.path_s)
        self._engine = resolved.new_engine()
        self._front_end = FrontEnd(round(1e9 * resolved.request_s), self._path_ns)
        self._engine_assumes_hits = resolved.policy.cache_hit_rate > 0
        self._sample_interval_ns = round(load.plan.metrics_every_s * 1e9)
        self._contexts: dict[tuple[int, int], Sequence[int]] = {}
        """Token ids of prompts and responses that a later request of the same session continues. The key is the request
        id of the session's first node, and the index of the node."""
        self._due: list[tuple[int, int, VirtualRequest]] = []
        """Heap of requests by due time, and by the order of their addition for equal due times."""
        self._order = count()
        self._live: set[Job] = set()
        self._ends: list[tuple[int, int, Job]] = []
        """Heap of the times at which clients give up, or at which requests time out. A time stays in the heap after its
        request has ended, until it is the earliest or `_end_at` removes it."""
        self._never_sent = 0
        """Number of abandoned requests that were never sent, because an earlier request of their session was."""
        self._counts = Counter[str]()
        """Number of Records by state."""
        self._phase_s = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
        """Total time of complete requests in each phase, in s."""
        self._last_ns = 0

    def run(self) -> Footer:
        """Run until every request has ended, and return the footer of the run file."""
        engine = self._engine
        sample_ns = 0 if self._sample_interval_ns else FOREVER_NS
        for part in self._classes:
            if part.schedule.due_ns is None:
                self._add_upcoming(part, part.schedule.clients, 0)
            else:
                self._add_upcoming(part, 1)
        while (self._due or self._live) and not self._notes:
            due_ns = self._due[0][0] if self._due else FOREVER_NS
            next_ns = min(due_ns, self._front_end.busy_until_ns) + self._path_ns
            if next_ns <= engine.now_ns or not engine.busy:
                self._handle_arrival(due_ns)
                continue
            if engine.now_ns >= self._progress_ns:
                self._report_progress()
            if engine.now_ns >= sample_ns:
                self._sample(engine.now_ns)
                sample_ns = engine.now_ns - engine.now_ns % self._sample_interval_ns + self._sample_interval_ns
            for response in engine.run(min(next_ns, self._next_end_ns(), sample_ns, self._progress_ns)):
                self._end(response.job, response.instants)
            self._end_timed_out()
        if self._notes:
            self._cancel_all()
        self._sample(self._last_ns)
        self._write(Telemetry(source="client", at_ns=self._last_ns, values={"stall_ns_max": 0}))
        counts = self._counts
        return Footer(
            ended_ns=self._last_ns,
            sent=counts.total() - counts["dropped"] - self._never_sent,
            complete=counts["complete"],
            truncated=0,
            failed=counts["failed"],
            rejected=0,
            dropped=counts["dropped"],
            abandoned=counts["abandoned"],
            interrupted=bool(self._notes),
            notes=self._notes,
        )

    def _report_progress(self) -> None:
        """Call the progress callback with the current counts.

        If the callback returns a reason to end the run, the reason is stored, and the run ends.
        """
        assert self._progress is not None
        now_ns = self._engine.now_ns
        self._progress_ns = now_ns - now_ns % PROGRESS_NS + PROGRESS_NS
        self._progress.clock.now_s = now_ns / 1e9
        counts = self._counts
        live = LiveCounters(
            due=self._sent,
            sent=self._sent,
            complete=counts["complete"],
            failed=counts["failed"],
            dropped=counts["dropped"],
            abandoned=counts["abandoned"],
        )
        reason = self._progress.show("running", live)
        if reason:
            self._notes.append(reason)

    def _cancel_all(self) -> None:
        """Record all requests that are in flight or waiting as cancelled, because the run was ended early.

        The remaining turns of sessions in progress are recorded as cancelled too.
        """
        now_ns = self._engine.now_ns
        self._last_ns = max(self._last_ns, now_ns)
        for job in list(self._live):
            instants = [] if self._front_end.cancel(job) else self._engine.cancel(job)
            self._write(self._record(job, instants, now_ns, ("cancelled", "cut off by an interrupt")))
            conversation, progress = job.owner.conversation, job.owner.progress
            remaining = list(conversation.remaining_requests()) if conversation else []
            remaining += progress.failed(job.owner.node) if progress else []
            for request in remaining:
                self._write(unsent_record(request, "cancelled", "not sent, the run was interrupted"))
            self._counts["failed"] += 1 + len(remaining)
        for part in self._classes:
            for waiting in part.waiting:
                record = unsent_record(waiting.request, "cancelled", "not sent, the run was interrupted")
                record.due_ns = waiting.due_ns
                self._write(record)
                self._counts["failed"] += 1
            part.waiting.clear()
        self._live.clear()

    def _handle_arrival(self, due_ns: int) -> None:
        """Handle the next event outside the engine.

        There are two possible events: the server's front end finishes a batch of requests, or a request becomes due at
        `due_ns`. The event that happens first is handled.
        """
        if self._front_end.busy_until_ns <= due_ns:
            for job in self._front_end.release():
                self._submit(job)
        else:
            self._arrive(heappop(self._due)[2])

    def _next_end_ns(self) -> int:
        """Return the next time at which a client gives up or a request times out, or FOREVER_NS if there is none."""
        ends = self._ends
        while ends and ends[0][2] not in self._live:
            heappop(ends)
        return ends[0][0] if ends else FOREVER_NS

    def _end_timed_out(self) -> None:
        """End every request whose client has given up, and every request that has timed out."""
        while (end_ns := self._next_end_ns()) < self._engine.now_ns:
            job = heappop(self._ends)[2]
            instants = [] if self._front_end.cancel(job) else self._engine.cancel(job)
            self._end(job, instants, end_ns)

    def _add_upcoming(self, part: VirtualClass, number: int, due_ns: int | None = None) -> None:
        """Schedule the next `number` requests or sessions of a class of traffic.

        The requests are due at `due_ns`. If `due_ns` is None, the schedule decides when they are due.
        """
        for request in islice(part.upcoming, number):
            if due_ns is not None:
                request.due_ns = due_ns
            self._add_due(request)

    def _add_due(self, request: VirtualRequest) -> None:
        heappush(self._due, (request.sent_ns, next(self._order), request))

    def _arrive(self, arrival: VirtualRequest) -> None:
        """Handle a request that is due: send it to the simulated server.

        If too many requests are in flight, the request waits or is dropped.
        """
        request = arrival.request
        if arrival.released_ns is not None:
            self._start(arrival)
            return
        part = arrival.part
        schedule = part.schedule
        if schedule.due_ns is not None and not (arrival.node or request.turn):
            self._add_upcoming(part, 1)
        if schedule.queues:
            part.waiting.append(arrival)
            self._release(part)
        elif schedule.due_ns is None or part.live < schedule.in_flight:
            self._start(arrival)
        else:
            record = unsent_record(request, "dropped", "")
            record.due_ns = arrival.due_ns
            self._keep(arrival, record, arrival.due_ns)

    def _release(self, part: VirtualClass) -> None:
        """Start waiting requests of the traffic class `part`, in order, up to its limit on requests in flight.

        `part.free_ns` contains the times at which earlier requests of the class ended. Each of these times allows one
        waiting request to start. The engine is simulated ahead of the arrivals, so such a time can be later than the
        due time of the waiting request. The waiting request then starts at the later time.
        """
        while part.waiting and part.free_ns:
            request = part.waiting.popleft()
            free_ns = heappop(part.free_ns)
            if free_ns <= request.due_ns:
                self._start(request)
            else:
                request.released_ns = free_ns
                self._add_due(request)

    def _start(self, arrival: VirtualRequest) -> None:
        """Send a request to the simulated server. Its front end later passes the request to the scheduler."""
        request = arrival.request
        sent_ns = arrival.sent_ns
        tokens = request.input_tokens
        ids: Sequence[int] = request.prompt if isinstance(request.prompt, tuple) else ()
        conversation = arrival.conversation
        if isinstance(conversation, Conversation):  # the prompt is the session so far and one more question
            turn = conversation.turns[request.turn]
            arrival.session_tokens += turn.input_tokens or approximate([turn.question])[0]
            tokens = arrival.session_tokens
            first_id = IDS_PER_SPAN * conversation.first_id
            ids = range(first_id, first_id + tokens)
        progress = arrival.progress
        if progress is not None:
            ids = self._prompt_of(arrival, progress)
            tokens = len(ids) or tokens
            for index, due_ns in progress.started(arrival.node, sent_ns):
                self._add_due(arrival.later_node(index, due_ns))
        job = Job(max(1, tokens), request.output_tokens or 1, sent_ns, owner=arrival, prompt=ids)
        self._live.add(job)
        arrival.part.live += 1
        self._choose_give_up(arrival, job)
        self._sent += 1
        self._end_at(job, sent_ns + arrival.part.timeout_ns)
        self._front_end.accept(job, sent_ns)

    def _choose_give_up(self, arrival: VirtualRequest, job: Job) -> None:
        """Decide whether the client abandons a request (--cancel), and when.

        The decision is stored in `arrival` and `job`.
        """
        part = arrival.part
        cancellation = part.cancellation
        if cancellation is None or not cancellation.chooses(part.plan.seed, arrival.request.id):
            return
        if cancellation.after_ns:
            arrival.gives_up_ns = arrival.sent_ns + cancellation.after_ns
            self._end_at(job, arrival.gives_up_ns)
        elif cancellation.after_tokens < job.output_tokens:
            arrival.gives_up_at_end = True
            job.unsent_tokens = job.output_tokens - cancellation.after_tokens
            job.output_tokens = cancellation.after_tokens

    def _end_at(self, job: Job, end_ns: int) -> None:
        """Schedule the end of a job at `end_ns`, when its request times out or its client gives up.

        If the job ends earlier, its entry in the heap `_ends` has no effect. Such entries are removed when the heap
        consists mostly of them. Otherwise the jobs that ended and their prompts would stay in memory until the timeout.
        """
        if len(self._ends) > MIN_ENDS + MAX_ENDS_PER_JOB * len(self._live):
            self._ends = [entry for entry in self._ends if entry[2] in self._live]
            heapify(self._ends)
        heappush(self._ends, (end_ns, next(self._order), job))

    def _leave(self, job: Job) -> None:
        """Record that a job is no longer in flight."""
        self._live.discard(job)
        job.owner.part.live -= 1

    def _prompt_of(self, arrival: VirtualRequest, progress: SessionProgress) -> Sequence[int]:
        """Return token ids for the prompt of `arrival`, a request in a session graph. `progress` is the state of the
        session.

        If the prompt continues a conversation, its ids begin with the ids of this conversation. If a later request will
        continue this conversation, the ids of the prompt and of its response are stored for this later request.
        """
        graph = progress.graph
        node = graph.nodes[arrival.node]
        request = arrival.request
        first_id = IDS_PER_SPAN * request.id
        if isinstance(request.prompt, tuple):
            ids: Sequence[int] = request.prompt
        else:
            before = () if node.context is None else self._contexts.get((graph.first_id, node.context), ())
            texts = [str(message.get("content", "")) for message in node.messages]
            added = sum(approximate(texts)) if texts else node.input_tokens
            ids = [*before, *range(first_id, first_id + added)]
        if progress.keeps_answer(arrival.node):
            answer_id = first_id + len(ids)
            self._contexts[graph.first_id, arrival.node] = [*ids, *range(answer_id, answer_id + request.output_tokens)]
        return ids

    def _follow_node(self, ended: VirtualRequest, progress: SessionProgress, record: Record, end_ns: int) -> None:
        """Schedule the requests of a session that become due because the request `ended` has ended.

        If `ended` did not complete, requests that depend on it can never be sent, and are recorded as not sent.
        """
        if record.state == "complete":
            for index, due_ns in progress.ended(ended.node, end_ns, ""):
                self._add_due(ended.later_node(index, due_ns))
        else:
            for request in progress.failed(ended.node):
                self._never_send(request, record, f"not sent, request {record.id} {record.state}")
        if not progress.unfinished:
            for index in range(len(progress.graph.nodes)):
                self._contexts.pop((progress.graph.first_id, index), None)

    def _never_send(self, request: Request, ended: Record, why: str) -> None:
        """Record that a request is never sent, because an earlier request of its session did not complete.

        `ended` is the Record of the earlier request, and `why` is the reason to store.
        """
        record = unsent_record(request, "abandoned" if ended.state == "abandoned" else "session_ended", why)
        self._write(record)
        self._counts[record.state] += 1
        self._never_sent += record.state == "abandoned"

    def _submit(self, job: Job) -> None:
        """Hand a job to the scheduler. A request that is too long for the KV cache is recorded as failed."""
        try:
            self._engine.submit(job)
        except ValueError as error:
            self._leave(job)
            sent_ns = job.owner.sent_ns
            record = record_for(
                job.owner.request,
                "failed",
                due_ns=job.owner.due_ns,
                released_ns=job.owner.released_ns,
                sent_ns=sent_ns,
                end_ns=sent_ns,
                error_kind="http_status",
                error_detail=str(error),
                http_status=400,
            )
            self._keep(job.owner, record, sent_ns)

    def _end(self, job: Job, instants: list[int], stopped_ns: int | None = None) -> None:
        """Record a job that is complete, abandoned or timed out.

        `instants` contains the times of the job's tokens in ns. `stopped_ns` is the time at which the client gave up or
        the request timed out. It is None if the job has generated all of its tokens.
        """
        request: VirtualRequest = job.owner
        cancellation = request.part.cancellation
        self._leave(job)
        end_ns = instants[-1] if stopped_ns is None else stopped_ns
        error: tuple[ErrorKind, str] | None = None
        gives_up_ns = request.gives_up_ns
        all_tokens_came = stopped_ns is None
        gives_up = all_tokens_came if request.gives_up_at_end else gives_up_ns is not None and gives_up_ns <= end_ns
        if cancellation and gives_up:
            error = ("abandoned", cancellation.detail)
            end_ns = end_ns if gives_up_ns is None else gives_up_ns
            instants = [instant for instant in instants if instant <= end_ns]
        elif stopped_ns is not None:
            error = ("timeout", f"no end within {request.part.timeout_ns / 1e9:g} s")
        if error is None and job.admitted_ns is not None:
            self._phase_s["queue"] += (job.admitted_ns - job.arrived_ns) / 1e9
            self._phase_s["prefill"] += (instants[0] - job.admitted_ns) / 1e9
            self._phase_s["decode"] += (instants[-1] - instants[0]) / 1e9
        request.session_tokens += job.output_tokens
        self._keep(request, self._record(job, instants, end_ns, error), end_ns)

    def _record(self, job: Job, instants: list[int], end_ns: int, error: tuple[ErrorKind, str] | None) -> Record:
        """Return the Record of a job that ended at `end_ns`. `error` is the error kind and detail of a failed job."""
        request: VirtualRequest = job.owner
        state: State = "complete"
        if error:
            state = "abandoned" if error[0] == "abandoned" else "failed"
        record = record_for(
            request.request,
            state,
            due_ns=request.due_ns,
            released_ns=request.released_ns,
            sent_ns=request.sent_ns,
            sent_end_ns=request.sent_ns,
            first_byte_ns=instants[0] if instants else None,
            chunk_ns=instants,
            chunk_tokens=[1] * len(instants),
            end_ns=end_ns,
            http_status=200,
            prompt_tokens=job.prompt_tokens,
            output_tokens=len(instants),
            counted_by="server",
            stamps=STAMPS.name,
        )
        if self._engine_assumes_hits and instants:
            record.marks = {CACHED_MARK: job.cached_tokens}
        if error:
            record.error_kind, record.error_detail = error
        else:
            record.finish_reason = "length"
        return record

    def _keep(self, ended: VirtualRequest, record: Record, end_ns: int) -> None:
        """Write the Record of a request that has ended, and schedule the next request of its session or client."""
        self._write(record)
        self._counts[record.state] += 1
        self._last_ns = max(self._last_ns, end_ns)
        part = ended.part
        schedule = part.schedule
        if schedule.queues:
            heappush(part.free_ns, end_ns)
            self._release(part)
        if ended.progress is not None:
            self._follow_node(ended, ended.progress, record, end_ns)
            if ended.progress.unfinished:
                return
        conversation = ended.conversation
        if conversation is not None:
            complete = record.state == "complete"
            next_turn = conversation.after("") if complete else None
            if next_turn is not None:
                due_ns = next_turn.due_after(end_ns)
                self._add_due(VirtualRequest(part, next_turn.request(), due_ns, next_turn, ended.session_tokens))
                return
            if not complete:
                for request in conversation.remaining_requests():
                    self._never_send(request, record, "the session ended before it")
        due_ns = end_ns + schedule.think_ns
        if schedule.due_ns is None and (schedule.until_ns is None or due_ns < schedule.until_ns):
            self._add_upcoming(part, 1, due_ns)

    def _sample(self, at_ns: int) -> None:
        """Write a telemetry sample with the values that a real server would publish as metrics."""
        gauges = self._engine.gauges()
        values = {
            "moment": "run",
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_used": gauges.kv_usage,
            "kv_tokens": self._engine.kv_tokens,
            "preemptions": gauges.preemptions,
            "cached_prompt_tokens": gauges.cached_prompt_tokens,
            "requests_finished": self._counts["complete"],
        }
        for phase, seconds in self._phase_s.items():
            values |= {f"{phase}_s_sum": round(seconds, 6), f"{phase}_s_count": self._counts["complete"]}
        self._write(Telemetry(source="server", at_ns=at_ns, values=values))
