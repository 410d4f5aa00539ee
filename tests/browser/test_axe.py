"""Every page held against the rules of axe-core (WCAG 2.2 and good practice), at three widths, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from loadgen.analysis.hardware import build_document
from loadgen.analysis.objectives import parse, parse_bounds
from loadgen.analysis.report import Document
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.sweep import SweepResult
from loadgen.analysis.sweep.document import frontier_document
from loadgen.cli.report import report
from loadgen.dissect import inference_report, training_report
from loadgen.results import load_and_summarise
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load
from loadgen.studies.twin_page import ReplayedRun, twin_document
from tests.browser.conftest import NASTY
from tests.support.command import in_process
from tests.support.dissected import inference_found, training_found
from tests.support.matrices import fabricate
from tests.support.runs import burst, failed, footer, header, healthy, run_of, write

PAGES = (
    *("plain", "bounded", "troubled", "failing_chips", "many", "repeats", "folder", "comparison", "matrix"),
    *("frontier", "missed", "limits", "inference", "training", "capacity", "twin", "speedup", "bounds", "technologies"),
)
"""Fixtures of pages on disk: what has a `path`."""
WIDTHS = (360, 1024, 1600)
WHOLE = 1024
"""At this width all is open and looked at; at the others rows of a table that look like those above are left out."""


@dataclass(frozen=True)
class OnDisk:
    """A page that was written."""

    path: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of a server with hostile words."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [folder / name for name in ("one", "two")]
    for place, run in enumerate(runs):
        first, records = header(40, server="vllm"), burst(40, 8, pace=1 + place / 2)
        first.server["model"] = NASTY
        write(run, [first, *records, *healthy(), footer(records)])
    return runs


@pytest.fixture(scope="module")
def failing_chips(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """The report of an invalid run with failed requests and a missed objective: every chip has its failing state."""
    folder = tmp_path_factory.mktemp("chips") / "run"
    records = [*burst(60, 8), *(failed(100 + index) for index in range(5))]
    run_of(folder, records, telemetry=healthy(stall_ns_max=2_000_000_000))
    part = load_and_summarise(folder, parse(["ttft.p50 < 1ms"]), parse_bounds(["ttft < 1ms"]))
    document = page_document([part])
    assert [chip.level for chip in document.chips] == ["error"] * 3
    return _written(folder, document)


@pytest.fixture(scope="module")
def repeats(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """The page of three repeats, one of which has failed requests."""
    folder = tmp_path_factory.mktemp("repeats")
    for number in (1, 2, 3):
        first = header(40, server="vllm")
        first.plan.update(repeat=number, repeats=3)
        records = [*burst(40, 8, seed=number), *(failed(40 + index) for index in range(number - 1))]
        write(folder / f"repeat-{number}", [first, *records, *healthy(), footer(records)])
    report([folder], quiet=True)
    return OnDisk(folder / "report.html")


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """What a GPU could reach."""
    made = make_deployment("H100", "llama-2-70b", "fp8", 8)
    return _written(tmp_path_factory.mktemp("limits"), build_document(compute_limits(made, Load(512, 128, 64)), made))


@pytest.fixture(scope="module")
def technologies(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A sweep over technology nodes and memories."""
    folder = tmp_path_factory.mktemp("technologies")
    words = ("--technology", "7nm..1nm", "--memory", "HBM2E,HBM4", "--page", "page.html")
    assert in_process(folder, "hardware", "sweep", *words)[0] == 0
    return OnDisk(folder / "page.html")


