"""Prepares the run of a Plan: finds the server, and builds everything that the run needs.

These are the main functions and their results:

    build_schedule ─> Schedule    when requests are due, how many, and how many at once
    build_prompts ──> Prompts     the prompts, with exact lengths according to the server's tokenizer
    prepare ────────> Prepared    the Schedule, a WorkerTask per worker process, and the header of the run

loadgen.engine.coordinator then executes the run.

Modules that load the measuring engine are imported inside functions. The reason is `loadgen ui`, which prepares a run
in a process that must not load the engine.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, replace

from loadgen import folders, machine
from loadgen.analysis.format import significant
from loadgen.engine.audio_checks import check_audio
from loadgen.engine.raw_files import RawFacts, first_path, raw_requests_of, survey
from loadgen.engine.resolve_server import (
    Say,
    access_for,
    check_models,
    dialect_for,
    find_replicas,
    has_exact_lengths,
    max_length,
    max_prompt_length,
    needs_seed,
    request_headers,
    server_for,
    simulated_name,
    with_seed,
)
from loadgen.engine.sent_seeds import note_seed
from loadgen.engine.vocabulary_cache import vocabulary_cache
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import describe_lengths, describe_plan, describe_recordings
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.backends.raw_bodies import dialect_for_path
from loadgen.servers.session_identity import SessionIdentity
from loadgen.traffic import (
    TrafficClass,
    load_of_traffic,
    scaled_load,
    shared_due_times,
    traffic_classes,
    with_shared_clients,
)
from loadgen.workloads import arrival_processes, arrivals, images, lengths
from loadgen.workloads.audio_files import Recordings
from loadgen.workloads.canaries import build_canaries
from loadgen.workloads.datasets import Dataset, describe_format
from loadgen.workloads.input_files import check_input
from loadgen.workloads.prompts import COMMON_WORDS, load_tokenizer
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.request import new_id_prefix
from loadgen.workloads.session_files import SessionFile, count_requests
from loadgen.workloads.sessions import MultiTurn
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.text_prompts import no_text
from loadgen.workloads.workload import Prompts, Synthetic, WorkloadSpec, prepare_prompts
from loadgen.workloads.workload_facts import about_tokens

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer, Header, TrafficFacts
    from loadgen.engine.balance import Dealer
    from loadgen.engine.canaries import CanaryTask
    from loadgen.engine.client_health import LiveCounters
    from loadgen.engine.request_queue import Schedule
    from loadgen.engine.worker import WorkerTask
    from loadgen.servers.backends.base import ServerFacts
    from loadgen.servers.backends.dialect import Dialect
    from loadgen.servers.discovery import ServerTokenizer
    from loadgen.servers.target import Target

IN_FLIGHT_DEFAULT = 10_000
"""Default maximum of requests in flight in an open loop. Further requests are dropped."""
MIN_SPARE = 8
UNKNOWN_TOKENS = 1 << 15
"""Context length of a simulated server if prompt lengths are not known beforehand: for sessions and for prompts from a
file."""
BYTES_PER_RECORD, BYTES_PER_CHUNK = 600, 16
ROTATE_BYTES = 64 << 20
"""Size of the files of Records of a run with --soak."""
COMPRESSED_SHARE = 0.4
"""Size of a compressed file of Records, as a share of the size before. This is a cautious value: files of streamed
responses are compressed to about a third."""
ABOUT_FILES = "compressed files of Records"
SECONDS_PER_DAY = 86_400
SEVERAL_INPUTS = ("several", "pairs")
"""The `inputs` of dialects whose requests take more than one input."""
RECORDING_METHOD = "recordings, which have no tokens"
EMPTIED_WORDS = {
    "emptied": "the server emptied its prefix cache, and a repeated prompt is computed again",
    "unused": "the server takes no repeated prompt from a prefix cache",
    "unchecked": "the server accepted the request to empty its prefix cache, but reports nothing to check this by",
}
"""Words for the result of --cold."""
BALANCE_WORDS = {
    "even": "requests go to them in turn",
    "least-busy": "each request goes to the one with the fewest requests in flight from this machine",
    "session": "sessions go to them in turn, and a session stays on one",
}
"""Descriptions of the values of --balance, for messages."""
QUIET_S, PROGRESS_INTERVAL_S = 0.4, 0.1
"""Time in seconds before the first progress of building prompts is shown, and between two updates."""
NS_PER_S = 1_000_000_000

OnProgress = Callable[[str, "LiveCounters"], str | None]
"""Callback that is called with the phase and the live counters ten times a second.

