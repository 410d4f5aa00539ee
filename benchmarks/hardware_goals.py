"""Compares the errors of the hardware model with the goals for its accuracy, in one table.

    python -m benchmarks.hardware_goals                     # the measurements in benchmarks/data, two minutes
    python -m benchmarks.hardware_goals --measured FOLDER   # all closed loops of a folder with published measurements
    python -m benchmarks.hardware_goals --write             # generate servers/hardware/validation.csv

FOLDER has the files `e2e_inferencex_dense.csv`, `e2e_nim_llama3.csv` and `e2e_sglang_open.csv` with the columns of
`CLOSED_LOOP_FILES`. An error is |predicted - measured| / measured. `benchmarks.hardware_model` has budgets for more
quantities, and `benchmarks.hardware_fit --held-out` fits that leave out one GPU, TP or model.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import hardware_model as bench
from benchmarks import schedulers, twin, twin_transfer
from loadgen.servers.hardware import gpu, model
from loadgen.servers.hardware.validation import (
    COLUMNS,
    COVERED,
    KERNELS,
    SPEED_UP,
    SPEED_UP_JOIN,
    TABLE,
    TRAINING,
    TRANSFERRED,
)

Points = list[bench.Point]
CLOSED_LOOP_FILES = {
    "e2e_inferencex_dense": "InferenceX",
    "e2e_nim_llama3": "NIM",
    "e2e_sglang_open": "aiconfigurator (32B)",
}
"""Source of the rows of each file. Lengths of the source InferenceX are 0.9 of the nominal ones on average."""
ENGINES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "NVIDIA": "NIM", "sglang": "SGLang"}
"""Framework by the first word of its name in these files."""
GENERATIONS = ("A100-80GB SXM", "H100 SXM", "B200 SXM")
"""GPUs whose measured speed-ups are compared with the model, in the order of their generations."""
TOLERANCE = 0.005
"""Differences of the median error up to this value are no difference."""
TRANSFER_SOURCES = {"vLLM": "InferenceX", "SGLang": "aiconfigurator (32B)"}
"""Source of the closed loops that twins of other servers predict, by framework."""
FRAMEWORKS = ("vLLM", "SGLang", "TensorRT-LLM", "NIM")


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits of the median, p90 and mean error of a quantity. `by` splits the points into groups with a line each.

    `reference` returns other predictions of the same measurements. Their median error, plus TOLERANCE, is a further
    limit of the median."""

    name: str
    points: Callable[[], Points]
    median: float = np.inf
    p90: float = np.inf
    mean: float = np.inf
    by: Callable[[bench.Point], str] | None = None
    reference: Callable[[], Points] | None = None

    @property
    def reference_median(self) -> float:
        """Median error of the reference, or infinity without a reference."""
        if self.reference is None:
            return np.inf
        return float(np.median([point.error for point in self.reference()]))


def published_closed_loops(folder: Path) -> bench.Rows:
    """Return the closed loops of a folder with published measurements, in the columns of closed_loops.csv."""
    rows = []
    for name, source in CLOSED_LOOP_FILES.items():
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
            rows += [_closed_loop(row, source) for row in csv.DictReader(lines)]
    return rows


def _closed_loop(row: dict[str, str], source: str) -> dict[str, str]:
    engine = row["framework"]
    if engine.startswith("trtllm 1"):
        source = "aiconfigurator (8B)"
    share = 0.9 if source == "InferenceX" else 1.0
    return {
        "source": source,
        "framework": ENGINES[engine.partition(" ")[0]],
        "gpu": gpu(row["gpu"].replace("B200-SXM", "B200")).name,
        "model": model(row["model"].replace("llama3", "llama-3")).name,
        "format": row["precision"].replace("bf16?", "bf16"),
        "tp": row["tp"],
        "input": str(round(share * int(row["isl"]))),
        "output": str(round(share * int(row["osl"]))),
        "in_flight": row["concurrency"],
        "ttft_ms": row["ttft_ms"],
        "tpot_ms": row["tpot_ms"],
    }


