"""The trace layouts, from small samples in the real formats, and what damage in them is called."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from datetime import date, timedelta
from fractions import Fraction
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.arrivals import parse
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.traces import TABLES, Entry

SAMPLES = Path(__file__).parents[2] / "data/traces"
MS = 1_000_000
S = 1_000_000_000


def test_mooncake_lines_are_read() -> None:
    """Milliseconds become ns from the first request on; lengths and block ids are kept."""
    assert list(Trace(SAMPLES / "mooncake.jsonl").entries()) == [
        Entry(0, 1100, 52, (7, 8, 9), 512),
        Entry(0, 600, 1, (7, 10), 512),
        Entry(3001 * MS, 1030, 26, (7, 8, 11), 512),
        Entry(6000 * MS, 13, 300, (12,), 512),
    ]


def test_azure_lines_of_2023_are_read() -> None:
    """Seven decimals, no zone, CRLF and no line end at the end; midnight is no jump."""
    assert list(Trace(SAMPLES / "azure-2023.csv").entries()) == [
        Entry(0, 410, 12),
        Entry(250_000_100, 33, 101),
        Entry(2_500_000_000, 2210, 7),
    ]


def test_azure_lines_of_2024_are_read() -> None:
    """Six decimals or none, with a zone; the leap day is there."""
    assert list(Trace(SAMPLES / "azure-2024.csv").entries()) == [
        Entry(0, 1452, 3),
        Entry(750 * MS, 584, 30),
        Entry(2_750_125_000, 862, 380),
    ]


def test_a_zone_is_taken_off_with_and_without_decimals(tmp_path: Path) -> None:
    """Instants of one file in three zones; what only looks like a zone is an error."""
    trace, rows = tmp_path / "trace.csv", ["00:00:00.25+00:00", "02:00:01.5+02:00", "00:00:02Z", "23:00:03.75-01:00"]
    days = ["2024-05-10", "2024-05-10", "2024-05-10", "2024-05-09"]
    written = [f"{day} {row},5,6" for day, row in zip(days, rows, strict=True)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *written]) + "\n")
    assert [entry.at_ns for entry in Trace(trace).entries()] == [0, 1250 * MS, 1750 * MS, 3500 * MS]
    for wrong in ("00:00:04+00:00.5", "00:00:04.5+0:000", "00:00:04.+00:00"):
        trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 {wrong},5,6\n")
        with pytest.raises(WorkloadError, match="has no date and time"):
            list(Trace(trace).entries())


def test_burstgpt_lines_are_read_and_failures_left_out() -> None:
    """Seconds from the first row; a row without tokens is a failed request, which cannot be replayed."""
    assert list(Trace(SAMPLES / "burstgpt.csv").entries()) == [
        Entry(0, 410, 18),
        Entry(40 * S, 1010, 230),
        Entry(115 * S, 417, 276),
    ]


def test_burstgpt_lines_with_sessions_are_read() -> None:
    """The later layout has more columns and fractions of a second."""
    assert list(Trace(SAMPLES / "burstgpt-sessions.csv").entries()) == [Entry(0, 410, 18), Entry(750 * MS, 1010, 230)]


@pytest.mark.parametrize(
    ("options", "due_ns", "input_tokens"),
    [
        ("", [0, 0, 3001 * MS, 6000 * MS], [1100, 600, 1030, 13]),
        (",speed=2", [0, 0, 3001 * MS // 2, 3000 * MS], [1100, 600, 1030, 13]),
        (",speed=0.3", [0, 0, 10_003_333_333, 20 * S], [1100, 600, 1030, 13]),
        (",start=1s", [2001 * MS, 5000 * MS], [1030, 13]),
        (",start=3001ms,speed=3", [0, 999_666_667], [1030, 13]),
        (",limit=3", [0, 0, 3001 * MS], [1100, 600, 1030]),
        (",start=1s,limit=1", [2001 * MS], [1030]),
    ],
)
def test_a_part_of_a_trace_can_be_replayed_at_another_speed(
    options: str, due_ns: list[int], input_tokens: list[int]
) -> None:
    """`start` becomes instant 0 and `speed` divides every offset, to the nearest nanosecond; lengths go along."""
    trace = parse(f"trace:{SAMPLES / 'mooncake.jsonl'}{options}")
    assert isinstance(trace, Trace)
    assert list(trace.due_ns(0)) == due_ns
    assert [entry.input_tokens for entry in trace.entries()] == input_tokens


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "its first line '' is not that of a known trace"),
        ("time,tokens\n1,2\n", "its first line 'time,tokens' is not that of a known trace"),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1: has no 'output_length'"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3\n', "line 1: is not JSON"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n\n[]\n', "line 3: "),
        ('{"timestamp": -1, "input_length": 2, "output_length": 3}\n', "line 1: has no timestamp in ms: -1"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}\n', "line 1: has no timestamp in ms: nan"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}\n', "line 1: expected a count, found True"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": ["x"]}\n', "expected a count, found 'x'"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", "line 2: has 2 fields, not 3"),
        (AZURE + "2023-11-16 18:15:46.68,374,5\n2023-11-16 18:15:46.67,374,5\n", "line 3: its time is before"),
        (AZURE + "yesterday,374,5\n", "line 2: has no date and time: 'yesterday'"),
        (AZURE + "2023-13-16 18:15:46,374,5\n", "line 2: has no date and time"),
        (AZURE + "2023-11-16 18:15:46,37.4,5\n", "line 2: expected a count, found '37.4'"),
        (AZURE + "2023-11-16 18:15:46,\udcff,5\n", "line 2: the byte 0xff at character 21 is not UTF-8"),
        (AZURE + "2023-11-16 18:15:46,10000001,5\n", "line 2: has 10000001 tokens, more than 10000000"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 99999999}\n', "line 1: has 99999999 tokens, more than"),
        ('{"timestamp":' + "[" * 100_000 + "\n", "line 1: "),
        (AZURE, "no request to replay"),
        (BURSTGPT + "5,ChatGPT,472,18,490,API log\nx,ChatGPT,1,1,2,API log\n", "line 3: has no timestamp in s"),
        (BURSTGPT + "5,ChatGPT,0,0,0,Conversation log\n", "no request to replay"),
        ('{"timestamp": Infinity, "input_length": 2, "output_length": 3}\n', "line 1: has no timestamp in ms: inf"),
        ('{"timestamp": "1", "input_length": 2, "output_length": 3}\n', "line 1: has no timestamp in ms: '1'"),
        ('{"timestamp": 1, "input_length": -2, "output_length": 3}\n', "line 1: expected a count, found -2"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3.5}\n', "line 1: expected a count, found 3.5"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": "x"}\n', "line 1: has hash_ids that"),
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [9223372036854775808]}\n',
            "line 1: has a hash id of more than 63 bits",
        ),
        (BURSTGPT + "-5,ChatGPT,472,18,490,API log\n", "line 2: has no timestamp in s: '-5'"),
        (BURSTGPT + "inf,ChatGPT,472,18,490,API log\n", "line 2: has no timestamp in s: 'inf'"),
        (BURSTGPT + "5,ChatGPT,472,-18,490,API log\n", "line 2: expected a count, found '-18'"),
    ],
)  # fmt: skip
def test_damage_is_an_error_with_its_line(tmp_path: Path, content: str, problem: str) -> None:
    """A damaged line is never guessed at or passed over: the error names file, line and reason."""
    file = tmp_path / "trace"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkloadError) as caught:
        list(Trace(file).entries())
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    """A file that cannot be read is named together with the system's reason."""
    with pytest.raises(WorkloadError, match=r"cannot read the trace .*nowhere: No such file"):
        list(Trace(tmp_path / "nowhere").entries())


