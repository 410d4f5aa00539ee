"""Measures a complete sweep: parses its targets, runs its pilot, chooses its loads and judges its steps.

This module also predicts a sweep with a twin (a simulated server fitted to a measured one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.results import load_and_summarise, write_page, write_summary
from loadgen.servers.backends import join_or
from loadgen.studies.sweep import (
    ARRIVALS,
    DEFAULT_DURATION_S,
    Book,
    EndReason,
    Measure,
    Over,
    StepEnd,
    Sweep,
    Watch,
    default_duration,
    journal,
    measured_steps,
    parse_loads,
    pilot,
    run,
)
from loadgen.studies.sweep.class_loads import class_loads, describe_load
from loadgen.studies.sweep.overload import StepSettings

if TYPE_CHECKING:
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.objectives import Objective
    from loadgen.analysis.run.runfile import Footer, Run
    from loadgen.analysis.summary import Summary
    from loadgen.analysis.sweep.capacity_search import Capacity, Search
    from loadgen.engine.prepare import OnProgress
    from loadgen.engine.resolve_server import Say
    from loadgen.journal import JournalLine
    from loadgen.studies.simulate import ServerModel, VirtualClock
    from loadgen.workloads.lengths import LengthDistribution

SEARCH_RANGE_FACTOR = 2.0**16
"""Highest rate that the search tries, divided by the start rate."""
MAX_CONCURRENCY = 65_536
"""Highest concurrency that the search tries."""
MAX_PREDICTED_STEPS = 16
"""Maximum number of loads for which a twin predicts the results."""
DEFAULT_START = 1.0
"""First load of a search that has neither a start nor a pilot."""
MIN_UNCLEAR_S = 45.0
"""Minimum duration in s of a step that ends without a verdict on the growth of its queue."""
UNCLEAR_RESPONSES = 16.0
"""Minimum duration of a step that ends without a verdict on the growth of its queue, as a multiple of the response
time."""
MIN_JUDGED_S = 30.0
"""Minimum duration in s of a step in a sweep with objectives."""
JUDGED_REQUESTS = 1500
"""Number of requests that are enough to judge a step by objectives."""
JUDGED_RESPONSES = 6.0
"""Minimum duration of a step in a sweep with objectives, as a multiple of the response time."""
NARROW_UNTIL_S = 90.0
"""A sweep without objectives narrows the interval of its capacity until its runs have lasted for this time in s."""
SAMPLED_LENGTHS = 1000
"""Number of lengths from which their variation is estimated."""
DECISIVE_LIMITS = ("cpu_share", "full_reads", "worker_lost", "client_limit")
"""Limits of the client that can make a queue grow or keep it from growing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTargets:
    """The objectives of a sweep and the loads to measure."""

    objectives: Sequence[Objective]
    over: Over
    loads: tuple[float, ...] = ()
    """Fixed loads to measure. If empty, the sweep searches for the capacity."""

    @property
    def bounds(self) -> list[Objective]:
        """The objectives on all requests, converted to bounds that a single request must meet.

        For example, `ttft.p99 < 500ms` becomes `ttft < 500ms`. These bounds define goodput.
        """
        from loadgen.analysis.sweep import request_bounds

        return request_bounds(objective for objective in self.objectives if not objective.part)

    def class_bounds(self, name: str) -> list[str]:
        """Return the objectives on the class of traffic `name`, converted to bounds that a single request must meet.

        For example, `ttft.p99 < 500ms` becomes `ttft < 500ms`.
        """
        from loadgen.analysis.sweep import request_bounds

        bounds = request_bounds(objective for objective in self.objectives if objective.part == name)
        return [bound.text.rpartition(":")[2].strip() for bound in bounds]


