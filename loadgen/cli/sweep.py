"""The command `sweep`: find the largest load at which a server meets its objectives.

`write_frontier` writes the page that shows one or more sweeps, also for `loadgen report` and `loadgen matrix`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from typer import Exit, Option

from loadgen import errors
from loadgen.cli.options import LOAD, OUTPUT, Catalog, PlanFile, fraction, merge_settings, run_command, seconds
from loadgen.cli.output import Output, Quiet, print_document, print_error
from loadgen.cli.simulate import Changes, Format, Hardware, KvTokens, RunningLimit, StepTokens, Tp, TwinFile, Vintage
from loadgen.cli.streams import results_are_kept
from loadgen.errors import OutputError, PlanError
from loadgen.results import SUMMARY_BYTES, load_and_summarise, report_link, write_page, write_summary, write_text
from loadgen.workloads.input_files import read_input

if TYPE_CHECKING:
    from loadgen.analysis.frame import Frame
    from loadgen.analysis.objectives import Objective
    from loadgen.analysis.run.runfile import Footer
    from loadgen.analysis.summary import Summary
    from loadgen.analysis.sweep import SweepResult
    from loadgen.analysis.sweep.capacity_search import Search
    from loadgen.engine.prepare import OnProgress
    from loadgen.journal import JournalLine
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.sweep import EndReason, Measure, Sweep

OBJECTIVE_HELP = (
    "Objective to meet, such as 'ttft.p99 < 500ms'; repeatable. A load with more than 1 % of incomplete or rejected "
    "requests also fails, unless an objective covers these."
)
VIRTUAL_HELP = (
    "GPU to simulate instead of a real server: H100. It runs --model in virtual time. `twin` simulates the twin."
)
Over = Literal["rate", "concurrency"]
SEARCH_RANGE_FACTOR = 2.0**16
"""How many times --start the search tries at most, for rates."""
MAX_CONCURRENCY = 65_536
MAX_PREDICTED_STEPS = 16
"""Maximum number of loads for which a twin predicts the results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCommandOptions:
    """The options of `loadgen sweep` that are not fields of the Plan."""

    objectives: Annotated[list[str] | None, Option("--objective", metavar="EXPR", help=OBJECTIVE_HELP, **LOAD)] = None
    over: Annotated[Over, Option(help="What to vary: Poisson request rate, or concurrency.", **LOAD)] = "rate"
    rates: Annotated[
        str | None, Option(metavar="R,R,...", help="Measure these rates: 1,2,4,...,64. Replaces the search.", **LOAD)
    ] = None
    concurrency: Annotated[
        str | None,
        Option(metavar="N,N,...", help="Measure these concurrencies: 1,2,4,...,256. Replaces the search.", **LOAD),
    ] = None
    start: Annotated[float, Option(min=1e-3, help="First load of the search, if no twin predicts one.", **LOAD)] = 1.0
    precision: Annotated[
        float,
        Option(parser=fraction, metavar="FRACTION", help="Precision of the capacity, up and down.", **LOAD),
    ] = 0.1
    confidence: Annotated[
        float,
        Option(parser=fraction, metavar="FRACTION", help="Confidence level of the capacity's interval.", **LOAD),
    ] = 0.95
    max_runs: Annotated[int, Option(min=1, max=100, help="Maximum number of runs.", **LOAD)] = 8
    max_time_s: Annotated[
        float | None,
        Option("--max-time", parser=seconds, metavar="T", help="Maximum time of this call of the command.", **LOAD),
    ] = None
    virtual: Annotated[str | None, Option(metavar="GPU", help=VIRTUAL_HELP, rich_help_panel="Server")] = None
    twin: TwinFile = None
    tp: Tp = None
    format_name: Format = None
    vintage: Vintage = None
    kv_tokens: KvTokens = None
    running_limit: RunningLimit = None
    step_tokens: StepTokens = None
    hardware: Hardware = None
    changes: Changes = None
    gpu_hour_cost: Annotated[
        float | None, Option(min=0, help="Price of one GPU per hour, for the cost of tokens.", **OUTPUT)
    ] = None
    gpus: Annotated[
        int | None, Option(min=1, help="Number of GPUs. Default: the GPUs that the run detected.", **OUTPUT)
    ] = None
    out: Annotated[
        Path | None, Option(help="Folder of the sweep. Default: runs/<time>-<server>-<label>.", **OUTPUT)
    ] = None
    resume: Annotated[bool, Option("--resume", help="Continue the sweep in the folder --out.", **OUTPUT)] = False
    as_json: Annotated[bool, Option("--json", help="Print sweep.json and nothing else.", **OUTPUT)] = False
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTargets:
    """The objectives of a sweep and the loads that it may measure."""

    objectives: Sequence[Objective]
    over: Over
    loads: tuple[float, ...] = ()
    """Loads to measure. Without any, the sweep searches the capacity."""

    @property
    def bounds(self) -> list[Objective]:
        """The objectives as bounds on single requests, for goodput."""
        from loadgen.analysis.sweep import request_bounds

        return request_bounds(self.objectives)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRunner:
    """Everything that is needed to run the steps of a sweep."""

    sweep: Sweep
    targets: SweepTargets
    search_settings: Mapping[str, Any]
    """Settings of the search, as the journal stores them: `precision`, `confidence`, `start`, ..."""
    measure: Measure
    """Makes the run of one step."""
    say: Callable[[str], None]
    on_progress: OnProgress
    max_runs: int
    max_time_s: float | None = None
    resume: bool = False