def test_a_start_behind_the_end_is_an_error() -> None:
    """Nothing to replay is said before the run, with its likely cause."""
    with pytest.raises(WorkloadError, match="no request to replay") as caught:
        list(Trace(SAMPLES / "mooncake.jsonl", start_ns=3600 * S).entries())
    assert "start=" in caught.value.hint


def test_a_trace_is_read_no_further_than_needed(tmp_path: Path) -> None:
    """With a limit, what comes behind it is not looked at, so the head of a huge file replays at once."""
    file = tmp_path / "trace.csv"
    file.write_text(AZURE + "2023-11-16 18:15:46,374,5\ndamage\n", "utf-8")
    assert len(list(Trace(file, limit=1).entries())) == 1


def test_zones_are_taken_into_account(tmp_path: Path) -> None:
    """The same instant written in two zones is the same instant."""
    file = tmp_path / "trace.csv"
    rows = ["2024-05-10 23:30:00-01:30,1,1", "2024-05-11T01:00:00Z,2,1", "2024-05-11 03:00:00.5+02:00,3,1"]
    file.write_text(AZURE + "\n".join(rows), "utf-8")
    assert [entry.at_ns for entry in Trace(file).entries()] == [0, 0, S // 2]


def test_every_day_follows_the_day_before(tmp_path: Path) -> None:
    """From 1999 to 2030, leap days of 2000 and after included, each date is a day after the last."""
    days = [date(1999, 12, 1) + timedelta(days=number) for number in range(11_000)]
    file = tmp_path / "trace.csv"
    file.write_text(AZURE + "".join(f"{day.isoformat()} 00:00:00,1,1\n" for day in days), "utf-8")
    assert [entry.at_ns for entry in Trace(file).entries()] == [number * 86_400 * S for number in range(11_000)]


def test_layouts_are_told_apart_by_their_header() -> None:
    """No header fits two layouts, so detection does not depend on their order."""
    assert all(a is b or not set(a) <= set(b) for a in TABLES for b in TABLES)


def mooncake(file: Path, stamps: Sequence[float], **fields: object) -> Path:
    """Write a trace of Mooncake's layout, of 600 input tokens in two blocks of 512."""
    row = {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]} | fields
    file.write_text("".join(json.dumps({"timestamp": at, **row}) + "\n" for at in stamps))
    return file


