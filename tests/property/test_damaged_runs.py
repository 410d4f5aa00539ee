"""Whatever was done to a run's files, `report`, `compare` and `export` read what is intact or say what is wrong."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_SERVER, EXIT_USAGE
from loadgen.runfile import RunFileError, read
from tests.command import in_process
from tests.matrices import fabricate
from tests.runs import header, healthy
from tests.telemetry import line

DATA = Path(__file__).parents[1] / "data" / "recorded"
NESTED: Any = []
for _ in range(900):
    NESTED = [NESTED]
CLOCK = {"workers": [0], "offset_ns": 7, "uncertainty_ns": 3}
TOLD = msgspec.to_builtins(header(3, server="vllm"))
TOLD["client"] |= {"machines": [{"name": "a", "exchanges": 5, **CLOCK}]}
TOLD["telemetry"] = {"gpu": {"gpus": [{"index": 0, "name": "A800", "memory_total_bytes": 9}]}, "not_measured": {}}
PROCESSES = [{"pid": 5, "rss_bytes": 3, "memory_used_bytes": 7}]
SAMPLES = [
    line("server", -1, "idle", running=0, kv_used=0.1, output_tokens=1, taken_share=0.9),
    line("server", 1, running=8, kv_used=0.4, output_tokens=9, kv_tokens=100),
    line("gpu", 1, gpus=[{"index": 0, "memory_used_bytes": 8, "power_w": 300.5, "processes": PROCESSES}]),
    line("host", 1, memory_used_bytes=9, processes=PROCESSES),
    line("clock", 0, machine="a", **CLOCK),
    *healthy(2),
]
BASES = [
    [
        TOLD,
        *([*map(msgspec.json.decode, (DATA / "burst/run.jsonl").read_bytes().splitlines())][-20:]),
        *map(msgspec.to_builtins, SAMPLES),
    ],
    *(
        [*map(msgspec.json.decode, (DATA / name / "run.jsonl").read_bytes().splitlines())]
        for name in ("poisson", "sessions")
    ),
]
ODD = st.sampled_from(
    (
        *(None, True, -1, 0, 7, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 1e-300, 1e308, -0.5),
        *("", "x", "\x00é", "burst", "poisson:20", "run", "client", "server", "request"),
        *([], {}, [1], {"a": 1}, [[]], [None], {"gap": 1}, NESTED),
    )
)
TORN = (
    b"\xff",
    b"[" * 100_000,
    b'{"type":"request"}',
    b"{}",
    b"null",
    b"\x00",
    b'{"type":"footer","ended_ns":1}',
    b"9" * 5000,
)


def _places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a line."""
    if here:
        yield here
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(each, (*here, key))


@st.composite
def damaged(draw: st.DrawFn, base: list[Any] | None = None) -> tuple[bytes, set[int]]:
    """A file of lines, of a run where none is given, after some mishaps; the ids of requests that were not touched."""
    lines = [(msgspec.json.encode(each), each) for each in (base or draw(st.sampled_from(BASES)))]
    for _ in range(draw(st.integers(1, 4))):
        at = (
            draw(st.integers(0, len(lines) - 1))
            if draw(st.booleans())
            else draw(st.integers(0, min(1, len(lines) - 1)))
        )
        text, told = lines[at]
        match draw(st.sampled_from(["value", "value", "value", "byte", "cut", "torn", "twice", "swap", "gone"])):
            case "value" if told:
                told = copy.deepcopy(told)
                *way, name = draw(st.sampled_from(sorted(_places(told), key=str)))
                held = told
                for each in way:
                    held = held[each]
                held[name] = draw(ODD)
                lines[at] = msgspec.json.encode(told), None
            case "byte":
                place = draw(st.integers(0, len(text)))
                lines[at] = text[:place] + draw(st.binary(max_size=2)) + text[place + 1 :], None
            case "cut":
                lines[at] = text[: draw(st.integers(0, len(text)))], None
            case "torn":
                lines.insert(at, (draw(st.sampled_from(TORN)), None))
            case "twice":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            case "swap":
                lines[at], lines[-1] = lines[-1], lines[at]
            case "gone" if len(lines) > 1:
                del lines[at]
    intact = {told["id"] for _, told in lines if told and told.get("type") == "request"}
    end = b"\n" if draw(st.booleans()) else b""
    return b"\n".join(text for text, _ in lines) + end, intact