It returns None, or a reason why the run must end now.
"""


class Prepared(msgspec.Struct, frozen=True):
    """A prepared run: everything that is known before the workers open their connections."""

    schedule: Schedule
    tasks: list[WorkerTask]
    header: Header
    bytes: int
    """Approximate size of the run file in bytes. The run is refused if the disk is clearly too small."""


def run(
    plan: Plan,
    folder: Path,
    *,
    command: list[str],
    say: Say,
    on_progress: OnProgress,
    launch: Mapping[str, Any] | None = None,
    alone: Mapping[str, str] | None = None,
) -> Footer:
    """Run the plan and write `folder/run.jsonl`.

    The folder must be new or empty, and no other command can use it until the run has ended.

    - `command` is the command line to store in the run file.
    - `say` is called with lines of text. The first line names the server.
    - `launch` describes how the server was started. It is stored in the run file.
    - `alone` maps the name of each class of traffic to the folder of a run in which only this class sent requests.
      Folders are relative to `folder`. The mapping is stored in the run file.

    Raises LoadgenError, loadgen.servers.errors.ServerError or PromptError if the plan or the server is not suitable. In
    this case no request has been sent. Raises OutputError if the run file cannot be written.
    """
    from loadgen.engine import coordinator
    from loadgen.engine.telemetry_sampler import open_sampler

    with folders.FolderClaim(folder), prepare(plan, folder, say, on_progress) as prepared:
        header = prepared.header
        sampler = partial(open_sampler, plan, header.server, prepared.schedule.due_ns)
        if plan.gpu or plan.dcgm_url or plan.server_pid:  # opened now, so that a missing library is an error
            opened = sampler()
            sampler = partial(lambda: opened)
        check_disk(plan, prepared, folder, say)
        targets = prepared.tasks[0].targets
        if all(target.over_ip for target in targets):
            machine.check_ports(prepared.schedule.at_once, sum(len(target.addresses) for target in targets))
        header.command = command
        header.server |= {"launch": dict(launch)} if launch else {}
        header.client |= {"alone": dict(alone)} if alone else {}
        header.client["calibration"] = machine.load_calibration(header.host, say)
        return coordinator.run(
            prepared.tasks, header, folder, on_progress, sampler, plan.at, keep_records_s=plan.keep_records_s
        )


def check_disk(plan: Plan, prepared: Prepared, folder: Path, say: Say) -> None:
    """Raise OutputError if the disk of `folder` is clearly too small for the run.

    For a run with --soak, also report how fast its files grow. The growth is known only if the due times are known
    before the run. Otherwise, as in a closed loop, the size per request is reported. The disk is then checked only if
    the number of requests is known and no old Records are removed during the run.
    """
    if not plan.soak:
        folders.check_room(folder, prepared.bytes)
        return
    due_ns, count = prepared.schedule.due_ns, prepared.schedule.count
    needed = prepared.bytes * COMPRESSED_SHARE
    if due_ns and due_ns[-1] > 0:
        length_s = due_ns[-1] / NS_PER_S
        day = needed / length_s * SECONDS_PER_DAY
        kept = ""
        if plan.keep_records_s is not None:
            needed *= min(1.0, plan.keep_records_s / length_s)
            kept = f", of which the last {significant(plan.keep_records_s / 3600)} h are kept"
        rate = f"{significant(len(due_ns) / length_s)} requests/s"
        growth = f"about {significant(day / 1e9, 2)} GB per day at {rate}, in {ABOUT_FILES}{kept}"
        say(f"disk: {growth}; {significant(needed / 1e9, 2)} GB in total")
    else:
        requests = count or prepared.schedule.clients
        say(f"disk: about {needed / max(1, requests) / 1e3:.1f} kB per request, in {ABOUT_FILES}")
        if count is None or plan.keep_records_s is not None:
            return  # The number of requests whose Records are on the disk at the same time is not known.
    folders.check_room(folder, min(prepared.bytes, round(needed) + 2 * ROTATE_BYTES * len(prepared.tasks)))


@contextlib.contextmanager
def prepare(
    plan: Plan, folder: Path, say: Say, on_progress: OnProgress = lambda _phase, _counts: None
) -> Iterator[Prepared]:
    """Find the server of a plan and build everything that the run needs. Raises the errors that `run` raises.

    `on_progress` is called with the number of prompts that have been counted or built so far. If a simulated server is
    started for the run, it stops when the context manager exits.
    """
    from loadgen.servers.target import resolve_target
    from loadgen.servers.wire.addresses import describe_addresses, select_addresses

    show = PromptProgress(on_progress)
    loads = [
        _draft_load(traffic_class, schedule, show)
        for traffic_class, schedule in scheduled_classes(plan)
        if plan.only_class in ("", traffic_class.name)
    ]
    first = loads[0].plan
    access = access_for(first)
    schedule = merged_schedule([load.schedule for load in loads])
    connections_per_worker = ceil(schedule.in_flight / (plan.workers * len(loads)))
    processes = plan.workers * len(loads)
    machine.allow_open_files(connections_per_worker + machine.FILES_PER_WORKER * (processes - 1))
    context = max(map(_context_tokens, loads))

    def about(facts: ServerFacts | None) -> str:
        return f": {'; '.join(_describe_load(load, facts) for load in loads)}"

    main = first.replaced(traffic=plan.traffic, model=plan.model)
    at_once = ceil(schedule.at_once / max(1, len(plan.urls)))  # on each replica
    with server_for(main, access, say, at_once, schedule.in_flight, context, about) as probed:
        replicas = find_replicas(main, probed, access, say)
        for replica in replicas[1:]:
            check_server_limits(main, replica, at_once)
        targets = [select_addresses(resolve_target(facts.url, access.tls, access.proxy)) for facts in replicas]
        id_prefix = new_id_prefix()
        ready = [_prepare_load(load, replicas, targets, id_prefix, say, show) for load in loads]
        for target in targets:
            if len(target.addresses) > 1 or target.unused:
                say(describe_addresses(target))
        if len(replicas) > 1:
            say(describe_balance(plan, len(replicas)))
        emptied = empty_caches(plan, replicas, say) if plan.cold else ""
        canaries = canary_tasks(plan, [load.task for load in ready], [load.plan.extra_body for load in loads], say)
        tasks = [  # workers take requests (or whole sessions) in turn, so that all have the same mix
            replace(
                load.task,
                number=len(ready) * worker + index,
                worker=worker,
                dealer=dealer_for(load.task, plan, worker),
                schedule=load.task.schedule.share_for(worker, plan.workers),
                part=folder / f"part-{len(ready) * worker + index}.jsonl",
                canaries=canaries.get(index) if worker == 0 else None,
                rotate_bytes=ROTATE_BYTES if plan.soak else 0,
            )
            for worker in range(plan.workers)
            for index, load in enumerate(ready)
        ]
        header = build_header(plan, ready[0].facts, ready[0].task.dialect, ready[0].task.prompts, at_once)
        header.server |= server_facts(replicas, targets)
        header.client["request_ids"] = id_prefix
        for load in ready:
            header.client |= load.raw_facts
        header.client |= {"cold": emptied} if emptied else {}
        noted = [] if plan.simulated else [note_seed(facts.url, facts.model, plan.seed) for facts in replicas]
        sent_before = next(filter(None, noted), "")
        header.client |= {"sent_before": sent_before} if sent_before else {}
        if plan.traffic:
            describe_traffic(header, loads, ready)
        yield Prepared(schedule, tasks, header, sum(load.bytes for load in ready))


class DraftLoad(msgspec.Struct, frozen=True):
    """The load of a plan, or of one class of its traffic, before the server is known."""

    name: str
    """Name of the class of traffic. Empty for a plan without classes."""
    plan: Plan
    first_id: int
    schedule: Schedule
    share: float
    """Share of the load of the whole plan. 0: the load is the class's own, or that of a plan without classes."""
    raw_source: RawRequests | None
    about_file: str
    repetition: str


