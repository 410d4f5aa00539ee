"""Write the reference pages that come from the code, or check that they are current.

python docs/generate.py           write them
python docs/generate.py --check   exit code 1 and their names when some are stale
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
    """The page of every command, argument and option, in the words of `--help`."""
    from loadgen.cli import app

    sections = _sections("loadgen", typer.main.get_command(app), None)
    return "\n".join([f"# Command line\n\n{NOTE}\n", *sections])


LIMITS = """`Integer` is a whole number between -2^61 and 2^61, `Count` one from 0 to 2^53, `Tokens` one from 0 to
10,000,000; a line with any other is damaged."""


def run_file() -> str:
    """The page of every field in a run file, from the annotations and docstrings of its structs."""
    modules = [
        ast.parse((DOCS.parent / "analysis/run" / name).read_text("utf-8")) for name in ("runfile.py", "record.py")
    ]
    structs = {node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef)}
    sections = [
        f"## {name}\n\n{ast.get_docstring(structs[name])}\n\n{_fields(structs[name])}\n"
        for name in ("Header", "Record", "Telemetry", "Footer")
    ]
    return "\n".join(
        [f"# Run file\n\n{NOTE}\n\nWhat it is for: [The run file](../concepts/run-file.md).\n\n{LIMITS}\n", *sections]
    )


def summary() -> str:
    """The page of every field of summary.json, from its structs in the order of the file."""
    structs = _summary_structs()
    sections = [
        f"## {name}\n\n{_text(ast.get_docstring(struct) or '')}\n\n{_fields(struct)}\n"
        for name, struct in structs.items()
    ]
    head = (DOCS / "reference/summary.template").read_text("utf-8").replace("{note}", NOTE)
    return "\n".join([head, *sections])


def summary_schema() -> str:
    """The JSON Schema of summary.json, with what each field says of itself."""
    import msgspec

    from loadgen.analysis.summary import FORMAT, Summary

    schema, structs = msgspec.json.schema(Summary), _summary_structs()
    for name, definition in schema["$defs"].items():
        meanings = {field: meaning for field, _, meaning in _fields_of(structs[name])} if name in structs else {}
        for field, told in definition["properties"].items():
            if meaning := meanings.get(field):
                told["description"] = " ".join(meaning.split())
    memory = schema["$defs"]["Summary"]["properties"]["memory"]  # {} in the file where it is None in Python
    memory["anyOf"] = [each if "$ref" in each else {"type": "object", "maxProperties": 0} for each in memory["anyOf"]]
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "summary.json", "version": FORMAT}
    return json.dumps(about | schema, indent=2) + "\n"


def _summary_structs() -> dict[str, ast.ClassDef]:
    """Those that summary.json is made of, in its order; the fields of a base belong to what it is of."""
    import msgspec

    from loadgen.analysis.summary import Summary

    files = [f"analysis/{name}.py" for name in ("summary", "hardware_limit", "prediction", "objectives")]
    files += ["analysis/run/runfile.py", "workloads/arrival_facts.py"]
    modules = [ast.parse((DOCS.parent / name).read_text("utf-8")) for name in files]
    found = {node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef)}
    for node in found.values():
        for base in (found[each] for each in map(ast.unparse, node.bases) if each in found):
            node.body = [node.body[0], *base.body[1:], *node.body[1:]]
    return {name: found[name] for name in msgspec.json.schema(Summary)["$defs"]}


def metrics() -> str:
    """The page of every metric and of the client's limits, from their registries."""
    from loadgen.analysis.client_health import LIMITS, figure_text
    from loadgen.analysis.metrics import METRICS
    from loadgen.analysis.stats import PERCENTILES, samples_needed

    rows = {
        "{metrics}": [
            f"| `{each.name}` | {each.title} | {each.unit} | {each.per} | {each.direction} | {each.definition} |"
            for each in METRICS.values()
        ],
        "{percentiles}": [
            f"| {name.replace('_', '.')} | {samples_needed(share):,} |" for name, share in PERCENTILES.items()
        ],
        "{limits}": [f"| {each.title} | {figure_text(each.figure, each.most)} | {each.meaning} |" for each in LIMITS],
    }
    return _filled("reference/metrics.template", rows)


