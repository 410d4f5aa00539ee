"""Documents that stay true: links resolve, generated pages are current, nothing is left unsaid."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
CORE_DEPENDENCIES_AT_MOST = 13


@pytest.fixture(scope="session")
def pages(root: Path) -> list[Path]:
    """Every Markdown page of ours."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])


def test_links_lead_somewhere(root: Path, pages: list[Path]) -> None:
    """Every relative link names a file of the tree, and its anchor a heading of that file."""
    broken = [f"{page.relative_to(root)}: {link}" for page in pages for link in _links(page) if not _leads(page, link)]
    assert not broken


def test_every_page_is_in_the_index(root: Path) -> None:
    """A reader of docs/index.md finds every page of the documentation from there."""
    index = root / "docs/index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in _links(index)}
    lost = [str(page.relative_to(root)) for page in (root / "docs").rglob("*.md") if page not in {*listed, index}]
    assert not lost


@pytest.mark.xdist_group("published measurements")  # one page lists the errors that the tests of this group compute
def test_generated_pages_are_current(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference pages say what the code says now; `make docs` writes them again."""
    status = runpy.run_path(str(root / "docs/generate.py"))["main"](["--check"])
    assert (status, *capsys.readouterr()) == (0, "", "")


def test_the_changelog_is_open(root: Path) -> None:
    """There is a section for what is not released yet, and it has entries."""
    section = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text("utf-8"), re.M | re.S)
    assert section
    assert re.search(r"^- ", section[1], re.M)


def test_every_dependency_has_a_reason(root: Path) -> None:
    """Each requirement stands on a line of its own with a comment that says what it is for."""
    text = (root / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    required = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    explained = re.findall(r'^ *"([^"]+)", +# \w', text, re.M)
    assert not Counter(required) - Counter(explained)


def test_the_core_stays_small(root: Path) -> None:
    """Whoever installs the tool gets at most thirteen libraries that we chose."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert len(project["dependencies"]) <= CORE_DEPENDENCIES_AT_MOST


def _links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text("utf-8"))
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def _leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them: lower case, no punctuation, hyphens for blanks."""
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