class PreparedLoad(msgspec.Struct, frozen=True):
    """The load of a plan, or of one class of traffic, after its prompts have been built."""

    task: WorkerTask
    """The task of a single worker process that would send all of the requests."""
    facts: ServerFacts
    raw_facts: dict[str, Any]
    bytes: int
    """Approximate size of the Records in bytes."""


def scheduled_classes(plan: Plan) -> list[tuple[TrafficClass, Schedule | None]]:
    """Return the classes of traffic of `plan`. Each class is paired with its schedule, or with None.

    None means that the caller must build the schedule from the plan of the class.

    - A plan without classes gives one class, which has an empty name and no schedule.
    - A plan may state due times for all classes together. They are divided among the classes that have a share. The
      schedule of such a class contains the due times of this class.
    - A plan may state a number of clients for all classes together. The clients are divided among the classes, and
      every class gets None.
    """
    if not plan.traffic:
        return [(TrafficClass("", plan, 0, 0), None)]
    classes = traffic_classes(plan)
    if not any(traffic_class.share for traffic_class in classes):
        return [(traffic_class, None) for traffic_class in classes]
    clients = plan.arrival_process.facts.clients
    if clients:
        return [(traffic_class, None) for traffic_class in with_shared_clients(classes, clients)]
    shared = build_schedule(plan)
    due_ns = shared_due_times(classes, shared.due_ns or (), plan.seed)
    result: list[tuple[TrafficClass, Schedule | None]] = []
    for traffic_class in classes:
        if traffic_class.share:
            own = due_ns[traffic_class.name]
            limit = replace(traffic_class, plan=traffic_class.plan.replaced(n=len(own)))
            result.append((limit, replace(shared, due_ns=own, count=len(own))))
        else:
            result.append((traffic_class, None))
    return result


def with_seed_of_run(plan: Plan, say: Say | None) -> Plan:
    """Return the plan with the seed of its run, which `with_seed` (loadgen.engine.resolve_server) chooses.

    If the user states no seed, loadgen may have to ask the server whether it is real or simulated. Before this request,
    the function checks the files that the plan names, so that a mistake in a file is reported first. Raises an error if
    a file is invalid or the server cannot be used.
    """
    if needs_seed(plan):
        _check_files(plan)
    return with_seed(plan, say)


def _check_files(plan: Plan) -> None:
    """Raise an error for a mistake in the files with requests and arrivals that a plan names."""
    for traffic_class, schedule in scheduled_classes(plan):
        sources = (traffic_class.plan.prompt_source, traffic_class.plan.arrival_process)
        if any(getattr(source, "path", None) for source in sources):
            _draft_load(traffic_class, schedule, PromptProgress(lambda _phase, _counts: None))


def _draft_load(traffic_class: TrafficClass, schedule: Schedule | None, show: PromptProgress) -> DraftLoad:
    """Check the files of a class of traffic. If `schedule` is None, also build the schedule of the class."""
    from loadgen.servers.discovery import endpoint_dialect

    plan = traffic_class.plan
    check_inputs(plan)
    raw_source = raw_requests_of(plan)
    plan = until_file_ends(with_file_endpoint(plan), show)
    access_for(plan)  # raises an error for a missing secret
    check_audio(plan, endpoint_dialect(plan.server, plan.endpoint))  # raises an error for an unknown endpoint too
    schedule = schedule or build_schedule(plan)
    about_file, repetition = check_prompt_file(plan, schedule, show)
    return DraftLoad(
        name=traffic_class.name,
        plan=plan,
        first_id=traffic_class.first_id,
        schedule=schedule,
        share=traffic_class.share,
        raw_source=raw_source,
        about_file=about_file,
        repetition=repetition,
    )


def _context_tokens(load: DraftLoad) -> int:
    """Return the context length in tokens that a simulated server needs for every request of a load.

    If the lengths of the requests are not known before the run, return UNKNOWN_TOKENS.
    """
    unknown = load.plan.uses_sessions or load.plan.uses_file
    return UNKNOWN_TOKENS if unknown else max(4096, max_prompt_length(load.plan) + max_length(load.plan.output_tokens))


