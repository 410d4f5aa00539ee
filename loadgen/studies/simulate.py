"""A Plan in virtual time: its requests go to a scheduler on modelled hardware, nobody waits, and nothing is sent. What
comes of it is a Run like any other.

    Plan ─ schedule_of ─> when ┐
         ─ Prompts ─────> what ┴─> jobs ──> VirtualEngine ──> Records ──> run.jsonl
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush
from importlib.metadata import version
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import msgspec

from loadgen.analysis.run.record import Record, record_for, unsent_record
from loadgen.analysis.run.runfile import Footer, Header, Run, RunWriter, StampFacts, Telemetry, append_lines
from loadgen.engine.prepare import BYTES_PER_CHUNK, BYTES_PER_RECORD, announce_trace, build_schedule
from loadgen.engine.request_queue import Schedule
from loadgen.engine.resolve_server import Say, max_length
from loadgen.errors import OutputError, PlanError
from loadgen.folders import FolderClaim, check_room
from loadgen.plan import Plan
from loadgen.servers.backends import BACKENDS
from loadgen.servers.discovery import endpoint_dialect
from loadgen.servers.hardware import DEFAULT_FORMAT, HardwareError
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.simulated.discrete_event import FOREVER_NS, FrontEnd, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import CURRENT, find_engine
from loadgen.servers.simulated.step_time import StepDurations
from loadgen.studies.twin import REQUEST_CONSTANTS, Twin, step_time_with
from loadgen.workloads import arrival_processes as processes
from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads.prompts import SharedSpan, load_tokenizer
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Conversation
from loadgen.workloads.token_counter import approximate
from loadgen.workloads.workload import Prompts, WorkloadSpec

DEFAULT_GPU, DEFAULT_MODEL = "A800", "llama-2-7b"
"""Where nobody names one."""
STAMPS = StampFacts(name="virtual", title="virtual time", exact=True, error_s=0.0, by_read=False)
IDS_PER_SPAN = 1 << 32
"""Token ids of one stretch of a prompt: so that no two stretches share any."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What serves: a generation of the plan's server, on hardware, or the twin of a server that was measured. What is
    None is the twin's, or else a default."""

    gpu: str | None = None
    model: str | None = None
    tensor: int | None = None
    format: str | None = None
    vintage: str | None = None
    kv_tokens: int | None = None
    """By default what memory the model leaves."""
    running_limit: int | None = None
    step_tokens: int | None = None
    """By default the engine's own, as the one before."""
    hardware: Path | None = None
    """A TOML file with more GPUs and models."""
    changes: tuple[str, ...] = ()
    """Other figures of the GPU than its data sheet's, as loadgen.servers.hardware.with_changes takes them."""
    twin: Twin | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is resolved: what its steps take, by which rules, and what its run file says of it."""

    policy: Policy
    kv_tokens: int
    step_time: StepDurations
    request_s: float
    path_s: float
    version: str
    model: str
    hardware: dict[str, Any]


@dataclass(slots=True)
class VirtualRequest:
    """A request that is under way."""

    request: Request
    due_ns: int
    conversation: Conversation | None = None
    said: int = 0
    """Tokens of its session before this turn."""


def run(
    plan: Plan,
    modelled: ServerModel,
    folder: Path,
    command: list[str],
    prediction: Sequence[Any] = (),
    take: Callable[[Record], object] = lambda _: None,
    say: Say = lambda _: None,
) -> Run:
    """Run the plan in virtual time and write `folder/run.jsonl`; the folder must be new or empty. A twin's `prediction`
    is stored in the header. Each Record goes to `take`; the rest of what `runfile.scan` would read is returned. Raises
    LoadgenError or WorkloadError."""
    with FolderClaim(folder):
        return _run(plan, modelled, folder, command, prediction, take, say)


def _run(
    plan: Plan,
    modelled: ServerModel,
    folder: Path,
    command: list[str],
    prediction: Sequence[Any],
    take: Callable[[Record], object],
    say: Say,
) -> Run:
    served, schedule, prompts = resolve_model(plan, modelled), build_schedule(plan), _prompts(plan)
    announce_trace(plan, schedule, say)
    bytes_each = BYTES_PER_RECORD + BYTES_PER_CHUNK * max_length(plan.output_tokens)
    check_room(folder, (schedule.count or schedule.clients) * bytes_each)
    header = _header(plan, modelled, served, command)
    header.server |= {"prediction": list(prediction)} if prediction else {}
    line, file = msgspec.json.encode(header), folder / "run.jsonl"
    append_lines(file, [line + b"\n"])
    writer, result = RunWriter(file), Run(file, msgspec.json.decode(line, type=Header), [], [], None)

    def keep(item: Record | Telemetry) -> None:
        writer.add(item)
        if isinstance(item, Record):
            take(item)
        else:
            result.telemetry.append(item)

    result.footer = VirtualRun(plan, served, prompts, schedule, keep).run()
    writer.add(result.footer)
    if rescued := writer.close():
        raise OutputError(f"cannot write {writer.path}: {writer.error}", f"Make room and try again; remove {rescued}.")
    return result


def run_in_memory(
    plan: Plan, modelled: ServerModel, draw: int | None = None, served: ResolvedModel | None = None
) -> Run:
    """Run the plan like `run`, but keep the Run in memory. `draw` selects one draw of a twin's constants; `served` is a
    model that `resolve_model` returned earlier. Raises as `run` does."""
    served = served or resolve_model(plan, modelled, draw)
    result = Run(Path("simulated/run.jsonl"), _header(plan, modelled, served, []), [], [], None)

    def keep(item: Record | Telemetry) -> None:
        retained: list[Any] = result.records if isinstance(item, Record) else result.telemetry
        retained.append(item)

    result.footer = VirtualRun(plan, served, _prompts(plan), build_schedule(plan), keep).run()
    return result


def resolve_model(plan: Plan, modelled: ServerModel, draw: int | None = None) -> ResolvedModel:
    """Raises PlanError for a model that nobody knows, or that does not fit."""
    if not endpoint_dialect(plan.server, plan.endpoint).streams:
        raise PlanError(f"--endpoint {plan.endpoint} generates no tokens", "Name one that does, or leave it out.")
    try:
        return _twins(modelled, modelled.twin, draw) if modelled.twin else _modelled(plan.server, modelled)
    except HardwareError as problem:
        raise PlanError(str(problem)) from None


def _modelled(server: str, modelled: ServerModel) -> ResolvedModel:
    """By the hardware model alone."""
    vintage, format_name = modelled.vintage or CURRENT, modelled.format or DEFAULT_FORMAT
    engine, tensor = find_engine(server, vintage), modelled.tensor or 1
    more: dict[str, Any] = {"tensor": tensor, "file": modelled.hardware, "changes": modelled.changes}
    deployment = engine.deployment(
        modelled.gpu or DEFAULT_GPU, modelled.model or DEFAULT_MODEL, format_name=format_name, **more
    )
    kv_tokens = modelled.kv_tokens or engine.kv_tokens(deployment)
    return ResolvedModel(
        policy=engine.policy_for(kv_tokens, modelled.running_limit, modelled.step_tokens),
        kv_tokens=kv_tokens,
        step_time=engine.step_time(deployment),
        request_s=0.0,
        path_s=deployment.framework.server_s,
        version=engine.version,
        model=deployment.model.name,
        hardware={**_hardware(deployment), "vintage": vintage},
    )


def _twins(modelled: ServerModel, twin: Twin, draw: int | None) -> ResolvedModel:
    """As measured, but for what is asked to be otherwise."""
    engine, values = find_engine(twin.rules, modelled.vintage or twin.vintage), twin.values(draw)
    what_if: dict[str, Any] = {"gpu": modelled.gpu, "model": modelled.model, "tensor": modelled.tensor}
    what_if |= {"number_format": modelled.format, "hardware": modelled.hardware, "changes": modelled.changes}
    as_it_was, deployment = twin.deployment(engine), twin.deployment(engine, **what_if)
    kv_tokens = modelled.kv_tokens or twin.kv_tokens
    if deployment and as_it_was and not modelled.kv_tokens:
        kv_tokens = round(kv_tokens * engine.kv_tokens(deployment) / engine.kv_tokens(as_it_was))
    limits = modelled.running_limit or twin.running_limit, modelled.step_tokens or twin.step_tokens
    return ResolvedModel(
        policy=engine.policy_for(kv_tokens, *limits),
        kv_tokens=kv_tokens,
        step_time=step_time_with(values, engine, deployment),
        **{name: values[name] for name in REQUEST_CONSTANTS},
        version=twin.server_version,
        model=deployment.model.name if deployment else twin.served,
        hardware={**_hardware(deployment), "twin": ", ".join(str(each["run"]) for each in twin.runs)},
    )


def _hardware(deployment: Deployment | None) -> dict[str, Any]:
    """As loadgen.analysis.hardware_limit reads it."""
    if deployment is None:
        return {}
    stored = deployment.weights.name
    named = deployment.model.name + f"-{stored}" * (stored != DEFAULT_FORMAT)
    return {"gpu": deployment.gpu.name, "model": named, "tensor_parallel": deployment.tensor, "format": stored}


def describe_server(plan: Plan, modelled: ServerModel) -> str:
    """What serves, in words. Raises PlanError."""
    served = resolve_model(plan, modelled)
    told = served.hardware
    kind = f"twin of {told['twin']}" if modelled.twin else told["vintage"]
    where = (
        f"{told['tensor_parallel']} x {told['gpu']}: {served.model}, {told['format']}"
        if "gpu" in told
        else served.model
    )
    return f"{plan.server} ({kind}) on {where}"


def _header(plan: Plan, modelled: ServerModel, served: ResolvedModel, command: list[str]) -> Header:
    facts = {
        "name": plan.server,
        "title": BACKENDS[plan.server].title,
        "version": f"{served.version} ({'twin' if modelled.twin else 'model'} of)",
        "model": plan.model or served.model,
        "url": None,
        "simulated": True,
        "virtual": True,
        "speed": None,
        "limits": {"kv_tokens": served.kv_tokens, "step_tokens": served.policy.step_tokens},
        "hardware": served.hardware,
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
    )


def _prompts(plan: Plan) -> Prompts:
    """The plan's Requests, by their lengths. Of those that share a beginning the ids are there for a prefix cache."""
    named = arrivals.parse(plan.arrivals)
    spec = WorkloadSpec(
        *(workload.parse(plan.workload), lengths.parse(str(plan.input_tokens))),
        *(lengths.parse_outputs(str(plan.output_tokens)).lengths, plan.seed),
        n=plan.n,
        trace=named if isinstance(named, processes.Trace) else None,
    )
    local = load_tokenizer(plan.tokenizer) if plan.tokenizer else None

    def counted(text: str) -> int:
        return (local.count([text]) if local else approximate([text]))[0]

    def ids(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        if not shared:
            return ""
        pieces = ((IDS_PER_SPAN * which, length) for which, length in (*shared, (number, input_tokens)))
        return tuple(
            islice(chain.from_iterable(range(first, first + length) for first, length in pieces), input_tokens)
        )

    return Prompts(spec, ids, counted)


class VirtualRun:
    """The event loop: arrivals, deadlines and samples of the server, in between an engine that runs by itself."""

    def __init__(
        self,
        plan: Plan,
        served: ResolvedModel,
        prompts: Prompts,
        schedule: Schedule,
        keep: Callable[[Record | Telemetry], None],
    ) -> None:
        self._write, self._schedule, self._path_ns = keep, schedule, round(1e9 * served.path_s)
        self._engine = VirtualEngine(Scheduler(served.policy, served.kv_tokens), served.step_time)
        self._front_end = FrontEnd(round(1e9 * served.request_s), self._path_ns)
        self._timeout_ns, self._every_ns = round(plan.timeout_s * 1e9), round(plan.metrics_every_s * 1e9)
        self._asked = self._sessions(prompts) if prompts.has_sessions else self._requests(prompts)
        self._following: list[tuple[int, int, VirtualRequest]] = []  # a heap of what ends made due
        self._places = count()
        self._live: set[Job] = set()
        self._deadlines: deque[tuple[int, Job]] = deque()
        self._counts = Counter[str]()
        self._last_ns = 0

    def run(self) -> Footer:
        """Until every request has ended."""
        engine, sample_ns = self._engine, 0 if self._every_ns else FOREVER_NS
        closed = self._schedule.due_ns is None
        self._begin(self._schedule.clients if closed else 1, 0 if closed else None)
        while self._following or self._live:
            due_ns = self._following[0][0] if self._following else FOREVER_NS
            next_ns = min(due_ns, self._front_end.busy_until_ns) + self._path_ns
            if next_ns <= engine.now_ns or not engine.busy:
                if self._front_end.busy_until_ns <= due_ns:
                    for job in self._front_end.release():
                        self._submit(job)
                else:
                    self._arrive(heappop(self._following)[2])
                continue
            if engine.now_ns >= sample_ns:
                self._sample(engine.now_ns)
                sample_ns = engine.now_ns - engine.now_ns % self._every_ns + self._every_ns
            for answer in engine.run(min(next_ns, self._deadline_ns(), sample_ns)):
                self._end(answer.job, answer.instants)
            while (given_up_ns := self._deadline_ns()) < engine.now_ns:
                _, job = self._deadlines.popleft()
                self._end(job, [] if self._front_end.cancel(job) else engine.cancel(job), given_up_ns)
        self._sample(self._last_ns)
        self._write(Telemetry(source="client", at_ns=self._last_ns, values={"stall_ns_max": 0}))
        counts = self._counts
        return Footer(
            ended_ns=self._last_ns,
            sent=counts.total() - counts["dropped"],
            complete=counts["complete"],
            truncated=0,
            failed=counts["failed"],
            rejected=0,
            dropped=counts["dropped"],
        )

    def _deadline_ns(self) -> int:
        """When the next of those under way is given up."""
        while self._deadlines and self._deadlines[0][1] not in self._live:
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else FOREVER_NS

    def _begin(self, number: int, due_ns: int | None = None) -> None:
        """So many more requests, or sessions, come due: at that instant, or at their own."""
        for each in islice(self._asked, number):
            each.due_ns = each.due_ns if due_ns is None else due_ns
            heappush(self._following, (each.due_ns, next(self._places), each))

    def _requests(self, prompts: Prompts) -> Iterator[VirtualRequest]:
        due_ns = repeat(0) if self._schedule.due_ns is None else self._schedule.due_ns
        return map(VirtualRequest, prompts.requests(), due_ns)

    def _sessions(self, prompts: Prompts) -> Iterator[VirtualRequest]:
        due_ns = repeat(0) if self._schedule.due_ns is None else self._schedule.due_ns
        return (
            VirtualRequest(each.request(), at_ns, each)
            for each, at_ns in zip(prompts.conversations(), due_ns, strict=False)
        )

    def _arrive(self, asked: VirtualRequest) -> None:
        """A request is due: it joins the queue, or is refused, or dropped past the limit on requests in flight."""
        request, due_ns = asked.request, asked.due_ns
        if self._schedule.due_ns is not None and not request.turn:
            self._begin(1)
        if len(self._live) >= self._schedule.in_flight:
            record = unsent_record(request, "dropped", "")
            record.due_ns = due_ns
            self._keep(asked, record, due_ns)
            return
        tokens = request.input_tokens
        ids: Sequence[int] = request.prompt if isinstance(request.prompt, tuple) else ()
        if (conversation := asked.conversation) is not None:  # its prompt is all that was said, and one more question
            turn, first = conversation.turns[request.turn], IDS_PER_SPAN * conversation.first_id
            asked.said = tokens = asked.said + (turn.input_tokens or approximate([turn.question])[0])
            ids = range(first, first + tokens)
        job = Job(max(1, tokens), request.output_tokens or 1, due_ns, owner=asked, prompt=ids)
        self._live.add(job)
        self._deadlines.append((due_ns + self._timeout_ns, job))
        self._front_end.accept(job, due_ns)

    def _submit(self, job: Job) -> None:
        """A request reaches the scheduler, which refuses one that its cache can never hold."""
        try:
            self._engine.submit(job)
        except ValueError as problem:
            self._live.discard(job)
            due_ns = job.owner.due_ns
            refused = record_for(
                *(job.owner.request, "failed"),
                due_ns=due_ns,
                sent_ns=due_ns,
                end_ns=due_ns,
                error_kind="http_status",
                error_detail=str(problem),
                http_status=400,
            )
            self._keep(job.owner, refused, due_ns)

    def _end(self, job: Job, instants: list[int], given_up_ns: int | None = None) -> None:
        """A job has all its tokens, or nobody waits for the rest."""
        requested: VirtualRequest = job.owner
        self._live.discard(job)
        end_ns = instants[-1] if given_up_ns is None else given_up_ns
        record = record_for(
            *(requested.request, "complete" if given_up_ns is None else "failed"),
            due_ns=requested.due_ns,
            sent_ns=requested.due_ns,
            sent_end_ns=requested.due_ns,
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
        if given_up_ns is None:
            record.finish_reason = "length"
        else:
            record.error_kind, record.error_detail = "timeout", f"no end within {self._timeout_ns / 1e9:g} s"
        requested.said += job.output_tokens
        self._keep(requested, record, end_ns)

    def _keep(self, asked: VirtualRequest, record: Record, end_ns: int) -> None:
        """Writes a Record, and finds out what its end makes due."""
        self._write(record)
        self._counts[record.state] += 1
        self._last_ns = max(self._last_ns, end_ns)
        conversation, complete = asked.conversation, record.state == "complete"
        if conversation is not None:
            following = conversation.after("") if complete else None
            if following is not None:
                due_ns = end_ns + following.think_ns
                turn = VirtualRequest(following.request(), due_ns, following, asked.said)
                heappush(self._following, (due_ns, next(self._places), turn))
                return
            for request in () if complete else conversation.remaining_requests():
                self._write(unsent_record(request, "session_ended", "the session ended before it"))
                self._counts["dropped"] += 1
        schedule, due_ns = self._schedule, end_ns + self._schedule.think_ns
        if schedule.due_ns is None and (schedule.until_ns is None or due_ns < schedule.until_ns):
            self._begin(1, due_ns)

    def _sample(self, at_ns: int) -> None:
        """What the server's page of metrics would say."""
        gauges, kv_tokens = self._engine.scheduler.gauges(), self._engine.scheduler.kv_tokens
        values = {
            "moment": "run",
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_used": gauges.kv_usage,
            "kv_tokens": kv_tokens,
            "preemptions": gauges.preemptions,
            "cached_prompt_tokens": gauges.cached_prompt_tokens,
            "requests_finished": self._counts["complete"],
        }
        self._write(Telemetry(source="server", at_ns=at_ns, values=values))