def goals(rows: bench.Rows) -> list[Goal]:
    """Return all goals. `rows` are the closed loops that are compared."""

    def loops(quantity: str) -> Callable[[], Points]:
        return partial(bench.closed_loop_points, rows, quantity)

    def fp8_cache() -> Points:
        return [point for point in bench.decode_attention() if point.case.startswith("fp8")]

    @cache
    def transfers() -> list[twin_transfer.Transfer]:
        return twin_transfer.transfers(rows)

    def twins(quantity: str) -> Callable[[], Points]:
        return lambda: twin_transfer.points(transfers(), quantity, with_twin=True)

    def no_twins(quantity: str) -> Callable[[], Points]:
        return lambda: twin_transfer.points(transfers(), quantity, with_twin=False)

    return [
        Goal("closed loops: TPOT", loops("TPOT"), 0.05, 0.16, by=framework_of),
        Goal("closed loops: TTFT", loops("TTFT"), 0.12, 0.35, by=framework_of),
        Goal("mixtures of experts: TPOT", lambda: bench.mixtures("TPOT"), 0.12, 0.30, by=framework_of),
        Goal("decode attention, fp8 KV", fp8_cache, 0.15),
        Goal("prefill attention", bench.prefill_attention, 0.15),
        Goal("GEMM, bf16 and fp8", bench.gemms, 0.08),
        Goal("static batches, TensorRT-LLM 0.9: TPOT", lambda: bench.static("TPOT"), 0.12, 0.30),
        Goal("static batches, TensorRT-LLM 0.9: prefill", lambda: bench.static("prefill"), 0.12, 0.30),
        Goal("bursts on engines of 2023, 13B: tokens/s", burst_points, mean=0.08),
        Goal("trace, twin of its first third", trace_points, p90=0.03),
        Goal("twin of another server: TPOT", twins("TPOT"), 0.10, reference=no_twins("TPOT")),
        Goal("twin of another server: TTFT", twins("TTFT"), 0.10, reference=no_twins("TTFT")),
    ]


def framework_of(point: bench.Point) -> str:
    """Return the framework of a closed loop, such as `NIM` for the source `NIM, NIM`."""
    return point.source.rpartition(", ")[2]


def burst_points() -> Points:
    """Return points of bursts of 1000 requests on the engines of 2023 (llm-infer-bench)."""
    return [
        bench.Point(
            "llm-infer-bench", "tokens/s", "A800", 1, f"{burst.group}, {burst.case}", burst.measured, burst.simulated
        )
        for burst in schedulers.bursts()
    ]


def trace_points() -> Points:
    """Return points of the median TTFT and TPOT of a trace of vLLM. A twin was fitted to the first third of it."""
    _, compared, _ = twin.trace()
    return [
        bench.Point("trace_vllm", median.case, "RTX PRO 6000", 1, "", median.measured, median.simulated)
        for median in compared
    ]


def line(name: str, points: Points, goal: Goal | None = None) -> str:
    """Format one line of the table. Without a goal, the line shows the errors of a group."""
    errors = np.array([point.error for point in points])
    p50, p90 = np.quantile(errors, (0.5, 0.9))
    bias = float(np.median([point.predicted / point.measured - 1 for point in points]))
    shown = f"{name:44} {len(points):6,} {p50:7.1%} {p90:7.1%} {errors.mean():7.1%} {bias:+7.1%}"
    if goal is None:
        return shown
    limits = {"median": goal.median, "p90": goal.p90, "mean": goal.mean}
    finite = [f"{statistic} {limit:.0%}" for statistic, limit in limits.items() if limit < np.inf]
    if goal.reference is not None:
        finite.append(f"median {goal.reference_median:.1%} without a twin")
    return f"{shown}  {'kept' if is_kept(goal, points) else 'NOT KEPT'}: {', '.join(finite)}"


