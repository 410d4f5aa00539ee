"""Lengths as tables: what each text means, how it is printed, what is refused, and what files may hold."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from loadgen.workloads.lengths import Empirical, Exponential, Fixed, Lengths, Lognormal, Uniform, parse
from loadgen.workloads.spec_syntax import WorkloadError

TEXTS: list[tuple[str, Lengths, str]] = [
    ("512", Fixed(512), "512"),
    (" 1 ", Fixed(1), "1"),
    ("32k", Fixed(32_000), "32000"),
    ("32K", Fixed(32_768), "32768"),
    ("uniform:1k..2.5k", Uniform(1000, 2500), "uniform:1000..2500"),
    ("exponential:mean=4K,max=32k", Exponential(Fraction(4096), 1, 32_000), "exponential:mean=4096,max=32000"),
    ("empirical:32k", Empirical(Path("32k")), "empirical:32k"),
    ("uniform:128..384", Uniform(128, 384), "uniform:128..384"),
    ("uniform:7..7", Uniform(7, 7), "uniform:7..7"),
    ("lognormal:mean=161.31,cv=1", Lognormal(Fraction("161.31"), Fraction(1)), "lognormal:mean=161.31,cv=1"),
    ("lognormal:cv=0.50,max=2048,mean=200,min=4", Lognormal(Fraction(200), Fraction(1, 2), 4, 2048),
     "lognormal:mean=200,cv=0.5,min=4,max=2048"),
    ("exponential:mean=128", Exponential(Fraction(128)), "exponential:mean=128"),
    ("exponential:mean=128,min=10,max=32", Exponential(Fraction(128), 10, 32), "exponential:mean=128,min=10,max=32"),
    ("empirical:a,b.txt", Empirical(Path("a,b.txt")), "empirical:a,b.txt"),
    ("empirical:t.csv,column=Request tokens", Empirical(Path("t.csv"), "Request tokens"),
     "empirical:t.csv,column=Request tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lengths", "canonical"), TEXTS, ids=[text for text, _, _ in TEXTS])
def test_text_and_value_stand_for_each_other(text: str, lengths: Lengths, canonical: str) -> None:
    """Each form is read as its value, printed in one canonical form, and read back unchanged."""
    assert parse(text) == lengths
    assert str(lengths) == canonical
    assert parse(canonical) == lengths


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("", "length '' is not a whole number", "such as 512"),
        ("0", "length 0 is outside 1 to 10000000", "such as 512"),
        ("12.5", "length '12.5' is not a whole number", "such as 512"),
        ("32m", "length '32m' is not a whole number", "such as 512 or 32k"),
        ("normal:3", "unknown distribution 'normal'", "a number, or uniform, lognormal"),
        ("uniform:5", "two lengths with .. between them", "uniform:A..B"),
        ("uniform:5..4", "longest length 4 is outside 5 to 10000000", "uniform:A..B"),
        ("lognormal:mean=5", "cv= is missing", "lognormal:mean=M,cv=C"),
        ("lognormal:", "'' is not one of mean=..., cv=..., min=..., max=...", "lognormal:mean=M"),
        ("lognormal:mean=0,cv=1", "mean 0 is outside 1", "lognormal:mean=M"),
        ("lognormal:mean=1000,cv=0.1,max=500", "max=500 is so far below the mean", "lognormal:mean=M"),
        ("exponential:mean=10000,max=50", "max=50 is so far below the mean", "exponential:mean=M"),
        ("exponential:mean=10,min=5,max=4", "max 4 is outside 5", "exponential:mean=M"),
        ("exponential:mean=10,cap=4", "'cap=4' is not one of", "exponential:mean=M"),
        ("empirical:", "the file's name is missing", "empirical:FILE"),
    ],
)
def test_what_is_wrong_is_named_and_put_right(text: str, problem: str, hint: str) -> None:
    """The message names the bad part; the hint is the syntax of that kind."""
    with pytest.raises(WorkloadError) as caught:
        parse(text)
    assert problem in str(caught.value)
    assert hint in caught.value.hint


def test_numbers_come_from_a_file_of_lines(tmp_path: Path) -> None:
    """One number per line, blank lines aside: nothing else is drawn, and all of them are."""
    file = tmp_path / "lengths.txt"
    file.write_text("12\n\n 7 \n900\n", "utf-8")
    assert set(islice(Empirical(file).tokens(0, "input"), 200)) == {7, 12, 900}


def test_numbers_come_from_a_column(tmp_path: Path) -> None:
    """A column is found by its header, also behind quoted commas and a byte-order mark."""
    file = tmp_path / "lengths.csv"
    file.write_text('\ufeffname,tokens\n"a, b",3\nc,4\n', "utf-8")
    assert set(islice(Empirical(file, "tokens").tokens(0, "input"), 200)) == {3, 4}


@pytest.mark.parametrize(
    ("content", "column", "problem"),
    [
        ("", None, "holds no lengths"),
        ("a,b\n", "a", "holds no lengths"),
        ("3\nfour\n", None, "line 2: length 'four' is not a whole number"),
        ("3\n0\n", None, "line 2: length 0 is outside"),
        ("a,b\n1,2\n3\n", "b", "line 3: length '' is not a whole number"),
        ("a,b\n1,2\n", "c", "has no column 'c'"),
    ],
)
def test_damage_in_a_file_is_an_error_with_its_line(
    tmp_path: Path, content: str, column: str | None, problem: str
) -> None:
    """A file that is empty, lacks the column or holds something else says so, with the line."""
    file = tmp_path / "lengths.csv"
    file.write_text(content, "utf-8")
    with pytest.raises(WorkloadError, match=problem):
        Empirical(file, column).tokens(0, "input")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that cannot be read is named together with the system's reason."""
    with pytest.raises(WorkloadError, match=r"cannot read the lengths in .*nowhere: No such file"):
        Empirical(tmp_path / "nowhere").tokens(0, "input")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("uniform:128..384", [291, 145, 315]),
        ("lognormal:mean=161.31,cv=1", [334, 354, 205]),
        ("exponential:mean=128", [130, 9, 167]),
    ],
)
def test_a_seed_means_the_same_for_ever(text: str, tokens: list[int]) -> None:
    """Seed 0 gives these lengths, in any process and any Python."""
    assert list(islice(parse(text).tokens(0, "input"), 3)) == tokens