@pytest.mark.parametrize("command", ["report", "compare", "export"])
@given(case=damaged())
@settings(max_examples=25)
def test_a_damaged_run_is_read_as_far_as_it_is_intact(command: str, case: tuple[bytes, set[int]]) -> None:
    """Each command ends with an exit code of its own and a sentence, never with an exception; every request whose line
    is intact is in the run."""
    content, intact = case
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "run").mkdir()
        (folder / "run" / "run.jsonl").write_bytes(content)
        shutil.copytree(DATA / "burst-again", folder / "other")
        words = {
            "report": ["run"],
            "compare": ["other", "run", "--anyway"],
            "export": ["run", "--csv", "t", "--parquet", "t"],
        }
        code, _, said = in_process(folder, command, *words[command])
        try:
            found = {record.id for record in read(folder / "run").records}
        except RunFileError:
            assert (code, said.startswith("loadgen: ")) == (EXIT_USAGE, True)
        else:
            assert code in {EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_CLIENT_LIMITED}, said
            assert intact <= found


def lines_of(file: Path) -> list[Any]:
    content = file.read_bytes()
    return [*map(msgspec.json.decode, content.splitlines() if file.suffix == ".jsonl" else [content])]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repeats, and a matrix, as they were written."""
    folder = tmp_path_factory.mktemp("whole")
    for number in (1, 2, 3):
        shutil.copytree(DATA / "burst", folder / "repeats" / f"repeat-{number}")
    fabricate(
        folder / "matrix", repeats=1, starts=1, hosts=[{"name": "a800"}], models=["llama-2-7b"], cases=[], references=[]
    )
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("report", "repeats"),
        ("compare", "repeats", "other", "--anyway"),
        ("export", "repeats", "--csv", "t"),
        ("matrix", "matrix"),
    ],
    ids=" ".join,
)
@given(data=st.data())
@settings(max_examples=10)
def test_damaged_folders_of_runs_are_read_or_refused(whole: Path, words: tuple[str, ...], data: st.DataObject) -> None:
    """Several runs, of which some are damaged, and what stands beside them: an exit code of its own and a sentence."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kind = words[1]
        shutil.copytree(whole / kind, folder / kind)
        shutil.copytree(DATA / "burst-again", folder / "other")
        files = sorted(each for each in (folder / kind).rglob("*") if each.suffix in {".json", ".jsonl"})
        for file in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True), "files"):
            match data.draw(st.sampled_from(["lines", "lines", "empty", "gone", "folder"])):
                case "lines":
                    file.write_bytes(data.draw(damaged(base=lines_of(file)))[0])
                case "empty":
                    file.write_bytes(b"")
                case how:
                    file.unlink()
                    if how == "folder":
                        file.mkdir()
        code, _, said = in_process(folder, *words)
        assert code in {EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_USAGE, EXIT_SERVER, EXIT_CLIENT_LIMITED}, said
        assert code != EXIT_USAGE or said.startswith("loadgen: "), said


@pytest.mark.parametrize("name", ["server", "host", "model"])
def test_lines_of_a_matrix_about_what_is_not_in_its_plan_are_left_out(whole: Path, tmp_path: Path, name: str) -> None:
    """A start or a failure of a server, host or model that the plan does not name."""
    folder = shutil.copytree(whole / "matrix", tmp_path / "matrix")
    lines = [msgspec.json.decode(each) for each in (folder / "matrix.jsonl").read_bytes().splitlines()]
    up, begin = (next(each for each in lines if each["type"] == kind) for kind in ("up", "begin"))
    failure = {"type": "failure", "repeat": 1, "kind": "E", "reason": "r", "hint": "", "log": "", "at": up["at"]}
    other = [up | {name: ""}, failure | {"cell": begin["cell"] | {name: ""}}]
    with (folder / "matrix.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(each) + b"\n" for each in other)
    code, _, said = in_process(tmp_path, "matrix", "matrix")
    assert code == EXIT_OK, said
    found = msgspec.json.decode((folder / "matrix.json").read_bytes())
    assert found["failures"] == []
    assert all(each["host"] and each["server"] for each in found["server_starts"])


def test_a_chunk_without_tokens_ends_no_comparison(tmp_path: Path) -> None:
    """A damaged count of 0: its gap counts, and nothing beside it."""
    lines = [msgspec.json.decode(each) for each in (DATA / "burst/run.jsonl").read_bytes().splitlines()]
    first = next(each for each in lines if each["type"] == "request")
    first["chunk_tokens"][1] = 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    shutil.copytree(DATA / "burst-again", tmp_path / "other")
    code, out, said = in_process(tmp_path, "compare", "other", "run", "--anyway")
    assert (code, "itl.p99" in out) == (EXIT_OK, True), said
