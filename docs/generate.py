"""Write the reference pages that come from the code, or check that they are current.

python docs/generate.py           write them
python docs/generate.py --check   exit code 1 and their names when some are stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

DOCS = Path(__file__).parent


def command_line() -> str:
    """The page of every command, argument and option, in the words of `--help`."""
    from loadgen.cli import app

    sections = _sections("loadgen", typer.main.get_command(app), None)
    return "# Command line\n\n<!-- Written by `make docs` from the commands themselves. -->\n\n" + "\n".join(sections)


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": command_line,
}


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    stale = [name for name, page in PAGES.items() if _present(DOCS / name) != page()]
    if "--check" in arguments:
        print(*(f"docs/{name} is stale: run `make docs`." for name in stale), sep="\n", end="")
        return bool(stale)
    for name in stale:
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(PAGES[name](), "utf-8")
        print(f"docs/{name}")
    return 0


def _present(page: Path) -> str:
    return page.read_text("utf-8") if page.exists() else ""


def _sections(name: str, command: Any, parent: Any) -> Iterator[str]:
    """One section per command, depth first. Untyped, because typer brings a click of its own in some versions."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield _section(command, context)
    for part in getattr(command, "commands", {}):
        yield from _sections(part, command.commands[part], context)


def _section(command: Any, context: Any) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    paragraphs = [f"## {context.command_path}", (command.help or "").strip(), f"    {usage}", _table(command, context)]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _table(command: Any, context: Any) -> str:
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    rows = [f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in records]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