def run_sweep(settings: dict[str, Any], options: SweepCommandOptions) -> NoReturn:
    """Run a sweep, or the rest of one, and report the results."""
    from loadgen.folders import run_folder

    targets = parse_targets(options.objectives, options.rates, options.concurrency, options.over)
    model = _server_model(options, settings.get("model"))
    if model and model.twin:
        settings = {"server": model.twin.server} | settings
    if options.gpu_hour_cost is not None or options.twin is not None:
        settings = {"speed": 1.0} | settings  # prices and twins need real time, also with the built-in server
    plan = _plan(settings, targets)
    if options.resume and options.out is None:
        raise PlanError("--resume needs --out", "Name the folder of the sweep: --out FOLDER")
    if not options.virtual:
        _check_speed(plan, options)
    virtual_model = model if options.virtual else None
    output = Output(as_json=options.as_json, quiet=options.quiet)
    search_settings: dict[str, Any] = {
        "precision": options.precision,
        "confidence": options.confidence,
        "start": options.start,
        "hour": options.gpu_hour_cost,
        "gpus": options.gpus,
    }
    with run_folder(options.out, plan.server, plan.label) as folder:
        sweep = new_sweep(plan, folder, targets, virtual_model)
        if model and not options.virtual:
            search_settings["foreseen"] = _predict(sweep, targets, model, search_settings)
        output.say(f"sweep over {targets.over}{', virtual time' if virtual_model else ''}: {folder}")
        with output.progress(None, plain=False) as on_progress:
            run_steps(
                StepRunner(
                    sweep=sweep,
                    targets=targets,
                    search_settings=search_settings,
                    measure=_measure_function(sweep, virtual_model, output),
                    say=output.say,
                    on_progress=on_progress,
                    max_runs=options.max_runs,
                    max_time_s=options.max_time_s,
                    resume=options.resume,
                )
            )
        results_are_kept(folder, text_only=not options.as_json)
        result = write_frontier([folder], output, folder / "frontier.html")[0]
        if result.ended == "interrupted":
            print_error(f"interrupted; to continue, repeat the command with --resume --out {folder}")
        raise Exit(exit_code(result))


@run_command(SweepCommandOptions, without=("arrivals", "repeats"), defaults={"label": "sweep"})
def sweep(
    settings: dict[str, Any],
    plan: PlanFile = None,
    catalog: Catalog = None,
    **shared: Any,
) -> None:
    """Find the largest load at which all objectives hold.

    A sweep needs only a few runs, because each run uses the most informative load. Each step is a run of --duration
    (60s by default) or --n requests, and overloads are stopped early. Exit codes: 0 capacity known with the requested
    precision; 2 usage error; 3 server not reachable or not the expected one; 4 the objectives do not hold at the lowest
    load; 5 the client was the limit; 6 capacity known less precisely; 130 interrupted.
    """
    merged = merge_settings(plan, catalog, settings)
    settings = {name: value for name, value in merged.items() if name not in ("arrivals", "repeats")}
    run_sweep(settings, SweepCommandOptions(**shared))