def dialects() -> str:
    """The page of every server's endpoints, from their kinds."""
    from loadgen.servers.backends import BACKENDS

    yes = {True: "yes", False: "no"}
    rows = [
        f"| {kind.name} | {f'**{endpoint}**' if endpoint == kind.native else endpoint} | `{dialect.path}` "
        f"| {yes[dialect.token_ids]} | {'truncated' if dialect.fixed_output else 'complete'} |"
        for kind in BACKENDS.values()
        for endpoint, dialect in kind.dialects.items()
    ]
    return _filled("reference/dialects.template", {"{dialects}": rows})


def telemetry() -> str:
    """The page of the vocabulary, from the tables by which pages are read and the curves that are drawn of them."""
    from loadgen.analysis.telemetry import CURVES
    from loadgen.servers.telemetry import COUNTERS, DCGM, metric_tables

    servers = {name: metrics.names for name, metrics in metric_tables().items()}

    words = list(dict.fromkeys(word for names in servers.values() for word in names))
    names = {
        server: {word: "<br>".join(f"`{_code(each)}`" for each in names.get(word, ())) for word in words}
        for server, names in servers.items()
    }
    rows = {
        "{words}": [
            f"| `{word}` | {'counter' if word in COUNTERS else 'gauge'} | "
            + " | ".join(names[server][word] or "–" for server in servers)  # noqa: RUF001 - a dash in a table cell
            + " |"
            for word in words
        ],
        "{servers}": [" | ".join(["| word", "kind", *servers]) + " |", "| --- " * (len(servers) + 2) + "|"],
        "{gpus}": [f"| `{word}` | `{name}` | {factor:,.12g} |" for word, (name, factor) in DCGM.items()],
        "{curves}": [f"| `{each.name}` | {each.title} | {each.unit} | {each.source} |" for each in CURVES],
    }
    return _filled("reference/telemetry.template", rows)


def _filled(template: str, rows: dict[str, list[str]]) -> str:
    page = (DOCS / template).read_text("utf-8").replace("{note}", NOTE)
    for mark, lines in rows.items():
        page = page.replace(mark, "\n".join(lines))
    return page


def exported() -> str:
    """The page of every exported table and column, from their registry."""
    from loadgen.analysis.export import MEANINGS, TABLES

    parts = []
    for name, columns in TABLES.items():
        rows = [f"| `{column.name}` | {column.kind} | {_text(column.meaning)} |" for column in columns]
        table = "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])
        parts.append(f"## {name}\n\n{MEANINGS[name]}\n\n{table}\n")
    head = (DOCS / "reference/export.template").read_text("utf-8").replace("{note}", NOTE)
    return "\n".join([head, *parts])


def hardware() -> str:
    """The page of every GPU, model and number format that a model of time can be asked about, from their tables."""
    from loadgen.servers.hardware import tables

    parts = []
    for name, entries in tables().items():
        head, *_ = entries
        rows = [f"| {' | '.join(map(_code, map(str, entry.values())))} |" for entry in entries]
        table = "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *rows])
        parts.append(f"## {name}\n\n{table}\n")
    head_lines = f"# Hardware\n\n{NOTE}\n\n{HARDWARE}\n"
    return "\n".join([head_lines, *parts])


HARDWARE = """What `loadgen limits`, `loadgen sim --clock batching` and the estimate of `loadgen matrix` know: data
sheets' figures, dense, per GPU, with decimal prefixes; link rates count both directions together, and 0 means that GPUs
talk over PCIe. `also` are other names. What each constant means, and what becomes of it: [What the hardware could
do](../concepts/hardware.md) and [When a simulated server's tokens leave](../concepts/simulated-timing.md)."""


