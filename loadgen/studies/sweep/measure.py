"""Measures a complete sweep: parses its targets, chooses its loads and judges its steps.

This module also predicts a sweep with a twin (a simulated server fitted to a measured one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.results import load_and_summarise, write_page, write_summary
from loadgen.studies.sweep import (
    ARRIVALS,
    EndReason,
    Measure,
    Over,
    Sweep,
    default_duration,
    journal,
    parse_loads,
    run,
)

if TYPE_CHECKING:
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.objectives import Objective
    from loadgen.analysis.run.runfile import Footer
    from loadgen.analysis.summary import Summary
    from loadgen.analysis.sweep.capacity_search import Search
    from loadgen.engine.prepare import OnProgress
    from loadgen.engine.resolve_server import Say
    from loadgen.journal import JournalLine
    from loadgen.studies.simulate import ServerModel

SEARCH_RANGE_FACTOR = 2.0**16
"""Highest rate that the search tries, divided by the start rate."""
MAX_CONCURRENCY = 65_536
"""Highest concurrency that the search tries."""
MAX_PREDICTED_STEPS = 16
"""Maximum number of loads for which a twin predicts the results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTargets:
    """The objectives of a sweep and the loads to measure."""

    objectives: Sequence[Objective]
    over: Over
    loads: tuple[float, ...] = ()
    """Fixed loads to measure. If empty, the sweep searches for the capacity."""

    @property
    def bounds(self) -> list[Objective]:
        """The objectives as limits for single requests. These limits define goodput."""
        from loadgen.analysis.sweep import request_bounds

        return request_bounds(self.objectives)


def parse_targets(
    objectives: Sequence[str] | None, rates: str | None, concurrency: str | None, over: Over
) -> SweepTargets:
    """Parse the objectives and the loads of a sweep. Raises PlanError."""
    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.sweep.capacity_search import check_objectives

    if rates and concurrency:
        raise PlanError("--rates and --concurrency are two sweeps", "Name one of them.")
    try:
        parsed = parse(objectives or (), "--objective")
        check_objectives(parsed)
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if rates:
        return SweepTargets(objectives=parsed, over="rate", loads=parse_loads(rates, "--rates", whole=False))
    if concurrency:
        loads = parse_loads(concurrency, "--concurrency", whole=True)
        return SweepTargets(objectives=parsed, over="concurrency", loads=loads)
    if not parsed:
        hint = "Name an objective: --objective 'ttft.p99 < 500ms'; or name loads: --concurrency 1,2,4,...,64"
        raise PlanError("--objective is missing", hint)
    return SweepTargets(objectives=parsed, over=over)


def plan_of_steps(settings: Mapping[str, Any], targets: SweepTargets) -> Plan:
    """Return the plan that all steps of a sweep share, apart from the load.

    Raises PlanError for mistakes in the plan, so that they are reported before the first step.
    """
    from loadgen.engine.resolve_server import with_detected_server

    arrivals = ARRIVALS[targets.over].format(targets.loads[0] if targets.loads else 1)
    return with_detected_server(Plan(**{**settings, **default_duration(settings), "arrivals": arrivals}))