def parse_targets(
    objectives: Sequence[str] | None, rates: str | None, concurrency: str | None, over: Over, *, parts: bool = False
) -> SweepTargets:
    """Parse the objectives and the loads of a sweep. Raises PlanError if one of them is invalid.

    `over` is the quantity that the sweep varies. If `parts` is True, an objective may name a class of traffic.
    `plan_of_steps` checks these names.
    """
    from loadgen.analysis.objectives import ObjectiveError, check_no_parts, parse
    from loadgen.analysis.sweep.capacity_search import check_objectives

    if rates and concurrency:
        raise PlanError("--rates and --concurrency are two sweeps", "Name one of them.")
    try:
        parsed = parse(objectives or (), "--objective")
        check_objectives(parsed)
        if not parts:
            check_no_parts(parsed, "--objective")
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if rates:
        return SweepTargets(objectives=parsed, over="rate", loads=parse_loads(rates, "--rates", whole=False))
    if concurrency:
        loads = parse_loads(concurrency, "--concurrency", whole=True)
        return SweepTargets(objectives=parsed, over="concurrency", loads=loads)
    if not parsed and over == "concurrency":
        hint = "Name an objective: --objective 'ttft.p99 < 500ms'; or name loads: --concurrency 1,2,4,...,64"
        raise PlanError("--objective is missing", hint)
    return SweepTargets(objectives=parsed, over=over)


def plan_of_steps(settings: Mapping[str, Any], targets: SweepTargets, say: Say | None = None) -> Plan:
    """Return the plan that all steps of a sweep share, apart from the load.

    `say` is called with a line if the URL of the server had to be corrected. Raises PlanError for mistakes in the plan,
    so that they are reported before the first step.
    """
    from loadgen.engine.resolve_server import with_detected_server

    if settings.get("at"):
        raise PlanError(
            "--at: a sweep runs no commands, because every step would run them again",
            "Leave --at out, or use loadgen run.",
        )
    settings = {**settings, **default_duration(settings)}
    if settings.get("traffic") is not None:
        return _plan_with_classes(settings, targets, say)
    arrivals = ARRIVALS[targets.over].format(targets.loads[0] if targets.loads else 1)
    plan = with_detected_server(Plan(**{**settings, "arrivals": arrivals}), say)
    if plan.uses_sessions and not targets.objectives and not targets.loads:
        hint = "A sweep of sessions needs an objective: --objective 'ttft.p99 < 500ms'"
        raise PlanError("--objective is missing", hint)
    return plan


def _plan_with_classes(settings: Mapping[str, Any], targets: SweepTargets, say: Say | None) -> Plan:
    """Return the plan of a sweep whose settings contain classes of traffic (the `[[traffic]]` tables of a plan file).

    The loads in the plan are those of the file. Each step of the sweep scales them. `targets` contains the objectives
    and the loads of the sweep. `say` is called with a line that describes the load.

    Raises PlanError in these cases:

    - The sweep has neither objectives nor loads.
    - The sweep cannot scale the load of any class.
    - The smallest concurrency is less than the number of classes.
    - An objective names an unknown class.
    """
    from loadgen.engine.resolve_server import with_detected_server

    plan = Plan(**settings)
    names = [table["name"] for table in plan.traffic]
    if not targets.objectives and not targets.loads:
        raise PlanError(
            "a sweep of classes of traffic needs an objective",
            f"Write objectives = [...] in a [[traffic]] table, or --objective '{names[0]}: ttft.p99 < 500ms'.",
        )
    for objective in targets.objectives:
        if objective.part and objective.part not in names:
            raise PlanError(
                f"--objective {objective.text!r}: the plan has no class of traffic {objective.part!r}",
                f"Choose {join_or(names)}.",
            )
    loads = class_loads(plan, targets.over)
    if say is not None:
        say(describe_load(plan, targets.over))
    lowest = targets.loads[0] if targets.loads else sum(loads.values())
    if targets.over == "concurrency" and lowest < len(loads):
        raise PlanError(
            f"--concurrency {lowest:g}: {len(loads)} classes need at least {len(loads)} clients", "Use larger loads."
        )
    return with_detected_server(plan, say)