def is_kept(goal: Goal, points: Points) -> bool:
    """Return True if no error of the points exceeds its limit."""
    errors = np.array([point.error for point in points])
    p50, p90 = np.quantile(errors, (0.5, 0.9))
    median = min(goal.median, goal.reference_median + TOLERANCE)
    return bool(p50 <= median and p90 <= goal.p90 and errors.mean() <= goal.mean)


def validation_rows() -> list[list[str]]:
    """Return the rows of validation.csv, from the measurements in benchmarks/data."""
    compared = _step_points()
    closed_loops = bench.read_rows("closed_loops")
    for figure in ("TTFT", "TPOT"):
        for point in bench.closed_loop_points(closed_loops, figure):
            key = (framework_of(point), point.gpu, "dense", figure)
            compared.setdefault(key, []).append((point, point.source.partition(",")[0]))
    for point in (*bench.training_times(), *bench.mt_nlg()):
        key = (TRAINING, gpu(point.gpu).name, "dense", "iteration")
        compared.setdefault(key, []).append((point, point.source))
    for figure in ("TTFT", "TPOT"):
        for point in bench.mixtures(figure):
            key = (framework_of(point), gpu(point.gpu).name, "mixture of experts", figure)
            compared.setdefault(key, []).append((point, point.source.partition(",")[0]))
    measurements: dict[tuple[str, ...], set[str]] = {}
    """Different measurements of a row with several predictions or ratios of each measurement."""
    for key, point in transferred_points():
        compared.setdefault(key, []).append((point, TRANSFER_SOURCES[key[0]]))
        measurements.setdefault(key, set()).add(f"TP {point.tp}, {point.case}")
    for point in kernel_points():
        key = (KERNELS, point.gpu, "dense", f"{point.quantity} in {_format_of_kernel(point)}")
        compared.setdefault(key, []).append((point, point.source))
    for framework, point in speed_ups():
        key = (framework, point.gpu, "dense", SPEED_UP)
        compared.setdefault(key, []).append((point, point.source))
        measurements.setdefault(key, set()).add(f"TP {point.tp}, {point.case}")
    return [
        _validation_row(key, values, len(measurements.get(key, values))) for key, values in sorted(compared.items())
    ]


@cache
def transferred_points() -> list[tuple[tuple[str, ...], bench.Point]]:
    """Return the predictions of twins of other servers, with the first four columns of their row of validation.csv."""
    results = twin_transfer.transfers(bench.read_rows("closed_loops"))
    return [
        ((framework_of(point), point.gpu, "dense", f"{TRANSFERRED} {quantity}"), point)
        for quantity in ("TTFT", "TPOT")
        for point in twin_transfer.points(results, quantity, with_twin=True)
    ]


def _step_points() -> dict[tuple[str, ...], list[tuple[bench.Point, str]]]:
    """Return the points of single steps with the source of each, by the first four columns of validation.csv."""
    compared: dict[tuple[str, ...], list[tuple[bench.Point, str]]] = {}
    for quantity, figure in {"prefill": "prefill", "TPOT": "decode step"}.items():
        for point in bench.static(quantity):
            compared.setdefault((point.source, point.gpu, "dense", figure), []).append((point, "static_trtllm09"))
    return compared


def kernel_points() -> Points:
    """Return points of single GEMMs and attention kernels, in all number formats."""
    return [*bench.gemms(), *bench.gemms_nvfp4(), *bench.decode_attention(), *bench.prefill_attention()]


def _format_of_kernel(point: bench.Point) -> str:
    """Return the number format of a kernel. It is the first word of the case, except for attention in prefill."""
    return "bf16" if point.quantity == "prefill attention" else point.case.partition(" ")[0]


def speed_ups() -> list[tuple[str, bench.Point]]:
    """Return points of speed-ups between generations of GPUs, each with its framework.

    A speed-up is the ratio of two times per output token. Both have the same model, tensor parallelism and load. The
    number formats may differ.
    """
    by_framework: dict[str, Points] = {}
    for point in bench.closed_loop_points(bench.read_rows("closed_loops"), "TPOT"):
        by_framework.setdefault(framework_of(point), []).append(point)
    by_framework["TensorRT-LLM 0.9"] = [replace(point, source="static_trtllm09") for point in bench.static("TPOT")]
    return [(framework, pair) for framework, points in by_framework.items() for pair in _pairs(points)]


