"""Whatever was done to a run's files, `report`, `compare` and `export` read what is intact or say what is wrong."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import api
from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.runfile import Telemetry, read
from loadgen.errors import (
    EXIT_CLIENT_LIMITED,
    EXIT_OK,
    EXIT_REQUESTS_FAILED,
    EXIT_SERVER,
    EXIT_USAGE,
    LoadgenError,
)
from tests.support.command import in_process
from tests.support.matrices import fabricate
from tests.support.runs import burst, footer, header, healthy
from tests.support.telemetry import line

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
CARD = {"index": 0, "name": "A800", "memory_total_bytes": 9}
FULL_HEADER = copy.deepcopy(TOLD)
FULL_HEADER["plan"] |= {"arrivals": "poisson:20", "repeat": 1, "repeats": 2, "duration_s": 5.0, "window_s": [0.0, 1.0]}
FULL_HEADER["plan"] |= {"workload": "synthetic", "gpu_model": "H100", "platform": "A800", "ignore_eos": True}
FULL_HEADER["load"] = {"kind": "poisson", "text": "x", "rate_per_s": 20.0, "cv": 1.0, "law": "gamma", "turns": 1}
FULL_HEADER["stamps"] = {"name": "ring", "title": "x", "exact": True, "error_s": 2e-05, "by_read": False}
FULL_HEADER["server"] |= {
    "speed": 1.0,
    "virtual": False,
    "title": "vLLM",
    "proxied_to": "http://x",
    "launch": {"pid": 1},
}
FULL_HEADER["server"] |= {"hardware": {"gpu": "H100", "model": "llama-2-7b", "tensor_parallel": 1}}
FULL_HEADER["server"] |= {"prediction": [{"figure": "ttft.p50", "value": 0.1, "low": 0.05, "high": 0.2}]}
FULL_HEADER["server"] |= {"notes": {"memory_option": "--x", "memory_taken": "90%", "prompt_piece_tokens": 8}}
FULL_HEADER["telemetry"] |= {"gpu": {"by": "NVML", "gpus": [CARD]}, "host": CARD | {"processes": PROCESSES}}
FULL_CLIENT: dict[str, Any] = {
    **{
        "cpu_ns": 24_000_000,
        "wall_ns": 1_000_000_000,
        "reads": 50,
        "coalesced_reads": 0,
        "full_reads": 0,
        "windows": 13,
    },
    **{"retransmits": 0, "out_of_order": 0, "stall_ns_max": 5_000_000, "clock_disagreement_ns": 4, "users": 3},
    **{"late_counts": {"-1": 1, "20": 40}, "ring_drops": 0, "ring_missed": 0, "ring_off_counts": {"9": 2, "13": 1}},
    **{"sweep_ns_max": 7, "ring_rejected": 1, "ring_given_up": 0, "socket_rejected": 1},
    **{"pauses": 1, "paused_ns": 5},
}
SERVED = ("running", "waiting", "kv_used", "kv_tokens", "taken_share", "prompt_tokens", "output_tokens")
SERVED += ("cached_prompt_tokens", "preemptions", "rejections", "requests_finished", "requests_failed")
FULL_CARD = CARD | dict.fromkeys(("memory_used_bytes", "power_w", "sm_clock_hz"), 8.0) | {"processes": PROCESSES}
FULL_CARD |= dict.fromkeys(("busy", "engine_active", "tensor_active", "dram_active"), 0.5)
FULL = [
    FULL_HEADER,
    *map(msgspec.to_builtins, burst(3, 4)),
    *(
        msgspec.to_builtins(sample)
        for sample in (
            *(line("server", at, moment, **dict.fromkeys(SERVED, 0.5)) for at, moment in ((-1, "idle"), (0, "start"))),
            line("server", 1, **dict.fromkeys(SERVED, 1)),
            *(line("gpu", at, moment, gpus=[FULL_CARD]) for at, moment in ((-1, "idle"), (1, "run"), (2, "end"))),
            line("host", 1, memory_used_bytes=9, processes=PROCESSES),
            line("clock", 0, machine="a", **CLOCK),
            line("clock", 2, machine="a", **CLOCK),
            Telemetry(source="client", at_ns=1_000_000_000, values=FULL_CLIENT),
            line("server", 2, gap="/metrics answers 503"),
        )
    ),
    msgspec.to_builtins(footer(burst(3, 4))),
]
"""A run with every field that readers look at."""
BASES = [
    FULL,
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
        *("", "x", "\x00é", "burst", "poisson:20", "run", "client", "server", "request", "5", "-1", "nan"),
        *([], {}, [1], {"a": 1}, [[]], [None], {"gap": 1}, {"1": "x"}, {"1": -5}, {"x": 1}, [{"index": {}}], NESTED),
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
def one_odd_value(draw: st.DrawFn) -> bytes:
    """The run with every field, in which one value of the header, of telemetry, a record or the footer is odd."""
    lines = copy.deepcopy(FULL)
    at = draw(st.one_of(st.just(0), st.integers(0, len(lines) - 1)))
    *way, name = draw(st.sampled_from(sorted(_places(lines[at]), key=str)))
    held = lines[at]
    for each in way:
        held = held[each]
    held[name] = draw(ODD)
    return b"\n".join(map(msgspec.json.encode, lines)) + b"\n"


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


@pytest.mark.parametrize("command", ["report", "compare", "export", "api"])
@given(content=one_odd_value())
@settings(max_examples=25)
def test_one_odd_value_of_any_field_is_no_exception(command: str, content: bytes) -> None:
    """A wrong type in any field of the header, of telemetry, of a record or of the footer: commands end with a
    documented exit code and a sentence, and the API raises nothing but RunFileError or LoadgenError."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "run").mkdir()
        (folder / "run" / "run.jsonl").write_bytes(content)
        shutil.copytree(DATA / "burst-again", folder / "other")
        if command == "api":
            with suppress(RunFileError, LoadgenError):
                result = api.read(folder / "run", objectives=["ttft.p99 < 1s"], goodput=["ttft < 1s"])
                assert result.text()
                assert len(result.frame()) > 0
                api.compare(folder / "other", result, anyway=True)
            return
        words = {
            "report": ["run"],
            "compare": ["other", "run", "--anyway"],
            "export": ["run", "--csv", "t"],
        }
        code, _, said = in_process(folder, command, *words[command])
        assert code in {EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_CLIENT_LIMITED, EXIT_USAGE}, said
        assert code != EXIT_USAGE or said.startswith("loadgen: "), said


@pytest.mark.parametrize("name", sorted(FULL_CLIENT))
@pytest.mark.parametrize("odd", [None, "burst", [1], {"1": "x"}, {"x": 1}, -0.5], ids=repr)
def test_odd_telemetry_of_the_client_is_skipped_and_counted(name: str, odd: Any, tmp_path: Path) -> None:
    """A line whose figure has another type is left out, and the report says that one line was damaged."""
    lines = copy.deepcopy(FULL)
    sample = next(each for each in lines if each.get("source") == "client")
    sample["values"][name] = odd
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    run = read(tmp_path / "run")
    assert run.damaged_lines == 1
    assert all(each.source != "client" for each in run.telemetry)


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