def validation() -> str:
    """The page of how far the hardware model is from measurements, the worst first."""
    import numpy as np

    from benchmarks import hardware_model as bench

    def row(name: str, points: list[bench.Point], kept: str) -> tuple[float, str]:
        errors = [each.error for each in points]
        p50, p90 = np.quantile(errors, (0.5, 0.9))
        bias = np.median([each.predicted / each.measured for each in points]) - 1
        cells = (name, f"{len(points):,}", f"{100 * p50:.0f} %", f"{100 * p90:.0f} %", f"{100 * bias:+.0f} %", kept)
        return float(p50), f"| {' | '.join(cells)} |"

    def listed(rows: list[tuple[float, str]], first: str) -> str:
        head = f"| {first} | points | median | p90 | bias |  |"
        worst_first = [text for _, text in sorted(rows, key=lambda each: -each[0])]
        return "\n".join([head, "| --- | --: | --: | --: | --: | --- |", *worst_first])

    sources, groups = [], []
    fitted = {each.name: (each.points(), "kept" if each.kept() else "NOT KEPT") for each in bench.BUDGETS}
    for name, (points, kept) in (fitted | {name: (made(), "") for name, made in bench.BESIDE.items()}).items():
        sources.append(row(name, points, kept))
        by_group: dict[tuple[str, int], list[bench.Point]] = {}
        for each in points:
            by_group.setdefault((each.gpu, each.tp), []).append(each)
        groups += [row(f"{name}: {gpu}, TP {tp}", of, "") for (gpu, tp), of in by_group.items()]
    filled = {"{sources}": listed(sources, "what"), "{groups}": listed(groups, "what, GPU, tensor parallel")}
    page = (DOCS / "reference/hardware-validation.template").read_text("utf-8").replace("{note}", NOTE)
    for mark, table in filled.items():
        page = page.replace(mark, table)
    return page


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
    for part in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _sections(part, command.get_command(context, part), context)


def _section(command: Any, context: Any) -> str:
    arguments = [each.name.upper() + "..." * (each.nargs != 1) for each in command.params if not _is_option(each)]
    usage = " ".join([context.command_path, *(["COMMAND"] if hasattr(command, "list_commands") else []), *arguments])
    rows = [f"| `{_code(_names(each))}` | {_text(_meaning(each))} |" for each in command.params]
    table = "\n".join(["| argument or option | meaning |", "| --- | --- |", *rows])
    says = (command.help or "").strip().replace("<", "&lt;")
    return f"## {context.command_path}\n\n{says}\n\n    {usage} [OPTIONS]\n\n{table}\n"


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _names(parameter: Any) -> str:
    """From the plain attributes, because `--help` lays them out differently in each version of typer."""
    if not _is_option(parameter):
        return str(parameter.name.upper())
    return ", ".join(parameter.opts) + "".join(f" / {name}" for name in parameter.secondary_opts)


def _meaning(parameter: Any) -> str:
    default = parameter.default
    shown = isinstance(default, (int, float, str)) and not isinstance(default, bool)
    ending = " Required." if parameter.required else f" Default: `{default}`." if shown else ""
    return (parameter.help or "") + ending


def _fields(struct: ast.ClassDef) -> str:
    rows = [f"| `{field}` | `{_code(kind)}` | {_text(meaning)} |" for field, kind, meaning in _fields_of(struct)]
    return "\n".join(["| field | type | meaning |", "| --- | --- | --- |", *rows])


def _fields_of(struct: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name in the file, type and meaning of each."""
    for index, node in enumerate(struct.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [each.value for each in getattr(node.value, "keywords", ()) if each.arg == "name"]
            name = ast.literal_eval(names[0]) if names else node.target.id
            yield name, ast.unparse(node.annotation), _said_after(struct, index)


def _said_after(struct: ast.ClassDef, index: int) -> str:
    """The string that stands below a field, which is its docstring."""
    following = struct.body[index + 1] if index + 1 < len(struct.body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return str(following.value.value)
    return ""


def _text(text: str) -> str:
    """Help texts and docstrings are plain text: an angle bracket in them is no HTML."""
    return _code(text).replace("<", "&lt;")


def _code(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