def class_settings(plan: Plan, over: Over, start: float | None) -> dict[str, Any]:
    """Return the settings of a capacity search that depend on the plan's classes of traffic.

    The result is empty if `plan` has no classes. Otherwise, it contains:

    - `plan_load`: the sum of the loads of all classes in the plan.
    - `start`: the load at which the search begins. This is the argument `start`, or `plan_load` if that is None.
    - `lowest`: the minimum load. It is set only if `over` is `concurrency`, because each class needs at least one
      client.
    """
    if not plan.traffic:
        return {}
    loads = class_loads(plan, over)
    total = sum(loads.values())
    lowest = {"lowest": len(loads)} if over == "concurrency" else {}
    return {"plan_load": total, "start": start or total, **lowest}


def new_sweep(
    plan: Plan,
    folder: Path,
    targets: SweepTargets,
    virtual_model: ServerModel | None,
    *,
    adaptive: bool = False,
    speed: float = 1.0,
) -> Sweep:
    """Return a new sweep.

    A sweep can only be resumed later with the same plan, objectives, server model and clock speed.

    - `virtual_model` describes the server of a simulated sweep. It is None if the sweep measures a real server.
    - With `adaptive`, the sweep chooses how long its steps last.
    - `speed` is the speed of the server's clock relative to real time. It differs from 1 only for simulated servers.
    """
    virtual = None
    if virtual_model is not None:
        draws = virtual_model.twin.draws if virtual_model.twin else None  # identify a twin by its numbers, not its file
        virtual = {"of": str(replace(virtual_model, twin=None)), "twin": draws}
    texts = [objective.text for objective in targets.objectives]
    covered = {objective.figure for objective in targets.objectives}
    return Sweep(
        plan=plan,
        over=targets.over,
        folder=folder,
        loads=targets.loads,
        journal_extra=(("objectives", texts), ("virtual", virtual), *((("speed", speed),) if speed != 1 else ())),
        rejections_allowed=bool({"complete", "rejected"} & covered),
        has_objectives=bool(texts),
        adaptive=adaptive,
    )


