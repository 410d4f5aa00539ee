"""The reference pages of arrivals and workloads say what the code reads."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.plan import Plan
from loadgen.plan_fields import catalog_names, from_catalog
from loadgen.workloads import arrivals, lengths, workload

PAGES = Path(__file__).parents[2].parent / "docs/reference"
FIRST_CODE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _rows(page: str, heading: str) -> list[str]:
    """The code that begins each table row of a section."""
    text = (PAGES / page).read_text("utf-8")
    section = text.partition(heading + "\n")[2].partition("\n## ")[0]
    return FIRST_CODE.findall(section)


@pytest.mark.parametrize(
    ("page", "heading", "parse", "kinds"),
    [
        ("arrivals.md", "# Arrivals", arrivals.parse, set(arrivals.ARRIVAL_PROCESSES)),
        ("workloads.md", "# Workloads", workload.parse, set(workload.WORKLOADS)),
        ("workloads.md", "## Lengths", lengths.parse, set(lengths.LENGTH_DISTRIBUTIONS) - {"fixed"}),
    ],
)
def test_every_form_is_on_the_page_in_canonical_text(
    page: str, heading: str, parse: Callable[[str], object], kinds: set[str]
) -> None:
    """Each row's code is read and printed back as it stands, and no kind is missing."""
    rows = _rows(page, heading)
    assert [str(parse(row)) for row in rows] == rows
    assert kinds <= {row.partition(":")[0] for row in rows}


def test_the_catalog_table_is_the_catalog() -> None:
    """Names, in order, with what each of them sends."""
    text = (PAGES / "workloads.md").read_text("utf-8").partition("## The catalog\n")[2]
    expected = [
        f"| `{name}` | {{n}} | `{{arrivals}}` | `{{input_tokens}}` | `{{output_tokens}}` |".format(**from_catalog(name))
        for name in catalog_names()
    ]
    assert [line for line in text.splitlines() if line.startswith("| `")] == expected


def test_the_example_of_a_plan_file_is_one() -> None:
    """The TOML on the page is accepted as it stands."""
    (example,) = BLOCK.findall((PAGES / "workloads.md").read_text("utf-8"))
    assert Plan(server="tgi", **tomllib.loads(example)).n == 1000
