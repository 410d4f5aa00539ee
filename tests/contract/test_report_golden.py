"""The page of one run that is kept for good, tag by tag and word by word."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import pytest

from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.run.runfile import read
from tests.support.runs import part_of

GOLDEN = Path(__file__).parents[1] / "golden" / "burst"
RENEW = (
    "After a change that is meant: PYTHONPATH=. python tests/contract/test_report_golden.py, and commit the difference."
)


def test_the_page_of_the_golden_run_stays() -> None:
    """Nineteen requests with every ending: what a reader sees and what the charts draw, without scripts and styles."""
    if bare(render(page_document([part_of(read(GOLDEN))]))) != (GOLDEN / "page.html").read_text("utf-8"):
        pytest.fail(f"The page of tests/golden/burst is another one now. {RENEW}")


def bare(page: str) -> str:
    """The page without what is kept elsewhere: scripts, hashes, styles. The data of each chart gets its own line, and
    packed data is unpacked."""
    page = re.sub(r"<script>.*?</script>\n", "", page, flags=re.S)
    page = re.sub(r"sha256-[^&]*", "sha256-", page)
    page = re.sub(r"<style>.*?</style>", "<style></style>", page, flags=re.S)
    page = re.sub(r'"tokens":"([^"]*)"', lambda match: f'"tokens":{unpacked(match[1])}', page)
    page = re.sub(r'(,)("(?:e2e_s|ttft_s|tpot_s|itl_s|position|gaps|course|timeline|sends|charts)":)', r"\1\n\2", page)
    return re.sub(r"^\s+|(?<=\n)\n", "", page, flags=re.M)


def unpacked(text: str) -> str:
    """Return packed JSON. Versions of zlib compress the same JSON into different bytes."""
    return gzip.decompress(base64.b64decode(text)).decode()


if __name__ == "__main__":
    (GOLDEN / "page.html").write_text(bare(render(page_document([part_of(read(GOLDEN))]))), "utf-8")
