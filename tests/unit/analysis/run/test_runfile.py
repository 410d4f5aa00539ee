"""Reading runs: whole, cut anywhere, with damaged lines, before and after the parts were gathered."""

from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Footer, Header, Telemetry, append_lines, open_run, read, scan
from loadgen.results import runs_in

HEADER = Header(version="0", started_at="2026-01-01T00:00:00Z", start_ns=5, plan={"n": 3}, server={"name": "tgi"})
RECORDS = [Record(id=i, state="complete", chunk_ns=[1, 2], chunk_tokens=[1, 1], sent_ns=0) for i in range(3)]
SAMPLE = Telemetry(source="client", at_ns=7, values={"reads": 2})
FOOTER = Footer(ended_ns=9, sent=3, complete=3, truncated=0, failed=0, dropped=0)


def lines(*items: object) -> bytes:
    return b"".join(msgspec.json.encode(item) + b"\n" for item in items)


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Header, records, telemetry and footer round-trip."""
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER, *RECORDS, SAMPLE, FOOTER))
    run = read(tmp_path)
    assert (run.header, run.records, run.telemetry, run.footer) == (HEADER, RECORDS, [SAMPLE], FOOTER)
    assert run.damaged_lines == 0


def test_a_busy_disk_makes_no_start_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is written while the start is 20 ms away, and waited for only with what follows it in the end."""
    waited: list[int] = []
    monkeypatch.setattr("loadgen.analysis.run.runfile.os.fsync", waited.append)
    open_run(tmp_path, msgspec.structs.replace(HEADER), "socket", 5, 6)
    assert (read(tmp_path).header.start_ns, waited) == (5, [])
    append_lines(tmp_path / "run.jsonl", [lines(FOOTER)])
    assert (read(tmp_path).footer, len(waited)) == (FOOTER, 1)


def test_a_killed_run_is_read_from_its_parts(tmp_path: Path) -> None:
    """Without a footer the workers' parts are still there; a record that is in both counts once."""
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER, RECORDS[0]))
    (tmp_path / "part-0.jsonl").write_bytes(lines(RECORDS[0], RECORDS[1]))
    (tmp_path / "part-1.jsonl").write_bytes(lines(RECORDS[2]) + b'{"type":"request","id":9,"sta')
    run = read(tmp_path)
    assert run.records == RECORDS
    assert run.footer is None
    assert run.damaged_lines == 1


def test_a_file_cut_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    """At every byte: an error while the header is incomplete, otherwise each whole line and at most one damaged."""
    whole = lines(HEADER, *RECORDS, FOOTER)
    head = len(lines(HEADER)) - 1
    file = tmp_path / "run.jsonl"
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        if cut < head:
            with pytest.raises(RunFileError):
                read(file)
            continue
        run = read(file)
        assert run.records == RECORDS[: len(run.records)]
        assert len(run.records) + bool(run.footer) + run.damaged_lines >= whole[:cut].count(b"\n") - 1
        assert run.damaged_lines <= 1


def test_damaged_lines_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    """A line that is not a line of ours is skipped, never guessed at."""
    damage = [b"\x00\xff\n", b"[]\n", b'{"type":"request"}\n', b'{"type":"weather"}\n', b"\n"]
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER, RECORDS[0]) + b"".join(damage) + lines(RECORDS[1], FOOTER))
    run = read(tmp_path)
    assert run.records == RECORDS[:2]
    assert run.damaged_lines == 4


def test_a_record_that_contradicts_itself_is_damaged(tmp_path: Path) -> None:
    """Chunks and their token counts go together; a line in which they do not is left out and counted."""
    (tmp_path / "run.jsonl").write_bytes(
        lines(HEADER, RECORDS[0])
        + b'{"type":"request","id":7,"state":"complete","chunk_ns":[1,2],"chunk_tokens":[1]}\n'
    )
    run = read(tmp_path)
    assert (run.records, run.damaged_lines) == (RECORDS[:1], 1)