def _describe_load(load: DraftLoad, facts: ServerFacts | None) -> str:
    """Return one line about a load, such as `200 requests, poisson:20, 512 tokens in, 128 out`."""
    from loadgen.servers.discovery import endpoint_dialect

    plan = load.plan
    dialect = endpoint_dialect(plan.server, plan.endpoint or (facts.default_endpoint if facts else None))
    text = describe_plan(plan, dialect, exact=has_exact_lengths(plan, dialect, facts))
    if load.share and not plan.arrival_process.facts.clients:
        text = text.replace(plan.arrivals, f"{load.share * 100:.3g}% of {plan.arrivals}", 1)
    return f"{load.name}: {text}" if load.name else text


def _prepare_load(
    load: DraftLoad,
    replicas: Sequence[ServerFacts],
    targets: Sequence[Target],
    id_prefix: str,
    say: Say,
    show: PromptProgress,
) -> PreparedLoad:
    """Choose the dialect (request and response format) of a load, check its models, and build its prompts.

    `replicas` are the facts about the servers at `targets`. All replicas serve the same model, so only the first one is
    asked for facts such as the tokenizer. If the load belongs to a class of traffic, the lines that `say` prints begin
    with the name of the class.
    """
    from loadgen.engine.worker import WorkerTask
    from loadgen.servers.discovery import apply_mark, check_limits, listed_models, open_tokenizer

    plan = load.plan
    tell: Say = (lambda line: say(f"{load.name}: {line}")) if load.name else say
    server = replicas[0]
    probed = server
    if load.first_id:
        inputs, outputs = max_prompt_length(plan), max_length(plan.output_tokens)
        check_limits(server, 1, inputs, outputs, batch_size=plan.batch_size, over_limit=plan.over_limit)
    if plan.first_model not in (None, server.model):
        listed = plan.first_model in listed_models(server, access_for(plan))
        probed = replace(server, model=plan.first_model, listed=listed)
    dialect = dialect_for(plan, probed, tell)
    check_models(plan, probed, dialect, tell)
    for replica in replicas[1:]:
        check_models(plan, replica, dialect, tell)
    announce_trace(plan, load.schedule, tell)
    if load.about_file:
        tell("; ".join(filter(None, (load.about_file, load.repetition))))
    access = access_for(plan, dialect)
    with open_tokenizer(probed, dialect, timeout_s=plan.timeout_s, access=access) as tokenizer:
        prompts = build_prompts(plan, load.schedule, dialect, tokenizer, probed, show, load.raw_source)
        if load.repetition:
            prompts = replace(prompts, counting_method=f"{prompts.counting_method}; {load.repetition}")
        facts = apply_mark(probed, tokenizer.mark)
    if facts is not probed:
        tell(f"{simulated_name(facts)}: its prompt counts show that it is simulated")
    tell(_describe_prompts(plan, load.schedule, prompts, str(plan.model_mix or facts.model)))
    raw = RawFacts()
    if load.raw_source is not None:
        raw = survey(load.raw_source, plan, load.schedule.count, dialect, probed)
    for line in raw.lines(plan):
        tell(line)
    task = WorkerTask(
        number=0,
        worker=0,
        workers=plan.workers,
        first_id=load.first_id,
        prompts=prompts,
        schedule=load.schedule,
        timeout_s=plan.timeout_s,
        targets=tuple(targets),
        replica_names=tuple(facts.url for facts in replicas) if len(replicas) > 1 else ("",),
        dealer=None,
        least_busy=len(replicas) > 1 and plan.balance == "least-busy",
        dialect=dialect,
        model=facts.model,
        model_mix=plan.model_mix,
        headers=request_headers(plan, dialect),
        id_prefix=id_prefix,
        dialects=raw.dialects,
        identity=SessionIdentity(plan.session_header, plan.session_capture),
        replica_header=plan.replica_header.lower(),
        server_timing=plan.server_timing,
        connections=plan.connections,
        cancellation=plan.cancellation,
        stamps=plan.stamps,
        client_priority=plan.client_priority,
        part=Path(),
        checks_texts=plan.verify > 0,
    )
    bytes_per_request = BYTES_PER_RECORD + BYTES_PER_CHUNK * max_length(plan.output_tokens)
    requests = load.schedule.count or load.schedule.clients
    return PreparedLoad(task, facts, raw.facts, requests * bytes_per_request)


def merged_schedule(schedules: Sequence[Schedule]) -> Schedule:
    """Merge the schedules of a run's classes of traffic into one Schedule, for checks of the whole run.

    If there are several classes, workers do not use the result, because each worker sends the requests of one class.
    The result has no due times if one of the classes is not an open loop.
    """
    from loadgen.engine.request_queue import Schedule

    if len(schedules) == 1:
        return schedules[0]
    counts = [schedule.count for schedule in schedules]
    due_ns = [schedule.due_ns for schedule in schedules if schedule.due_ns is not None]
    return Schedule(
        due_ns=array("q", sorted(chain.from_iterable(due_ns))) if len(due_ns) == len(schedules) else None,
        count=None if None in counts else sum(count or 0 for count in counts),
        clients=sum(schedule.at_once for schedule in schedules),
        think_ns=0,
        until_ns=None,
        in_flight=sum(schedule.in_flight for schedule in schedules),
        spare=sum(schedule.spare for schedule in schedules),
    )


def describe_traffic(header: Header, loads: Sequence[DraftLoad], ready: Sequence[PreparedLoad]) -> None:
    """Store the facts about the classes of traffic in the header of a run.

    For each class, `loads` contains the load before its prompts were built, and `ready` contains the load with its
    prompts.
    """
    header.traffic = [
        traffic_facts(
            load.plan,
            load.name,
            load.first_id,
            load.share,
            endpoint=prepared.task.dialect.endpoint,
            model=prepared.facts.model,
        )
        for load, prepared in zip(loads, ready, strict=True)
    ]
    header.load = load_of_traffic({facts.name: facts.load for facts in header.traffic})
    methods = dict.fromkeys(prepared.task.prompts.counting_method for prepared in ready)
    header.client["prompts"] = "; ".join(methods)
    header.client["exact"] = all(prepared.task.prompts.exact for prepared in ready)


