"""`loadgen sweep`: how much load a server carries while it keeps to objectives; and the frontier page of sweeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from typer import Argument, Exit, Option

from loadgen import errors
from loadgen.cli.options import ADVANCED, LOAD, OUTPUT, fraction, run_command, seconds
from loadgen.cli.output import Output, Quiet, print_document, print_error
from loadgen.cli.simulate import Changes, Format, Hardware, KvTokens, RunningLimit, StepTokens, Tp, TwinFile, Vintage
from loadgen.cli.streams import results_are_kept
from loadgen.errors import OutputError, PlanError
from loadgen.results import SUMMARY_BYTES, load_and_summarise, report_link, write_page, write_summary, write_text
from loadgen.workloads.input_files import read_input

if TYPE_CHECKING:
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
    "What must hold, such as 'ttft.p99 < 500ms'; repeatable. More than 1 % of requests incomplete, rejected ones "
    "included, break it too, unless one of them names these."
)
VIRTUAL_HELP = (
    "In virtual time: on a model of this GPU, such as H100, with the model that --model names; or of the twin."
)
Grows = Annotated[
    Literal["rate", "concurrency"], Option(help="What grows: Poisson arrivals, or requests at a time.", **LOAD)
]
Precision = Annotated[
    float, Option(parser=fraction, metavar="SHARE", help="How exactly, up and down, the capacity is wanted.", **LOAD)
]
Confidence = Annotated[
    float, Option(parser=fraction, metavar="SHARE", help="How surely its interval holds it.", **LOAD)
]
MaxTime = Annotated[
    float | None, Option("--max-time", parser=seconds, metavar="T", help="At most so long, this time.", **LOAD)
]
Price = Annotated[float | None, Option(min=0, help="Price of one GPU for an hour: cost per million tokens.", **OUTPUT)]
Folder = Annotated[Path | None, Option(help="Folder of the sweep. Default: runs/<time>-<server>-<label>.", **OUTPUT)]
SEARCH_RANGE_FACTOR = 2.0**16
"""How far above and below --start the capacity may be: rates."""
MAX_CONCURRENCY = 65_536
MAX_PREDICTED_STEPS = 16
"""Loads at which a twin is asked what to expect."""


def run_sweep(
    settings: dict[str, Any],
    *,
    objectives: Annotated[list[str] | None, Option("--objective", metavar="EXPR", help=OBJECTIVE_HELP, **LOAD)] = None,
    over: Grows = "rate",
    rates: Annotated[str | None, Option(metavar="R,R,...", help="These rates: 1,2,4,...,64.", **LOAD)] = None,
    concurrency: Annotated[str | None, Option(metavar="N,N,...", help="These numbers: 1,2,4,...,256.", **LOAD)] = None,
    start: Annotated[float, Option(min=1e-3, help="The first load, where nothing predicts one.", **LOAD)] = 1.0,
    precision: Precision = 0.1,
    confidence: Confidence = 0.95,
    max_runs: Annotated[int, Option(min=1, max=100, help="At most so many runs.", **LOAD)] = 8,
    max_time_s: MaxTime = None,
    virtual: Annotated[str | None, Option(metavar="GPU", help=VIRTUAL_HELP, rich_help_panel="Server")] = None,
    twin: TwinFile = None,
    tp: Tp = None,
    format_name: Format = None,
    vintage: Vintage = None,
    kv_tokens: KvTokens = None,
    running_limit: RunningLimit = None,
    step_tokens: StepTokens = None,
    hardware: Hardware = None,
    changes: Changes = None,
    gpu_hour_cost: Price = None,
    gpus: Annotated[int | None, Option(min=1, help="How many there are; else what the run saw.", **OUTPUT)] = None,
    out: Folder = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the sweep in --out.", **OUTPUT)] = False,
    as_json: Annotated[bool, Option("--json", help="Print sweep.json and nothing else.", **OUTPUT)] = False,
    quiet: Quiet = False,
) -> NoReturn:
    """Measure what the options say, and report."""
    from loadgen.folders import run_folder

    judged, loads, over = parse_targets(objectives, rates, concurrency, over)
    limits = (kv_tokens, running_limit, step_tokens, hardware, tuple(changes or ()))
    modelled = _server_model(virtual, twin, settings.get("model"), tp, format_name, vintage, *limits)
    settings = ({"server": modelled.twin.server} if modelled and modelled.twin else {}) | settings
    if gpu_hour_cost is not None or twin is not None:
        settings = {"speed": 1.0} | settings  # of the built-in server: prices and twins are of real time
    plan = _plan(settings, over, loads)
    if resume and out is None:
        raise PlanError("--resume without --out goes on with nothing", "Name the folder of the sweep: --out FOLDER")
    made = modelled if virtual else None
    output = Output(as_json=as_json, quiet=quiet)
    settled: dict[str, Any] = {
        "precision": precision,
        "confidence": confidence,
        "start": start,
        "hour": gpu_hour_cost,
        "gpus": gpus,
    }
    maximum = max_runs, max_time_s
    if not virtual:
        _check_speed(plan, {"--gpu-hour-cost": gpu_hour_cost is not None, "--twin": modelled is not None})
    with run_folder(out, plan.server, plan.label) as folder:
        sweep = new_sweep(plan, over, folder, loads, judged, made)
        if modelled and not virtual:
            settled["foreseen"] = _predict(sweep, judged, modelled, settled)
        output.say(f"sweep over {over}{', virtual time' if made else ''}: {folder}")
        serve = step_runner(sweep, made, output)
        with output.progress(None, plain=False) as show_progress:
            run_steps(sweep, judged, settled, serve, output.say, show_progress, resume=resume, most=maximum)
        results_are_kept(folder, text_only=not as_json)
        results = write_frontier([folder], output, folder / "frontier.html")[0]
        if results.ended == "interrupted":
            print_error(f"interrupted; go on with the same command and --resume --out {folder}")
        raise Exit(exit_code(results))


@run_command(run_sweep, without=("arrivals", "repeats"), defaults={"label": "sweep"})
def sweep(
    settings: dict[str, Any],
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    catalog: Annotated[str | None, Option(help="A named workload, such as chat: see docs.", **ADVANCED)] = None,
    **shared: Any,
) -> None:
    """Find the largest load at which all objectives hold. A few runs, each at the load that tells most.

    Each step is a run of --duration (60s by default) or --n requests. An overload is ended as soon as it is clear. Exit
    codes: 0 known as exactly as asked, 2 usage, 3 server not reachable or not the one named, 4 the objectives do not
    hold at the lowest load, 5 the client was the limit, 6 known less exactly, 130 interrupted.
    """
    from loadgen.plan_fields import from_catalog, read_plan

    named = {} if catalog is None else from_catalog(catalog)
    given = named | ({} if plan is None else read_plan(plan)) | settings
    run_sweep({name: value for name, value in given.items() if name not in ("arrivals", "repeats")}, **shared)


def exit_code(found: SweepResult) -> int:
    """What a sweep leads to."""
    codes = {"interrupted": errors.EXIT_INTERRUPTED, "client": errors.EXIT_CLIENT_LIMITED}
    if found.state == "open" and found.ended != "done":  # a list of loads was measured as it was asked for
        codes |= dict.fromkeys(("runs", "time"), errors.EXIT_INCONCLUSIVE)
    below = errors.EXIT_ASSERTION if found.state == "below" else errors.EXIT_OK
    return codes.get(found.ended, below)


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    from loadgen.studies.sweep import SWEEP

    return (path / SWEEP.file).is_file()


def write_frontier(folders: Sequence[Path], output: Output, page: Path) -> list[SweepResult]:
    """Write sweep.json of each sweep and one page for all, and print them as asked. Raises OutputError."""
    from loadgen.analysis.sweep.document import terminal_document

    results = [read_sweep(folder) for folder in folders]
    if len(speeds := sorted({each.speed for each in results})) > 1:
        text = " and ".join(f"{speed:g}" for speed in speeds)
        raise PlanError(
            f"these sweeps are at different speeds ({text} times real time), and a page is of one",
            "Sweep each simulated server at --speed 1.",
        )
    names = [each.name for each in results]
    named = [
        name if names.count(name) == 1 else f"{name} ({folder.name})"
        for name, folder in zip(names, folders, strict=True)
    ]
    texts = write_sweeps(dict(zip(named, zip(folders, results, strict=True), strict=True)), page)
    if output.as_json:
        print(texts[0] if len(texts) == 1 else json.dumps([json.loads(text) for text in texts], indent=2), end="")
    elif not output.quiet:
        for each in results:
            print()
            print_document(terminal_document(each))
        print(f"\n{page}")
    return results


def write_sweeps(named: Mapping[str, tuple[Path, SweepResult]], page: Path) -> list[str]:
    """Write sweep.json of each, which is returned, and one page for all. Raises OutputError."""
    import msgspec

    from loadgen.analysis.report.page import render
    from loadgen.analysis.sweep.document import frontier_document

    texts = [msgspec.json.format(msgspec.json.encode(each), indent=2).decode() + "\n" for _, each in named.values()]
    for (folder, _), text in zip(named.values(), texts, strict=True):
        write_text(folder / "sweep.json", text)
    where = {id(each): folder for folder, each in named.values()}
    sweeps = {name: each for name, (_, each) in named.items()}
    write_text(page, render(frontier_document(sweeps, lambda each, of: report_link(where[id(each)] / of, page))))
    return texts


def read_sweep(folder: Path) -> SweepResult:
    """What the files of a sweep say. Raises OutputError where there is none."""
    from msgspec import MsgspecError

    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.summary import from_json
    from loadgen.analysis.sweep import MeasuredStep, build_result, observations
    from loadgen.studies.sweep import measured_steps, read_lines, step_folder

    lines = read_lines(folder)
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder} holds no sweep.", "Give a folder that holds sweep.jsonl.")
    try:
        objectives = parse(begun["plan"].get("objectives") or ())
        settled = next((line for line in reversed(lines) if line["type"] == "search"), {})
        measured = []
        for line in measured_steps(lines):
            run = folder / step_folder(line["step"])
            try:
                summary = from_json(read_input(run / "summary.json", SUMMARY_BYTES, pipes=False))
            except (OSError, MsgspecError):
                summary = load_and_summarise(run, objectives, _bounds(objectives), drawn=False).summary
            measured.append(MeasuredStep(line, step_folder(line["step"]), summary))
        results = (
            _search(begun["plan"]["over"], settled).capacity(observations(measured_steps(lines)))
            if objectives
            else None
        )
        why = next(
            (line["why"] for line in reversed(lines) if line["type"] in ("ended", "resumed") and "why" in line), ""
        )
        return build_result(begun["plan"], measured, results if measured else None, settled, why)
    except (AttributeError, KeyError, TypeError, ObjectiveError) as error:
        raise OutputError(f"{folder}: sweep.jsonl is damaged: {error}", "Begin anew with --out.") from None


def parse_targets(
    objectives: Sequence[str] | None, rates: str | None, concurrency: str | None, over: Literal["rate", "concurrency"]
) -> tuple[list[Objective], tuple[float, ...], Literal["rate", "concurrency"]]:
    """Objectives, fixed loads, and what grows. Raises PlanError."""
    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.sweep.capacity_search import check_objectives
    from loadgen.studies.sweep import parse_loads

    if rates and concurrency:
        raise PlanError("--rates and --concurrency are two sweeps", "Name one of them.")
    try:
        judged = parse(objectives or (), "--objective")
        check_objectives(judged)
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if rates:
        return judged, parse_loads(rates, "--rates", whole=False), "rate"
    if concurrency:
        return judged, parse_loads(concurrency, "--concurrency", whole=True), "concurrency"
    if not judged:
        hint = "Say what must hold: --objective 'ttft.p99 < 500ms'; or name loads: --concurrency 1,2,4,...,64"
        raise PlanError("--objective is missing", hint)
    return judged, (), over


def _server_model(virtual: str | None, twin: Path | None, model: str | None, *more: Any) -> ServerModel | None:
    """What a sweep in virtual time is of, or what predicts; `more` as in Modelled. Raises PlanError."""
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.twin import read_twin

    if virtual == "twin" and twin is None:
        raise PlanError("--virtual twin without --twin", "Name its file: --twin twin.json; or a GPU: --virtual H100")
    if not (virtual or twin):
        return None
    gpu, named = None if virtual == "twin" else virtual, model if virtual else None
    return replace(ServerModel(gpu, named, *more), twin=read_twin(twin) if twin else None)


def _check_speed(plan: Plan, real_time: Mapping[str, bool]) -> None:
    """Refuse options that speak of real time where the clock of a simulated server runs faster. Raises PlanError.

    Every other figure of the sweep would be of the server's speed, and no page may hold figures of two speeds.
    """
    from loadgen.engine.resolve_server import clock_speed

    given = [option for option, is_given in real_time.items() if is_given]
    if given and (speed := clock_speed(plan)) != 1:
        raise PlanError(
            f"{', '.join(given)}: of real time, while the simulated server's clock runs {speed:g} times as fast",
            "Use a simulated server at --speed 1, or a real one.",
        )


def _plan(settings: dict[str, Any], over: str, loads: Sequence[float]) -> Plan:
    """The plan of all steps, whose mistakes are found before the first. Raises PlanError."""
    from loadgen.engine.resolve_server import with_detected_server
    from loadgen.plan import Plan
    from loadgen.studies.sweep import ARRIVALS, default_duration

    return with_detected_server(
        Plan(**settings | default_duration(settings) | {"arrivals": ARRIVALS[over].format(loads[0] if loads else 1)})
    )


def new_sweep(
    plan: Plan,
    over: Literal["rate", "concurrency"],
    folder: Path,
    loads: tuple[float, ...],
    judged: Sequence[Objective],
    made: ServerModel | None,
) -> Sweep:
    from loadgen.studies.sweep import Sweep

    texts = [each.text for each in judged]
    twin = made.twin.draws if made and made.twin else None  # as long as its numbers are the same
    virtual = None if made is None else {"of": str(replace(made, twin=None)), "twin": twin}
    allowed = bool({"complete", "rejected"} & {each.figure for each in judged})
    return Sweep(plan, over, folder, loads, (("objectives", texts), ("virtual", virtual)), allowed)


def step_runner(sweep: Sweep, made: ServerModel | None, output: Output) -> Measure:
    """What makes the run of a step: on a model, or on a server."""
    from loadgen.engine import prepare
    from loadgen.servers.auth import redact
    from loadgen.studies import simulate

    command = redact(["loadgen", *sys.argv[1:]])

    def serve(plan: Plan, folder: Path, show: OnProgress) -> Footer:
        if made is not None:
            footer = simulate.run(plan, made, folder, command).footer
            assert footer is not None
            return footer
        first = plan.seed == sweep.plan.seed  # the others say the same
        say = output.say if first else lambda _line: None
        return prepare.run(plan, folder, command=command, say=say, on_progress=show)

    return serve


def _search(over: str, settled: dict[str, Any], *, guided: bool = False) -> Search:
    from loadgen.analysis.sweep.capacity_search import Search

    known: dict[str, Any] = {name: settled[name] for name in ("confidence", "precision") if name in settled}
    if guided and (foreseen := settled.get("foreseen")):
        known["predicted"] = foreseen["capacity"] or None
    if over == "concurrency":
        return Search(1.0, float(MAX_CONCURRENCY), whole=True, **known)
    start = settled.get("start", 1.0)
    return Search(start / 64, start * SEARCH_RANGE_FACTOR, **known)


def _bounds(judged: Sequence[Objective]) -> list[Objective]:
    from loadgen.analysis.sweep import request_bounds

    return request_bounds(judged)


def run_steps(
    sweep: Sweep,
    judged: Sequence[Objective],
    settled: dict[str, Any],
    serve: Measure,
    say: Callable[[str], None],
    show: OnProgress,
    *,
    resume: bool,
    most: tuple[int, float | None],
) -> EndReason:
    """Run what is left of a sweep; why it ended. `most` runs and seconds."""
    from loadgen.analysis.sweep import observations
    from loadgen.studies.sweep import journal, run

    search = _search(sweep.over, settled, guided=True)
    objectives = tuple(each.text for each in judged)
    bounds = tuple(bound.text for bound in _bounds(judged))

    def serve_step(plan: Plan, folder: Path, show: OnProgress) -> Footer:
        return serve(plan.replaced(objectives=objectives, goodput=bounds), folder, show)

    def next_load(lines: Sequence[JournalLine]) -> float | None:
        if not sweep.loads:
            return search.next_load(observations(lines), settled["start"])
        most_load = min((line["load"] for line in lines if line["stopped"]), default=float("inf"))
        done = {line["load"] for line in lines}
        return next((load for load in sweep.loads if load not in done and load < most_load), None)

    with journal(sweep.folder, sweep.journal_plan, resume=resume) as book:
        book.write("search", **settled)
        return run(
            sweep,
            book,
            measure=serve_step,
            judge=partial(judge_step, judged, say, sweep.over),
            next_load=next_load,
            show=show,
            max_runs=most[0] if not sweep.loads else len(sweep.loads),
            max_time_s=most[1],
        )


def _predict(
    sweep: Sweep, judged: Sequence[Objective], modelled: ServerModel, settled: dict[str, Any]
) -> dict[str, Any]:
    """The same sweep of a twin, in virtual time: the capacity that it predicts, and what it predicts at each load."""
    from loadgen.analysis.sweep import expected_point, observations

    search = _search(sweep.over, settled)
    steps = simulate_sweep(sweep, judged, modelled, search, settled["start"], MAX_PREDICTED_STEPS)
    points = [expected_point(summary, line["load"]) for line, summary in steps]
    results = search.capacity(observations(line for line, _ in steps)).capacity if judged else None
    return {"capacity": results, "points": points}


def simulate_sweep(
    sweep: Sweep, judged: Sequence[Objective], modelled: ServerModel, search: Search, start: float, max_runs: int
) -> list[tuple[JournalLine, Summary]]:
    """A sweep in virtual time that is not written: of each step its line and its summary."""
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.steady_window import frame_of_run
    from loadgen.analysis.sweep import observations
    from loadgen.analysis.sweep.capacity_search import chance_over
    from loadgen.studies import simulate

    steps, loads = list[tuple["JournalLine", "Summary"]](), iter(sweep.loads)
    while len(steps) < max_runs and (
        load := next(loads, None) if sweep.loads else search.next_load(observations(line for line, _ in steps), start)
    ):
        run = simulate.run_in_memory(sweep.step(len(steps) + 1, load), modelled)
        frame = frame_of_run(run)
        summary = summarise(run, frame)
        chance = chance_over(judged, _bounds(judged), frame, summary) if judged else 0.0
        line = {"load": load, "over": chance, "carried": _carried_load(sweep.over, summary, load, chance)}
        steps.append((line, summary))
    return steps


def _carried_load(over: str, summary: Summary, load: float, chance: float, *, overloaded: bool = False) -> float | None:
    from loadgen.analysis.sweep import carried_rate

    return carried_rate(summary, load, overloaded=overloaded) if over == "rate" and chance > 0.5 else None


def judge_step(
    judged: Sequence[Objective], say: Callable[[str], None], over: str, folder: Path, load: float, overloaded: bool
) -> dict[str, Any]:
    """Write summary and report of a step; what its line says of it."""
    from loadgen.analysis.matrix.document import one_line_summary
    from loadgen.analysis.steady_window import load_run as loaded
    from loadgen.analysis.sweep import mean_power_w
    from loadgen.analysis.sweep.capacity_search import chance_over
    from loadgen.analysis.sweep.document import UNITS
    from loadgen.analysis.sweep.document import format_chance as shown_chance

    run, frame = loaded(folder)
    bounds = _bounds(judged)
    part = load_and_summarise(folder, judged, bounds, known=(run, frame))
    write_summary(folder, part.summary)
    write_page([part], folder / "report.html", [])
    summary = part.summary
    chance = 1.0 if overloaded else chance_over(judged, bounds, frame, summary) if judged else 0.0
    back = _carried_load(over, summary, load, chance, overloaded=overloaded)
    said = "overload, ended early" if overloaded else f"P(over capacity) {shown_chance(chance)}"
    say(f"  {load:g} {UNITS[over]}: {one_line_summary(summary)}; {said}")
    dropped = summary.requests.dropped > 0 and len(summary.client.reasons) == 1  # for too many in flight: an overload
    client = "ok" if dropped else summary.client.verdict
    return {"over": chance, "carried": back, "client": client, "power_w": mean_power_w(run)}
