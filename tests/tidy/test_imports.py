"""What an import costs and drags in. The directions between packages are import-linter's: see pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import loadgen

HEAVY = {
    *("numpy", "pandas", "plotly", "pydantic", "httpx", "aiohttp", "uvloop", "tokenizers", "jinja2", "rich"),
    *("prometheus_client", "psutil", "pynvml"),
}
"""What a command that does not need it must not load."""

CLIENTS = {"aiohttp", "httpx", "uvloop", "requests", "urllib3"}

DATACLASSES = {"Answer", "Connection", "Exchange", "ResponseFraming", "Output", "Plan", "ScheduledRequest"}
"""What stays one: fields that are written while measuring, where a Struct is slower, and an `__init__` of its own."""

RUN = "from loadgen.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"


def test_analysis_loads_no_client_library(root: Path) -> None:
    """Every module of analysis can be imported where no HTTP client and no event loop is installed."""
    modules = sorted(_module(file, root) for file in (root / "analysis").rglob("*.py"))
    assert not CLIENTS & _loaded(root, "".join(f"import {module}\n" for module in modules))


def test_the_public_names_cost_nothing_until_they_are_used(root: Path) -> None:
    """`import loadgen` loads nothing but itself: every reader of a run pays for it. Its names are those it lists."""
    before, after = _loaded(root, ""), _loaded(root, "import loadgen\n")
    assert after - before - sys.stdlib_module_names == {"loadgen"}
    assert all(getattr(loadgen, name) for name in loadgen.__all__)
    with pytest.raises(AttributeError, match="no attribute 'burst'"):
        _ = loadgen.burst


def test_the_version_costs_no_heavy_import(root: Path) -> None:
    """`loadgen --version` answers without loading tables, charts, clients or tokenizers."""
    command = "import sys\nsys.argv = ['loadgen', '--version']\n" + RUN
    assert not HEAVY & _loaded(root, command)


def test_a_plan_costs_no_heavy_import(root: Path) -> None:
    """All that stands between the command and its first byte: what makes its options and its Plan."""
    plan = "from loadgen.cli.options import plan_parameters\n[*plan_parameters()]\n"
    assert not HEAVY & _loaded(root, f"{plan}from loadgen.plan import Plan\nPlan(server='vllm', n=1)\n")


def test_the_coordinator_waits_for_no_event_loop(root: Path) -> None:
    """What measures is imported by the worker, while its coordinator reads the server for the first time."""
    assert not (HEAVY | CLIENTS | {"asyncio"}) & _loaded(root, "import loadgen.engine.coordinator\n")


def test_values_are_structs(root: Path) -> None:
    """Of what a run imports: a dataclass takes half a millisecond of its start, a Struct a twentieth of that."""
    program = (
        "import loadgen.analysis.report.run_document, loadgen.analysis.slo, loadgen.cli.output, loadgen.cli.run\n"
        "import loadgen.engine.coordinator, loadgen.engine.driver, loadgen.engine.prepare\n"
        "import loadgen.servers.discovery, loadgen.servers.telemetry, sys\n"
        "found = {each for one in [*sys.modules.values()] for each in vars(one).values() if isinstance(each, type)}\n"
        "ours = {each for each in found if each.__module__.partition('.')[0] in sys.argv[1:]}\n"
        "print(*(each.__name__ for each in ours if '__dataclass_fields__' in vars(each)))"
    )
    assert _printed(root, program, "workloads", "servers", "loadgen", "analysis") == DATACLASSES


@pytest.mark.parametrize(
    "module",
    [
        "loadgen.analysis.run.record",
        "loadgen.analysis.run.runfile",
        "loadgen.workloads.request",
        "loadgen.servers.backends.base",
    ],
)
def test_the_shared_shapes_are_cheap(root: Path, module: str) -> None:
    """The shapes that every part shares load none of the heavy libraries."""
    assert not (HEAVY | CLIENTS) & _loaded(root, f"import {module}\n")


def _module(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _loaded(root: Path, program: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter holds after running `program`."""
    report = "import sys\nprint('\\nloaded', *{name.partition('.')[0] for name in sys.modules})\n"
    return _printed(root, program + report) - {"loaded"}


def _printed(root: Path, program: str, *arguments: str) -> set[str]:
    """The words of the last line that a fresh interpreter prints, running `program`."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())