def traffic_facts(plan: Plan, name: str, first_id: int, share: float, *, endpoint: str, model: str) -> TrafficFacts:
    """Return the facts about one class of traffic, for the header of a run.

    - `plan` is the plan of the class, and `name` is the name of the class.
    - `first_id` is the id of the first request of the class.
    - `share` is the share of the class in the load of the whole plan, from 0 to 1. For a class with a separate load, it
      is 0.
    - `endpoint` and `model` receive the requests of the class.
    """
    from loadgen.analysis.run.runfile import TrafficFacts, load_facts

    return TrafficFacts(
        name=name,
        first_id=first_id,
        load=scaled_load(load_facts(plan.arrivals, plan.workload, plan.concurrency or 0), share),
        n=plan.n,
        duration_s=plan.duration_s,
        workload=plan.workload,
        input_tokens=plan.input_tokens,
        output_tokens=plan.output_tokens if BACKENDS[plan.server].dialects[endpoint].streams else 0,
        endpoint=endpoint,
        model=str(plan.model_mix or model),
        goodput=list(plan.goodput),
    )


def check_server_limits(plan: Plan, facts: ServerFacts, at_once: int) -> None:
    """Raise LimitError if the load of a plan exceeds the limits of a replica.

    `at_once` is the number of requests that the replica receives at the same time."""
    from loadgen.servers.discovery import check_limits, endpoint_dialect

    dialect = endpoint_dialect(plan.server, plan.endpoint)
    max_prompt = max_prompt_length(plan) if dialect.count_by_running else 1
    max_output = max_length(plan.output_tokens) if dialect.has_output_length else 0
    check_limits(facts, at_once, max_prompt, max_output, batch_size=plan.batch_size, over_limit=plan.over_limit)


def dealer_for(task: WorkerTask, plan: Plan, worker: int) -> Dealer | None:
    """Return the object that chooses a replica for each request of a worker, or None if there is only one replica.

    `worker` is the index of the worker process.
    """
    from loadgen.engine.balance import Dealer

    if len(task.targets) == 1:
        return None
    return Dealer(len(task.targets), plan.balance, worker, plan.workers, task.first_id)


def describe_balance(plan: Plan, replicas: int) -> str:
    """Return one line that says how the requests of a plan are distributed over its replicas."""
    words = BALANCE_WORDS[plan.balance]
    if plan.balance == "even" and plan.n is not None and not plan.uses_sessions and not plan.traffic:
        least, rest = divmod(plan.n, replicas)
        words = f"{words}: {least if not rest else f'{least} or {least + 1}'} for each"
    return f"{replicas} replicas: {words}"


def server_facts(replicas: Sequence[ServerFacts], targets: Sequence[Target]) -> dict[str, Any]:
    """Return the facts about the server for the header of a run: its addresses, and the facts about each replica."""
    if len(replicas) == 1:
        return targets[0].facts
    addresses = dict.fromkeys(address for target in targets for address in target.facts.get("addresses", ()))
    unused = {address: reason for target in targets for address, reason in target.unused.items()}
    return targets[0].facts | {
        "addresses": [*addresses],
        "addresses_unused": unused,
        "replicas": [
            {"url": facts.url, "query": facts.query, **target.facts}
            for facts, target in zip(replicas, targets, strict=True)
        ],
    }


def empty_caches(plan: Plan, replicas: Sequence[ServerFacts], say: Say) -> str:
    """Empty the prefix caches of all replicas (option --cold), and return how certain it is that they are empty.

    The result is a value of loadgen.servers.cache_reset.ResetResult. If the results of the replicas differ, the least
    certain result is returned. `say` is called with a message for each replica. Raises CacheResetError if a replica
    cannot empty its cache, or still uses cached tokens afterwards.
    """
    from loadgen.servers.cache_reset import reset_prefix_cache

    results = []
    for facts in replicas:
        results.append(reset_prefix_cache(facts, access_for(plan), plan.timeout_s))
        where = f"{facts.url}: " if len(replicas) > 1 else ""
        say(f"--cold: {where}{EMPTIED_WORDS[results[-1]]}")
    return max(results, key=[*EMPTIED_WORDS].index)


def canary_tasks(
    plan: Plan, tasks: Sequence[WorkerTask], bodies: Sequence[Mapping[str, Any]], say: Say
) -> dict[int, CanaryTask]:
    """Return the canaries of a plan (--verify), by the index of the class of traffic that sends them.

    A canary is a prompt with a known answer. Classes with the same endpoint and model need the same canaries, so only
    the first of these classes sends them. Classes whose responses have no text, such as embeddings, send none.

    `tasks` contains one task per class of traffic, or a single task for a run without classes. `bodies` contains the
    fields that the user adds to the requests of each class. Raises PlanError if no class has responses with text.
    """
    from loadgen.engine.canaries import CanaryTask
    from loadgen.servers.auth import fill_fields

    if not plan.verify:
        return {}
    destinations: dict[tuple[str, str, str], int] = {}
    for index, task in enumerate(tasks):
        if task.dialect.streams:
            destinations.setdefault((task.dialect.endpoint, task.dialect.path, task.model), index)
    if not destinations:
        raise PlanError(
            f"--verify: responses of --endpoint {tasks[0].dialect.endpoint} have no text",
            "Leave --verify out, or use chat.",
        )
    each = f" for each of {len(destinations)} endpoints or models" if len(destinations) > 1 else ""
    say(f"{plan.verify} canar{'y' if plan.verify == 1 else 'ies'} before, during and after the load (--verify){each}")
    prompts = build_canaries(plan.verify * len(destinations), plan.seed)
    return {
        index: CanaryTask(prompts[number * plan.verify : (number + 1) * plan.verify], fill_fields(bodies[index]))
        for number, index in enumerate(destinations.values())
    }


