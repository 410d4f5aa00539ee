"""What a matrix is going to do, as text: the table of `--dry-run`, and one line before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import Any

from loadgen.matrix import estimate
from loadgen.matrix.cells import Repeat, Start, cells, skipped
from loadgen.matrix.plan import MatrixPlan
from loadgen.matrix.state import Line

HOW = {
    estimate.MEASURED: "the mean of what this matrix has measured so far",
    estimate.MODELLED: "what the simulated server makes of this server, card and model, "
    f"and {estimate.PREPARED_S:g} s; a run of a given duration takes that",
    estimate.GUESSED: "until a server is up "
    + ", ".join(f"{seconds:g} s ({launch})" for launch, seconds in estimate.START_S.items())
    + f"; a run at {estimate.TOKENS_PER_S:,.0f} output tokens/s",
}


def heading(plan: MatrixPlan, starts: Sequence[Start]) -> str:
    """How much there is to do, in one line."""
    parts = [
        _count(len(plan.servers), "server"),
        _count(len(plan.hosts), "host"),
        _count(len(plan.models), "model"),
        _count(len(plan.workloads), "workload"),
    ]
    runs = sum(len(start.repeats) for start in starts)
    return (
        f"{plan.name}: {' x '.join(parts)}: {_count(len(cells(plan)), 'cell')}, "
        f"{_count(plan.repeats, 'repeat')} each: {_count(runs, 'run')} in {_count(len(starts), 'start')}"
    )


def dry_run(
    plan: MatrixPlan, starts: Sequence[Start], lines: Sequence[Line], done: Iterable[Repeat], *, width: int = 100
) -> str:
    """The starts in order, what each serves, how long it takes, and how that is known."""
    from rich.console import Console

    output = StringIO()
    console = Console(file=output, width=width, highlight=False, legacy_windows=False)
    over = frozenset(done)
    console.print(f"{heading(plan, starts)}\n")
    console.print(_table(plan, starts, lines, over))
    for line in _below(plan, starts, lines, over):
        console.print(line, soft_wrap=False, markup=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _table(plan: MatrixPlan, starts: Sequence[Start], lines: Sequence[Line], done: frozenset[Repeat]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "server", "host", "model", "runs"):
        table.add_column(name, justify="right" if name == "start" else "left", no_wrap=name != "runs")
    for name in ("up after", "runs take"):
        table.add_column(name, justify="right", no_wrap=True)
    runs = estimate.of_runs(plan, starts, lines)
    for start in starts:
        up = estimate.of_start(start, lines)
        left = [repeat for repeat in start.repeats if repeat not in done]
        found = [runs[repeat.cell] for repeat in left]
        take = f"{sum(each.seconds for each in found):,.0f} s {_hows(each.how for each in found)}"
        table.add_row(
            str(start.number),
            f"{start.server.name} ({start.launch})",
            start.host.name,
            start.model.name,
            "  ".join(_marked(repeat, done) for repeat in start.repeats),
            f"{up.seconds:,.0f} s {up.how}" if left else "",
            take if left else "done",
        )
    return table


def _below(plan: MatrixPlan, starts: Sequence[Start], lines: Sequence[Line], done: frozenset[Repeat]) -> Iterator[str]:
    for cell, reason in skipped(plan).items():
        yield f"Not measured: {cell}: {reason}."
    yield ""
    left = sum(repeat not in done for start in starts for repeat in start.repeats)
    over = f", {len(done)} are done" if done else ""
    yield f"{_count(left, 'run')} to go{over}: {estimate.in_words(estimate.total_s(plan, starts, lines, done))}."
    runs = estimate.of_runs(plan, starts, lines)
    used = Counter([each.how for each in runs.values()] + [estimate.of_start(start, lines).how for start in starts])
    yield from (f"  {how}: {meaning}." for how, meaning in HOW.items() if used[how])


def _marked(repeat: Repeat, done: frozenset[Repeat]) -> str:
    return f"{repeat.cell.workload}#{repeat.number}{' done' if repeat in done else ''}"


def _hows(found: Iterable[str]) -> str:
    return "/".join(dict.fromkeys(found))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
