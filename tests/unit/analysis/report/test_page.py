"""The page as a file: whole, small, marked, and deaf to what servers put into their words."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis import report
from loadgen.analysis.report import page as pages
from loadgen.analysis.report.page import SCRIPTS, render
from loadgen.analysis.report.run_document import ReportedRun, page_document
from tests.support.runs import burst, failed, header, loop, part_of, run_of

NASTY = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\"'"


def part(folder: Path, *, n: int = 40, **changes: Any) -> ReportedRun:
    """What a page needs of a run with one failure."""
    return part_of(run_of(folder, [*burst(n, 4), failed(n + 1, "in_band_error", NASTY)], **changes))


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """The page of a run whose every text is hostile."""
    changed = {"version": NASTY, "model": NASTY, "limits": {NASTY: NASTY}}
    records = [*burst(40, 4), failed(41, "in_band_error", NASTY)]
    run = run_of(tmp_path / "run", records)
    run.header.server |= changed
    run.header.command.append(NASTY)
    return render(page_document([part_of(run)]))


def test_a_servers_words_stay_words(hostile: str) -> None:
    """No markup of a server's survives: not in the text, not in the charts' data, not in the title."""
    assert "<script>document" not in hostile
    assert "<img src=x" not in hostile
    assert hostile.count("</script>") == 2 + len(SCRIPTS) + 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', hostile, re.S)
    assert data
    assert json.loads(data[1])["runs"][0]["name"] == f"tgi {NASTY}"


def test_only_our_scripts_may_run(hostile: str) -> None:
    """The policy names the hash of each script in the page and allows nothing else, from nowhere."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', hostile)
    assert policy
    packed = re.search(r'id="plotly">(.*?)</script>', hostile)
    assert packed
    scripts = [
        gzip.decompress(base64.b64decode(packed[1])).decode(),
        *re.findall(r"<script>(.*?)</script>", hostile, re.S),
    ]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = policy[1].replace("&#39;", "'")
    assert re.findall(r"'sha256-([^']+)'", allowed) == hashes
    assert "default-src 'none'" in allowed
    assert "http" not in allowed
    assert "unsafe-eval" not in allowed


def test_the_page_needs_no_other_file(hostile: str) -> None:
    """Nothing is loaded from anywhere: no script, style, image or frame has an address outside the page."""
    without_scripts = re.sub(r"<script.*?</script>", "", hostile, flags=re.S)
    addresses = re.findall(r'<(?:script|img|iframe|link|object|embed)[^>]*(?:src|href)="([^"]*)"', without_scripts)
    assert [address for address in addresses if not address.startswith("data:")] == []
    assert "@import" not in without_scripts
    assert "url(" not in without_scripts


def test_a_report_of_a_full_burst_is_small(tmp_path: Path) -> None:
    """1,000 requests of 128 tokens make a file of less than 1.5 MB."""
    run = run_of(tmp_path / "run", burst(1000, 128))
    assert len(render(page_document([part_of(run)])).encode()) < 1_500_000


def test_a_simulated_run_is_marked_once_always_in_view(tmp_path: Path) -> None:
    """SIMULATED, and at which speed, stands in the file's title, beside the navigation, which stays in view, and at the
    head of each printed page; nowhere else."""
    page = re.sub(
        r"<script>.*?</script>", "", render(page_document([part(tmp_path / "run", simulated=True)])), flags=re.S
    )
    assert page.count("SIMULATED") == 3
    assert page.count('@top-right{content:"SIMULATED at 5 times speed"}') == 1
    assert re.search(r"<title>SIMULATED at 5 times speed", page)
    assert re.search(r'<nav [^>]*>\s*<span class="badge">SIMULATED at 5 times speed', page)


def test_a_real_run_is_not_marked(tmp_path: Path) -> None:
    """Nothing in the page of a real server's run calls it simulated."""
    page = render(page_document([part(tmp_path / "run")]))
    assert "SIMULATED" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def test_one_simulated_run_marks_the_page_that_it_shares(tmp_path: Path) -> None:
    """In a report of a real and a simulated run the page is marked, and of the two cards only one."""
    page = render(page_document([part(tmp_path / "real", server="vllm"), part(tmp_path / "simulated", simulated=True)]))
    cards = re.findall(r'<article class="run [\w-]+">\s*<h2>(.*?)</h2>', page, re.S)
    assert ["SIMULATED" in card for card in cards] == [False, True]
    assert re.search(r'<nav [^>]*>\s*<span class="badge">SIMULATED', page)


def test_runs_of_one_server_are_told_apart(tmp_path: Path) -> None:
    """Two runs of the same server have different names and line styles, and the same colour."""
    page = render(page_document([part(tmp_path / "a"), part(tmp_path / "b"), part(tmp_path / "c", server="vllm")]))
    data = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert data
    runs = json.loads(data[1])["runs"]
    assert [run["name"] for run in runs] == ["tgi 3.3.5 (run 1)", "tgi 3.3.5 (run 2)", "vllm 3.3.5"]
    assert [(run["colour"], run["dash"]) for run in runs] == [("run-1", "solid"), ("run-1", "dash"), ("run-2", "solid")]