def _describe_prompts(plan: Plan, schedule: Schedule, prompts: Prompts, model: str) -> str:
    """Return one line about the prompts of a run: their number, their length, and how their tokens were counted."""
    count = "" if schedule.count is None else f"{schedule.count * plan.batch_size} "
    exact = prompts.exact or plan.uses_file
    tokens = about_tokens(f"{describe_lengths(plan)[0]} tokens", exact=exact)
    plural = "" if schedule.count == 1 else "s"
    noun = f"prompt{plural}" if plan.batch_size == 1 else "inputs"
    kind = f"session{plural}, {tokens} a turn" if plan.uses_sessions else f"{noun} of {tokens}"
    for_model = f" for {model}" if model else ""
    if prompts.spec.recordings:
        return f"{count}{describe_recordings(plan)}{for_model}"
    if exact:
        return f"{count}{kind} ({prompts.counting_method}){for_model}"
    return f"{count}{kind}{for_model}: {prompts.counting_method}"


def check_inputs(plan: Plan) -> None:
    """Check that every file with requests can be opened, before the server is contacted.

    Pipes and lists of lengths are read here, so that the workers, which are forked later, have their contents. Raises
    loadgen.workloads.spec_syntax.WorkloadError for a file that cannot be read.
    """
    inputs = plan.input_lengths
    outputs = plan.output_lengths.lengths
    for name, spec in (("input", inputs), ("output", outputs)):
        if isinstance(spec, lengths.Empirical):
            next(spec.tokens(plan.seed, name))
    for source in (plan.prompt_source, plan.arrival_process):
        path: Path | None = getattr(source, "path", None)
        if path is not None and not isinstance(source, Recordings):
            try:
                check_input(path)
            except OSError as error:
                raise WorkloadError(f"cannot read {path}: {error.strerror}") from None


def build_schedule(plan: Plan) -> Schedule:
    """Return the schedule of a plan: the due times of an open loop, or the clients of a closed loop.

    Raises loadgen.workloads.spec_syntax.WorkloadError for a trace that cannot be read. Raises PlanError if the number
    of workers exceeds the maximum number of requests in flight, or if a file has fewer times than the plan needs.
    """
    from loadgen.engine.request_queue import Schedule

    process = plan.arrival_process
    until_ns = None if plan.duration_s is None else round(plan.duration_s * NS_PER_S)
    closed_loop = process if isinstance(process, arrival_processes.ClosedLoopArrivals) else None
    max_concurrent = closed_loop.clients if closed_loop else plan.concurrency
    if max_concurrent and plan.workers > max_concurrent:
        raise PlanError(
            f"{plan.workers} workers cannot share --concurrency {max_concurrent}: each needs at least one request",
            f"Use --workers {max_concurrent} or fewer. Workers on all machines count together.",
        )
    if closed_loop:
        clients = closed_loop.clients if plan.n is None else min(closed_loop.clients, plan.n)
        return Schedule(
            due_ns=None,
            count=plan.n,
            clients=clients,
            think_ns=closed_loop.think_ns,
            until_ns=until_ns,
            in_flight=clients,
            spare=clients,
        )
    due_ns = array("q", arrivals.due_instants(process, plan.seed, n=plan.n, until_ns=until_ns))

    if isinstance(process, arrival_processes.RecordedTimes) and plan.n is not None and len(due_ns) < plan.n:
        raise PlanError(
            f"{process.path} holds the times of only {len(due_ns)} {_unit(plan)}, but the plan needs {plan.n}",
            f"Request fewer: --n {len(due_ns)}. Or state another load, such as --rate 5, with --repeat-file.",
        )

    # The maximum number of requests that are due within one second.
    max_per_s = 0
    first = 0
    for last, due in enumerate(due_ns):
        while due - due_ns[first] >= NS_PER_S:
            first += 1
        max_per_s = max(max_per_s, last - first + 1)
    requests = len(due_ns)
    if isinstance(plan.prompt_source, SessionFile):  # several requests of a session may be in flight, on one worker
        requests = plan.workers * count_requests(plan.prompt_source, len(due_ns), plan.seed)
    in_flight = min(requests, plan.concurrency or plan.max_in_flight or max(IN_FLIGHT_DEFAULT, max_per_s))
    return Schedule(
        due_ns=due_ns,
        count=len(due_ns),
        clients=0,
        think_ns=0,
        until_ns=None,
        in_flight=in_flight,
        spare=min(in_flight, max(MIN_SPARE, max_per_s)),
        queues=plan.concurrency is not None,
    )


def announce_trace(plan: Plan, schedule: Schedule, say: Say) -> None:
    """Report how many requests of a trace will be sent, and how long the replay takes. Do nothing if the plan has no
    trace.

    A surprising duration shows the user that the time unit of the trace is wrong.
    """
    process = plan.arrival_process
    if isinstance(process, arrival_processes.Trace) and schedule.due_ns is not None:
        say(process.describe(schedule.due_ns, whole=plan.n is None and plan.duration_s is None))