def test_scanning_gives_each_record_once_and_keeps_none(tmp_path: Path) -> None:
    """Records go to whoever takes them, in the order of the file; the rest of the Run is as it is read."""
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER, *RECORDS, SAMPLE))
    (tmp_path / "part-0.jsonl").write_bytes(lines(RECORDS[2]))
    taken: list[Record] = []
    run = scan(tmp_path, taken.append)
    assert taken == RECORDS
    assert (run.records, run.header, run.telemetry) == ([], HEADER, [SAMPLE])


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """A newer minor version may add fields; older readers still read."""
    line = b'{"type":"request","id":1,"state":"failed","colour":"red"}\n'
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER) + line)
    assert read(tmp_path).records == [Record(id=1, state="failed")]


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    """No folder, no header, or a newer format: each gets its own words."""
    with pytest.raises(RunFileError, match="no run found"):
        read(tmp_path)
    (tmp_path / "run.jsonl").write_bytes(b"")
    with pytest.raises(RunFileError, match="not a readable header"):
        read(tmp_path)
    newer = msgspec.structs.replace(HEADER, format=99)
    (tmp_path / "run.jsonl").write_bytes(lines(newer))
    with pytest.raises(RunFileError, match="newer loadgen"):
        read(tmp_path)


RECORD = '{"type":"request","id":%s,"state":"complete","chunk_ns":[1,2],"chunk_tokens":%s}'
SAMPLED = '{"type":"telemetry","source":"client","at_ns":%s,"values":%s}'
TORN = {
    "no UTF-8": b'{"type":"request","id":1,"state":"failed","error_detail":"\xff"}',
    "nested": b'{"type":"request","id":1,"state":"failed","x":' + b"[" * 100_000,
    "id of 2^63": (RECORD % (2**63, [1, 1])).encode(),
    "count of 2^63": (RECORD % (1, [1, 2**63])).encode(),
    "negative count": (RECORD % (1, [1, -1])).encode(),
    "unequal columns": (RECORD % (1, [1])).encode(),
    "instant of 2^63": b'{"type":"request","id":1,"state":"failed","sent_ns":9223372036854775808}',
    "sample at 2^63": (SAMPLED % (2**63, "{}")).encode(),
    "no number": (SAMPLED % (1, '{"cpu_ns":"7"}')).encode(),
    "null": (SAMPLED % (1, '{"stall_ns_max":null}')).encode(),
    "no bucket": (SAMPLED % (1, '{"late_counts":{"x":1}}')).encode(),
    "no list": (SAMPLED % (1, '{"gpus":7}')).encode(),
    "no clock": b'{"type":"telemetry","source":"clock","at_ns":0,"values":{}}',
    "footer": b'{"type":"footer","ended_ns":1,"sent":-3,"complete":0,"truncated":0,"failed":0,"dropped":0}',
}


@pytest.mark.parametrize("line", TORN.values(), ids=TORN)
def test_what_cannot_be_is_damaged(tmp_path: Path, line: bytes) -> None:
    """By its bytes, its depth, its types or its limits: left out and counted; what stands twice counts once."""
    (tmp_path / "run.jsonl").write_bytes(lines(HEADER, RECORDS[0]) + line + b"\n" + lines(*RECORDS, SAMPLE, FOOTER))
    run = read(tmp_path)
    assert (run.records, run.telemetry, run.footer, run.damaged_lines) == (RECORDS, [SAMPLE], FOOTER, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"window_s": "all"}},
        {"plan": {"label": 7}},
        {"plan": {"n": "many"}},
        {"server": {"limits": [1]}},
        {"client": {"machines": [{"name": "a"}]}},
        {"telemetry": {"gpu": []}},
    ],
)
def test_a_header_of_other_types_is_no_run(tmp_path: Path, changes: dict[str, object]) -> None:
    """The message says where."""
    (tmp_path / "run.jsonl").write_bytes(lines(msgspec.to_builtins(HEADER) | changes))
    with pytest.raises(RunFileError, match=f"not a readable header .*{next(iter(changes))}"):
        read(tmp_path)


def test_a_copy_beside_the_repeats_is_none_of_them(tmp_path: Path) -> None:
    """Only what ends in its number, in their order."""
    for name in ("repeat-10", "repeat-2", "repeat-1.bak", "repeat-1-unfinished-1", "repeat-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.jsonl").write_bytes(lines(HEADER))
    assert [run.name for run in runs_in(tmp_path)] == ["repeat-2", "repeat-10"]
