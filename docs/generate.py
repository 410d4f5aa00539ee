"""Generates the reference pages from the code, or checks that they are current.

python docs/generate.py           write all pages that differ
python docs/generate.py --check   print the pages that differ, and exit with 1 if there are any
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

DOCS = Path(__file__).parent
NOTE = "<!-- Written by `make docs` from the code itself. -->"


def command_line() -> str:
    """Return the page of all commands, arguments and options, with the text of `--help`."""
    from loadgen.cli import app

    sections = _sections("loadgen", typer.main.get_command(app), None)
    return "\n".join([f"# Command line\n\n{NOTE}\n\n{COMMAND_LINE}\n", *sections])


COMMAND_LINE = """For everyone who looks for an option. This page lists every command with its arguments and options, as
`--help` prints them. [Which command for which job](../which-command.md) helps to choose a command."""
RUN_FILE = """For everyone who reads `run.jsonl` with a program of their own. This page lists every field of its
lines. [The run file](../concepts/run-file.md) explains how the file is written and read.

`Integer` is a whole number between -2^61 and 2^61, `Count` one from 0 to 2^53, and `Tokens` one from 0 to 10,000,000. A
line with any other number is damaged."""


def run_file() -> str:
    """Return the page of all fields of a run file, from the annotations and docstrings of its structs."""
    modules = [
        ast.parse((DOCS.parent / "analysis/run" / name).read_text("utf-8"))
        for name in ("runfile.py", "record.py", "canary.py", "command_record.py", "removed_records.py")
    ]
    structs = {node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef)}
    sections = [
        f"## {name}\n\n{ast.get_docstring(structs[name])}\n\n{_fields(structs[name])}\n"
        for name in (
            "Header",
            "Record",
            "Canary",
            "CommandRecord",
            "RemovedRecords",
            "RemovedWindow",
            "Telemetry",
            "Footer",
        )
    ]
    return "\n".join([f"# Run file\n\n{NOTE}\n\n{RUN_FILE}\n", *sections])


def summary() -> str:
    """Return the page of all fields of summary.json, from its structs in the order of the file."""
    structs = _summary_structs()
    sections = [
        f"## {name}\n\n{_text(ast.get_docstring(struct) or '')}\n\n{_fields(struct)}\n"
        for name, struct in structs.items()
    ]
    head = (DOCS / "reference/summary.template").read_text("utf-8").replace("{note}", NOTE)
    return "\n".join([head, *sections])


def summary_schema() -> str:
    """Return the JSON Schema of summary.json, with the docstrings of the fields as descriptions."""
    import msgspec

    from loadgen.analysis.summary import FORMAT, Summary

    schema, structs = msgspec.json.schema(Summary), _summary_structs()
    for name, definition in schema["$defs"].items():
        meanings = {field: meaning for field, _, meaning in _fields_of(structs[name])} if name in structs else {}
        for field, description in definition["properties"].items():
            if meanings.get(field):
                description["description"] = " ".join(meanings[field].split())
    # `memory` is None in Python and {} in the file.
    memory = schema["$defs"]["Summary"]["properties"]["memory"]
    empty = {"type": "object", "maxProperties": 0}
    memory["anyOf"] = [option if "$ref" in option else empty for option in memory["anyOf"]]
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "summary.json", "version": FORMAT}
    return json.dumps(about | schema, indent=2) + "\n"


def _summary_structs() -> dict[str, ast.ClassDef]:
    """Return the class definitions of summary.json by name, in the order of the file. Fields of base classes are
    included.
    """
    import msgspec

    from loadgen.analysis.summary import Summary

    names = (
        "summary",
        "hardware_limit",
        "held_back",
        "cached_prompts",
        "canaries",
        "checked_texts",
        "reasoning",
        "speculation",
        "valid_outputs",
        "prediction",
        "objectives",
    )
    files = [f"analysis/{name}.py" for name in names]
    files += ["analysis/run/runfile.py", "workloads/arrival_facts.py"]
    modules = [ast.parse((DOCS.parent / name).read_text("utf-8")) for name in files]
    classes = {node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef)}
    for node in classes.values():
        base_names = [ast.unparse(base) for base in node.bases]
        for base in [classes[name] for name in base_names if name in classes]:
            node.body = [node.body[0], *base.body[1:], *node.body[1:]]
    return {name: classes[name] for name in msgspec.json.schema(Summary)["$defs"]}


def metrics() -> str:
    """Return the page of all metrics and of the client's limits, from their registries."""
    from loadgen.analysis.client_health import LIMITS, figure_text
    from loadgen.analysis.metrics import METRICS
    from loadgen.analysis.stats import PERCENTILES, samples_needed

    rows = {
        "{metrics}": [
            f"| `{metric.name}` | {metric.title} | {metric.unit} | {metric.per} | {metric.direction} "
            f"| {metric.definition} |"
            for metric in METRICS.values()
        ],
        "{percentiles}": [
            f"| {name.replace('_', '.')} | {samples_needed(share):,} |" for name, share in PERCENTILES.items()
        ],
        "{limits}": [
            f"| {limit.title} | {figure_text(limit.figure, limit.maximum)} | {limit.meaning} |" for limit in LIMITS
        ],
    }
    return _filled("reference/metrics.template", rows)