def with_file_endpoint(plan: Plan) -> Plan:
    """Return the plan with the endpoint that its workload requires, unless the plan already names an endpoint.

    A file with lists of chat messages requires the chat endpoint, and recordings require the endpoint for
    transcriptions. For a file of whole requests, the path of the first request determines the endpoint. The responses
    to whole requests may have any length, because loadgen does not change the bodies of these requests.
    """
    source = plan.prompt_source
    if isinstance(source, RawRequests):
        plan = plan.replaced(ignore_eos=False)
        path = "" if plan.path else first_path(source)
        dialect = dialect_for_path(BACKENDS[plan.server].dialects, path) if path and plan.endpoint is None else None
        return plan if dialect is None else plan.replaced(endpoint=dialect.endpoint)
    if plan.endpoint is None and isinstance(source, Dataset | SessionFile) and source.has_messages:
        return plan.replaced(endpoint="chat")
    if plan.endpoint is None and (isinstance(source, Recordings) or plan.audio_seconds is not None):
        return plan.replaced(endpoint="transcriptions")
    return plan


def until_file_ends(plan: Plan, progress: Callable[[int], None] = lambda _: None) -> Plan:
    """Return the plan with `n` set to the number of requests that the file of its workload provides.

    This is the number of prompts, requests or sessions in the file, divided by `batch_size`. If the plan has another
    limit that ends the run, or if its workload uses no file, return the plan unchanged.

    `progress` is called with the number of entries of the file that have been counted. Raises WorkloadError for a
    malformed file, and PlanError if `n` would be smaller than the number of workers.
    """
    if plan.arrival_process.ends(plan.n, plan.duration_s) or not plan.uses_file:
        return plan
    entries = _count_entries(plan, None, progress)
    count = entries // plan.batch_size
    if count < plan.workers:
        batch = f" in requests of {plan.batch_size}," if plan.batch_size > 1 else ""
        raise PlanError(
            f"{plan.workload_file} holds {entries} {_unit(plan)}{batch} for {plan.workers} workers",
            f"Use --workers {count}." if count else "Name another file.",
        )
    return plan.replaced(n=count)


def check_prompt_file(
    plan: Plan, schedule: Schedule, progress: Callable[[int], None] = lambda _: None
) -> tuple[str, str]:
    """Read the prompts of a plan's file once, before the server is contacted. Return two texts for the user.

    - The first text describes the file. It is empty if the plan uses no file.
    - The second text says that the prompts are repeated. It is empty if the file has enough prompts.

    `progress` is called with the number of prompts read so far. Raises WorkloadError for a malformed file and for text
    that cannot be sent. Raises PlanError if the file is empty, or if it has too few prompts and the plan does not
    repeat them.
    """
    source = plan.prompt_source
    if not plan.uses_file:
        return "", ""
    needed = None if schedule.count is None else schedule.count * plan.batch_size
    count = _count_entries(plan, needed, progress)
    if not count:
        raise PlanError(f"{plan.workload_file} holds no {_unit(plan)}", "Name another file.")
    about = f"{_unit(plan)} from {source}: {describe_format(source)}"
    repeats = plan.repeat_file or (isinstance(source, SessionFile) and source.loop)
    if repeats and (needed is None or count < needed):
        return about, f"the file's {count} {_unit(plan)} are repeated, so a prefix cache may help the server"
    if needed is not None and count < needed:
        raise PlanError(
            f"{plan.workload_file} holds only {count} {_unit(plan)}, but the plan needs {needed}",
            f"Request fewer: --n {count // plan.batch_size}. "
            "Or repeat them, so that a prefix cache may help the server: "
            f"{'loop=yes after the name of the file' if isinstance(source, SessionFile) else '--repeat-file'}.",
        )
    return about, ""


def _count_entries(plan: Plan, limit: int | None, progress: Callable[[int], None]) -> int:
    """Return the number of prompts or sessions in the plan's file, up to `limit`."""
    source = plan.prompt_source
    count = 0
    with_entries = Dataset | MultiTurn | RawRequests | Recordings | SessionFile
    samples = source.samples() if isinstance(source, with_entries) else None
    for count, _ in enumerate(islice(samples or (), limit), 1):
        progress(count)
    return count


def _unit(plan: Plan) -> str:
    """Return the plural noun for the entries of the plan's file: `sessions`, `recordings` or `prompts`."""
    if isinstance(plan.prompt_source, Recordings):
        return "recordings"
    return "sessions" if plan.uses_sessions else "prompts"


