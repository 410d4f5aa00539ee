"""The command `plan-capacity`: compute the number of GPUs that a load needs. No server is contacted."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from loadgen.cli.options import LOAD, OUTPUT, PlanFile, merge_settings, run_command
from loadgen.cli.simulate import (
    REAL_SERVER_OPTIONS,
    SERVER,
    Acceptance,
    CacheHitRate,
    ChunkedPrefill,
    DraftTokens,
    Hardware,
    StepTokens,
)
from loadgen.errors import PlanError
from loadgen.results import write_text

if TYPE_CHECKING:
    from loadgen.analysis.objectives import Objective
    from loadgen.studies.capacity import CapacityOption

HEADINGS = ("GPUs", "type", "TP", "requests/s each", "per hour", "per 1M tokens")
DEFAULT_GPUS = ("L40S", "A100", "H100", "H200", "B200")
"""GPUs to try if none is named."""
LINE_WIDTH = 80
ASSUMPTIONS = """Costs are per hour, and per million output tokens at this rate. They assume
Poisson arrivals, spread evenly over replicas without a shared cache, and no
spare capacity for failures or peaks. Ranges in parentheses: steps take {share:.0f}%
more or less time than modelled. Nine of ten published measurements are within
that range."""


def run_capacity(
    settings: dict[str, Any],
    *,
    rate: Annotated[
        float,
        Option(
            min=0.001,
            help="Total load in requests per second; sessions per second if the workload has sessions.",
            **LOAD,
        ),
    ],
    objective: Annotated[
        list[str] | None,
        Option(metavar="EXPR", help="Objective to meet, such as 'ttft.p99 < 500ms'; repeatable.", **LOAD),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        Option(metavar="GPU[=PRICE]", help="GPU to consider, such as 'H100=$2.50' per hour; repeatable.", **SERVER),
    ] = None,
    model: Annotated[str, Option(help="Model or config.json.", **SERVER)] = "llama-3.1-8b",
    tp: Annotated[
        str,
        Option(metavar="N,N", help="Numbers of GPUs per replica; they share each layer (tensor parallel).", **SERVER),
    ] = "1,2,4,8",
    draft_tokens: DraftTokens = 0,
    acceptance: Acceptance = None,
    cache_hit_rate: CacheHitRate = None,
    chunked_prefill: ChunkedPrefill = None,
    step_tokens: StepTokens = None,
    format_name: Annotated[
        str,
        Option(
            "--format",
            metavar="F,F",
            help="Weight formats to consider; choose among bf16, fp8, int8, int4, w4a16, mxfp4 and nvfp4.",
            **SERVER,
        ),
    ] = "bf16",
    hardware: Hardware = None,
    page: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write an HTML page; it shows the options and their cost by rate.", **OUTPUT),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON and nothing else.", **OUTPUT)] = False,
    quiet: Annotated[bool, Option("--quiet", help="Show no progress.", **OUTPUT)] = False,
) -> None:
    """Simulate each candidate at several rates, and print how many GPUs it needs.

    A candidate is a GPU type, a number of GPUs per replica and a weight format.
    """
    from loadgen.analysis.capacity import figure_reader, objectives_check, unplannable
    from loadgen.analysis.objectives import ObjectiveError, check_no_parts, parse
    from loadgen.cli.measured_shares import parse_acceptance, parse_cache_hit_rate
    from loadgen.plan import Plan
    from loadgen.servers.hardware import constant
    from loadgen.servers.hardware.inference import ServingOptions
    from loadgen.servers.hardware.validation import describe
    from loadgen.studies import capacity
    from loadgen.studies.simulate import ServerModel

    _check_no_classes(settings)
    try:
        objectives = parse(objective or (), "--objective")
        check_no_parts(objectives, "--objective")
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if not objectives or unplannable(objectives):
        unsuitable = ", ".join(unplannable(objectives)) or "no objective"
        raise PlanError(
            f"{unsuitable}: plan-capacity needs upper bounds on latencies",
            "Name one or more: --objective 'ttft.p99 < 500ms' --objective 'tpot.p99 < 50ms'",
        )
    plan = Plan(**({"server": "vllm"} | settings | {"arrivals": f"poisson:{rate:g}", "n": 1, "metrics_every_s": 0.0}))
    serving = ServingOptions(
        draft_tokens=draft_tokens,
        acceptance=parse_acceptance(acceptance, draft_tokens),
        cache_hit_rate=parse_cache_hit_rate(cache_hit_rate),
        chunked_prefill=chunked_prefill or "",
    )
    base = ServerModel(model=model, hardware=hardware, step_tokens=step_tokens, serving=serving)
    candidates = capacity.candidates(gpu or DEFAULT_GPUS, _parse_gpu_counts(tp), format_name.split(","), base)
    options = []
    for number, candidate in enumerate(candidates, 1):
        if not quiet and sys.stderr.isatty():
            progress = f"{number}/{len(candidates)}: {candidate.tensor} x {candidate.gpu}"
            print(f"\r\033[K{progress}", end="", file=sys.stderr)
        options.append(
            capacity.capacity_option(
                plan, candidate, base, rate, figure_reader(objectives), objectives_check(objectives)
            )
        )
    if not quiet and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    load = f"{rate:g} requests/s of {plan.input_tokens} + {plan.output_tokens} tokens ({plan.workload})"
    goals = ", ".join(objective.text for objective in objectives)
    assumptions = ASSUMPTIONS.format(share=100 * constant("step_error"))
    by_gpu = {option.gpu: describe(option.accuracy) for option in options if option.accuracy}
    for name, text in by_gpu.items():
        assumptions += "\n" + textwrap.fill(f"Accuracy of the model on {name}: {text}.", LINE_WIDTH)
    if page is not None:
        from loadgen.analysis.report.page import render
        from loadgen.studies.capacity_page import capacity_document

        document = capacity_document(
            ranked(options),
            objectives,
            rate_per_s=rate,
            title=f"GPUs for {load}",
            subtitle=f"{model} on {plan.server}: {goals}",
            reasons=impossible_lines(options, objectives),
            assumptions=" ".join(assumptions.replace("in parentheses", "in small print").split()),
        )
        write_text(page, render(document), "Name another file with --page.")
    if as_json:
        from msgspec import json

        order = [*ranked(options), *(option for option in options if not option.gpus)]
        print(json.format(json.encode({"rate_per_s": rate, "options": order})).decode())
        return
    print(f"SIMULATED (virtual)  {model} on {plan.server}: {goals}")
    print("\n".join([load, "", format_options(options, objectives), ""]))
    print(assumptions)
    if page is not None:
        print(f"\nPage: {page}")


def _check_no_classes(settings: dict[str, Any]) -> None:
    """Raise PlanError if the plan has classes of traffic."""
    if settings.get("traffic") is not None:
        raise PlanError(
            "plan-capacity computes GPUs for one kind of request, but the plan has classes of traffic",
            "Find the capacity of the mix on one candidate: loadgen sweep PLAN --virtual H100 --model llama-3.1-8b; or "
            "compute each class in a plan of its own.",
        )


def ranked(options: Sequence[CapacityOption]) -> list[CapacityOption]:
    """Return the candidates that meet the objectives, sorted by cost per hour.

    Candidates without a price come last, sorted by their number of GPUs.
    """

    def key(option: CapacityOption) -> tuple[bool, float, int, str]:
        return option.cost_per_hour is None, option.cost_per_hour or 0, option.gpus or 0, option.gpu

    return sorted((option for option in options if option.gpus), key=key)


def format_options(options: Sequence[CapacityOption], objectives: Sequence[Objective]) -> str:
    """Return a table of the candidates that meet the objectives, the cheapest first.

    Below the table, a list names the other candidates and the reason why each of them is not possible. A candidate is a
    GPU type, a number of GPUs per replica and a weight format.
    """
    from loadgen.analysis.hardware import align_columns

    several_formats = len({option.format for option in options}) > 1
    rows = [_option_row(option, several_formats=several_formats) for option in ranked(options)]
    blocks = [align_columns([HEADINGS, *rows])] if rows else []
    lines = [f"  {line}" for line in impossible_lines(options, objectives)]
    if lines:
        blocks.append("\n".join(["Not possible:", *lines]))
    return "\n\n".join(blocks)


def impossible_lines(options: Sequence[CapacityOption], objectives: Sequence[Objective]) -> list[str]:
    """Return one line of text for each candidate that cannot serve the load, with the reason.

    A candidate is a type and number of GPUs with a weight format.
    """
    several_formats = len({option.format for option in options}) > 1
    return [
        f"{option.gpu} x {option.tensor_parallel}{f' {option.format}' if several_formats else ''}: "
        f"{_reason(option, objectives)}"
        for option in options
        if not option.gpus
    ]


def _option_row(option: CapacityOption, *, several_formats: bool) -> tuple[str, ...]:
    """Return the table row of one candidate: the number and type of GPUs, the rate per replica, and the costs.

    The row has one cell per heading in `HEADINGS`. With `several_formats`, the type contains the weight format.
    """
    from loadgen.analysis.format import significant

    low = significant(option.replica_per_s_low or 0)
    high = significant(option.replica_per_s_high or 0)
    is_exact = option.gpus_low == option.gpus_high
    gpu_range = "" if is_exact else f" ({option.gpus_low}-{option.gpus_high or '∞'})"
    return (
        f"{option.gpus}{gpu_range}",
        f"{option.gpu}{f' {option.format}' if several_formats else ''}",
        f"{option.tensor_parallel}",
        f"{significant(option.replica_per_s or 0)} ({low}-{high})",
        _format_cost(option.cost_per_hour, option.currency),
        _format_cost(option.cost_per_million_tokens, option.currency),
    )


def _reason(option: CapacityOption, objectives: Sequence[Objective]) -> str:
    """Return the reason why a candidate cannot serve the load.

    Either its model does not fit into the GPU memory, or even a single request misses an objective.
    """
    if not option.figures:
        return option.not_possible
    latencies = [
        f"{objective.figure}.{objective.statistic} {_format_figure(figure)}"
        for objective, figure in zip(objectives, option.figures, strict=True)
    ]
    return f"a single request has {', '.join(latencies)}"


def _format_cost(cost: float | None, currency: str) -> str:
    from loadgen.analysis.prices import currency_parts

    before, after = currency_parts(currency)
    return "-" if cost is None else f"{before}{cost:,.2f}{after}"


def _format_figure(figure: float | None) -> str:
    from loadgen.analysis.format import duration

    return "unknown" if figure is None else duration(figure)


def _parse_gpu_counts(listed: str) -> list[int]:
    """Parse a list of GPU counts such as `1,2,4`. Raises PlanError for a malformed list."""
    words = listed.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 64 for word in words):
        raise PlanError(f"--tp {listed} is not a list of numbers from 1 to 64", "Write --tp 1,2,4")
    return [int(word) for word in words]


@run_command(
    run_capacity,
    without=(
        *REAL_SERVER_OPTIONS,
        "arrivals",
        "n",
        "duration_s",
        "repeats",
        "concurrency",
        "max_in_flight",
        "metrics_every_s",
        "label",
        "platform",
    ),
    defaults={},
)
def plan_capacity(
    settings: dict[str, Any],
    plan: PlanFile = None,
    **shared: Any,
) -> None:
    """Compute how many GPUs a load needs to meet its objectives.

    For each GPU type and number of GPUs per replica, the server is simulated with the hardware model and the server's
    scheduler, in virtual time. Nothing is sent. The cheapest option is listed first. Exit codes: 0 computed, 2 usage
    error.
    """
    run_capacity(merge_settings(plan, None, settings), **shared)