def dialects() -> str:
    """Return the page of all servers' endpoints, from the registry of backends."""
    from loadgen.servers.backends import BACKENDS

    rows = []
    for backend in BACKENDS.values():
        for endpoint, dialect in backend.dialects.items():
            name = f"**{endpoint}**" if endpoint == backend.native else endpoint
            token_ids = "yes" if dialect.token_ids else "no"
            short = "truncated" if dialect.fixed_output else "complete"
            rows.append(f"| {backend.name} | {name} | `{dialect.path}` | {token_ids} | {short} |")
    return _filled("reference/dialects.template", {"{dialects}": rows})


def telemetry() -> str:
    """Return the page of all telemetry names and all curves. The names come from the tables for reading metrics
    endpoints.
    """
    from loadgen.analysis.telemetry import CURVES
    from loadgen.servers.telemetry import COUNTERS, DCGM, metric_tables

    servers = {name: metrics.names for name, metrics in metric_tables().items()}

    words = list(dict.fromkeys(word for names in servers.values() for word in names))
    names = {
        server: {word: "<br>".join(f"`{_code(name)}`" for name in names.get(word, ())) for word in words}
        for server, names in servers.items()
    }
    rows = {
        "{words}": [
            f"| `{word}` | {'counter' if word in COUNTERS else 'gauge'} | "
            + " | ".join(names[server][word] or "–" for server in servers)  # noqa: RUF001 - a dash in a table cell
            + " |"
            for word in words
        ],
        "{servers}": [" | ".join(["| name", "type", *servers]) + " |", "| --- " * (len(servers) + 2) + "|"],
        "{gpus}": [f"| `{word}` | `{name}` | {factor:,.12g} |" for word, (name, factor) in DCGM.items()],
        "{curves}": [f"| `{curve.name}` | {curve.title} | {curve.unit} | {curve.source} |" for curve in CURVES],
    }
    return _filled("reference/telemetry.template", rows)


def _filled(template: str, rows: dict[str, list[str]]) -> str:
    """Return a template with each placeholder replaced by its lines."""
    page = (DOCS / template).read_text("utf-8").replace("{note}", NOTE)
    for mark, lines in rows.items():
        page = page.replace(mark, "\n".join(lines))
    return page


def exported() -> str:
    """Return the page of all exported tables and columns, from their registry."""
    from loadgen.analysis.export import MEANINGS, TABLES

    parts = []
    for name, columns in TABLES.items():
        rows = [f"| `{column.name}` | {column.kind} | {_text(column.meaning)} |" for column in columns]
        table = "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])
        parts.append(f"## {name}\n\n{MEANINGS[name]}\n\n{table}\n")
    head = (DOCS / "reference/export.template").read_text("utf-8").replace("{note}", NOTE)
    return "\n".join([head, *parts])


def hardware() -> str:
    """Return the page of all GPUs, models, number formats and constants of the hardware model."""
    from loadgen.servers.hardware import tables

    parts = []
    for name, entries in tables().items():
        head, *_ = entries
        rows = [f"| {' | '.join(map(_code, map(str, entry.values())))} |" for entry in entries]
        table = "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *rows])
        parts.append(f"## {name}\n\n{table}\n")
    head_lines = f"# Hardware\n\n{NOTE}\n\n{HARDWARE}\n"
    return "\n".join([head_lines, *parts])


HARDWARE = """For everyone who wants to know which GPUs, models and engines the hardware model includes, and where its
constants come from. `loadgen limits`, `simulate`, `plan-capacity`, `mock-server --clock batching` and the estimate of
`loadgen matrix` use these tables.

Figures are those of the data sheets: dense, per GPU, with decimal prefixes. Link rates are the sum of both directions,
and 0 means that GPUs communicate over PCIe. `also` lists other names. [What the hardware could
do](../concepts/hardware.md) and [When a simulated server sends its tokens](../concepts/simulated-timing.md) explain the
constants and how they are used."""