@pytest.mark.parametrize(
    ("stamps", "unit"),
    [
        ([0.0, 0.2, 0.4], "s"),
        ([number // 6 for number in range(50)], "s"),
        ([1_700_000_000 + number * 0.15 for number in range(50)], "s"),
        ([number * 150_000 for number in range(50)], "us"),
        ([number * 150_000_000 for number in range(50)], "ns"),
        ([0, 25.5, 61.25, 90.125], "s"),
    ],
)
def test_a_unit_that_is_not_plausible_is_refused(tmp_path: Path, stamps: Sequence[float], unit: str) -> None:
    """Nothing is replayed 1,000 times too fast or too slow: the error names the rates, and the unit to state. With that
    unit the trace is read."""
    file = mooncake(tmp_path / "trace.jsonl", stamps)
    with pytest.raises(WorkloadError, match="the unit of its timestamps is unclear") as caught:
        list(Trace(file).entries())
    assert f"read in {unit} at " in str(caught.value)
    assert f"unit={unit}" in caught.value.hint
    named = parse(f"trace:{file},unit={unit}")
    assert isinstance(named, Trace)
    seconds = {"s": 1.0, "us": 1e-6, "ns": 1e-9}[unit]
    assert [entry.at_ns for entry in named.entries()] == pytest.approx(
        [(at - stamps[0]) * seconds * 1e9 for at in stamps], abs=500
    )


@pytest.mark.parametrize("damage", ["{}", "{", "[1]", '{"timestamp": "x"}'])
def test_damage_does_not_keep_a_unit_from_being_checked(tmp_path: Path, damage: str) -> None:
    """The rows before the damage decide; the damage itself is named where the unit is right."""
    file = mooncake(tmp_path / "seconds.jsonl", [0.0, 0.2, 0.4])
    file.write_text(file.read_text() + damage + "\n")
    with pytest.raises(WorkloadError, match="the unit of its timestamps is unclear"):
        list(Trace(file).entries())
    with pytest.raises(WorkloadError, match="line 4: "):
        list(Trace(file, unit="s").entries())


@pytest.mark.parametrize("stamps", [[0, 0, 0], [5], [0, 3001, 6000], [0.0, 150.25, 300.5], [7, 7.5, 7, 8]])
def test_milliseconds_are_read_without_a_word_from_the_user(tmp_path: Path, stamps: Sequence[float]) -> None:
    """One instant, one row, plausible rates, and fractions of a ms where seconds are not plausible. Rows out of order
    are named by their line, whatever the unit."""
    file = mooncake(tmp_path / "trace.jsonl", stamps)
    if sorted(stamps) == list(stamps):
        assert [entry.at_ns for entry in Trace(file).entries()] == [round((at - stamps[0]) * MS) for at in stamps]
    else:
        with pytest.raises(WorkloadError, match="line 3: its time is before"):
            list(Trace(file, unit="ms").entries())


@pytest.mark.parametrize(
    ("length", "count", "problem", "hint"),
    [
        (20, 2, "has 2 hash_ids for an input_length of 20, which is 1 block of 512 tokens", "block=16"),
        (600, 38, "has 38 hash_ids for an input_length of 600, which is 2 blocks of 512 tokens", "block=16"),
        (600, 3, "has 3 hash_ids for an input_length of 600, which is 2 blocks of 512 tokens", "block=256"),
        (600, 1, "has 1 hash id for an input_length of 600, which is 2 blocks of 512 tokens", "block=1024"),
        (3, 700, "has 700 hash_ids for an input_length of 3, which is 1 block of 512 tokens", "remove hash_ids"),
    ],
)
def test_hash_ids_that_contradict_the_length_are_refused(
    tmp_path: Path, length: int, count: int, problem: str, hint: str
) -> None:
    """The error names the line and both numbers, and a size of blocks that fits. With that size the trace is read."""
    file = mooncake(tmp_path / "trace.jsonl", [0, 100], input_length=length, hash_ids=list(range(count)))
    with pytest.raises(WorkloadError) as caught:
        list(Trace(file).entries())
    assert str(caught.value) == f"{file}, line 1: {problem}"
    assert hint in caught.value.hint
    if hint.startswith("block="):
        named = parse(f"trace:{file},{hint}")
        assert isinstance(named, Trace)
        assert {len(entry.blocks) for entry in named.entries()} == {count}
        assert str(named) == f"trace:{file},{hint}"


@pytest.mark.parametrize("hash_ids", [None, []])
def test_hash_ids_may_be_missing(tmp_path: Path, hash_ids: object) -> None:
    """No ids contradict nothing."""
    file = mooncake(tmp_path / "trace.jsonl", [0, 100], hash_ids=hash_ids)
    assert [entry.blocks for entry in Trace(file).entries()] == [(), ()]


def test_line_ends_do_not_matter(tmp_path: Path) -> None:
    """CRLF and a byte order mark are read in every layout."""
    for sample in ("mooncake.jsonl", "azure-2024.csv", "burstgpt.csv"):
        lines = (SAMPLES / sample).read_bytes().replace(b"\r\n", b"\n")
        file = tmp_path / sample
        file.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
        assert list(Trace(file).entries()) == list(Trace(SAMPLES / sample).entries())


def test_a_compressed_trace_is_unpacked(tmp_path: Path) -> None:
    """A trace that is compressed with gzip is read like the original."""
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress((SAMPLES / "mooncake.jsonl").read_bytes()))
    assert list(Trace(file).entries()) == list(Trace(SAMPLES / "mooncake.jsonl").entries())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("azure-2023.csv,unit=s", "are dates"),
        ("burstgpt.csv,block=16", "has no hash ids"),
        ("burstgpt.csv,unit=h", "unit"),
    ],
)
def test_options_that_a_layout_does_not_have_are_refused(options: str, problem: str) -> None:
    """A unit of dates, blocks of a table, and a unit that there is not."""
    with pytest.raises(WorkloadError, match=problem):
        list(parse(f"trace:{SAMPLES / options}").due_ns(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "mooncake.jsonl",
            "4 requests over 6 s (0.5 per second); Mooncake layout, timestamps in ms, blocks of 512 tokens",
        ),
        ("mooncake.jsonl,limit=2", "2 requests at one instant; Mooncake layout"),
        ("mooncake.jsonl,limit=1", "1 request; Mooncake layout"),
        (
            "mooncake.jsonl,speed=0.001",
            "4 requests over 100 min (1.8 per hour), replayed at 0.001 times the recorded",
        ),
        (
            "burstgpt.csv",
            "3 requests over 115 s (1.04 per minute), 1 row without tokens left out; BurstGPT layout, timestamps in s",
        ),
        ("burstgpt.csv,limit=1", "1 request; BurstGPT layout, timestamps in s"),
        ("burstgpt.csv,unit=ms", "3 requests over 115 ms (17.4 per second), "),
        ("azure-2024.csv", "3 requests over 2.75 s (0.727 per second); Azure layout, timestamps are dates"),
    ],
)
def test_a_trace_says_how_it_was_understood(options: str, words: str) -> None:
    """A sentence before the run has the requests, the time that they take, their rate, and the unit."""
    trace = parse(f"trace:{SAMPLES / options}")
    assert isinstance(trace, Trace)
    name = options.partition(",")[0]
    assert trace.describe(list(trace.due_ns(0))).startswith(f"Trace {name}: {words}")


def test_a_replay_of_many_years_is_refused(tmp_path: Path) -> None:
    """An instant that no clock can hold is an error, not a traceback."""
    file = mooncake(tmp_path / "trace.jsonl", [0, 10**9, 10**10])
    with pytest.raises(WorkloadError, match="takes more than ten years"):
        list(Trace(file, speed=Fraction(1, 1_000_000), unit="ms").due_ns(0))
    with pytest.raises(WorkloadError, match="line 3: read in s, the request comes 115,740 days after the first"):
        list(Trace(mooncake(file, [0, 1, 10**10]), unit="s").entries())


def test_a_trace_compressed_with_zstd(tmp_path: Path) -> None:
    """A trace in zstd is read like the plain file, although its first rows are read twice."""
    rows = b"".join(b'{"timestamp": %d, "input_length": 9, "output_length": 3}\n' % (1000 * n) for n in range(5))
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(pa.compress(rows, codec="zstd", asbytes=True))
    assert list(Trace(path).entries()) == [Entry(n * S, 9, 3, (), 512) for n in range(5)]
