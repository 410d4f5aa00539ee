"""A summary as text for the terminal: what came back, how it was distributed, whether to believe it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from analysis import delivery_words, good_words, memory, turns_text, words
from analysis.asked import asked
from analysis.stats import PERCENTILES, WITH_INTERVAL, samples_needed
from analysis.terminal import plain, printed

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "normalised_s")
COLUMNS = ("mean", *WITH_INTERVAL, "max")
DETAIL_LENGTH = 100


def render(summary: words.Summary, *, width: int = 80, colour: bool = False) -> str:
    """The summary as lines of at most `width` characters; ANSI colours only if asked for."""
    return printed(_parts(summary), width=width, colour=colour)


def _parts(summary: words.Summary) -> list[Any]:
    parts: list[Any] = [_title(summary), "", _headline(summary), "", _latency(summary), *_below_table(summary), ""]
    parts += _turns(summary)
    if summary["requests"]["errors"]:
        parts += [_failures(summary), ""]
    return [*parts, *_verdict(summary), *_objectives(summary)]


def _title(summary: words.Summary) -> Text:
    from rich.text import Text

    model = summary["server"]["model"]
    title = Text()
    if mark := words.simulated(summary):
        title.append(f"{mark}  ", style="bold yellow")
    title.append(plain(words.who(summary)), style="bold")
    title.append(plain(f"  {model}" if model else ""))
    title.append(f"\n{asked(summary)}", style="dim")
    return title


def _headline(summary: words.Summary) -> Table:
    from rich.table import Table

    throughput, run = summary["throughput"], summary["run"]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    table.add_row("Output", f"{words.significant(throughput['output_tokens_per_s'], 4)} tokens/s", words.tail(summary))
    both = f"{words.significant(throughput['total_tokens_per_s'], 4)} tokens/s"
    table.add_row("Output and prompts", both, words.rate_interval(summary, "total_tokens_per_s"))
    took = "; ".join(
        filter(None, (words.rate_interval(summary, "requests_per_s"), f"in {words.duration(run['duration_s'])}"))
    )
    table.add_row("Requests", f"{words.significant(throughput['requests_per_s'])} /s", took)
    if summary["run"]["arrivals"] == "burst":
        table.add_row("Burst skew", words.duration(summary["burst"]["skew_s"]), words.skew(summary))
    return table


def _latency(summary: words.Summary) -> Table:
    from rich.table import Table

    mark = words.simulated(summary)
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title=f"{mark}  latency" if mark else "latency",
        title_justify="left",
        title_style="dim",
        header_style="dim",
        expand=False,
    )
    table.add_column("", no_wrap=True, min_width=11)
    table.add_column("", style="dim", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    for name in LATENCIES:
        table.add_row(words.NAMES[name], *_latency_cells(summary["latency"][name]))
    return table


def _latency_cells(described: words.Summary) -> list[str]:
    factor, unit = words.scale_of(described["p50"] or described["mean"])
    cells = []
    for name in COLUMNS:
        value = described[name]
        if name in described["thin"]:
            cells.append(f"n<{samples_needed(PERCENTILES[name])}")
        else:
            cells.append(words.UNKNOWN if value is None else words.significant(value * factor, 4))
    return [unit, *cells]


def _below_table(summary: words.Summary) -> list[Text]:
    from rich.text import Text

    lines = []
    if any(summary["latency"][name]["thin"] for name in LATENCIES):
        lines.append("n<N: n too small, the percentile needs N independent samples to mean something.")
    if shared := words.burst_intervals(summary):
        lines.append(shared)
    return [Text(line, style="dim") for line in lines]


def _turns(summary: words.Summary) -> list[Any]:
    """Latency by turn, where the run was of sessions."""
    from rich.table import Table
    from rich.text import Text

    if not (found := summary.get("turns")):
        return []
    mark, title = words.simulated(summary), "latency by turn"
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title=f"{mark}  {title}" if mark else title,
        title_justify="left",
        title_style="dim",
        header_style="dim",
    )
    for head in turns_text.HEADS:
        table.add_column(head, justify="right")
    for turn in found[: turns_text.SHOWN_MAX]:
        table.add_row(*turns_text.cells(turn))
    more = turns_text.left_out(summary)
    return [table, *([Text(more, style="dim")] if more else []), ""]


def _failures(summary: words.Summary) -> Table:
    from rich.table import Table
    from rich.text import Text

    mark = words.simulated(summary)
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title=f"{mark}  not complete" if mark else "not complete",
        title_justify="left",
        title_style="dim",
        show_header=False,
    )
    table.add_column(justify="right", style="bold red")
    table.add_column(no_wrap=True)
    table.add_column()
    for kind, number in summary["requests"]["errors"].items():
        example = summary["requests"]["examples"][kind][0]
        status = f"{example['http_status']} " if example["http_status"] not in (None, 200) else ""
        table.add_row(f"{number:,}", Text(plain(kind)), Text(plain(f"{status}{example['detail']}")[:DETAIL_LENGTH]))
    return table


def _verdict(summary: words.Summary) -> list[Text]:
    from rich.text import Text

    requests = summary["requests"]
    good = requests["complete"] == requests["sent"] + requests["dropped"] + requests["unrecorded"]
    lines = [
        Text(words.endings(summary), style="green" if good else "red"),
        Text(words.lengths(summary)),
        Text(words.believe(summary), style="green" if summary["client"]["verdict"] == "ok" else "red"),
    ]
    if sent := delivery_words.delivery(summary):
        lines.append(Text(sent, style="" if delivery_words.delivered(summary) else "yellow"))
    if machines := words.machines(summary):
        lines.append(Text(plain(machines)))
    lines += [Text(plain(line)) for line in good_words.goodput(summary)]
    if window := words.window(summary):
        lines.append(Text(window))
    if counted := words.counters(summary):
        lines.append(Text(counted))
    lines += [Text(plain(line)) for line in memory.sentences(summary)]
    return [*lines, *(Text(plain(warning), style="yellow") for warning in words.warnings(summary))]


def _objectives(summary: words.Summary) -> list[Any]:
    """One row each, and what a verdict that is none means."""
    from rich.table import Table
    from rich.text import Text

    objectives = summary.get("objectives", ())
    if not objectives:
        return []
    mark = words.simulated(summary)
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title=f"{mark}  objectives" if mark else "objectives",
        title_justify="left",
        title_style="dim",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column()
    for each in objectives:
        style = {"pass": "green", "fail": "bold red"}.get(each["verdict"], "yellow")
        table.add_row(Text(each["verdict"], style=style), Text(plain(words.objective(each))))
    untold = sum(each["verdict"] == "cannot tell" for each in objectives)
    warning = f"{words.count(untold, 'objective')} cannot be told from this run. That is neither a pass nor a fail."
    return ["", table, *([Text(warning, style="yellow")] if untold else [])]