def _pairs(points: Points) -> Points:
    """Return the speed-up of each pair of points on GPUs of two generations, the earlier generation first."""
    pairs = []
    for before, after in product(points, points):
        if before.gpu not in GENERATIONS or after.gpu not in GENERATIONS or _load_of(before) != _load_of(after):
            continue
        if GENERATIONS.index(before.gpu) < GENERATIONS.index(after.gpu):
            ratios = before.measured / after.measured, before.predicted / after.predicted
            gpus = f"{before.gpu}{SPEED_UP_JOIN}{after.gpu}"
            pairs.append(bench.Point(before.source.partition(",")[0], SPEED_UP, gpus, before.tp, before.case, *ratios))
    return pairs


def _load_of(point: bench.Point) -> tuple[int, str, str]:
    """Return TP, model and load of a point, without the number format, from a case `MODEL FORMAT LOAD`."""
    shape, _, load = point.case.split(" ", 2)
    return point.tp, shape, load


def _validation_row(key: tuple[str, ...], compared: list[tuple[bench.Point, str]], measurements: int) -> list[str]:
    """Return a row of validation.csv. `measurements` is the number of different measurements among the points."""
    p50, p90 = np.quantile([point.error for point, _ in compared], (0.5, 0.9))
    sources = "; ".join(sorted({source for _, source in compared}))
    covered = [""] * len(COVERED)
    if key[0] not in (KERNELS, TRAINING) and key[3] != SPEED_UP:
        settings = [settings_of(point) for point, _ in compared]
        covered = [" ".join(sorted({row[index] for row in settings}, key=_by_size)) for index in range(len(COVERED))]
    return [*key, str(measurements), f"{p50:.3f}", f"{p90:.3f}", sources, *covered]


def settings_of(point: bench.Point) -> tuple[str, ...]:
    """Return the values of the columns COVERED for a point with a case `MODEL FORMAT LOAD`.

    The load ends in `512/128, 64 in flight` or `512/128, batch 64`: tokens per prompt and per response, and requests in
    flight. The load of a mixture of experts begins with `EP 2, attention DP 1`.
    """
    case = re.compile(r"\S+ (\S+) (?:EP (\d+), attention DP (\d+) )?(\d+)/(\d+), (?:batch )?(\d+)")
    groups = case.match(point.case)
    assert groups
    return groups[1], str(point.tp), groups[2] or "1", groups[3] or "1", *groups.group(4, 5, 6)


def _by_size(text: str) -> tuple[int, str]:
    """Return a sort key that sorts numbers by size."""
    return len(text), text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or generate validation.csv. Return exit code 1 if a goal is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", metavar="FOLDER", type=Path, help="folder with published measurements")
    parser.add_argument("--write", action="store_true", help=f"generate {TABLE.name}")
    options = parser.parse_args(arguments)
    if options.write:
        table = [COLUMNS, *validation_rows()]
        with TABLE.open("w", encoding="utf-8", newline="") as lines:
            csv.writer(lines, lineterminator="\n").writerows(table)
        return 0
    rows = published_closed_loops(options.measured) if options.measured else bench.read_rows("closed_loops")
    print(f"{'':44} {'rows':>6} {'median':>7} {'p90':>7} {'mean':>7} {'bias':>7}")
    all_kept = True
    for goal in goals(rows):
        points = goal.points()
        if not points:
            print(f"{goal.name:44} {0:6}")
            continue
        all_kept &= is_kept(goal, points)
        print(line(goal.name, points, goal))
        for group in sorted({goal.by(point) for point in points}) if goal.by else []:
            print(line(f"  {group}", [point for point in points if goal.by and goal.by(point) == group]))
    ordered, pairs = schedulers.order_kept(schedulers.bursts())
    print(f"bursts: {ordered} of {pairs} pairs of servers in the measured order")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