def exit_code(result: SweepResult) -> int:
    """Return the exit code of a sweep."""
    if result.ended == "interrupted":
        return errors.EXIT_INTERRUPTED
    if result.ended == "client":
        return errors.EXIT_CLIENT_LIMITED
    if result.ended in ("runs", "time") and result.state == "open":  # the capacity is not known precisely enough
        return errors.EXIT_INCONCLUSIVE
    return errors.EXIT_ASSERTION if result.state == "below" else errors.EXIT_OK


def is_sweep(path: Path) -> bool:
    """Return whether a folder contains a sweep."""
    from loadgen.studies.sweep import SWEEP

    return (path / SWEEP.file).is_file()


def write_frontier(folders: Sequence[Path], output: Output, page: Path) -> list[SweepResult]:
    """Write sweep.json for each sweep and one page for all sweeps, and print them. Raises OutputError."""
    from loadgen.analysis.sweep.document import terminal_document

    results = [read_sweep(folder) for folder in folders]
    speeds = sorted({result.speed for result in results})
    if len(speeds) > 1:
        raise PlanError(
            f"these sweeps ran at different speeds ({' and '.join(f'{speed:g}' for speed in speeds)} times real time) "
            "and cannot share a page",
            "Sweep each simulated server at --speed 1.",
        )
    names = [result.name for result in results]
    sweeps = {}
    for folder, result in zip(folders, results, strict=True):
        name = result.name if names.count(result.name) == 1 else f"{result.name} ({folder.name})"
        sweeps[name] = (folder, result)
    texts = write_sweeps(sweeps, page)
    if output.as_json:
        print(texts[0] if len(texts) == 1 else json.dumps([json.loads(text) for text in texts], indent=2), end="")
    elif not output.quiet:
        for result in results:
            print()
            print_document(terminal_document(result))
        print(f"\n{page}")
    return results


def write_sweeps(sweeps: Mapping[str, tuple[Path, SweepResult]], page: Path) -> list[str]:
    """Write sweep.json for each sweep and one page for all sweeps. Return the content of each sweep.json.

    `sweeps` contains the folder and the result of each sweep by its name on the page. Raises OutputError.
    """
    import msgspec

    from loadgen.analysis.report.page import render
    from loadgen.analysis.sweep.document import frontier_document

    texts = []
    for folder, result in sweeps.values():
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
        write_text(folder / "sweep.json", text)
        texts.append(text)
    folders = {id(result): folder for folder, result in sweeps.values()}
    results = {name: result for name, (_, result) in sweeps.items()}
    document = frontier_document(results, lambda result, step: report_link(folders[id(result)] / step, page))
    write_text(page, render(document))
    return texts


def read_sweep(folder: Path) -> SweepResult:
    """Read the result of a sweep from its files. Raises OutputError if there is none."""
    from msgspec import MsgspecError

    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.summary import from_json
    from loadgen.analysis.sweep import MeasuredStep, build_result, observations
    from loadgen.studies.sweep import measured_steps, read_lines, step_folder

    lines = read_lines(folder)
    first = next((line for line in lines if line["type"] == "plan"), None)
    if first is None:
        raise OutputError(f"{folder} does not contain a sweep.", "Name a folder with a sweep.jsonl.")
    try:
        plan = first["plan"]
        targets = SweepTargets(objectives=parse(plan.get("objectives") or ()), over=plan["over"])
        search_settings = next((line for line in reversed(lines) if line["type"] == "search"), {})
        steps = []
        for line in measured_steps(lines):
            run = folder / step_folder(line["step"])
            try:
                summary = from_json(read_input(run / "summary.json", SUMMARY_BYTES, pipes=False))
            except (OSError, MsgspecError):
                summary = load_and_summarise(run, targets.objectives, targets.bounds, drawn=False).summary
            steps.append(MeasuredStep(line, step_folder(line["step"]), summary))
        capacity = None
        if targets.objectives and steps:
            capacity = _search(targets.over, search_settings).capacity(observations(measured_steps(lines)))
        ends = (line["why"] for line in reversed(lines) if line["type"] in ("ended", "resumed") and "why" in line)
        return build_result(plan, steps, capacity, search_settings, next(ends, ""))
    except (AttributeError, KeyError, TypeError, ObjectiveError) as error:
        raise OutputError(f"{folder}: sweep.jsonl is damaged: {error}", "Start again with another --out.") from None


