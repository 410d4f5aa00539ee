"""`loadgen report --serve`: one page, on loopback, for as long as the command runs."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadgen.analysis.report.page import HEADERS
from tests.support.command import Forked
from tests.support.runs import burst, footer, header, healthy, write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """The address that the command printed, the command, and the page's file."""
    records = burst(10, 4)
    folder = write(tmp_path / "run", [header(10), *records, *healthy(), footer(records)])
    command = ["report", str(folder), "--quiet", "--serve"]
    with Forked(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
        assert found
        yield found[0], process, folder / "report.html"
        process.kill()


def test_the_page_is_shown_and_nothing_else(served: tuple[str, subprocess.Popen[str], Path]) -> None:
    """The page comes as it is, with its headers; other paths, methods and host names get nothing; Ctrl-C ends it."""
    url, process, page = served
    answer = httpx.get(url)
    assert answer.content == page.read_bytes()
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "Python" not in answer.headers["server"]
    assert httpx.head(url).content == b""
    assert httpx.get(f"{url}summary.json").status_code == 404
    assert httpx.get(f"{url}../run.jsonl").status_code == 404
    assert httpx.get(url, headers={"Host": "example.com"}).status_code == 421
    assert httpx.post(url).status_code == 501
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
