"""A matrix as text for the terminal: one table, what failed, and whether to believe it."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from analysis import matrix_words as said
from analysis import words

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
    from rich.console import Console
    from rich.text import Text

    output = StringIO()
    console = Console(
        file=output,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    title = Text()
    if mark := said.mark(found):
        title.append(f"{mark}  ", style="bold yellow")
    console.print(title.append(said.title(found), style="bold"))
    console.print()
    console.print(_table(found))
    for line in said.sentences_of_all(found):
        console.print(Text(line))
    console.print()
    for line in found["failures"]:
        cell = said.cell_of(found, line["cell"])
        console.print(Text(_plain(f"failed: {cell}, repeat {line['repeat']}: {line['reason']}"), style="red"))
    for belief in said.beliefs(found):
        console.print(Text(belief["text"], style="green" if belief["good"] else "yellow"))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


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
            _plain(said.platform_of(found, cell["host"])),
            *(_plain(cell[name]) for name, shown in several.items() if shown),
            _plain(said.server_of(found, cell["server"])),
            f"{len(cell['runs'])}/{cell['planned']}",
            *(said.figure(name, cell["figures"]) for name in SHOWN),
            words.UNKNOWN if cell["lengths"]["mean"] is None else f"{cell['lengths']['mean']:,.1f}",
        )
    return table


def _plain(text: str) -> str:
    """Without control characters: a server's words must not move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