def parse_targets(
    objectives: Sequence[str] | None, rates: str | None, concurrency: str | None, over: Over
) -> SweepTargets:
    """Parse the objectives and the loads of a sweep. Raises PlanError."""
    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.sweep.capacity_search import check_objectives
    from loadgen.studies.sweep import parse_loads

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


def _server_model(options: SweepCommandOptions, model: str | None) -> ServerModel | None:
    """Return the model that is swept in virtual time, or that predicts a real sweep. Raises PlanError."""
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.twin import read_twin

    if options.virtual == "twin" and options.twin is None:
        raise PlanError("--virtual twin needs --twin", "Name its file: --twin twin.json; or a GPU: --virtual H100")
    if not (options.virtual or options.twin):
        return None
    return ServerModel(
        gpu=None if options.virtual == "twin" else options.virtual,
        model=model if options.virtual else None,
        tensor=options.tp,
        format=options.format_name,
        vintage=options.vintage,
        kv_tokens=options.kv_tokens,
        running_limit=options.running_limit,
        step_tokens=options.step_tokens,
        hardware=options.hardware,
        changes=tuple(options.changes or ()),
        twin=read_twin(options.twin) if options.twin else None,
    )


def _check_speed(plan: Plan, options: SweepCommandOptions) -> None:
    """Refuse options that need real time if the clock of a simulated server runs faster. Raises PlanError.

    All other figures of the sweep have the speed of the server, and a page must not mix two speeds.
    """
    from loadgen.engine.resolve_server import clock_speed

    needs_real_time = {"--gpu-hour-cost": options.gpu_hour_cost is not None, "--twin": options.twin is not None}
    used = [option for option, is_used in needs_real_time.items() if is_used]
    if not used:
        return
    speed = clock_speed(plan)
    if speed != 1:
        verb = "needs" if len(used) == 1 else "need"
        raise PlanError(
            f"{', '.join(used)} {verb} real time, but the clock of the simulated server runs {speed:g} times as fast",
            "Use a simulated server at --speed 1, or a real one.",
        )


def _plan(settings: dict[str, Any], targets: SweepTargets) -> Plan:
    """Return the plan of all steps. Mistakes in it are reported before the first step. Raises PlanError."""
    from loadgen.engine.resolve_server import with_detected_server
    from loadgen.plan import Plan
    from loadgen.studies.sweep import ARRIVALS, default_duration

    arrivals = ARRIVALS[targets.over].format(targets.loads[0] if targets.loads else 1)
    return with_detected_server(Plan(**settings | default_duration(settings) | {"arrivals": arrivals}))


def new_sweep(plan: Plan, folder: Path, targets: SweepTargets, virtual_model: ServerModel | None) -> Sweep:
    """Return the sweep. It must be resumed with the same plan, objectives and virtual model."""
    from loadgen.studies.sweep import Sweep

    virtual = None
    if virtual_model is not None:
        draws = virtual_model.twin.draws if virtual_model.twin else None  # identify a twin by its numbers, not its file
        virtual = {"of": str(replace(virtual_model, twin=None)), "twin": draws}
    texts = [objective.text for objective in targets.objectives]
    covered = {objective.figure for objective in targets.objectives}
    return Sweep(
        plan,
        targets.over,
        folder,
        targets.loads,
        (("objectives", texts), ("virtual", virtual)),
        bool({"complete", "rejected"} & covered),
    )


