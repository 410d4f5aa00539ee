"""`loadgen twin`: the constants of a server, from real runs of it, for `loadgen simulate --twin`."""

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

if TYPE_CHECKING:
    from loadgen.analysis.prediction import Predicted
    from loadgen.analysis.run.runfile import Run
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.twin import Twin
    from loadgen.studies.twin_fitting import Observed

MIN_DRAWS, MAX_DRAWS, TARGET_REQUESTS = 4, 24, 40_000
"""Runs that an interval is made from: fewer of long ones."""
MAX_CACHED_FRACTION = 0.05
"""Of the prompts of a run that should be new to the server."""
CACHED_NOTE = (
    "were in the server's prefix cache, and the twin takes them for computed. Run it again with another --seed."
)
WHOLE_RUN = "rates of the whole run, up to its last token"
"""The report of a long open loop has a measuring window, and so other rates."""
MAX_REQUESTS = 100_000
"""Requests of which there is no interval."""

twin = Typer(
    no_args_is_help=True,
    help="Estimate a server's constants from real runs of it; simulate takes them.",
    **TYPER_DEFAULTS,
)
Runs = Annotated[list[Path], Argument(help="Folders of real runs of one server, as it stands.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


@twin.command()
def fit(
    runs: Runs,
    out: Annotated[Path, Option(help="The file to write.")] = Path("twin.json"),
    rules: Annotated[
        str | None, Option(help="Whose scheduler: vllm, tgi or lightllm; by default the server's.")
    ] = None,
    vintage: Annotated[str, Option(help="Which generation of it: current or 2023.")] = "current",
    gpu: Annotated[str | None, Option(help="What it ran on, such as H100; by default what the runs say.")] = None,
    model: Annotated[str | None, Option(help="Its model, such as llama-3.1-8b, or a config.json.")] = None,
    tp: Annotated[int | None, Option(min=1, help="GPUs that share each layer.")] = None,
    format_name: Annotated[str | None, Option("--format", help="Of weights: bf16, fp8, int8, int4, nvfp4.")] = None,
    hardware: Annotated[Path | None, Option(help="A TOML file with more GPUs and models.")] = None,
    kv_tokens: Annotated[int | None, Option(min=64, help="Tokens in its KV cache; else as its metrics say.")] = None,
    running_limit: Annotated[int | None, Option(min=1, help="Sequences in a step; else as the runs show.")] = None,
    step_tokens: Annotated[int | None, Option(min=1, help="Tokens in a step; else as the runs show.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the constants and limits with which a replay of these runs has the latencies that were measured.

    Take a burst and a light load: one shows what prompts and many sequences cost, the other what few do. Prompts should
    be new to the server: another --seed for each run. Exit codes: 0 written, 2 usage, or runs that cannot be used.
    """
    from loadgen.servers.hardware import HardwareError
    from loadgen.servers.simulated.scheduler_presets import ENGINES, find_engine
    from loadgen.studies.twin_fitting import figures, fit, observed, simulate_run

    read = [_read(path) for path in runs]
    kind = str(read[0].header.server.get("name") or "")
    if any(str(run.header.server.get("name") or "") != kind for run in read):
        raise PlanError("these runs are of different servers", "Fit each server by itself.")
    rules = rules or (kind if kind in ENGINES else "vllm")
    named: dict[str, Any] = {"gpu": gpu, "model": model, "tensor": tp, "number_format": format_name}
    told = _detected_hardware(read[0]) if not gpu else {}
    named = told | {name: value for name, value in named.items() if value}
    if named and not {"gpu", "model"} <= named.keys():
        raise PlanError("a twin on known hardware takes --gpu and --model", "Name both, or neither.")
    try:
        engine = find_engine(rules, vintage)
        parts = {"tensor": named.get("tensor", 1), "format_name": named.get("number_format", "bf16"), "file": hardware}
        deployment = engine.deployment(named["gpu"], named["model"], **parts) if named else None
    except HardwareError as problem:
        raise PlanError(str(problem)) from None
    limits = {"kv_tokens": kv_tokens, "running_limit": running_limit, "step_tokens": step_tokens}
    known = named | limits | {"vintage": vintage, "hardware": str(hardware or "")}
    result = fit(read, rules, deployment, known)
    for path, known_already in zip(runs, map(_cached_fraction, read), strict=True):
        if known_already > MAX_CACHED_FRACTION:
            print_error(f"{path}: {known_already:.0%} of its prompt tokens {CACHED_NOTE}")
    write_text(out, json.dumps(_builtins(result), indent=1) + "\n", "Name another file with --out.")
    if as_json:
        print(json.dumps(_builtins(result), indent=1))
        return
    print(_describe_twin(result))
    for run in map(observed, read):
        measured = figures(run, run.ttft_s, run.tpot_s, run.ended_s)
        replayed = {name: (each,) for name, each in simulate_run(run, result).items()}
        print(f"\n{run.name}, replayed ({WHOLE_RUN})\n{_comparison_table(measured, replayed)}")
    print(f"\n{out}\nnext: loadgen simulate --twin {out} --arrivals poisson:4 --n 500")


@twin.command()
def check(
    file: Annotated[Path, Argument(help="What `loadgen twin fit` wrote.")],
    runs: Annotated[list[Path], Argument(help="Folders of other real runs of that server.")],
    as_json: AsJson = False,
) -> None:
    """Predict the requests of other runs, sent when they were sent, beside what was measured.

    Exit codes: 0 printed, 2 usage, or runs that cannot be used.
    """
    from loadgen.studies.twin import read
    from loadgen.studies.twin_fitting import figures, observed

    known = read(file)
    told = {}
    for run in map(observed, map(_read, runs)):
        measured, result = figures(run, run.ttft_s, run.tpot_s, run.ended_s), predict_run(run, known)
        told[run.name] = [
            {"figure": each.figure, "measured": measured[each.figure]}
            | {"predicted": each.value, "low": each.low, "high": each.high}
            for each in result
        ]
        if not as_json:
            intervals = {each.figure: (each.value, each.low, each.high) for each in result}
            print(f"{run.name} ({WHOLE_RUN})\n{_comparison_table(measured, intervals)}\n")
    if as_json:
        print(json.dumps(told, indent=1))


def predict(plan: Plan, modelled: ServerModel, draws: int | None = None) -> list[Predicted]:
    """Figures of the plan on a twin, each with its 95 % interval; nothing is written. Empty for a load so long that it
    would take minutes. Raises as loadgen.studies.simulate.run does."""
    from loadgen.analysis import prediction
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.compare.figures import RUN_VARIATION
    from loadgen.analysis.repeats import figures_of
    from loadgen.engine.prepare import build_schedule
    from loadgen.studies.simulate import in_memory

    if modelled.twin is None:
        raise PlanError("an interval is that of a twin", "Name one with --twin.")
    requests = build_schedule(plan).count or TARGET_REQUESTS
    if requests > MAX_REQUESTS:
        return []
    number = draws or min(MAX_DRAWS, max(MIN_DRAWS, TARGET_REQUESTS // max(1, requests)), len(modelled.twin.draws))
    central, *others = (
        figures_of(summarise(in_memory(plan, modelled, draw)), thin=True) for draw in (None, *range(number))
    )
    return prediction.predict(central, others, modelled.twin.residual, RUN_VARIATION)


def predict_run(run: Observed, known: Twin) -> list[Predicted]:
    """The same, of the requests of a run."""
    from loadgen.analysis import prediction
    from loadgen.analysis.compare.figures import RUN_VARIATION
    from loadgen.studies.twin_fitting import simulate_run

    central, *others = (simulate_run(run, known, draw) for draw in (None, *range(len(known.draws))))
    return prediction.predict(central, others, known.residual, RUN_VARIATION)


REAL_TIME_HINT = "Run it again with --speed 1."


def _read(path: Path) -> Run:
    """Read a run. Raises PlanError for a run in virtual time, and for one at another speed than real time.

    A twin's constants are seconds, bytes and FLOPs of hardware. Times of a clock that runs five times faster would give
    five times the memory bandwidth, and a twin that predicts nothing that exists.
    """
    from loadgen.analysis.run import runfile

    run = runfile.read(path)
    if run.header.server.get("virtual"):
        raise PlanError(f"{path} was simulated", "Fit runs of the server itself.")
    server = run.header.server
    if server.get("simulated") and server.get("speed") is None:
        raise PlanError(f"{path} is of a simulated server at unknown speed, and a twin is of real time", REAL_TIME_HINT)
    speed = server.get("speed") or 1
    if speed != 1:
        raise PlanError(
            f"{path} is of a simulated server at {speed:g} times speed, and a twin is of real time",
            REAL_TIME_HINT,
        )
    return run


def _detected_hardware(run: Run) -> dict[str, Any]:
    """What the run itself says of GPU and model, as names of the hardware tables; nothing where either is unknown."""
    from loadgen.analysis.build_summary import summarise

    limit = summarise(run).limit
    if limit is None:
        return {}
    return {"gpu": limit.gpu, "model": limit.model, "tensor": limit.gpus, "number_format": limit.format}


def _cached_fraction(run: Run) -> float:
    """The share of its prompt tokens that the server knew already, where the workload repeats none."""
    from loadgen.analysis.hardware_limit import CACHED

    seen = [line.values for line in run.telemetry if line.source == "server" and "cached_prompt_tokens" in line.values]
    if not seen or str(run.header.plan.get("workload") or "").startswith(CACHED):
        return 0.0
    cached, computed = (
        seen[-1].get(name, 0) - seen[0].get(name, 0) for name in ("cached_prompt_tokens", "prompt_tokens")
    )
    return float(cached / computed) if computed else 0.0


def _builtins(found: Twin) -> Any:
    from msgspec import to_builtins

    return to_builtins(found)


def _describe_twin(found: Twin) -> str:
    """Its constants and its limits."""
    from loadgen.analysis.format import duration, percent
    from loadgen.analysis.hardware import align_columns

    rows = [("", "", "95 %")]
    for name, each in found.constants.items():
        value, low, high = map(duration if each.unit == "s" else percent, (each.value, each.low, each.high))
        rows.append((f"{name}: {each.meaning}", value, f"{low} to {high}"))
    where = f"{found.tensor} x {found.gpu}, {found.model}, {found.number_format}" if found.gpu else "hardware unknown"
    number = sum(int(run["requests"]) for run in found.runs)
    limits = {"running_limit": found.running_limit, "step_tokens": found.step_tokens}
    told = [f"{name} {value:,}" for name, value in ({"kv_tokens": found.kv_tokens} | limits).items() if value]
    lines = align_columns(rows).splitlines()
    head = f"Twin of {found.server} {found.server_version}, {where}: {number:,} requests of {len(found.runs)} runs"
    return "\n".join(
        [head, "", *lines, "", f"Limits: {', '.join(told)}; others as the rules of {found.rules} have them."]
    )


def _comparison_table(measured: Mapping[str, float | None], told: Mapping[str, Sequence[float | None]]) -> str:
    """Measured and predicted figures, and by how much the second is off."""
    from loadgen.analysis.format import figure_title, significant, unit_of
    from loadgen.analysis.hardware import align_columns

    rows: list[Sequence[str]] = [("", "measured", "predicted", "", "off", "95 %")]
    for name, (value, *ends) in told.items():
        was = measured.get(name)
        if was and value:
            factor, unit = unit_of(name, was)
            interval = " to ".join(significant((end or 0) * factor) for end in ends)
            figure = [significant(each * factor) for each in (was, value)]
            rows.append((figure_title(name), *figure, unit, f"{100 * (value / was - 1):+.1f} %", interval))
    return align_columns(rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows])
