"""The command `plan-capacity`, which searches for the cheapest configuration that serves a load.

The command computes and simulates, and contacts no server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
    Hardware,
    StepTokens,
)
from loadgen.errors import PlanError
from loadgen.load_shorthand import override, requests_per_s
from loadgen.results import write_text

if TYPE_CHECKING:
    from loadgen.analysis.objectives import Objective
    from loadgen.servers.hardware import ModelShape
    from loadgen.studies.configurations import SearchSpace
    from loadgen.studies.price_list import GpuPrice

DEFAULT_GPUS = ("L40S", "A100", "H100", "H200", "B200")
"""GPUs to try if none is named."""
SMALLEST_RATE = 0.001
"""Smallest load in requests per second."""
MAX_NUMBER = 64
"""Largest number in a list such as `--tp 1,2,4`."""
SEARCH: dict[str, Any] = {"rich_help_panel": "Search"}
SEARCH_ENGINES = "vllm,sglang,tgi,trtllm"
SEARCH_PIPELINES = "1,2,4"
SEARCH_GROUPS = "1,2,4,8,16"
"""Values that `--search` gives to options that are not named."""


def run_capacity(
    settings: dict[str, Any],
    *,
    rate: Annotated[
        str,
        Option(
            metavar="N",
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
    prices: Annotated[
        Path | None,
        Option(metavar="FILE", help="TOML file with GPU prices by region, also spot.", **SERVER),
    ] = None,
    region: Annotated[
        list[str] | None, Option(metavar="NAME", help="Region of --prices to consider; repeatable.", **SERVER)
    ] = None,
    spot: Annotated[bool, Option("--spot", help="Consider spot prices too, with spare replicas.", **SERVER)] = False,
    model: Annotated[str, Option(help="Model or config.json.", **SERVER)] = "llama-3.1-8b",
    search: Annotated[
        bool,
        Option(
            "--search",
            help="Consider every engine, pipelines, parallel experts and separate prefill workers too.",
            **SEARCH,
        ),
    ] = False,
    engine: Annotated[
        str | None,
        Option(
            metavar="E,E", help="Engines to consider: vllm, sglang, tgi, trtllm. Default: that of --server.", **SEARCH
        ),
    ] = None,
    tp: Annotated[
        str,
        Option(metavar="N,N", help="Numbers of GPUs that share each layer (tensor parallel).", **SEARCH),
    ] = "1,2,4,8",
    pp: Annotated[
        str | None, Option(metavar="N,N", help="Numbers of pipeline stages (default 1). Each has --tp GPUs.", **SEARCH)
    ] = None,
    ep: Annotated[
        str | None, Option(metavar="N,N", help="Numbers of expert-parallel groups (default 1).", **SEARCH)
    ] = None,
    dp_attention: Annotated[
        str | None,
        Option(metavar="N,N", help="Numbers of attention groups of --tp GPUs that share the experts.", **SEARCH),
    ] = None,
    disaggregated: Annotated[
        bool,
        Option("--disaggregated", help="Consider separate prefill and decode workers too.", **SEARCH),
    ] = False,
    draft_tokens: Annotated[
        str,
        Option(metavar="N,N", help="Numbers of drafted tokens; 0,3 compares speculation with none.", **SEARCH),
    ] = "0",
    acceptance: Acceptance = None,
    cache_hit_rate: CacheHitRate = None,
    chunked_prefill: ChunkedPrefill = None,
    step_tokens: StepTokens = None,
    format_name: Annotated[
        str,
        Option(
            "--format",
            metavar="F,F",
            help="Weight formats to consider: bf16, fp8, int8, int4, w4a16, mxfp4, nvfp4.",
            **SEARCH,
        ),
    ] = "bf16",
    max_gpus: Annotated[
        int | None, Option(min=1, metavar="N", help="Maximum number of GPUs of the whole plan.", **SEARCH)
    ] = None,
    gpus_per_node: Annotated[int, Option(min=1, metavar="N", help="GPUs per machine.", **SEARCH)] = 8,
    exhaustive: Annotated[
        bool, Option("--exhaustive", help="Simulate every configuration that fits into memory.", **SEARCH)
    ] = False,
    hardware: Hardware = None,
    page: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write an HTML page: options and Pareto set.", **OUTPUT),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON and nothing else.", **OUTPUT)] = False,
    quiet: Annotated[bool, Option("--quiet", help="Show no progress.", **OUTPUT)] = False,
) -> None:
    """Search configurations, simulate the cheapest ones, and print how many GPUs each needs."""
    from loadgen.cli.measured_shares import parse_acceptance, parse_cache_hit_rate
    from loadgen.plan import Plan
    from loadgen.studies.capacity_report import CapacityReport
    from loadgen.studies.capacity_search import CapacitySearch
    from loadgen.studies.configurations import SearchSpace

    _check_no_classes(settings)
    per_s = _rate(rate)
    objectives = _objectives(objective)
    plan = Plan(**({"server": "vllm"} | _with_rate(settings, per_s) | {"n": 1, "metrics_every_s": 0.0}))
    shape = _model(model, hardware)
    price_list = _prices(gpu or (), prices, region or (), hardware, spot=spot)
    default_engine = SEARCH_ENGINES if search else plan.server
    experts_default = SEARCH_GROUPS if search and shape.experts else "1"
    drafts = _numbers("--draft-tokens", draft_tokens, smallest=0)
    space = SearchSpace(
        gpus=_gpus(gpu or (), price_list, hardware),
        formats=_formats(format_name),
        engines=_engines(engine or default_engine),
        tensors=_numbers("--tp", tp),
        pipelines=_numbers("--pp", pp or (SEARCH_PIPELINES if search else "1")),
        expert_groups=_numbers("--ep", ep or experts_default),
        attention_groups=_numbers("--dp-attention", dp_attention or experts_default),
        drafts=drafts,
        disaggregation=(False, True) if disaggregated or search else (False,),
        acceptance=parse_acceptance(acceptance, max(drafts)),
        cache_hit_rate=parse_cache_hit_rate(cache_hit_rate),
        chunked_prefill=chunked_prefill or "",
        step_tokens=step_tokens,
        node_gpus=gpus_per_node,
        max_gpus=max_gpus,
        hardware=hardware,
    )
    _check_parallel_experts(space, shape)
    if prices is not None and not {price.gpu for price in price_list} & set(space.gpus):
        raise PlanError(
            f"{prices} has no price of {', '.join(space.gpus)}",
            "Add a [[price]] for it, name another --gpu or --region, or leave --prices out.",
        )
    show = not quiet and sys.stderr.isatty()

    def progress(text: str) -> None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    result = CapacitySearch(
        plan,
        shape,
        model,
        space,
        price_list,
        objectives,
        per_s,
        spot=spot,
        exhaustive=exhaustive,
        progress=progress if show else lambda _: None,
    ).run()
    if show:
        print("\r\033[K", end="", file=sys.stderr)
    report = CapacityReport(result, plan, model, objectives, space)
    if page is not None:
        from loadgen.analysis.report.page import render
        from loadgen.studies.capacity_page import capacity_document

        write_text(page, render(capacity_document(report)), "Name another file with --page.")
    if as_json:
        from msgspec import json

        print(json.format(json.encode(result)).decode())
        return
    print(report.text())
    if page is not None:
        print(f"\nPage: {page}")


def _rate(text: str) -> float:
    """Return the rate that `text` states, such as `50` or `50/s`. Raises PlanError if it is below SMALLEST_RATE."""
    per_s = float(requests_per_s(text))
    if per_s < SMALLEST_RATE:
        raise PlanError(f"--rate {text}: too low for a plan", f"Write at least --rate {SMALLEST_RATE}.")
    return per_s


def _with_rate(settings: Mapping[str, Any], per_s: float) -> dict[str, Any]:
    """Return the settings of a plan with Poisson arrivals instead of the load that the plan states.

    A concurrency is the load of the plan if the plan has no rate and no arrivals. Otherwise it is a limit, which stays.
    """
    result = override(settings, {"arrivals": f"poisson:{per_s:g}"})
    if not {"rate", "arrivals"} & settings.keys():
        result.pop("concurrency", None)
    return result


def _check_no_classes(settings: dict[str, Any]) -> None:
    """Raise PlanError if the plan has classes of traffic."""
    if settings.get("traffic") is not None:
        raise PlanError(
            "plan-capacity computes GPUs for one kind of request, but the plan has classes of traffic",
            "Find the capacity of the mix on one candidate: loadgen sweep PLAN --virtual H100 --model llama-3.1-8b; or "
            "compute each class in a plan of its own.",
        )


def _objectives(texts: Sequence[str] | None) -> list[Objective]:
    """Return the parsed objectives. Raises PlanError unless all are upper bounds on latencies."""
    from loadgen.analysis.capacity import unplannable
    from loadgen.analysis.objectives import ObjectiveError, check_no_parts, parse

    try:
        objectives = parse(texts or (), "--objective")
        check_no_parts(objectives, "--objective")
    except ObjectiveError as error:
        raise PlanError(str(error), error.hint) from None
    if not objectives or unplannable(objectives):
        unsuitable = ", ".join(unplannable(objectives)) or "no objective"
        raise PlanError(
            f"{unsuitable}: plan-capacity needs upper bounds on latencies",
            "Name one or more: --objective 'ttft.p99 < 500ms' --objective 'tpot.p99 < 50ms'",
        )
    return objectives


def _model(name: str, hardware: Path | None) -> ModelShape:
    from loadgen.servers.hardware import HardwareError, model

    try:
        return model(name, hardware)
    except HardwareError as error:
        raise PlanError(str(error)) from None


def _gpu_name(name: str, hardware: Path | None) -> str:
    """Return the name of a GPU in the hardware tables. Raises PlanError for an unknown GPU."""
    from loadgen.servers.hardware import HardwareError, gpu

    try:
        return gpu(name, hardware).name
    except HardwareError as error:
        hint = "Write --gpu H100, or with the price of one GPU per hour: --gpu 'H100=$2.50'"
        raise PlanError(str(error), hint) from None


def _prices(
    gpus: Sequence[str], path: Path | None, regions: Sequence[str], hardware: Path | None, *, spot: bool
) -> list[GpuPrice]:
    """Return the prices of GPUs that the user states with `--gpu` and in the file of `--prices`.

    - `gpus` contains the values of `--gpu`, for example `H100=$2.50`. Such a price replaces the prices of this GPU in
      the file.
    - `path` is the file of `--prices`.
    - `regions` contains the regions whose prices are used. If it is empty, all prices of the file are used.
    - `hardware` is a file of the user that describes GPUs.
    - `spot` is True if the user has requested spot prices.

    Raises PlanError for an invalid price, an unknown region, prices in different currencies, or `--spot` without spot
    prices.
    """
    from loadgen.analysis.prices import HINT, parse_price
    from loadgen.studies.price_list import GpuPrice, check_currencies, read_price_list

    listed = read_price_list(path, hardware) if path else []
    if (spot or regions) and path is None:
        raise PlanError(f"{'--spot' if spot else '--region'} needs a price list", "Name one with --prices FILE.toml.")
    known = sorted({price.region for price in listed if price.region})
    for name in regions:
        if name not in known:
            choices = f"choose one of {', '.join(known)}" if known else "the price list names no region"
            raise PlanError(f"--region {name}: no such region in {path}", f"{choices[0].upper()}{choices[1:]}.")
    listed = [price for price in listed if not regions or price.region in regions]
    if spot and not any(price.spot for price in listed):
        raise PlanError(f"--spot: {path} has no spot prices", "Add spot and interruptions_per_hour to a [[price]].")
    named: list[GpuPrice] = []
    for text in gpus:
        name, priced, amount = text.partition("=")
        if not priced:
            continue
        try:
            named.append(GpuPrice(_gpu_name(name, hardware), on_demand=parse_price(amount)))
        except ValueError as error:
            raise PlanError(f"--gpu {text}: {error}", f"{HINT}, such as --gpu 'H100=$2.50'") from None
    replaced = {price.gpu for price in named}
    prices = named + [price for price in listed if price.gpu not in replaced]
    sources = [option for option, used in (("--gpu", named), ("--prices", path)) if used]
    check_currencies(prices, " and ".join(sources))
    return prices


def _gpus(texts: Sequence[str], prices: Sequence[GpuPrice], hardware: Path | None) -> list[str]:
    """Return the names of the GPUs to consider: those of `--gpu`, or those of the price list, or the default."""
    names = [text.partition("=")[0] for text in texts] or [price.gpu for price in prices] or list(DEFAULT_GPUS)
    return list(dict.fromkeys(_gpu_name(name, hardware) for name in names))


def _formats(listed: str) -> list[str]:
    from loadgen.servers.hardware import HardwareError, number_format

    try:
        return list(dict.fromkeys(number_format(name).name for name in listed.split(",")))
    except HardwareError as error:
        raise PlanError(f"--format: {error}") from None


def _engines(listed: str) -> list[str]:
    """Parse a list of engines such as `vllm,sglang`. Raises PlanError for an engine that cannot be simulated."""
    from loadgen.studies.configurations import ENGINES

    names = list(dict.fromkeys(listed.split(",")))
    for name in names:
        if name not in ENGINES:
            raise PlanError(f"the scheduler of {name} is not modelled", f"Choose among --engine {','.join(ENGINES)}.")
    return names


def _numbers(option: str, listed: str, smallest: int = 1) -> list[int]:
    """Return the numbers in the text `listed`, such as `1,2,4`, without repetitions.

    `listed` is the value of the option `option`. Raises PlanError if `listed` is not a list of integers from `smallest`
    to MAX_NUMBER.
    """
    words = listed.split(",")
    if not all(word.isdecimal() and smallest <= int(word) <= MAX_NUMBER for word in words):
        raise PlanError(
            f"{option} {listed} is not a list of numbers from {smallest} to {MAX_NUMBER}", f"Write {option} 1,2,4"
        )
    return list(dict.fromkeys(map(int, words)))


def _check_parallel_experts(space: SearchSpace, shape: ModelShape) -> None:
    """Raise PlanError if the user divides experts or attention (--ep, --dp-attention) for a model without experts."""
    if shape.experts is None and max(*space.expert_groups, *space.attention_groups, 1) > 1:
        raise PlanError(
            f"{shape.name} has no experts: --ep and --dp-attention need a mixture of experts", "Leave both out."
        )


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
    """Compute how many GPUs a load needs, and what they cost.

    The GPUs meet the objectives at this load. The search combines GPU types, engines and ways to divide the model. Some
    combinations are dropped at once: the model does not fit into memory, or an objective is missed even at the peak
    rates of the GPUs' data sheets. A formula ranks the others. The cheapest ones are simulated in virtual time with the
    server's scheduler. Nothing is sent. Exit codes: 0 computed, 2 usage error.
    """
    run_capacity(merge_settings(plan, None, settings), **shared)