def validation() -> str:
    """Return the page that compares the hardware model with published measurements, the largest errors first."""
    import numpy as np

    from benchmarks import hardware_model as bench

    def row(name: str, points: list[bench.Point], kept: str) -> tuple[float, str]:
        errors = [point.error for point in points]
        p50, p90 = np.quantile(errors, (0.5, 0.9))
        bias = np.median([point.predicted / point.measured for point in points]) - 1
        cells = (name, f"{len(points):,}", f"{100 * p50:.0f}%", f"{100 * p90:.0f}%", f"{100 * bias:+.0f}%", kept)
        return float(p50), f"| {' | '.join(cells)} |"

    def table(rows: list[tuple[float, str]], first_column: str) -> str:
        head = f"| {first_column} | points | median | p90 | bias | budget |"
        worst_first = [text for _, text in sorted(rows, key=lambda entry: -entry[0])]
        return "\n".join([head, "| --- | --: | --: | --: | --: | --- |", *worst_first])

    sources = []
    groups = []
    with_budget = {entry.name: (entry.points(), "met" if entry.kept() else "NOT MET") for entry in bench.BUDGETS}
    without_budget = {name: (points_of(), "") for name, points_of in bench.BESIDE.items()}
    for name, (points, kept) in (with_budget | without_budget).items():
        sources.append(row(name, points, kept))
        by_group: dict[tuple[str, int], list[bench.Point]] = {}
        for point in points:
            by_group.setdefault((point.gpu, point.tp), []).append(point)
        groups += [row(f"{name}: {gpu}, TP {tp}", members, "") for (gpu, tp), members in by_group.items()]
    tables = {
        "{sources}": [table(sources, "quantity")],
        "{groups}": [table(groups, "quantity, GPU, tensor parallel")],
    }
    return _filled("reference/hardware-validation.template", tables)


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": command_line,
    "reference/hardware.md": hardware,
    "reference/hardware-validation.md": validation,
    "reference/metrics.md": metrics,
    "reference/summary.md": summary,
    "reference/summary.schema.json": summary_schema,
    "reference/export.md": exported,
    "reference/run-file.md": run_file,
    "reference/telemetry.md": telemetry,
    "reference/dialects.md": dialects,
}


def main(arguments: list[str]) -> int:
    """Write or check the pages. Return the exit code."""
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
    """Yield one section per command, depth first.

    The arguments are untyped, because some versions of typer bundle their own click.
    """
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield _section(command, context)
    for subcommand in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _sections(subcommand, command.get_command(context, subcommand), context)


def _section(command: Any, context: Any) -> str:
    usage = [context.command_path]
    if hasattr(command, "list_commands"):
        usage.append("COMMAND")
    usage += [
        parameter.name.upper() + ("" if parameter.nargs == 1 else "...")
        for parameter in command.params
        if not _is_option(parameter)
    ]
    rows = [f"| `{_code(_names(parameter))}` | {_text(_meaning(parameter))} |" for parameter in command.params]
    table = "\n".join(["| argument or option | meaning |", "| --- | --- |", *rows])
    description = (command.help or "").strip().replace("<", "&lt;")
    return f"## {context.command_path}\n\n{description}\n\n    {' '.join(usage)} [OPTIONS]\n\n{table}\n"


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _names(parameter: Any) -> str:
    """Return the names of a parameter, from its attributes. The layout of `--help` varies with typer's version."""
    if not _is_option(parameter):
        return str(parameter.name.upper())
    return ", ".join(parameter.opts) + "".join(f" / {name}" for name in parameter.secondary_opts)


def _meaning(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if parameter.required:
        return text + " Required."
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        return text + f" Default: `{default}`."
    return text


def _fields(struct: ast.ClassDef) -> str:
    rows = [f"| `{field}` | `{_code(kind)}` | {_text(meaning)} |" for field, kind, meaning in _fields_of(struct)]
    return "\n".join(["| field | type | meaning |", "| --- | --- | --- |", *rows])


def _fields_of(struct: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the name in the file, the type and the meaning of each field of a struct."""
    for index, node in enumerate(struct.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            keywords = getattr(node.value, "keywords", ())
            names = [keyword.value for keyword in keywords if keyword.arg == "name"]
            name = ast.literal_eval(names[0]) if names else node.target.id
            yield name, ast.unparse(node.annotation), _field_docstring(struct, index)


def _field_docstring(struct: ast.ClassDef, index: int) -> str:
    """Return the string literal below a field, or an empty string."""
    following = struct.body[index + 1] if index + 1 < len(struct.body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return str(following.value.value)
    return ""


def _text(text: str) -> str:
    """Escape a help text or docstring for a Markdown table cell. Angle brackets are escaped too, because they are not
    HTML.
    """
    return _code(text).replace("<", "&lt;")


def _code(text: str) -> str:
    """Escape a text for a table cell inside backticks."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
