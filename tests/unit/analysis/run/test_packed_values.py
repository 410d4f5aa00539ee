"""Samples of the client's state are kept in little memory, and have the values that were written."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.analysis.run.packed_values import PackedValues, pack_values, unpack_values
from loadgen.analysis.run.runfile import Telemetry, read
from tests.support.runs import complete, header, write

VALUES: dict[str, Any] = {
    "cpu_ns": 17_748_352,
    "realtime": False,
    "late_counts": {"-1": 3, "12": 40},
    "disagreement_ns": -5,
    "simulated_speed": 2.5,
    "gateways": ["nginx/1.22.1"],
    "unknown": None,
}


@pytest.mark.parametrize("values", [VALUES, {}, {"cpu_ns": 1}, {"late_counts": {}}, {"cpu_ns": 1, "reads": 1 << 40}])
def test_packed_values_equal_the_values(values: dict[str, Any]) -> None:
    """Names keep their order, and types are the same: False is not 0."""
    packed = pack_values(values)
    assert isinstance(packed, PackedValues)
    for result in (packed, pickle.loads(pickle.dumps(packed)), unpack_values(packed)):
        assert result == values
        assert {name: type(value) for name, value in result.items()} == {
            name: type(value) for name, value in values.items()
        }
    assert list(packed) == list(values)
    assert "other" not in packed
    assert packed.get("other", 7) == 7
    with pytest.raises(KeyError):
        packed["other"]


def test_an_integer_of_more_than_64_bits_is_kept() -> None:
    """A foreign file may contain such a number."""
    values = {"cpu_ns": 1 << 64}
    assert pack_values(values) is values


def test_samples_of_the_client_take_less_than_half_of_the_memory(tmp_path: Path) -> None:
    """A day has 86,400 samples per worker."""
    count = 3_000
    values = {name: 1_000_000_007 + index for index, name in enumerate("abcdefghijklmnopqrst")}
    histograms = {name: {str(bucket): 300 + bucket for bucket in range(9)} for name in ("late_counts", "off_counts")}

    def sample(number: int) -> Telemetry:
        return Telemetry(source="client", at_ns=number * 10**9, values=values | histograms)

    lines = [msgspec.json.encode(sample(number)) for number in range(count)]
    folder = write(tmp_path / "run", [header(1), complete(0, [1])])
    with (folder / "run.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in lines)
    tracemalloc.start()
    as_dicts: list[Mapping[str, Any]] = [msgspec.json.decode(line, type=Telemetry).values for line in lines]
    dict_bytes, _ = tracemalloc.get_traced_memory()
    run = read(folder)
    both_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.values for line in run.telemetry if line.source == "client"] == as_dicts
    assert both_bytes - dict_bytes < dict_bytes / 2


def test_the_order_of_the_values_is_kept() -> None:
    """Exported tables list the values of a sample in the order of the run file."""
    values = {"reads": 1, "late_counts": {"3": 1}, "simulated": True, "windows": 2}
    assert list(unpack_values(pack_values(values)).items()) == list(values.items())
