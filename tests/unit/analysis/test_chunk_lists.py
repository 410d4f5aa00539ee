"""The chunks of many Records are converted at once, with the same result as for each Record by itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.analysis.chunk_lists import lists_of_records, lists_of_texts
from loadgen.analysis.frame import FrameBuilder
from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.run.compact_record import CompactRecord
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import scan
from tests.support.runs import complete, footer, header, healthy, rejected, write
from tests.unit.analysis.test_parallel_scan import assert_equal

MS = 1_000_000


def compact(chunk_ns: str, chunk_tokens: str) -> CompactRecord:
    return CompactRecord(
        id=0, state="complete", chunk_ns=msgspec.Raw(chunk_ns.encode()), chunk_tokens=msgspec.Raw(chunk_tokens.encode())
    )


def test_texts_give_the_arrays_of_lists() -> None:
    """Negative times, empty lists, large counts and spaces are read as the decoder reads them."""
    lists: list[tuple[list[int], list[int]]] = [
        ([-5, 0, 7], [1, 1, 1]),
        ([], []),
        ([10**15], [300]),
        ([1, 2], [1, 0]),
        ([3, 3, 3], [1, 11, 111]),
    ]
    records = [Record(id=0, state="complete", chunk_ns=times, chunk_tokens=tokens) for times, tokens in lists]
    texts = [compact(str(times), str(tokens).replace(" ", "")) for times, tokens in lists]
    result, expected = lists_of_texts(texts), lists_of_records(records)
    assert result is not None
    for array, other in zip(result, expected, strict=True):
        assert array.tolist() == other.tolist()
    assert [record.expanded() for record in texts] == records


@pytest.mark.parametrize(
    ("chunk_ns", "chunk_tokens"),
    [
        ("[1,2]", "[1]"),
        ("[1,2]", "[1,-1]"),
        ("[1,2]", "[1,9999999999999999999]"),
        ("[1.5,2]", "[1,1]"),
        ("[1e3,2]", "[1,1]"),
        ('["1",2]', "[1,1]"),
        ("[[1],2]", "[1,1]"),
        ("[null,2]", "[1,1]"),
        ('{"a":1}', "[1]"),
        ("[4000000000000000000]", "[1]"),
        ("[1,2]", "null"),
        ("[ ]", "[0]"),
        ("[1]", "[ ]"),
        ("[\n]", "[]"),
        ("12", "[]"),
        ("12", "[1]"),
        ("[[1,2]]", "[1,1]"),
        ("[1,2]", "[[1,1]]"),
        ('"1,2"', "[1,1]"),
    ],
)
def test_other_texts_are_left_to_the_decoder(chunk_ns: str, chunk_tokens: str) -> None:
    """Lists of other values, beyond the limits or of different lengths are not converted, whatever stands next to
    them.
    """
    good = compact("[1,2]", "[1,1]")
    assert lists_of_texts([good, compact(chunk_ns, chunk_tokens), good]) is None


def test_two_damaged_texts_do_not_hide_each_other() -> None:
    """A number and a list in a list have as many brackets as two lists."""
    good = compact("[1,2]", "[1,1]")
    assert lists_of_texts([good, compact("5", "[1]"), compact("[[1,2]]", "[1,1]"), good]) is None


@pytest.mark.parametrize(
    "damage", [b"{", b'{"type":"request","id":1,"state":"complete","chunk_ns":["x"]}', b"\xff", b""]
)
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    """A damaged line among good ones is counted, and every other Record is read."""
    records = [complete(number, [MS, 2 * MS]) for number in range(50)]
    write(tmp_path / "run", [header(50), *records, *healthy(), footer(records)])
    file = tmp_path / "run" / "run.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:20], damage, *lines[20:]]) + b"\n")
    run, frame = read_columns(file.parent)
    assert run.damaged_lines == (1 if damage else 0)
    assert frame.id.tolist() == list(range(50))


def test_blocks_give_the_columns_of_single_records(tmp_path: Path) -> None:
    """Marks, models, errors, hidden tokens and unusual counts give the same columns in both ways."""
    records = [
        complete(0, [MS, 2 * MS], tokens=[1, 300]),
        complete(1, [MS, 2 * MS], hidden_tokens=2, output_tokens=4, counted_by="server", chunk_counts="ids"),
        complete(2, [MS], model="b", marks={"inputs": 3}, replica="node", output_error="no JSON"),
        rejected(3),
        complete(4, [MS, 2 * MS, 3 * MS], output_tokens=9, counted_by="server", chunk_counts="chunk"),
    ]
    write(tmp_path / "run", [header(5), *records, *healthy(), footer(records)])
    single = FrameBuilder()
    run = scan(tmp_path / "run", single.add)
    block_run, frame = read_columns(tmp_path / "run")
    assert_equal(frame, single.frame())
    assert block_run == run
    assert np.isnan(frame.mark("inputs")).tolist() == [True, True, False, True, True]
