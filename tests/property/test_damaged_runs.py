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

from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_USAGE
from loadgen.runfile import RunFileError, read
from tests.command import in_process
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
def damaged(draw: st.DrawFn) -> tuple[bytes, set[int]]:
    """A run file after some mishaps, and the ids of requests whose lines were not touched."""
    lines = [(msgspec.json.encode(each), each) for each in draw(st.sampled_from(BASES))]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1)) if draw(st.booleans()) else draw(st.integers(0, 1))
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
    intact = {told["id"] for _, told in lines if told and told["type"] == "request"}
    end = b"\n" if draw(st.booleans()) else b""
    return b"\n".join(text for text, _ in lines) + end, intact


@pytest.mark.parametrize("command", ["report", "compare", "export"])
@given(case=damaged())
@settings(max_examples=60)
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