class PromptProgress:
    """Shows the number of prompts that have been counted or built, at most ten times a second.

    Nothing is shown in the first QUIET_S (0.4) seconds, because no progress display is needed for short work.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._shown_s = time.monotonic() + QUIET_S

    def __call__(self, done: int) -> None:
        """Report that `done` prompts have been counted or built so far."""
        from loadgen.engine.client_health import LiveCounters

        now_s = time.monotonic()
        if now_s - self._shown_s >= PROGRESS_INTERVAL_S:
            self._shown_s = now_s
            self._on_progress("building prompts", LiveCounters(prepared=done))


def build_prompts(
    plan: Plan,
    schedule: Schedule,
    dialect: Dialect,
    server: ServerTokenizer,
    facts: ServerFacts,
    progress: Callable[[int], None] = lambda _: None,
    raw_source: RawRequests | None = None,
) -> Prompts:
    """Build the prompts of `plan`, and do all work that needs the tokenizer of the server.

    - `schedule` contains the number of requests, and `dialect` is the request format of the endpoint.
    - `server` counts tokens with the server's tokenizer, and `facts` describes the server.
    - `progress` is called with the number of prompts that have been counted or built so far.
    - `raw_source` is the workload of the plan if it consists of whole requests, whose bodies are sent as they are.

    Raises PlanError, PromptError, WorkloadError or ServerError.
    """
    from loadgen.servers.backends.pooling import QUERY_WORDS

    source = raw_source or plan.prompt_source
    process = plan.arrival_process
    inputs = plan.input_lengths
    outputs = plan.output_lengths.lengths
    request_fields: dict[str, Any] = {}
    from loadgen.servers.auth import fill_fields

    if plan.extra_body or plan.may_stop_early:
        request_fields = {"body": fill_fields(plan.extra_body), "ignore_eos": not plan.may_stop_early}
    check_batch(plan, dialect)
    check_audio(plan, dialect)
    if not dialect.has_output_length:
        if plan.uses_sessions and not isinstance(source, RawRequests):
            raise PlanError(
                f"--endpoint {dialect.endpoint} cannot be used for sessions, because its responses have no text",
                "Use --endpoint chat.",
            )
        outputs = lengths.Fixed(1)
        request_fields["output_tokens"] = 0
    if dialect.count_by_running is None:
        request_fields["input_tokens"] = 0
    local = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    if isinstance(source, RawRequests) and not plan.warmup:
        return Prompts(
            WorkloadSpec(source, inputs, outputs, plan.seed, n=schedule.count, repeat_file=plan.repeat_file),
            no_text,
            len,
            "whole requests, whose prompts the server counts",
        )
    if plan.image and not dialect.chat:
        raise PlanError("--image: only chat messages can hold images", "Use --endpoint chat.")
    takes_recordings = dialect.inputs == "recording"
    spec = WorkloadSpec(
        source,
        plan.audio_lengths if takes_recordings else inputs,
        outputs,
        plan.seed,
        n=schedule.count,
        warmup=plan.warmup,
        trace=process if isinstance(process, arrival_processes.Trace) and not takes_recordings else None,
        recordings=takes_recordings,
        request_fields=request_fields,
        repeat_file=plan.repeat_file,
        image_sizes=tuple(map(images.parse_size, plan.image)),
        batch_size=plan.batch_size,
        query_words=QUERY_WORDS if dialect.inputs == "pairs" else 0,
    )
    if takes_recordings:
        return Prompts(spec, lambda *_: "", len, RECORDING_METHOD)
    return prepare_prompts(
        spec,
        token_ids=dialect.token_ids,
        local=local,
        server=server if dialect.count_by_running else None,
        chat=dialect.chat,
        by=plan.lengths if dialect.count_by_running else "approximate",
        store=None if local else vocabulary_cache(facts, server.counting_path, server.words or COMMON_WORDS),
        progress=progress,
    )


def check_batch(plan: Plan, dialect: Dialect) -> None:
    """Raise PlanError if `--batch-size` is more than 1, but the requests of the plan cannot have several inputs.

    There are three possible reasons:

    - The endpoint of `dialect` takes one input per request.
    - The plan has a trace, which states one prompt length per request.
    - The endpoint takes a query with several documents, and the inputs of the workload do not share a query.
    """
    if plan.batch_size == 1:
        return
    option = f"--batch-size {plan.batch_size}"
    if dialect.inputs not in SEVERAL_INPUTS:
        names = [name for name, other in BACKENDS[plan.server].dialects.items() if other.inputs in SEVERAL_INPUTS]
        noun = "recording" if dialect.inputs == "recording" else "prompt"
        hint = f"Use --endpoint {join_or(names)}, or leave --batch-size out." if names else "Leave --batch-size out."
        raise PlanError(f"{option}: a request to --endpoint {dialect.endpoint} has only one {noun}", hint)
    synthetic = isinstance(plan.prompt_source, Synthetic)
    if synthetic and isinstance(plan.arrival_process, arrival_processes.Trace):
        raise PlanError(f"{option}: a trace states one prompt length per request", "Leave --batch-size out.")
    if dialect.inputs == "pairs" and not synthetic:
        raise PlanError(
            f"{option}: the inputs of a request to --endpoint {dialect.endpoint} share a query, and those of "
            f"--workload {plan.workload} do not",
            "Leave --batch-size out; a line of a JSONL file can contain its own documents.",
        )


def build_header(plan: Plan, facts: ServerFacts, dialect: Dialect, prompts: Prompts, at_once: int = 1) -> Header:
    """Return the header of the run file, with everything that is known before the run starts.

    `at_once` is the number of requests that are certainly in flight together on one replica. The header also says which
    of these exceptions apply:

    - `at_once` exceeds a limit of the server, and the user has accepted this (--over-limit).
    - The results of this server version are misleading, and the user has accepted this (--force).
    - The server refuses some request fields, so loadgen leaves them out.
    """
    from loadgen.analysis.run.runfile import Header
    from loadgen.servers.discovery import docker_proxy_target, exceeded_request_limit

    plan_fields = plan.to_dict() | {"endpoint": dialect.endpoint}
    if not dialect.has_output_length:
        plan_fields["output_tokens"] = 0
    if dialect.inputs == "recording":
        plan_fields |= {"input_tokens": 0, "audio_seconds": None if plan.uses_file else str(plan.audio_lengths)}
    server = asdict(facts)
    proxied_to = "" if plan.proxy else docker_proxy_target(facts.url)
    if proxied_to:
        server["proxied_to"] = proxied_to
    client = {"prompts": prompts.counting_method, "exact": prompts.exact}
    exceptions = {
        "forced": dialect.misleading_reason(facts.version),
        "left_out": dialect.dropped_fields,
        "over_limit": exceeded_request_limit(facts, at_once, plan.batch_size),
    }
    client |= {name: value for name, value in exceptions.items() if value}
    return Header(
        version=version("llm-loadgen"),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start_ns=0,
        plan=plan_fields,
        server=server,
        host=machine.facts(),
        client=client,
    )
