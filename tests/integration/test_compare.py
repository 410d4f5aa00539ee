"""`loadgen compare` as a person and as a CI job use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command import ROOT, loadgen
from tests.support.runs import burst, footer, header, healthy, write


def compare(*arguments: str | Path) -> tuple[int, str, str]:
    """Run it; exit code, stdout, stderr."""
    done = loadgen(ROOT, "compare", *map(str, arguments))
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three repeats of a server in `a`, three of one twice as slow in `b`, and a run with other prompts."""
    folder = tmp_path_factory.mktemp("runs")
    for name, pace in (("a", 1.0), ("b", 2.0)):
        for place in (1, 2, 3):
            records = burst(40, 8, seed=place + 10 * (pace > 1), pace=pace)
            first = header(40)
            first.plan |= {"repeat": place, "repeats": 3, "seed": 6 + place}
            write(folder / name / f"repeat-{place}", [first, *records, *healthy(), footer(records)])
    records = burst(40, 8)
    other = header(40)
    other.plan |= {"input_tokens": 128}
    write(folder / "other", [other, *records, *healthy(), footer(records)])
    return folder


def test_groups_of_repeats(runs: Path) -> None:
    """A folder of repeats on either side: between-run statistics, in text, and exit code 0."""
    code, out, _ = compare(runs / "a", runs / "b")
    assert code == 0
    assert "A: a (3 runs)" in out
    assert "Welch" in out
    assert "worse" in out


def test_runs_can_be_listed_on_either_side(runs: Path) -> None:
    """A... -- B...: two against one; --json prints the comparison and nothing else."""
    a = [runs / "a" / f"repeat-{place}" for place in (1, 2)]
    code, out, _ = compare("--json", *a, "--", runs / "b" / "repeat-1")
    found = json.loads(out)
    assert (code, found["runs_a"], found["runs_b"]) == (0, 2, 1)
    assert {row["verdict"] for row in found["rows"]} <= {"better", "worse", "no difference", "inconclusive"}


def test_a_ci_job_fails_when_b_is_worse(runs: Path) -> None:
    """Exit code 4 and the condition on stderr; the other way round, and with a generous bound, 0."""
    worse = ["--fail-if", "tpot.p50 worse by 5%", "--quiet"]
    code, out, err = compare(*worse, runs / "a", runs / "b")
    assert (code, out) == (4, "")
    assert re.match(r"loadgen: fail: tpot.p50 worse by 5%: [\d.]+ to [\d.]+ ms, (\+[\d.]+%|[\d.]+x), ", err)
    assert compare(*worse, runs / "b", runs / "a")[0] == 0
    assert compare("--fail-if", "tpot.p50 worse by 400%", runs / "a", runs / "b")[0] == 0


def test_unequal_work_is_refused(runs: Path) -> None:
    """Exit code 2 and what differs; with --anyway it is compared, and what differs stands above the figures."""
    one = runs / "a" / "repeat-1"
    code, out, err = compare(one, runs / "other")
    assert (code, out) == (2, "")
    assert "input_tokens: 512 in A, 128 in B" in err
    assert "--anyway" in err
    code, out, _ = compare("--anyway", one, runs / "other")
    assert code == 0
    assert out.index("input_tokens: 512 in A") < out.index("output_tokens_per_s")


def test_markdown_and_page(runs: Path, tmp_path: Path) -> None:
    """A table for a pull request, and a page with the comparison above the charts of all runs."""
    code, out, _ = compare("--markdown", "--html", tmp_path / "c.html", runs / "a", runs / "b")
    assert code == 0
    assert out.startswith("## b (B) compared with a (A)\n")
    assert "| tpot.p50 |" in out
    page = (tmp_path / "c.html").read_text("utf-8")
    assert 'id="comparison"' in page
    assert 'id="chart-comparison"' in page


def test_options_may_stand_after_the_runs(runs: Path) -> None:
    """Also after those on the second side of the two hyphens."""
    a = [runs / "a" / f"repeat-{place}" for place in (1, 2)]
    code, out, err = compare(*a, "--", runs / "b" / "repeat-1", "--json", "--margin", "2%")
    assert code == 0, err
    assert (json.loads(out)["runs_a"], json.loads(out)["margin"]) == (2, 0.02)
    assert compare(runs / "a", runs / "b", "--json")[0] == 0


@pytest.mark.parametrize(("counts_as", "code"), [(None, 6), ("pass", 0), ("fail", 4)])
def test_what_cannot_be_told_is_never_silent(counts_as: str | None, code: int, runs: Path) -> None:
    """p99 of 40 requests: exit code 6 and the reason, with --quiet too, unless --inconclusive says otherwise."""
    one, other = runs / "a" / "repeat-1", runs / "b" / "repeat-1"
    asked = ["--inconclusive", counts_as] if counts_as else []
    found, out, err = compare(one, other, "--quiet", "--anyway", "--fail-if", "e2e.p99 worse by 5%", *asked)
    assert (found, out) == (code, "")
    assert ("needs 662" in err) == (counts_as != "pass")


def test_two_single_runs_are_enough_for_a_large_difference(runs: Path) -> None:
    """Twice as slow is beyond what two runs of one server differ by: exit code 4, A and B named; with the bound set to
    99% nobody can tell."""
    two = [runs / "a" / "repeat-1", runs / "b" / "repeat-1", "--quiet", "--fail-if", "tpot.p50 worse by 5%"]
    code, _, err = compare(*two)
    if "the client was the limit" in err:  # on a busy machine nothing is called of such runs
        assert code == 6
        return
    assert code == 4
    assert re.search(r"tpot.p50 worse by 5%: \d+\.\d+ to \d+\.\d+ ms, (\+[\d.]+%|[\d.]+x), ", err)
    assert compare(*two, "--run-variation", "99%")[0] == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "needs at least two runs"),
        (["a", "b", "other"], "no -- between the runs A and the runs B"),
        (["a", "--"], "one side of --"),
        (["--fail-if", "ttft worse", "a", "b"], "is not a condition"),
        (["a", "nowhere"], "no run found"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], said: str, runs: Path) -> None:
    """Exit code 2, and what to write instead."""
    places = [str(runs / each) if each in ("a", "b", "other", "nowhere") else each for each in arguments]
    code, _, err = compare(*places)
    assert code == 2
    assert said in err