def _measure_function(sweep: Sweep, virtual_model: ServerModel | None, output: Output) -> Measure:
    """Return the function that makes the run of one step, on a server or on a model."""
    from loadgen.engine import prepare
    from loadgen.servers.auth import redact
    from loadgen.studies import simulate

    command = redact(["loadgen", *sys.argv[1:]])

    def measure(plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        if virtual_model is not None:
            footer = simulate.run(plan, virtual_model, folder, command).footer
            assert footer is not None
            return footer
        is_first = plan.seed == sweep.plan.seed  # later steps would print the same lines
        say = output.say if is_first else lambda _line: None
        return prepare.run(plan, folder, command=command, say=say, on_progress=on_progress)

    return measure


def _search(over: Over, search_settings: Mapping[str, Any], *, predicted: float | None = None) -> Search:
    """Return the search with the settings in the journal. `predicted` is the capacity that a twin predicts."""
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


def run_steps(runner: StepRunner) -> EndReason:
    """Run the remaining steps of a sweep, and return why it ended."""
    from loadgen.analysis.sweep import observations
    from loadgen.studies.sweep import journal, run

    sweep = runner.sweep
    prediction = runner.search_settings.get("foreseen")
    search = _search(sweep.over, runner.search_settings, predicted=prediction["capacity"] if prediction else None)
    objectives = tuple(objective.text for objective in runner.targets.objectives)
    bounds = tuple(bound.text for bound in runner.targets.bounds)

    def measure(plan: Plan, folder: Path, on_progress: OnProgress) -> Footer:
        return runner.measure(plan.replaced(objectives=objectives, goodput=bounds), folder, on_progress)

    def next_load(lines: Sequence[JournalLine]) -> float | None:
        if not sweep.loads:
            return search.next_load(observations(lines), runner.search_settings["start"])
        lowest_overload = min((line["load"] for line in lines if line["stopped"]), default=float("inf"))
        done = {line["load"] for line in lines}
        return next((load for load in sweep.loads if load not in done and load < lowest_overload), None)

    with journal(sweep.folder, sweep.journal_plan, resume=runner.resume) as book:
        book.write("search", **runner.search_settings)
        return run(
            sweep,
            book,
            measure=measure,
            judge=partial(judge_step, runner.targets, runner.say),
            next_load=next_load,
            show=runner.on_progress,
            max_runs=len(sweep.loads) or runner.max_runs,
            max_time_s=runner.max_time_s,
        )


def _predict(
    sweep: Sweep, targets: SweepTargets, model: ServerModel, search_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Sweep a twin in virtual time. Return its capacity and its figures at each load."""
    from loadgen.analysis.sweep import expected_point, observations

    search = _search(sweep.over, search_settings)
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

    steps = list[tuple["JournalLine", "Summary"]]()
    fixed_loads = iter(sweep.loads)
    while len(steps) < max_runs:
        if sweep.loads:
            load = next(fixed_loads, None)
        else:
            load = search.next_load(observations(line for line, _ in steps), start)
        if not load:
            break
        run = simulate.run_in_memory(sweep.step(len(steps) + 1, load), model)
        frame = frame_of_run(run)
        summary = summarise(run, frame)
        chance = _chance_over(targets, frame, summary)
        line = {"load": load, "over": chance, "carried": _carried_rate(sweep.over, summary, load, chance)}
        steps.append((line, summary))
    return steps


def _chance_over(targets: SweepTargets, frame: Frame, summary: Summary) -> float:
    """Return the probability that the load is over the capacity. Without objectives it is 0."""
    from loadgen.analysis.sweep.capacity_search import chance_over

    return chance_over(targets.objectives, targets.bounds, frame, summary) if targets.objectives else 0.0


def _carried_rate(
    over: Over, summary: Summary, load: float, chance: float, *, overloaded: bool = False
) -> float | None:
    """Return the rate that the server sustained, if the load is a rate that is probably over the capacity."""
    from loadgen.analysis.sweep import carried_rate

    return carried_rate(summary, load, overloaded=overloaded) if over == "rate" and chance > 0.5 else None


def judge_step(
    targets: SweepTargets, say: Callable[[str], None], folder: Path, load: float, overloaded: bool
) -> dict[str, Any]:
    """Write the summary and report of a step, and return the fields of its journal line."""
    from loadgen.analysis.matrix.document import one_line_summary
    from loadgen.analysis.steady_window import load_run
    from loadgen.analysis.sweep import mean_power_w
    from loadgen.analysis.sweep.document import UNITS, format_chance

    run, frame = load_run(folder)
    reported = load_and_summarise(folder, targets.objectives, targets.bounds, known=(run, frame))
    write_summary(folder, reported.summary)
    write_page([reported], folder / "report.html", [])
    summary = reported.summary
    chance = 1.0 if overloaded else _chance_over(targets, frame, summary)
    verdict = "overload, stopped early" if overloaded else f"P(over capacity) {format_chance(chance)}"
    say(f"  {load:g} {UNITS[targets.over]}: {one_line_summary(summary)}; {verdict}")
    # Requests that are dropped because too many are in flight show an overload of the server, not of the client.
    only_dropped = summary.requests.dropped > 0 and len(summary.client.reasons) == 1
    return {
        "over": chance,
        "carried": _carried_rate(targets.over, summary, load, chance, overloaded=overloaded),
        "client": "ok" if only_dropped else summary.client.verdict,
        "power_w": mean_power_w(run),
    }