def new_sweep(plan: Plan, folder: Path, targets: SweepTargets, virtual_model: ServerModel | None) -> Sweep:
    """Return a new sweep. It can only be resumed with the same plan, objectives and simulated server.

    `virtual_model` describes the server of a simulated sweep. It is None if the sweep measures a real server.
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
        journal_extra=(("objectives", texts), ("virtual", virtual)),
        rejections_allowed=bool({"complete", "rejected"} & covered),
    )


def measure_function(sweep: Sweep, virtual_model: ServerModel | None, command: list[str], say: Say) -> Measure:
    """Return the function that executes the run of one step.

    The run is simulated if there is a virtual model. Otherwise its requests are sent to a server.
    """
    from loadgen.engine import prepare
    from loadgen.studies import simulate

    def measure(plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        if virtual_model is not None:
            footer = simulate.run(plan, virtual_model, folder, command).footer
            assert footer is not None
            return footer
        is_first = plan.seed == sweep.plan.seed  # later steps would print the same lines
        return prepare.run(
            plan, folder, command=command, say=say if is_first else lambda _line: None, on_progress=on_progress
        )

    return measure


def build_search(over: Over, search_settings: Mapping[str, Any], *, predicted: float | None = None) -> Search:
    """Return a capacity search. `search_settings` are the search settings in the journal of the sweep.

    `predicted` is the capacity that a twin (a simulated server fitted to a measured one) predicts.
    """
    from loadgen.analysis.sweep.capacity_search import Search

    options: dict[str, Any] = {
        name: search_settings[name] for name in ("confidence", "precision") if name in search_settings
    }
    if predicted:
        options["predicted"] = predicted
    if over == "concurrency":
        return Search(1.0, float(MAX_CONCURRENCY), whole=True, **options)
    start = search_settings.get("start", 1.0)
    return Search(start / 64, start * SEARCH_RANGE_FACTOR, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRunner:
    """Runs the steps of a new sweep, or the remaining steps of an interrupted one."""

    sweep: Sweep
    targets: SweepTargets
    search_settings: Mapping[str, Any]
    """Settings of the search, as the journal stores them: `precision`, `confidence`, `start`, ..."""
    measure: Measure
    """Executes the run of one step."""
    say: Callable[[str], None]
    on_progress: OnProgress
    max_runs: int
    max_time_s: float | None = None
    resume: bool = False

    def run(self) -> EndReason:
        """Run the remaining steps, and return the reason why the sweep ended."""
        sweep = self.sweep
        prediction = self.search_settings.get("foreseen")
        predicted = prediction["capacity"] if prediction else None
        search = build_search(sweep.over, self.search_settings, predicted=predicted)

        def next_load(lines: Sequence[JournalLine]) -> float | None:
            return self._next_fixed_load(lines) if sweep.loads else self._next_search_load(search, lines)

        with journal(sweep.folder, sweep.journal_plan, resume=self.resume) as book:
            book.write("search", **self.search_settings)
            return run(
                sweep,
                book,
                measure=self._measure_with_objectives,
                judge=self._judge,
                next_load=next_load,
                show=self.on_progress,
                max_runs=len(sweep.loads) or self.max_runs,
                max_time_s=self.max_time_s,
            )

    def _next_fixed_load(self, lines: Sequence[JournalLine]) -> float | None:
        """Return the next load of the list that has not been measured, or None if no load remains.

        Loads above the lowest load that caused an overload are skipped.
        """
        lowest_overload = min((line["load"] for line in lines if line["stopped"]), default=float("inf"))
        done = {line["load"] for line in lines}
        return next((load for load in self.sweep.loads if load not in done and load < lowest_overload), None)

    def _next_search_load(self, search: Search, lines: Sequence[JournalLine]) -> float | None:
        from loadgen.analysis.sweep import observations

        return search.next_load(observations(lines), self.search_settings["start"])

    def _measure_with_objectives(self, plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        objectives = tuple(objective.text for objective in self.targets.objectives)
        bounds = tuple(bound.text for bound in self.targets.bounds)
        return self.measure(plan.replaced(objectives=objectives, goodput=bounds), folder, on_progress)

    def _judge(self, folder: Path, load: float, overloaded: bool) -> dict[str, Any]:
        """Write the summary and report of a step, and return the fields of its `end` line in the journal."""
        from loadgen.analysis.matrix.document import one_line_summary
        from loadgen.analysis.steady_window import load_run
        from loadgen.analysis.sweep import mean_power_w
        from loadgen.analysis.sweep.document import UNITS, format_chance

        over = self.targets.over
        loaded_run, frame = load_run(folder)
        reported = load_and_summarise(folder, self.targets.objectives, self.targets.bounds, known=(loaded_run, frame))
        write_summary(folder, reported.summary)
        write_page([reported], folder / "report.html", [])
        summary = reported.summary
        chance = 1.0 if overloaded else _chance_over(self.targets, frame, summary)
        verdict = "overload, stopped early" if overloaded else f"P(over capacity) {format_chance(chance)}"
        self.say(f"  {load:g} {UNITS[over]}: {one_line_summary(summary)}; {verdict}")
        # Requests that are dropped because too many are in flight show an overload of the server, not of the client.
        only_dropped = summary.requests.dropped > 0 and len(summary.client.reasons) == 1
        return {
            "over": chance,
            "carried": _carried_rate(over, summary, load, chance, overloaded=overloaded),
            "client": "ok" if only_dropped else summary.client.verdict,
            "power_w": mean_power_w(loaded_run),
        }


def predict_sweep(
    sweep: Sweep, targets: SweepTargets, model: ServerModel, search_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Predict the result of a sweep with a simulated server.

    Return the predicted capacity and the predicted figures at each load, as the journal stores them.
    """
    from loadgen.analysis.sweep import expected_point, observations

    search = build_search(sweep.over, search_settings)
    steps = simulate_sweep(sweep, targets, model, search, search_settings["start"], MAX_PREDICTED_STEPS)
    points = [expected_point(summary, line["load"]) for line, summary in steps]
    capacity = search.capacity(observations(line for line, _ in steps)).capacity if targets.objectives else None
    return {"capacity": capacity, "points": points}


def simulate_sweep(
    sweep: Sweep, targets: SweepTargets, model: ServerModel, search: Search, start: float, max_runs: int
) -> list[tuple[JournalLine, Summary]]:
    """Run a sweep in virtual time without writing files. Return the journal line and the summary of each step."""
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.steady_window import frame_of_run
    from loadgen.analysis.sweep import observations
    from loadgen.studies import simulate

    steps: list[tuple[JournalLine, Summary]] = []
    fixed_loads = iter(sweep.loads)
    while len(steps) < max_runs:
        if sweep.loads:
            load = next(fixed_loads, None)
        else:
            load = search.next_load(observations(line for line, _ in steps), start)
        if not load:
            break
        simulated_run = simulate.run_in_memory(sweep.step(len(steps) + 1, load), model)
        frame = frame_of_run(simulated_run)
        summary = summarise(simulated_run, frame)
        chance = _chance_over(targets, frame, summary)
        line = {"load": load, "over": chance, "carried": _carried_rate(sweep.over, summary, load, chance)}
        steps.append((line, summary))
    return steps


def _chance_over(targets: SweepTargets, frame: Frame, summary: Summary) -> float:
    """Return the probability that a load is above the capacity of the server, or 0 if there are no objectives."""
    from loadgen.analysis.sweep.capacity_search import chance_over

    return chance_over(targets.objectives, targets.bounds, frame, summary) if targets.objectives else 0.0


def _carried_rate(
    over: Over, summary: Summary, load: float, chance: float, *, overloaded: bool = False
) -> float | None:
    """Return the rate that the server sustained at a load above its capacity, in requests per second.

    Return None if the sweep varies the concurrency, or if the load is probably within the capacity.
    """
    from loadgen.analysis.sweep import carried_rate

    return carried_rate(summary, load, overloaded=overloaded) if over == "rate" and chance > 0.5 else None
