"""Whatever a file holds, reading it gives what is in it or a WorkloadError, and no other exception."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.workloads import datasets
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.lengths import Empirical
from loadgen.workloads.spec_syntax import WorkloadError

DATA = Path(__file__).parent.parent / "data"
SAMPLES = sorted(file.read_bytes() for file in DATA.glob("*/*") if file.is_file())
READERS: dict[str, Callable[[Path], Iterator[object]]] = {
    "trace": lambda file: Trace(file).entries(),
    "sharegpt": datasets.sharegpt,
    "alpaca": datasets.alpaca,
    "jsonl": datasets.jsonl,
    "lengths": lambda file: (length for length, _ in zip(Empirical(file).tokens(0, "input"), range(9), strict=False)),
    "column": lambda file: (
        length for length, _ in zip(Empirical(file, "ContextTokens").tokens(0, "input"), range(9), strict=False)
    ),
}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sample with a few bytes replaced, cut off somewhere, or bytes that were never a sample."""
    content = bytearray(draw(st.sampled_from(SAMPLES) | st.binary(max_size=200)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4)):
        if place < len(content):
            content[place] = byte
    return bytes(content[: draw(st.integers(0, len(content)))])


@pytest.mark.parametrize("reader", READERS)
@given(content=damaged())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_never_raises_anything_else(tmp_path: Path, reader: str, content: bytes) -> None:
    """Samples with changed bytes or cut short, and plain noise, are read or refused by each reader."""
    file = tmp_path / "file"
    file.write_bytes(content)
    with contextlib.suppress(WorkloadError):
        deque(READERS[reader](file), maxlen=0)