def measure_function(
    virtual_model: ServerModel | None, command: list[str], say: Say, clock: VirtualClock | None = None
) -> Measure:
    """Return the function that executes one run of the sweep.

    If `virtual_model` is not None, the run is simulated, and `clock` shows the virtual time. Otherwise the requests of
    the run are sent to a server. In the first run, `say` is called with lines about this server.
    """
    from loadgen.engine import prepare
    from loadgen.studies import simulate

    announced = False

    def measure(plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        nonlocal announced
        if virtual_model is not None:
            progress = None if clock is None else simulate.VirtualProgress(on_progress, clock)
            footer = simulate.run(plan, virtual_model, folder, command, progress=progress).footer
            assert footer is not None
            return footer
        is_first = not announced  # later runs would print the same lines
        announced = True
        return prepare.run(
            plan, folder, command=command, say=say if is_first else lambda _line: None, on_progress=on_progress
        )

    return measure


class MemoryBook:
    """The journal of a simulated sweep, kept in memory. No file is written."""

    def __init__(self) -> None:
        self.lines: list[JournalLine] = []

    def write(self, kind: str, /, **values: Any) -> None:
        """Append one line to the journal."""
        self.lines.append({"type": kind, **values})


class MemoryRuns:
    """Simulates the runs of a sweep in virtual time and keeps them in memory."""

    def __init__(self, model: ServerModel) -> None:
        from loadgen.studies.simulate import VirtualClock

        self.clock = VirtualClock()
        self._model = model
        self._runs: dict[Path, Run] = {}

    def measure(self, plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        """Simulate the run of a plan."""
        from loadgen.studies import simulate

        simulated_run = simulate.run_in_memory(
            plan, self._model, progress=simulate.VirtualProgress(on_progress, self.clock)
        )
        self._runs = {folder: simulated_run}
        assert simulated_run.footer is not None
        return simulated_run.footer

    def load(self, folder: Path) -> tuple[Run, Frame]:
        """Return the run in `folder`, and a Frame with its Records. Only the newest run can be loaded."""
        from loadgen.analysis.steady_window import frame_of_run

        return self._runs[folder], frame_of_run(self._runs[folder])


def build_search(
    over: Over, search_settings: Mapping[str, Any], *, predicted: float | None = None, full_rate: float | None = None
) -> Search:
    """Return a search for the capacity of the server.

    - `over` is the quantity that the search varies, "rate" or "concurrency".
    - `search_settings` contains the precision, the confidence and the first load, as the sweep's journal stores them.
    - `predicted` is the capacity that a twin (a simulated server fitted to a measured one) predicts.
    - `full_rate` is the full throughput of the server in requests per second, which the pilot has measured.
    """
    from loadgen.analysis.sweep.capacity_search import Search

    options: dict[str, Any] = _precision(search_settings)
    if predicted:
        options["predicted"] = predicted
    if over == "concurrency":
        return Search(float(search_settings.get("lowest") or 1), float(MAX_CONCURRENCY), whole=True, **options)
    start = search_settings.get("start") or full_rate or DEFAULT_START
    return Search(start / 64, start * SEARCH_RANGE_FACTOR, full_rate=full_rate, **options)


def _precision(search_settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: search_settings[name] for name in ("confidence", "precision") if name in search_settings}


def capacity_of(
    sweep: Mapping[str, Any], search_settings: Mapping[str, Any], lines: Sequence[JournalLine]
) -> Capacity | None:
    """Return the capacity that a sweep has found, given the lines of its journal.

    `sweep` is the plan in the first line of the journal. Return None if no step has finished, or if the sweep has fixed
    loads and no objectives, because such a sweep does not search for the capacity.
    """
    from loadgen.analysis.sweep import observations
    from loadgen.analysis.sweep.capacity_search import capacity_of_list
    from loadgen.analysis.sweep.edge_search import EdgeSearch
    from loadgen.analysis.sweep.saturation import estimate

    runs = observations(measured_steps(lines))
    objectives = sweep.get("objectives")
    if not runs or (sweep.get("loads") and not objectives):
        return None
    if sweep.get("loads"):
        return capacity_of_list(runs)
    levels = pilot.levels_of(lines)
    if not objectives:
        return EdgeSearch(estimate(levels), **_precision(search_settings)).capacity(runs) if levels else None
    full_rate = estimate(levels) if levels else None
    return build_search(sweep["over"], search_settings, full_rate=full_rate).capacity(runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRunner:
    """Runs the pilot and the steps of a sweep. If an interrupted sweep is resumed, only the remaining steps are run."""

    sweep: Sweep
    targets: SweepTargets
    search_settings: Mapping[str, Any]
    """Settings of the search, as the journal stores them: `precision`, `confidence`, `start`, ..."""
    measure: Measure
    """Executes one run."""
    say: Callable[[str], None]
    on_progress: OnProgress
    max_runs: int
    max_time_s: float | None = None
    resume: bool = False
    clock: Callable[[], float] = time.monotonic
    """Clock of the runs: time.monotonic, or the virtual time."""
    load_run: Callable[[Path], tuple[Run, Frame]] | None = None
    """Loads a run that is only in memory, and a Frame with its Records as columns. None: runs are read from files."""
    summaries: list[Summary] = field(default_factory=list)
    """Summaries of the measured steps."""

    def run(self) -> EndReason:
        """Run the pilot and the steps that have not been run yet, and return the reason why the sweep ended.

        The results are written to the journal of the sweep.
        """
        with journal(self.sweep.folder, self.sweep.journal_plan, resume=self.resume) as book:
            book.write("search", **self.search_settings)
            return self.run_with(book)

    def run_with(self, book: Book) -> EndReason:
        """Run the sweep, and return the reason why it ended. The results are written to `book`, the journal of the
        sweep.

        The pilot and the steps that `book` contains already are not repeated.
        """
        watch = Watch(self.on_progress, lambda load: self._settings(load, book.lines), self.clock)
        began_s = time.monotonic()
        pilot_end = self._run_pilot(book, watch) if self._has_pilot else "done"
        if pilot_end != "done":
            book.write("ended", why=pilot_end)
            return pilot_end
        left_s = None if self.max_time_s is None else self.max_time_s - (time.monotonic() - began_s)
        return run(
            self.sweep,
            book,
            measure=self._measure_with_objectives,
            judge=self._judge,
            next_load=lambda steps: self._next_load(steps, book.lines),
            watch=watch,
            max_runs=len(self.sweep.loads) or self.max_runs,
            max_time_s=left_s,
        )

    @property
    def _has_pilot(self) -> bool:
        """Return True if a pilot measures the full throughput of the server before the first step.

        A sweep has no pilot if it varies the concurrency, has a list of loads or sends sessions. A sweep with
        objectives also has no pilot if the user has set the first load or a twin has predicted the capacity.
        """
        sweep = self.sweep
        if sweep.over != "rate" or sweep.loads or sweep.plan.uses_sessions:
            return False
        known = self.search_settings.get("start") or self.search_settings.get("foreseen")
        return sweep.seeks_stability or not known

    def _run_pilot(self, book: Book, watch: Watch) -> EndReason:
        deadline_s = None if self.max_time_s is None else time.monotonic() + self.max_time_s
        try:
            return pilot.run_pilot(
                self.sweep,
                book,
                measure=self.measure,
                read_ends=self._ends_s,
                watch=watch,
                say=self.say,
                deadline_s=deadline_s,
            )
        except KeyboardInterrupt:
            return "interrupted"

    def _ends_s(self, folder: Path) -> list[float]:
        """Return the times at which the complete requests of a run ended, in s and in increasing order."""
        _, frame = self._load(folder)
        return sorted(float(end_ns) / 1e9 for end_ns in frame.end_ns[frame.complete])

    def _load(self, folder: Path) -> tuple[Run, Frame]:
        from loadgen.analysis.steady_window import load_run

        return (self.load_run or load_run)(folder)

    def _settings(self, load: float, lines: Sequence[JournalLine]) -> StepSettings:
        """Return the settings of the step at this load: its duration, and the test that detects a growing queue."""
        from loadgen.analysis.sweep import saturation
        from loadgen.analysis.sweep.queue_growth import GrowthTest

        levels = pilot.levels_of(lines)
        if not levels or not self._has_pilot:
            return StepSettings()
        decides = self.sweep.seeks_stability
        response_s = saturation.response_s(levels)
        growth = GrowthTest(
            load,
            response_s=response_s,
            full_in_flight=saturation.full_concurrency(levels),
            variation=work_variation(self.sweep.plan, random_arrivals=not decides),
        )
        duration_s = self.sweep.plan.duration_s
        if self.sweep.adaptive and decides:
            duration_s = max(MIN_UNCLEAR_S, UNCLEAR_RESPONSES * response_s)
        elif self.sweep.adaptive:
            enough_s = min(DEFAULT_DURATION_S, max(MIN_JUDGED_S, JUDGED_REQUESTS / load))
            duration_s = max(enough_s, JUDGED_RESPONSES * response_s)
        return StepSettings(duration_s, growth, decides)

    def _next_load(self, steps: Sequence[JournalLine], lines: Sequence[JournalLine]) -> float | None:
        from loadgen.analysis.sweep import observations
        from loadgen.analysis.sweep.edge_search import EdgeSearch
        from loadgen.analysis.sweep.saturation import estimate

        if self.sweep.loads:
            return self._next_fixed_load(steps)
        levels = pilot.levels_of(lines)
        if self.sweep.seeks_stability:
            used_s = sum(line["run_s"] for line in lines if line["type"] in ("pilot", "end"))
            longest_s = max((line["run_s"] for line in steps), default=0.0)
            search = EdgeSearch(estimate(levels), **_precision(self.search_settings))
            return search.next_load(observations(steps), time_left=used_s + longest_s < NARROW_UNTIL_S)
        prediction = self.search_settings.get("foreseen")
        objective_search = build_search(
            self.sweep.over,
            self.search_settings,
            predicted=prediction["capacity"] if prediction else None,
            full_rate=estimate(levels) if levels else None,
        )
        return objective_search.next_load(observations(steps), self.search_settings.get("start") or DEFAULT_START)

    def _next_fixed_load(self, lines: Sequence[JournalLine]) -> float | None:
        """Return the next load to measure from the sweep's list, or None if there is none.

        `lines` describes the loads that were measured so far. If a load overloaded the server, higher loads are
        skipped.
        """
        lowest_overload = min((line["load"] for line in lines if line["stopped"]), default=float("inf"))
        done = {line["load"] for line in lines}
        return next((load for load in self.sweep.loads if load not in done and load < lowest_overload), None)

    def _measure_with_objectives(self, plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        objectives = tuple(objective.text for objective in self.targets.objectives)
        bounds = tuple(bound.text for bound in self.targets.bounds)
        tables = []
        for table in plan.traffic:
            class_bounds = self.targets.class_bounds(table["name"])
            tables.append({"goodput": class_bounds, **table} if class_bounds else table)
        plan = plan.replaced(objectives=objectives, goodput=bounds, traffic=tuple(tables))
        return self.measure(plan, folder, on_progress)

    def _judge(self, folder: Path, load: float, end: StepEnd) -> dict[str, Any]:
        """Write the summary and report of a step, and return the fields of its `end` line in the journal."""
        from loadgen.analysis.build_summary import summarise
        from loadgen.analysis.matrix.document import one_line_summary
        from loadgen.analysis.sweep import mean_power_w
        from loadgen.analysis.sweep.document import UNITS, format_load, verdict_text

        over = self.targets.over
        loaded_run, frame = self._load(folder)
        if self.load_run is None:
            known = (loaded_run, frame)
            reported = load_and_summarise(folder, self.targets.objectives, self.targets.bounds, known=known)
            write_summary(folder, reported.summary)
            write_page([reported], folder / "report.html", [])
            summary = reported.summary
        else:
            summary = summarise(loaded_run, frame)
        self.summaries.append(summary)
        chance = end.chance_over
        if chance is None:
            chance = 1.0 if end.overloaded else _chance_over(self.targets, frame, summary)
        verdict = verdict_text(chance, overloaded=end.overloaded, objectives=bool(self.targets.objectives))
        decided = bool(self.targets.objectives) or self.sweep.seeks_stability or end.overloaded
        self.say(f"  {format_load(over, load)} {UNITS[over]}: {one_line_summary(summary)}" + f"; {verdict}" * decided)
        return {
            "over": chance,
            "carried": None if self.sweep.plan.traffic else _carried_rate(over, summary, load, chance, end=end),
            "client": _client_verdict(summary, stability=self.sweep.seeks_stability),
            "power_w": mean_power_w(loaded_run),
        }


def _client_verdict(summary: Summary, *, stability: bool) -> str:
    """Return `limited` if the client may have caused the result of a step, otherwise `ok`.

    The client is loadgen itself. `stability` is True if the sweep only searches for the largest rate at which the
    server's queue does not grow. Only the limits in DECISIVE_LIMITS count then, because they can make a queue grow or
    keep it from growing. An example is a client without free CPU time.

    In other sweeps, all limits on the client's health count, with one exception. If the client only dropped requests
    because too many were in flight, the server was overloaded, and the result is `ok`.
    """
    from loadgen.analysis.client_health import LIMITS

    client = summary.client
    if stability:
        maximum = {limit.figure: limit.maximum for limit in LIMITS}
        figures = [(getattr(client, name), maximum[name]) for name in DECISIVE_LIMITS]
        return "limited" if any(value is not None and value > most for value, most in figures) else "ok"
    only_dropped = summary.requests.dropped > 0 and len(client.reasons) == 1
    return "ok" if only_dropped else client.verdict


def work_variation(plan: Plan, *, random_arrivals: bool) -> float:
    """Return the coefficient of variation of the work that arrives at the server.

    The work varies for two reasons:

    - Requests have different lengths. Either the prompt lengths or the output lengths are used, whichever vary more. If
      the lengths are unknown before the run, for example because prompts come from a file, their coefficient of
      variation is assumed to be 1.
    - Requests arrive at random times. If `random_arrivals` is True, the variation of Poisson arrivals is added.
    """
    inputs = _variation(plan.input_lengths, plan.seed, "input")
    outputs = _variation(plan.output_lengths.lengths, plan.seed, "output")
    unknown = plan.uses_file or plan.output_lengths.may_end
    lengths_variation = 1.0 if unknown else max(inputs, outputs)
    return float((lengths_variation**2 + float(random_arrivals)) ** 0.5)


def _variation(lengths: LengthDistribution | None, seed: int, name: str) -> float:
    """Return the coefficient of variation of sampled lengths, or 1 if the lengths are unknown."""
    if lengths is None:
        return 1.0
    tokens = list(islice(lengths.tokens(seed, name), SAMPLED_LENGTHS))
    return pstdev(tokens) / fmean(tokens)


def predict_sweep(
    sweep: Sweep, targets: SweepTargets, model: ServerModel, search_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Simulate a sweep with the server `model`, and return the results to expect from the real sweep.

    `targets` contains the objectives and the loads. `search_settings` contains, for example, the precision and the
    first load of the search. The returned dict has two keys:

    - `capacity`: the predicted capacity. None if the sweep has no objectives, or if the capacity was not found.
    - `points`: the predicted figures at each simulated load.
    """
    from loadgen.analysis.sweep import expected_point

    simulated_sweep = simulate_sweep(sweep, targets, model, search_settings, MAX_PREDICTED_STEPS)
    points = [expected_point(summary, line["load"]) for line, summary in simulated_sweep.steps]
    capacity = simulated_sweep.capacity
    return {"capacity": capacity.capacity if capacity and targets.objectives else None, "points": points}


class SimulatedSweep(NamedTuple):
    """The result of a sweep in virtual time. No files were written."""

    lines: list[JournalLine]
    """The lines of the sweep's journal."""
    steps: list[tuple[JournalLine, Summary]]
    """The `end` line and the summary of each step."""
    capacity: Capacity | None

    @property
    def run_s(self) -> float:
        """Return the total duration of all runs in virtual time, in s."""
        return float(sum(line["run_s"] for line in self.lines if line["type"] in ("pilot", "end")))


def simulate_sweep(
    sweep: Sweep, targets: SweepTargets, model: ServerModel, search_settings: Mapping[str, Any], max_runs: int
) -> SimulatedSweep:
    """Run a sweep in virtual time without writing files."""
    runs = MemoryRuns(model)
    book = MemoryBook()
    runner = StepRunner(
        sweep=sweep,
        targets=targets,
        search_settings=search_settings,
        measure=runs.measure,
        say=lambda _line: None,
        on_progress=lambda _phase, _counts: None,
        max_runs=max_runs,
        clock=runs.clock,
        load_run=runs.load,
    )
    runner.run_with(book)
    steps = list(zip(measured_steps(book.lines), runner.summaries, strict=True))
    return SimulatedSweep(book.lines, steps, capacity_of(sweep.journal_plan, search_settings, book.lines))


def _chance_over(targets: SweepTargets, frame: Frame, summary: Summary) -> float:
    """Return the probability that the load of this run is above the capacity of the server.

    The capacity is the largest load at which the server meets the objectives. Return 0 if there are no objectives.
    """
    from loadgen.analysis.sweep.capacity_search import chance_over

    return chance_over(targets.objectives, targets.bounds, frame, summary) if targets.objectives else 0.0


def _carried_rate(over: Over, summary: Summary, load: float, chance: float, *, end: StepEnd) -> float | None:
    """Return the rate in requests per second that an overloaded server sustained, or None if it was not overloaded.

    `load` is the load of the step, and `chance` is the probability that it is above the capacity of the server. The
    server counts as overloaded if `chance` is above 0.5, and if one of these conditions holds:

    - The step was ended early because of an overload (`end.overloaded`).
    - The rate of complete requests is clearly lower than `load`.

    `over` is the quantity that the sweep varies. If it is the concurrency, the result is always None.
    """
    from loadgen.analysis.sweep import carried_rate

    return carried_rate(summary, load, overloaded=end.overloaded) if over == "rate" and chance > 0.5 else None
