"""From a Plan to its run: which server, its facts, the due instants, the prompts, each worker's task, the Run's header.

    Plan ─ build_schedule ─> Schedule    when, how many, how many at once
         ─ build_prompts ──> Prompts     what is asked, exact by the server's own count
         ─ prepare ─────> Prepared    the Schedule, a WorkerTask per process, and the header
         ─ run ─────────> Footer      with loadgen.engine.coordinator

What loads the measuring engine is imported where it is used: the interactive part prepares in a process without it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from loadgen import folders
from loadgen import machine as host
from loadgen.engine.resolve_server import Say, access_for, dialect_for, max_length, server_for, simulated_name
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import describe_lengths, describe_plan
from loadgen.workloads import arrival_processes as processes
from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads import images as pictures
from loadgen.workloads.datasets import Dataset
from loadgen.workloads.input_files import check_input
from loadgen.workloads.prompts import load_tokenizer
from loadgen.workloads.sessions import MultiTurn
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.workload import Prompts, WorkloadSpec, prepare_prompts

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer, Header
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.request_queue import Schedule
    from loadgen.engine.worker import WorkerTask
    from loadgen.servers.backends.base import ServerFacts
    from loadgen.servers.backends.dialect import Dialect
    from loadgen.servers.discovery import ServerTokenizer

IN_FLIGHT_DEFAULT = 10_000
"""Open loop: more requests than this at a time are dropped unless the plan says otherwise."""
MIN_SPARE = 8
UNKNOWN_TOKENS = 1 << 15
"""What a simulated server has room for where there are sessions, or prompts of a file."""
BYTES_PER_RECORD, BYTES_PER_CHUNK = 600, 16
NS_PER_S = 1_000_000_000

OnProgress = Callable[[str, "LiveCounters"], str | None]
"""Gets a phase and the counts, ten times a second; what it says is why the run is to end now."""


class Prepared(msgspec.Struct, frozen=True):
    """All that is known before the first connection is opened."""

    schedule: Schedule
    tasks: list[WorkerTask]
    header: Header
    bytes: int
    """What the run file will take, roughly: to refuse a disk that is clearly too small."""


def run(
    plan: Plan,
    folder: Path,
    *,
    command: list[str],
    say: Say,
    on_progress: OnProgress,
    launch: Mapping[str, Any] | None = None,
) -> Footer:
    """Run the plan and write `folder/run.jsonl`. The folder must be new or empty, and is claimed until the run has
    ended. The first line that `say` gets names the server. `launch` is what is known of how the server was started.
    Raises LoadgenError, loadgen.servers.errors.ServerError or PromptError before anything is sent."""
    from loadgen.engine import coordinator
    from loadgen.engine.telemetry_sampler import open_sampler

    with folders.FolderClaim(folder), prepare(plan, folder, say) as prepared:
        header = prepared.header
        sampler = partial(open_sampler, plan, header.server, prepared.schedule.due_ns)
        if plan.gpu or plan.dcgm_url or plan.server_pid:  # a missing library is an error before the run
            sampler = partial(lambda made: made, sampler())
        folders.check_room(folder, prepared.bytes)
        host.check_ports(prepared.schedule.at_once, len(prepared.tasks[0].target.addresses))
        header.command = command
        header.server |= {"launch": dict(launch)} if launch else {}
        header.client["calibration"] = host.load_calibration(header.host, say)
        return coordinator.run(prepared.tasks, header, folder, on_progress, sampler)


@contextlib.contextmanager
def prepare(plan: Plan, folder: Path, say: Say) -> Iterator[Prepared]:
    """Find the server and build everything for it. A simulated one that is started here lives as long as the block.
    Raises as `run` does."""
    from loadgen.engine.worker import WorkerTask
    from loadgen.servers.auth import resolve_target
    from loadgen.servers.discovery import apply_mark, endpoint_dialect, open_tokenizer
    from loadgen.servers.wire.addresses import describe_addresses, select_addresses

    check_inputs(plan)
    access = access_for(plan)
    requested = endpoint_dialect(plan.server, plan.endpoint)
    schedule = build_schedule(plan)
    check_prompt_file(plan, schedule)
    host.allow_open_files(-(-schedule.in_flight // plan.workers) + host.FILES_PER_WORKER * (plan.workers - 1))
    room = UNKNOWN_TOKENS if plan.uses_sessions or plan.uses_file else 4096
    with server_for(
        plan, access, say, schedule.at_once, schedule.in_flight, room, f": {describe_plan(plan, requested)}"
    ) as probed:
        dialect = dialect_for(plan, probed, access, say)
        announce_trace(plan, schedule, say)
        with open_tokenizer(probed, dialect, timeout_s=plan.timeout_s, access=access) as tokenizer:
            prompts = build_prompts(plan, schedule, dialect, tokenizer)
            facts = apply_mark(probed, tokenizer.mark)
        if facts is not probed:
            say(f"{simulated_name(facts)}: its counts of prompts say that it is simulated")
        count = "" if schedule.count is None else f"{schedule.count} "
        tokens = "about " * (not prompts.exact and not plan.uses_file) + describe_lengths(plan)[0]
        what = f"sessions, {tokens} tokens a turn" if plan.uses_sessions else f"prompts of {tokens} tokens"
        say(f"{count}{what} ({prompts.counting_method})" + f" for {facts.model}" * bool(facts.model))
        target = select_addresses(resolve_target(facts.url, access.tls))
        if len(target.addresses) > 1 or target.unused:
            say(describe_addresses(target))
        tasks = [  # requests, or whole sessions, are dealt in turn, so that each worker has the same mix
            WorkerTask(
                worker=worker,
                workers=plan.workers,
                prompts=prompts,
                schedule=schedule.share_for(worker, plan.workers),
                timeout_s=plan.timeout_s,
                target=target,
                dialect=dialect,
                model=facts.model,
                headers=access.headers if dialect.streams else {"Accept": "application/json", **access.headers},
                stamps=plan.stamps,
                client_priority=plan.client_priority,
                part=folder / f"part-{worker}.jsonl",
            )
            for worker in range(plan.workers)
        ]
        bytes_each = BYTES_PER_RECORD + BYTES_PER_CHUNK * max_length(plan.output_tokens)
        header = build_header(plan, facts, dialect, prompts, schedule.at_once)
        header.server |= target.facts
        yield Prepared(schedule, tasks, header, (schedule.count or schedule.clients) * bytes_each)


def check_inputs(plan: Plan) -> None:
    """Open every file that the requests come from, before the server is contacted and before workers are forked, which
    inherit what was read of pipes and of lists of lengths. Raises loadgen.workloads.spec_syntax.WorkloadError."""
    inputs, outputs = lengths.parse(str(plan.input_tokens)), lengths.parse_outputs(str(plan.output_tokens)).lengths
    for name, named in (("input", inputs), ("output", outputs)):
        if isinstance(named, lengths.Empirical):
            next(named.tokens(plan.seed, name))
    for source in (workload.parse(plan.workload), arrivals.parse(plan.arrivals)):
        path: Path | None = getattr(source, "path", None)
        if path is not None:
            try:
                check_input(path)
            except OSError as error:
                raise WorkloadError(f"cannot read {path}: {error.strerror}") from None


def build_schedule(plan: Plan) -> Schedule:
    """The due instants or clients of a plan. Raises loadgen.workloads.spec_syntax.WorkloadError for a trace that
    cannot be read."""
    from loadgen.engine.request_queue import Schedule

    named = arrivals.parse(plan.arrivals)
    until_ns = None if plan.duration_s is None else round(plan.duration_s * NS_PER_S)
    if isinstance(named, processes.ClosedLoopArrivals):
        clients = named.clients if plan.n is None else min(named.clients, plan.n)
        return Schedule(None, plan.n, clients, named.think_ns, until_ns, clients, clients)
    due_ns = array("q", arrivals.due_instants(named, plan.seed, n=plan.n, until_ns=until_ns))
    maximum = first = 0  # requests that are due within one second, at most
    for last, due in enumerate(due_ns):
        while due - due_ns[first] >= NS_PER_S:
            first += 1
        maximum = max(maximum, last - first + 1)
    in_flight = min(len(due_ns), plan.max_in_flight or max(IN_FLIGHT_DEFAULT, maximum))
    return Schedule(due_ns, len(due_ns), 0, 0, None, in_flight, min(in_flight, max(MIN_SPARE, maximum)))


def announce_trace(plan: Plan, schedule: Schedule, say: Say) -> None:
    """Say how many requests of a trace are due over how long, so that a unit that is misunderstood is noticed."""
    named = arrivals.parse(plan.arrivals)
    if isinstance(named, processes.Trace) and schedule.due_ns is not None:
        say(named.describe(schedule.due_ns, whole=plan.n is None and plan.duration_s is None))


def check_prompt_file(plan: Plan, schedule: Schedule) -> None:
    """Read the prompts of a plan's file once, before any server is asked. Raises WorkloadError for damage and for text
    that cannot be sent, and PlanError when the file holds fewer prompts than the plan needs."""
    requested = workload.parse(plan.workload)
    samples = requested.samples() if isinstance(requested, Dataset | MultiTurn) else None
    if samples is None:
        return
    count = sum(1 for _ in islice(samples, schedule.count))
    if schedule.count is not None and count < schedule.count:
        what = "sessions" if plan.uses_sessions else "prompts"
        raise PlanError(
            f"{getattr(requested, 'path', '')} holds {count} {what}, and {schedule.count} are to be sent",
            f"Ask for fewer: --n {count}",
        )


def build_prompts(plan: Plan, schedule: Schedule, dialect: Dialect, server: ServerTokenizer) -> Prompts:
    """Return the Requests of a plan. Everything that needs the server's tokenizer happens here. Raises PlanError,
    PromptError, WorkloadError or ServerError."""
    requested, named = workload.parse(plan.workload), arrivals.parse(plan.arrivals)
    inputs = lengths.parse(str(plan.input_tokens))
    outputs = lengths.parse_outputs(str(plan.output_tokens)).lengths
    trace = named if isinstance(named, processes.Trace) else None
    also: dict[str, Any] = {}
    if plan.extra_body or plan.may_stop_early:
        also = {"body": plan.extra_body, "ignore_eos": not plan.may_stop_early}
    if not dialect.streams:
        if isinstance(requested, MultiTurn):
            raise PlanError(
                f"--endpoint {dialect.endpoint} has no answers for sessions to quote", "Use --endpoint chat."
            )
        outputs, also["output_tokens"] = lengths.Fixed(1), 0
    local, chat = load_tokenizer(plan.tokenizer) if plan.tokenizer else None, dialect.endpoint == "chat"
    if plan.image and not chat:
        raise PlanError("--image: only messages of a chat hold pictures", "Use --endpoint chat.")
    spec = WorkloadSpec(
        *(requested, inputs, outputs, plan.seed),
        n=schedule.count,
        warmup=plan.warmup,
        trace=trace,
        request_fields=also,
        image_sizes=tuple(map(pictures.parse_size, plan.image)),
    )
    return prepare_prompts(spec, token_ids=dialect.token_ids, local=local, server=server, chat=chat, by=plan.lengths)


def build_header(plan: Plan, facts: ServerFacts, dialect: Dialect, prompts: Prompts, at_once: int = 1) -> Header:
    """Return the header: what is known of a run before it starts. `at_once` requests are certainly in flight together.

    A version that misleads and a load over the server's limit are only here where --force and --over-limit let them
    pass.
    """
    from loadgen.analysis.run.runfile import Header
    from loadgen.servers.discovery import docker_proxy_target, exceeded_request_limit

    told = {"forced": dialect.misleading_reason(facts.version), "left_out": dialect.dropped_fields}
    told |= {"over_limit": exceeded_request_limit(facts, at_once)}
    return Header(
        version=version("llm-loadgen"),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start_ns=0,
        plan=plan.to_dict() | {"endpoint": dialect.endpoint, **({} if dialect.streams else {"output_tokens": 0})},
        server=asdict(facts) | ({"proxied_to": proxied} if (proxied := docker_proxy_target(facts.url)) else {}),
        host=host.facts(),
        client={
            "prompts": prompts.counting_method,
            "exact": prompts.exact,
            **{name: fact for name, fact in told.items() if fact},
        },
    )