def test_every_chart_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    """Each chart is an image with a title and a text of its own, and its data stands in a table beside it."""
    page = render(page_document([part(tmp_path / "run")]))
    charts = re.findall(r'<div class="chart[^"]*" id="chart-(\w+)" role="img"[^>]* aria-labelledby="(\S+) (\S+)"', page)
    assert [name for name, _, _ in charts] == [
        *("e2e_s", "ttft_s", "tpot_s", "itl_s"),
        *("parts", "position", "gaps", "course", "timeline", "sends"),
    ]
    for name, title, text in charts:
        assert f'id="{title}"' in page
        assert f'id="{text}"' in page
        assert f'data-save="csv" data-of="{name}"' in page


def test_every_link_leads_to_a_part_of_the_page(tmp_path: Path) -> None:
    """Each section can be linked to, each link in the page has its target, and no two elements share a name."""
    page = re.sub(
        r"<script>.*?</script>", "", render(page_document([part(tmp_path / "a"), part(tmp_path / "b")])), flags=re.S
    )
    targets = re.findall(r' id="([^"]+)"', page)
    assert len(targets) == len(set(targets))
    links = re.findall(r'href="#([^"]+)"', page)
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert set(sections) <= set(links) <= set(targets)


def test_an_open_loop_is_not_called_a_burst(tmp_path: Path) -> None:
    """The page says what was delivered, what was measured and what was warm-up, and has no burst in its words."""
    plan = header(1200).plan | {"arrivals": "constant:100", "label": "run"}
    page = render(
        page_document([part_of(run_of(tmp_path / "run", loop(1200, warmup=3), plan=plan, command=["loadgen", "run"]))])
    )
    text = re.sub(r"<script.*?</script>|<style>.*?</style>|<dl class=.definitions.*?</dl>", "", page, flags=re.S)
    assert "burst" not in text.lower()
    for words in (
        "1,200 of 1,200 requests sent, 100.0 /s (target 100.0)",
        "3 warm-up requests before time 0, excluded from all figures.",
        "Measured from 0.500 s to 12.0 s of the run (about 50 in flight): 1,150 requests due within.",
        "50 of 1,200 requests outside the window; the slowest took 500 ms.",
        "1,150 ended in the window of 11.49\u00a0s; 1,200 of 1,200 complete",
        "of complete requests that were due inside the window, with a 95% band.",
    ):
        assert words in text
    cells = dict(re.findall(r'<th scope="row">([^<]*)</th>\s*<td class="number">([^<]*)</td>\s*</tr>', text))
    assert cells["Requests due"] == cells["Requests sent"] == "1,200"
    assert cells["Requests per second, target"] == cells["Requests per second, actual"] == "100.0"
    assert cells["Dispatch delay, p99"] == "20.0 µs"


def test_a_run_without_a_sample_makes_a_page(tmp_path: Path) -> None:
    """Nothing was sent: the page says so and holds no figure."""
    run = run_of(tmp_path / "run", [], telemetry=[])
    page = render(page_document([part_of(run)]))
    assert "Nothing was sent." in page
    assert "NaN" not in re.sub(r'<script( type="application/gzip"[^>]*)?>.*?</script>', "", page, flags=re.S)


def test_the_charting_library_is_the_published_one() -> None:
    """plotly-basic.min.js is, byte for byte, that of plotly.js-basic-dist-min 4.1.1 on npm, its licence beside it."""
    folder = Path(report.__file__).parent
    digest = hashlib.sha256((folder / "plotly-basic.min.js").read_bytes()).hexdigest()
    assert digest == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert (folder / "plotly-LICENSE.txt").read_text("utf-8").startswith("MIT License")


def test_a_page_has_the_charting_library_with_its_outermost_function_in_parentheses() -> None:
    """Without the two parentheses, the source on the page is that of the file."""
    source = (Path(report.__file__).parent / "plotly-basic.min.js").read_text("utf-8")
    shipped = pages.plotly_source()
    assert shipped.rstrip().endswith("})));")
    assert shipped.replace("this, (() => {", "this, () => {").replace("})));\n", "}));") == source.rstrip()


def test_a_template_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python keeps what it compiles; a damaged file is compiled again, and one that cannot be kept does not
    matter."""
    compiled = list[str]()
    whole = pages.Environment.compile

    def counted(*given: Any, **named: Any) -> Any:
        compiled.append(given[2])
        return whole(*given, **named)

    monkeypatch.setattr(pages.Environment, "compile", counted)
    monkeypatch.setattr(pages.TemplateCache, "_file", lambda _, bucket: tmp_path / "kept" / bucket.key)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    parts = [part(tmp_path / "run")]
    first = render(page_document(parts))
    render(page_document(parts))
    assert len(compiled) == 4  # nowhere to keep them
    (tmp_path / "kept").mkdir()
    for expected in (6, 6):
        assert (render(page_document(parts)), len(compiled)) == (first, expected)
    next((tmp_path / "kept").iterdir()).write_bytes(b"no code")
    assert (render(page_document(parts)), len(compiled)) == (first, 7)


def test_facts_of_a_damaged_header_are_shown_as_they_are(tmp_path: Path) -> None:
    """What should be a number of bytes and is none is no size, and ends nothing."""
    run = run_of(tmp_path / "run", burst(4, 2))
    run.header.host.update(memory_bytes="unreadable", cache_bytes=10**400, swap_bytes=2**30)
    shown = " ".join(render(page_document([part_of(run)])).split())
    assert "unreadable" in shown
    assert "1.00 GiB" in shown