@pytest.fixture(scope="module")
def capacity(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A capacity plan."""
    gpus = ("--gpu", "H100=$2.50", "--gpu", "L40S=$0.90", "--disaggregated", "--tp", "1")
    words = ("--rate", "5", "--objective", "ttft.p99 < 1s", *gpus, "--page", "page.html")
    folder = tmp_path_factory.mktemp("capacity")
    assert in_process(folder, "plan-capacity", *words)[0] == 0
    return OnDisk(folder / "page.html")


@pytest.fixture(scope="module")
def speedup(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """The factors of a speed-up over two steps."""
    return _hardware_page(tmp_path_factory, "compare", "A100", "H100", "B200", "--model", "llama-3.1-70b", "--tp", "8")


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """What binds the kernels of a model with experts: memory, compute and latency."""
    return _hardware_page(tmp_path_factory, "bounds", "--model", "deepseek-r1", "--tp", "8", "--batch", "64")


def _hardware_page(tmp_path_factory: pytest.TempPathFactory, *words: str) -> OnDisk:
    folder = tmp_path_factory.mktemp("hardware")
    assert in_process(folder, "hardware", *words, "--page", "page.html")[0] == 0
    return OnDisk(folder / "page.html")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A twin that is compared with one run."""
    seconds = np.linspace(0.1, 0.2, 40)
    run = ReplayedRun(
        "burst", {"ttft.p50": 0.15}, {"ttft.p50": (0.16, 0.1, 0.2)}, dict.fromkeys(("ttft", "tpot"), (seconds, seconds))
    )
    document = twin_document([run], title="Twin of vllm", subtitle="", facts=[], rates_note="Rates of the whole run.")
    return _written(tmp_path_factory.mktemp("twin"), document)


@pytest.fixture(scope="module")
def folder(runs: list[Path]) -> OnDisk:
    """The index of a folder of runs and of repeats."""
    for number in (1, 2):
        records = burst(40, 8, seed=number)
        write(
            runs[0].parent / f"again/repeat-{number}",
            [header(40, server="vllm"), *records, *healthy(), footer(records)],
        )
    report([runs[0].parent], quiet=True)
    return OnDisk(runs[0].parent / "index.html")


@pytest.fixture(scope="module")
def comparison(runs: list[Path]) -> OnDisk:
    """One run against the other."""
    page = runs[0].parent / "compare.html"
    assert in_process(page.parent, "compare", "--html", str(page), "--quiet", *map(str, runs))[0] == 0
    return OnDisk(page)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A matrix in which one server never came up."""
    return OnDisk(fabricate(tmp_path_factory.mktemp("matrix") / "m", failing="lightllm", nasty=NASTY) / "matrix.html")


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A sweep in virtual time."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = ("sweep", "--server", "vllm", "--virtual", "H100", "--rates", "2,8", "--objective", "tpot.p99 < 50ms")
    in_process(folder, *sweep, "--duration", "10s", "--quiet", "--out", str(folder / "s"))
    return OnDisk(folder / "s/frontier.html")


@pytest.fixture(scope="module")
def missed(frontier: OnDisk, tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """The page of a sweep whose chips all fail: the client was the limit, no load met the objectives, and there are
    rejected requests."""
    found = msgspec.json.decode((frontier.path.parent / "sweep.json").read_bytes(), type=SweepResult)
    steps = [
        msgspec.structs.replace(step, over=0.99, verdict="not met", client="limited", rejected=3, complete=1)
        for step in found.steps
    ]
    steps[0] = msgspec.structs.replace(steps[0], over=0.4, verdict="inconclusive")
    result = msgspec.structs.replace(found, steps=steps, state="open", ended="client", mark="SIMULATED")
    document = frontier_document({result.name: result}, lambda _sweep, folder: folder)
    return _written(tmp_path_factory.mktemp("missed"), document)


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """A step taken apart."""
    return _written(tmp_path_factory.mktemp("inference"), inference_report.build_document(inference_found()))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    """Steps of training, with and without several processes."""
    return _written(tmp_path_factory.mktemp("training"), training_report.build_document(training_found()))


def _written(folder: Path, document: Document) -> OnDisk:
    (folder / "page.html").write_text(render(document), "utf-8")
    return OnDisk(folder / "page.html")


@pytest.mark.parametrize("name", PAGES)
def test_no_rule_of_accessibility_is_broken(name: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    """No finding of axe: contrast, names, landmarks, headings, tables, focus; also with every detail open."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(request.getfixturevalue(name).path.as_uri())
    for width, scheme in _looks():
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(
            "(open) => document.querySelectorAll('.fold, .help').forEach((each) => each.open = open)", width == WHOLE
        )
        found = [
            (each["id"], [node["html"][:120] for node in each["nodes"]][:3])
            for each in _violations(page, None if width == WHOLE else {"exclude": ["tbody tr:nth-child(n+4)"]})
        ]
        assert (width, scheme, found) == (width, scheme, [])
    context.close()


def _looks() -> Iterator[tuple[int, Any]]:
    return ((width, scheme) for width in WIDTHS for scheme in ("light", "dark"))


def _violations(page: Any, context: Any) -> list[dict[str, Any]]:
    return list(Axe().run(page, context, {"resultTypes": ["violations"]}).response["violations"])
