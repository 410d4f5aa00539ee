"""`loadgen plan-capacity`: how many GPUs of which kind a load takes. No server is asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from loadgen.cli.options import LOAD, OUTPUT, run_command
from loadgen.cli.simulate import REAL_SERVER_OPTIONS, SERVER, Hardware
from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.objectives import Objective
    from loadgen.studies.capacity import CapacityOption

HEADINGS = ("GPUs", "kind", "TP", "requests/s each", "per hour", "per 1M tokens")
DEFAULT_GPUS = ("L40S", "A100", "H100", "H200", "B200")
"""What is tried where none is named."""
ASSUMPTIONS = """Costs are per hour, and per million output tokens at this rate. Assumed: Poisson
arrivals, spread evenly over replicas that share no cache; no spare capacity for
failures or peaks. In parentheses: if steps take {share:.0f} % more or less time than
modelled; nine of ten published measurements are within that."""


def run_capacity(
    settings: dict[str, Any],
    *,
    rate: Annotated[float, Option(min=0.001, help="Requests per second, or sessions, of all users.", **LOAD)],
    objective: Annotated[
        list[str] | None,
        Option(metavar="EXPR", help="What has to hold, such as 'ttft.p99 < 500ms'; repeatable.", **LOAD),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        Option(metavar="GPU[=PRICE]", help="A kind, with what an hour of one costs: H100=2.50; repeatable.", **SERVER),
    ] = None,
    model: Annotated[
        str, Option(help="Such as llama-2-13b, llama-3.1-8b, or a Hugging Face config.json.", **SERVER)
    ] = "llama-3.1-8b",
    tp: Annotated[str, Option(metavar="N,N", help="GPUs that share the model.", **SERVER)] = "1,2,4,8",
    format_name: Annotated[
        str, Option("--format", metavar="F,F", help="Of weights: bf16, fp8, int8, int4, nvfp4.", **SERVER)
    ] = "bf16",
    hardware: Hardware = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON and nothing else.", **OUTPUT)] = False,
    quiet: Annotated[bool, Option("--quiet", help="No progress.", **OUTPUT)] = False,
) -> None:
    """Simulate each candidate at several rates, and print what each takes."""
    from loadgen.analysis.capacity import figure_reader, objectives_check, unplannable
    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.plan import Plan
    from loadgen.servers.hardware import constant
    from loadgen.studies import capacity
    from loadgen.studies.simulate import ServerModel

    try:
        objectives = parse(objective or (), "--objective")
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if not objectives or unplannable(objectives):
        said = ", ".join(unplannable(objectives)) or "no objective"
        raise PlanError(
            f"{said}: a capacity is the load up to which latencies stay below bounds",
            "Name one or more: --objective 'ttft.p99 < 500ms' --objective 'tpot.p99 < 50ms'",
        )
    plan = Plan(**({"server": "vllm"} | settings | {"arrivals": f"poisson:{rate:g}", "n": 1, "metrics_every_s": 0.0}))
    base = ServerModel(model=model, hardware=hardware)
    tried = capacity.candidates(gpu or DEFAULT_GPUS, _parse_gpu_counts(tp), format_name.split(","), base)
    options = []
    for index, candidate in enumerate(tried, 1):
        if not quiet and sys.stderr.isatty():
            print(f"\r\033[K{index}/{len(tried)}: {candidate.tensor} x {candidate.gpu}", end="", file=sys.stderr)
        options.append(
            capacity.option(plan, candidate, base, rate, figure_reader(objectives), objectives_check(objectives))
        )
    if not quiet and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if as_json:
        from msgspec import json

        order = [*ranked(options), *(option for option in options if not option.gpus)]
        print(json.format(json.encode({"rate_per_s": rate, "options": order})).decode())
        return
    requested = f"{rate:g} requests/s of {plan.input_tokens} + {plan.output_tokens} tokens ({plan.workload})"
    print(f"SIMULATED (virtual)  {model} on {plan.server}: {', '.join(objective.text for objective in objectives)}")
    print("\n".join([requested, "", format_options(options, objectives), ""]))
    print(ASSUMPTIONS.format(share=100 * constant("step_error")))


def ranked(options: Sequence[CapacityOption]) -> list[CapacityOption]:
    """Those that are possible, the cheapest first; without a price, the fewest GPUs first."""
    possible = [option for option in options if option.gpus]
    return sorted(possible, key=lambda each: (each.cost_per_hour is None, each.cost_per_hour or 0, each.gpus, each.gpu))


def format_options(options: Sequence[CapacityOption], objectives: Sequence[Objective]) -> str:
    """A table, the cheapest first, and why others cannot."""
    from loadgen.analysis.format import significant
    from loadgen.analysis.hardware import align_columns

    several = len({option.format for option in options}) > 1
    rows = []
    for each in ranked(options):
        ends = f"{each.gpus_low}-{each.gpus_high or '∞'}"
        exact = each.gpus_low == each.gpus_high
        low, high = (significant(end or 0) for end in (each.replica_per_s_low, each.replica_per_s_high))
        costs = each.cost_per_hour, each.cost_per_million_tokens
        rows.append(
            (
                f"{each.gpus}{'' if exact else f' ({ends})'}",
                f"{each.gpu}{f' {each.format}' if several else ''}",
                f"{each.tensor_parallel}",
                f"{significant(each.replica_per_s or 0)} ({low}-{high})",
                *("-" if cost is None else f"{cost:,.2f}" for cost in costs),
            )
        )
    blocks = [align_columns([HEADINGS, *rows])] if rows else []
    left = [option for option in options if not option.gpus]
    if left:
        lines = []
        for each in left:
            why = each.not_possible
            if each.figures:
                alone = zip(objectives, each.figures, strict=True)
                why = "alone " + ", ".join(
                    f"{one.figure}.{one.statistic} {_format_figure(figure)}" for one, figure in alone
                )
            lines.append(f"  {each.gpu} x {each.tensor_parallel}{f' {each.format}' if several else ''}: {why}")
        blocks.append("\n".join(["Not possible:", *lines]))
    return "\n\n".join(blocks)


def _format_figure(figure: float | None) -> str:
    from loadgen.analysis.format import duration

    return "unknown" if figure is None else duration(figure)


def _parse_gpu_counts(listed: str) -> list[int]:
    """`1,2,4`. Raises PlanError."""
    words = listed.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 64 for word in words):
        raise PlanError(f"--tp {listed}: is no list of numbers of GPUs", "Write --tp 1,2,4")
    return [int(word) for word in words]


@run_command(
    run_capacity,
    without=(
        *REAL_SERVER_OPTIONS,
        "arrivals",
        "n",
        "duration_s",
        "repeats",
        "max_in_flight",
        "metrics_every_s",
        "label",
        "platform",
    ),
    defaults={},
)
def plan_capacity(
    settings: dict[str, Any],
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    **shared: Any,
) -> None:
    """How many GPUs a load takes within its objectives: of each kind, and for each number that share the model.

    By the hardware model and the server's scheduler, in virtual time; nothing is sent. The cheapest first. Exit codes:
    0 answered, 2 usage.
    """
    from loadgen.plan_fields import read_plan

    run_capacity(({} if plan is None else read_plan(plan)) | settings, **shared)
