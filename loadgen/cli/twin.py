"""The command `twin`: fit a twin to runs of a real server, or check a twin against other runs.

A twin is a simulated server with the timing constants and limits of a measured one. `loadgen simulate --twin` runs
plans on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.cli.output import print_error
from loadgen.errors import PlanError
from loadgen.results import write_text
from loadgen.servers.errors import UnreachableError

if TYPE_CHECKING:
    from loadgen.analysis.prediction import Predicted
    from loadgen.analysis.run.runfile import Run
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.twin import Twin
    from loadgen.studies.twin_fitting import ObservedRun

MIN_DRAWS = 4
MAX_DRAWS = 24
TARGET_REQUESTS = 40_000
"""An interval takes `TARGET_REQUESTS / requests` simulations, from MIN_DRAWS to MAX_DRAWS."""
CACHED_NOTE = (
    "were in the server's prefix cache, but the twin counts them as computed. Repeat the run with another --seed."
)
WHOLE_RUN = "rates of the whole run, up to its last token"
"""Label of rates that can differ from those in a report, because reports of long open-loop runs use a window."""
MAX_REQUESTS = 100_000
"""Loads with more requests get no intervals, because simulating them takes minutes."""

twin = Typer(
    no_args_is_help=True,
    help="Fit a twin (a simulated server) to real runs and check it.",
    **TYPER_DEFAULTS,
)
Runs = Annotated[list[Path], Argument(help="Folders of real runs of one server in one configuration.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]
TwinPage = Annotated[
    Path | None,
    Option("--page", metavar="FILE", help="Also write an HTML page that compares the twin with the measured runs."),
]


@twin.command()
def fit(
    runs: Runs,
    out: Annotated[Path, Option(help="File to write.")] = Path("twin.json"),
    rules: Annotated[
        str | None, Option(help="Scheduler to simulate: vllm, tgi, lightllm or sglang. Default: the server's own.")
    ] = None,
    vintage: Annotated[str, Option(help="Generation of the scheduler: current or 2023.")] = "current",
    gpu: Annotated[
        str | None, Option(help="GPU of the server, such as H100. Default: as recorded in the runs.")
    ] = None,
    model: Annotated[str | None, Option(help="Model of the server, such as llama-3.1-8b, or a config.json.")] = None,
    tp: Annotated[int | None, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = None,
    format_name: Annotated[
        str | None, Option("--format", help="Weight format: bf16, fp8, int8, int4 or nvfp4.")
    ] = None,
    hardware: Annotated[Path | None, Option(help="TOML file with additional GPUs and models.")] = None,
    kv_tokens: Annotated[
        int | None, Option(min=64, help="KV cache size in tokens. Default: from the server's metrics.")
    ] = None,
    running_limit: Annotated[
        int | None, Option(min=1, help="Maximum sequences per scheduler step. Default: estimated from the runs.")
    ] = None,
    step_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens per scheduler step. Default: estimated from the runs.")
    ] = None,
    simulated: Annotated[
        bool, Option("--simulated", help="Accept runs of the built-in simulated server that were not made on purpose.")
    ] = False,
    page: TwinPage = None,
    as_json: AsJson = False,
) -> None:
    """Fit a twin to runs of a real server.

    The fit estimates the server's timing constants and limits. A simulation of the same requests then reproduces the
    measured latencies. Use at least two runs: a burst, which shows the cost of prompts and of many concurrent
    sequences, and a light load, which shows the cost of few sequences. The server must not have the prompts in its
    prefix cache, so do not use a --seed twice. Exit codes: 0 written; 2 usage error, or unusable runs; 3 the
    runs are those of the built-in simulated server, and --simulated is not given.
    """
    from loadgen.analysis.build_summary import summarise
    from loadgen.servers.hardware import HardwareError
    from loadgen.servers.simulated.scheduler_presets import ENGINES, find_engine
    from loadgen.studies.twin_fitting import figures, fit, observe_run, simulate_run

    loaded = [_read(path, fallback=simulated) for path in runs]
    backend = str(loaded[0].header.server.get("name") or "")
    if any(str(run.header.server.get("name") or "") != backend for run in loaded):
        raise PlanError("the runs are from different servers", "Fit a twin for each server separately.")
    rules = rules or (backend if backend in ENGINES else "vllm")
    options: dict[str, Any] = {"gpu": gpu, "model": model, "tensor": tp, "number_format": format_name}
    deployed = _detected_hardware(loaded[0]) if not gpu else {}
    deployed |= {name: value for name, value in options.items() if value}
    if deployed and not {"gpu", "model"} <= deployed.keys():
        raise PlanError(
            "to fit a twin based on a GPU from the hardware table, give both --gpu and --model",
            "Or give neither of them.",
        )
    try:
        engine = find_engine(rules, vintage)
        deployment = None
        if deployed:
            deployment = engine.deployment(
                deployed["gpu"],
                deployed["model"],
                tensor=deployed.get("tensor", 1),
                format_name=deployed.get("number_format", "bf16"),
                file=hardware,
            )
    except HardwareError as error:
        raise PlanError(str(error)) from None
    limits = {"kv_tokens": kv_tokens, "running_limit": running_limit, "step_tokens": step_tokens}
    known = deployed | limits | {"vintage": vintage, "hardware": str(hardware or "")}
    result = fit(loaded, rules, deployment, known)
    for path, run in zip(runs, loaded, strict=True):
        cached = summarise(run).cached_prompts
        if cached is not None and cached.unexpected:
            print_error(f"{path}: {cached.share:.0%} of its prompt tokens {CACHED_NOTE}")
    text = json.dumps(_builtins(result), indent=1)
    write_text(out, f"{text}\n", "Name another file with --out.")
    _write_replays(page, result, [observe_run(run) for run in loaded])
    if as_json:
        print(text)
        return
    print(_describe_twin(result))
    for measured_run in map(observe_run, loaded):
        measured = figures(measured_run, measured_run.ttft_s, measured_run.tpot_s, measured_run.ended_s)
        replayed = {name: (value,) for name, value in simulate_run(measured_run, result).items()}
        print(f"\n{measured_run.name}, replayed ({WHOLE_RUN})\n{_comparison_table(measured, replayed)}")
    files = "\n".join(map(str, filter(None, (page, out))))
    print(f"\n{files}\nnext: loadgen simulate --twin {out} --arrivals poisson:4 --n 500")


@twin.command()
def check(
    file: Annotated[Path, Argument(help="File that `loadgen twin fit` wrote.")],
    runs: Annotated[list[Path], Argument(help="Folders of real runs of that server that were not used for the fit.")],
    page: TwinPage = None,
    as_json: AsJson = False,
) -> None:
    """Compare a twin's predictions with real runs.

    Use runs to which the twin was not fitted. The twin simulates the requests of each run at the times at which
    they were sent. Exit codes: 0 compared; 2 usage error, or unusable runs.
    """
    from loadgen.studies.twin import read_twin
    from loadgen.studies.twin_fitting import figures, observe_run

    fitted_twin = read_twin(file)
    comparisons = {}
    replays: list[tuple[ObservedRun, Mapping[str, Sequence[float | None]]]] = []
    for path in runs:
        run = observe_run(_read(path, fallback=True))
        measured = figures(run, run.ttft_s, run.tpot_s, run.ended_s)
        predictions = predict_run(run, fitted_twin)
        comparisons[run.name] = [
            {
                "figure": prediction.figure,
                "measured": measured[prediction.figure],
                "predicted": prediction.value,
                "low": prediction.low,
                "high": prediction.high,
            }
            for prediction in predictions
        ]
        intervals = {
            prediction.figure: (prediction.value, prediction.low, prediction.high) for prediction in predictions
        }
        replays.append((run, intervals))
        if not as_json:
            print(f"{run.name} ({WHOLE_RUN})\n{_comparison_table(measured, intervals)}\n")
    if page is not None:
        _write_page(page, fitted_twin, replays, with_constants=False)
    if as_json:
        print(json.dumps(comparisons, indent=1))
    elif page is not None:
        print(page)


def _write_replays(page: Path | None, fitted_twin: Twin, runs: Sequence[ObservedRun]) -> None:
    """Simulate the runs to which a twin was fitted, and write the page that compares the simulations with the runs.

    Do nothing if `page` is None.
    """
    from loadgen.studies.twin_fitting import simulate_run

    if page is None:
        return
    figures = [{name: (value,) for name, value in simulate_run(run, fitted_twin).items()} for run in runs]
    _write_page(page, fitted_twin, list(zip(runs, figures, strict=True)), with_constants=True)


def _write_page(
    page: Path,
    fitted_twin: Twin,
    replays: Sequence[tuple[ObservedRun, Mapping[str, Sequence[float | None]]]],
    *,
    with_constants: bool,
) -> None:
    """Write the page that compares a twin with measured runs.

    `replays` contains each measured run with the figures that the twin predicts for it. With `with_constants`, the page
    also shows the twin's constants.
    """
    from loadgen.analysis.report import Code
    from loadgen.analysis.report.page import render
    from loadgen.studies.twin_fitting import figures, replay_on_twin
    from loadgen.studies.twin_page import ReplayedRun, twin_document

    runs = []
    for run, predicted in replays:
        ttft_s, tpot_s, _ = replay_on_twin(run, fitted_twin)
        latencies = {"ttft": (run.ttft_s, ttft_s), "tpot": (run.tpot_s, tpot_s)}
        measured = figures(run, run.ttft_s, run.tpot_s, run.ended_s)
        runs.append(ReplayedRun(run.name, measured, predicted, latencies))
    heading, _, constants = _describe_twin(fitted_twin).partition("\n\n")
    document = twin_document(
        runs,
        title=heading.partition(":")[0],
        subtitle="Replay of the runs to which it was fitted" if with_constants else "Prediction of recorded runs",
        facts=[Code(constants, "Constants and limits of the twin", scroll=True)] if with_constants else [],
        rates_note=f"{WHOLE_RUN[0].upper()}{WHOLE_RUN[1:]}.",
    )
    write_text(page, render(document), "Name another file with --page.")


def predict(plan: Plan, model: ServerModel, draws: int | None = None) -> list[Predicted]:
    """Predict the figures of a plan on a twin, each with a 95% interval. No file is written.

    The plan is simulated once with the constants of the twin. To find out how uncertain the result is, the plan is also
    simulated with constants that were drawn at random within the uncertainty of the fit. `draws` is the number of these
    simulations. By default, it depends on the number of requests. If the plan names other hardware or another model
    than the twin, the intervals also contain the errors of the hardware model.

    Return an empty list for loads of more than MAX_REQUESTS requests. Raises the same errors as
    loadgen.studies.simulate.run.
    """
    from loadgen.analysis import prediction
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.compare.figures import RUN_VARIATION
    from loadgen.analysis.repeats import figures_of
    from loadgen.studies.simulate import planned_requests, resolve_model, run_in_memory

    if model.twin is None:
        raise PlanError("intervals need a twin", "Name one with --twin.")
    requests = planned_requests(plan) or TARGET_REQUESTS
    if requests > MAX_REQUESTS:
        return []
    affordable = max(MIN_DRAWS, TARGET_REQUESTS // max(1, requests))
    number = draws or min(MAX_DRAWS, affordable, len(model.twin.draws))
    central, *drawn = (
        figures_of(summarise(run_in_memory(plan, model, draw)), thin=True) for draw in (None, *range(number))
    )
    return prediction.predict(central, drawn, resolve_model(plan, model).errors, RUN_VARIATION)


def predict_run(run: ObservedRun, fitted_twin: Twin) -> list[Predicted]:
    """Simulate the requests of a recorded run on a twin. Return the predicted latency figures with 95% intervals."""
    from loadgen.analysis import prediction
    from loadgen.analysis.compare.figures import RUN_VARIATION
    from loadgen.studies.twin_fitting import simulate_run

    draws = (None, *range(len(fitted_twin.draws)))
    central, *drawn = (simulate_run(run, fitted_twin, draw) for draw in draws)
    return prediction.predict(central, drawn, fitted_twin.residual, RUN_VARIATION)


REAL_TIME_HINT = "Repeat the run with --speed 1."


def _read(path: Path, *, fallback: bool = False) -> Run:
    """Read the run at `path`, to fit a twin to it or to compare a twin with it.

    Raises PlanError if the times of the run are not real seconds, because the constants of a twin are in real seconds.
    This is the case for a run in virtual time, and for a simulated server whose clock did not run in real time. For
    example, a simulated server at five times real time would seem to have five times the memory bandwidth.

    Raises UnreachableError if loadgen used the built-in simulated server only because it found no real one. A twin of
    such a run would describe none of the user's servers. With `fallback`, such runs are accepted.
    """
    from loadgen.analysis.run import runfile

    run = runfile.read(path)
    if run.header.server.get("virtual"):
        raise PlanError(f"{path} is a simulated run", "Use runs of a real server.")
    server = run.header.server
    if server.get("simulated") and server.get("speed") is None:
        raise PlanError(
            f"{path} is a run of a simulated server at unknown speed, but a twin needs real time", REAL_TIME_HINT
        )
    speed = server.get("speed") or 1
    if speed != 1:
        raise PlanError(
            f"{path} is a run of a simulated server at {speed:g} times real time, but a twin needs real time",
            REAL_TIME_HINT,
        )
    plan = run.header.plan
    on_purpose = fallback or plan.get("simulated") or plan.get("url")
    if server.get("simulated") and server.get("pids") and not on_purpose:
        raise UnreachableError(
            f"{path} is a run of the built-in simulated server, because no {server.get('title')} server was found",
            "Repeat it with --url for a real server, or pass --simulated to fit a twin to the simulated one.",
        )
    return run


def _detected_hardware(run: Run) -> dict[str, Any]:
    """Return the detected hardware of a run, with the keys `gpu`, `model`, `tensor` and `number_format`.

    GPU, model and format have the same names as in the hardware tables. The dict is empty if the GPU or the model is
    unknown.
    """
    from loadgen.analysis.build_summary import summarise

    limit = summarise(run).limit
    if limit is None:
        return {}
    return {"gpu": limit.gpu, "model": limit.model, "tensor": limit.gpus, "number_format": limit.format}


def _builtins(fitted_twin: Twin) -> Any:
    from msgspec import to_builtins

    return to_builtins(fitted_twin)


def _describe_twin(fitted_twin: Twin) -> str:
    """Return the constants and limits of a twin as text."""
    from loadgen.analysis.format import duration, percent
    from loadgen.analysis.hardware import align_columns

    rows = [("", "", "95% CI")]
    for name, constant in fitted_twin.constants.items():
        text = duration if constant.unit == "s" else percent
        interval = f"{text(constant.low)} to {text(constant.high)}"
        rows.append((f"{name}: {constant.meaning}", text(constant.value), interval))
    hardware = "hardware unknown"
    if fitted_twin.gpu:
        gpus = f"{fitted_twin.tensor} x {fitted_twin.gpu}"
        hardware = f"{gpus}, {fitted_twin.model}, {fitted_twin.number_format}"
    requests = sum(int(run["requests"]) for run in fitted_twin.runs)
    server = f"{fitted_twin.server} {fitted_twin.server_version}"
    heading = f"Twin of {server}, {hardware}: {requests:,} requests of {len(fitted_twin.runs)} runs"
    limits = {
        "kv_tokens": fitted_twin.kv_tokens,
        "running_limit": fitted_twin.running_limit,
        "step_tokens": fitted_twin.step_tokens,
    }
    known_limits = ", ".join(f"{name} {value:,}" for name, value in limits.items() if value)
    footer = f"Limits: {known_limits}; all others are the defaults of {fitted_twin.rules}."
    return f"{heading}\n\n{align_columns(rows).rstrip()}\n\n{footer}"


def _comparison_table(measured: Mapping[str, float | None], predicted: Mapping[str, Sequence[float | None]]) -> str:
    """Return a table of measured and predicted figures with the error of each prediction.

    Each prediction is a tuple `(value,)` or `(value, low, high)`.
    """
    from loadgen.analysis.format import figure_title, interval_text, significant, unit_of
    from loadgen.analysis.hardware import align_columns

    rows: list[Sequence[str]] = [("", "measured", "predicted", "", "off", "95% CI")]
    for name, (value, *ends) in predicted.items():
        true_value = measured.get(name)
        if true_value and value:
            factor, unit = unit_of(name, true_value)
            interval = interval_text(*(significant((end or 0) * factor) for end in ends)) if ends else ""
            error = f"{100 * (value / true_value - 1):+.1f}%"
            cells = (significant(true_value * factor), significant(value * factor), unit, error, interval)
            rows.append((figure_title(name), *cells))
    has_intervals = any(row[-1] for row in rows[1:])
    return align_columns(rows if has_intervals else [row[:-1] for row in rows])
