"""A matrix as text for the terminal: one table, what failed, and whether to believe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis import matrix_words as said
from analysis import words
from analysis.terminal import plain, printed

SHOWN = ("output_tokens_per_s", "ttft.p50", "tpot.p50", "e2e.p50", "e2e.p99")
TITLES = ("output", "TTFT p50", "TPOT p50", "E2E p50", "E2E p99")

Found = Mapping[str, Any]


def in_a_line(summary: Found) -> str:
    """What one run gave, in a few words."""
    rate = words.significant(summary["throughput"]["output_tokens_per_s"], 4)
    latency = summary["latency"]
    parts = [
        f"{rate} tokens/s",
        f"TTFT {words.duration(latency['ttft_s']['p50'])}",
        f"E2E {words.duration(latency['e2e_s']['p50'])}",
    ]
    requests = summary["requests"]
    if requests["complete"] != requests["sent"] + requests["dropped"] + requests["unrecorded"]:
        parts.append(words.endings(summary).rstrip("."))
    if summary["client"]["verdict"] != "ok":
        parts.append("the client was the limit")
    return ", ".join(parts)


def render(found: Found, *, width: int = 100, colour: bool = False) -> str:
    """The matrix as lines of at most `width` characters; ANSI colours only if asked for."""
    return printed(_parts(found), width=width, colour=colour)


def _parts(found: Found) -> list[Any]:
    from rich.text import Text

    title = Text()
    if mark := said.mark(found):
        title.append(f"{mark}  ", style="bold yellow")
    parts: list[Any] = [title.append(said.title(found), style="bold"), "", _table(found)]
    parts += [Text(line) for line in said.sentences_of_all(found)]
    parts.append("")
    for line in found["failures"]:
        cell = said.cell_of(found, line["cell"])
        parts.append(Text(plain(f"failed: {cell}, repeat {line['repeat']}: {line['reason']}"), style="red"))
    beliefs = said.beliefs(found)
    return [*parts, *(Text(each["text"], style="green" if each["good"] else "yellow") for each in beliefs)]


def _table(found: Found) -> Any:
    from rich.table import Table

    several = {name: len(found[f"{name}s"]) > 1 for name in ("model", "workload")}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("platform", *(name for name, shown in several.items() if shown), "server"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", *TITLES, "tokens each"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(found["cells"], key=lambda cell: [host["name"] for host in found["hosts"]].index(cell["host"]))
    for cell in ordered:
        table.add_row(
            plain(said.platform_of(found, cell["host"])),
            *(plain(cell[name]) for name, shown in several.items() if shown),
            plain(said.server_of(found, cell["server"])),
            f"{len(cell['runs'])}/{cell['planned']}",
            *(said.figure(name, cell["figures"]) for name in SHOWN),
            words.UNKNOWN if cell["lengths"]["mean"] is None else f"{cell['lengths']['mean']:,.1f}",
        )
    return table
