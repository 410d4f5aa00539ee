"""Hypothetical GPUs: what another node, memory or network changes, checked by hand and against real GPUs."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from loadgen.servers.hardware import HardwareError, gpu, parse_gpus, tables, with_changes
from loadgen.servers.hardware.kernels import power_scale
from loadgen.servers.hardware.technology import (
    memory_names,
    network_names,
    original_technology,
    scaled_gpu,
    technologies,
    technology_names,
)

A100 = gpu("A100")


def test_every_row_names_its_source() -> None:
    """Figures without a source are not accepted; every derived GPU exists, and its node and memory do too."""
    found = tables()
    for table in ("technologies", "memories", "networks", "gpu_technologies"):
        assert all(row["source"] for row in found[table])
    nodes, memories = ({next(iter(row.values())) for row in found[table]} for table in ("technologies", "memories"))
    for row in found["gpu_technologies"]:
        assert gpu(row["gpu"]).name == row["gpu"]
        assert (row["technology"] in nodes, row["memory"] in memories) == (True, True)


@pytest.mark.parametrize("row", tables()["memories"], ids=lambda row: row["memory"])
def test_bandwidths_are_pins_times_their_rate(row: dict[str, str]) -> None:
    """Bits per second and pin, times pins, divided by eight, to the rounding of the standard."""
    assert float(row["GBps"]) == pytest.approx(float(row["Gbps_per_pin"]) * int(row["bits"]) / 8, rel=0.005)


def test_figures_of_a_node_multiply() -> None:
    """Each row is relative to the one above: 7 nm has 2.1 x 1.6 times the logic of 12 nm."""
    nodes = technologies()
    assert nodes["7nm"].density == pytest.approx(2.1 * 1.6)
    assert nodes["7nm"].power == pytest.approx(0.6 * 0.6)
    assert [node.name for node in nodes.values() if node.projected] == ["1.4nm", "1nm"]


def test_the_chip_uses_its_area_and_its_power() -> None:
    """From 7 to 5 nm: 1.8 times the SMs, and the clock at which they draw the old power, by hand."""
    made = scaled_gpu(A100, "5nm")
    exponent = log(1 / 0.7) / log(1.15)
    clock = (1 / (1.8 * 0.7)) ** (1 / exponent)
    assert made.gpu.sms == round(1.8 * 108) == 194
    assert made.gpu.clock_hz == pytest.approx(1.41e9 * clock)
    assert made.gpu.flops_per_s == pytest.approx(312e12 * 194 / 108 * clock)
    assert 1.8 * 0.7 * clock**exponent == pytest.approx(1)  # the power of the chip
    assert made.limited_by == "power"
    assert made.gpu.watts == A100.watts
    assert power_scale(made.gpu) == pytest.approx(power_scale(A100))  # power is not subtracted twice
    assert made.gpu.name == "A100-80GB SXM (5nm)"


def test_a_node_and_back_is_the_original() -> None:
    """The figures of 5 nm relative to 7 nm are the inverse of those of 7 nm relative to 5 nm."""
    h100 = gpu("H100")
    older = scaled_gpu(h100, "7nm")
    assert older.limited_by == "area"
    assert older.gpu.flops_per_s * scaled_gpu(A100, "5nm").gpu.flops_per_s / A100.flops_per_s == pytest.approx(
        h100.flops_per_s, rel=0.01
    )


def test_the_own_parts_change_nothing() -> None:
    """An A100 in 7 nm with HBM2E and NVLink 3 is an A100."""
    made = scaled_gpu(A100, *original_technology(A100), "NVLink 3")
    assert made.changes == ()
    assert (made.gpu.peaks, made.gpu.sms, made.gpu.memory_bytes) == (A100.peaks, A100.sms, A100.memory_bytes)
    assert (made.gpu.memory_bytes_per_s, made.gpu.link) == (A100.memory_bytes_per_s, A100.link)


def test_memory_keeps_the_number_of_stacks() -> None:
    """Five stacks at the share of the standard's rate that A100 uses, or another number."""
    share = 2039 / (5 * 461)
    assert scaled_gpu(A100, None, "HBM3").gpu.memory_bytes_per_s == pytest.approx(share * 5 * 819e9)
    assert scaled_gpu(A100, None, "HBM3").gpu.memory_bytes == pytest.approx(5 * 24e9)
    eight = scaled_gpu(A100, None, "8 x hbm4").gpu
    assert eight.memory_bytes_per_s == pytest.approx(share * 8 * 2048e9)
    other = scaled_gpu(A100, None, "16xGDDR7").gpu
    assert (other.memory_bytes_per_s, other.memory_bytes) == (pytest.approx(16 * 128e9), pytest.approx(16 * 3e9))


@pytest.mark.parametrize(
    ("name", "technology", "memory", "network", "real", "compute", "bandwidth"),
    [
        ("A100-40GB SXM", None, "HBM2E", None, "A100-80GB SXM", 0.01, 0.15),
        ("H100 SXM", None, "6 x HBM3E", None, "H200 SXM", 0.01, 0.25),
        ("V100", "7nm", "HBM2E", "NVLink 3", "A100-80GB SXM", 0.35, 0.4),
        ("A100", "5nm", "HBM3", "NVLink 4", "H100 SXM", 0.5, 0.1),
    ],
)
def test_real_successors_are_within_stated_distances(
    name: str, technology: str | None, memory: str, network: str | None, real: str, compute: float, bandwidth: float
) -> None:
    """Real GPUs changed more than their node: architecture, area and power. The distances are those of the guide."""
    made, found = scaled_gpu(gpu(name), technology, memory, network).gpu, gpu(real)
    assert made.flops_per_s == pytest.approx(found.flops_per_s, rel=compute)
    assert made.memory_bytes_per_s == pytest.approx(found.memory_bytes_per_s, rel=bandwidth)
    if network:
        assert made.link == found.link


def test_networks_of_both_scopes() -> None:
    """NVLink replaces the links within a machine, InfiniBand those between machines, and + both."""
    both = scaled_gpu(A100, None, None, "NVLink 5+InfiniBand NDR").gpu
    assert (both.link.name, 2 * both.link.bytes_per_s) == ("NVLink 5", 1800e9)
    assert (both.machine_link.name, 2 * both.machine_link.bytes_per_s) == ("InfiniBand NDR", 100e9)
    assert scaled_gpu(A100, None, None, "400GbE").gpu.machine_link.step_s > both.machine_link.step_s
    assert A100.machine_link.name == "InfiniBand"


def test_changes_of_set_derive_the_same_gpu() -> None:
    """`--set` and the options share one way; other changes come after it."""
    changes = ["memory=100GB", "technology=3nm", "memory_generation=HBM4"]
    made = with_changes(A100, changes)
    assert made.name == "A100-80GB SXM (3nm, HBM4)"
    assert made.memory_bytes == 100e9
    assert made.sms == scaled_gpu(A100, "3nm").gpu.sms


def test_a_set_figure_replaces_the_derived_one_in_the_list_of_changes() -> None:
    """HBM4 in H100 gives 120 GB, two thirds of the standard, because H100 has smaller stacks than HBM3 allows."""
    derived = with_changes(gpu("H100"), ["memory_generation=HBM4"])
    made = with_changes(gpu("H100"), ["memory_generation=HBM4", "memory=180GB"])
    assert [change.after for change in derived.changes] == ["8.38 TB/s", "120 GB"]
    assert made.memory_bytes == 180e9
    assert [(change.after, change.reason) for change in made.changes[1:]] == [("180GB", "--set memory=180GB")]


def test_a_name_in_parentheses_is_a_hypothetical_gpu() -> None:
    """So every command that takes a GPU takes a hypothetical one; its own name leads back to it."""
    made = gpu("a100 (hbm4, 3 nm, NVLink 5, XDR)")
    assert made == scaled_gpu(A100, "3nm", "HBM4", "NVLink 5+InfiniBand XDR").gpu
    assert made.name == "A100-80GB SXM (3nm, HBM4, NVLink 5, InfiniBand XDR)"
    assert gpu(made.name) == made
    assert parse_gpus("4 x A100 (8 x HBM4)") == (4, "A100-80GB SXM (8 x HBM4)")
    with pytest.raises(HardwareError, match=r"'4nm' is no technology node, memory or network .*: choose from 12nm"):
        gpu("A100 (4nm)")
    with pytest.raises(HardwareError, match="names several nodes or several memories"):
        gpu("A100 (3nm, 5nm)")
    with pytest.raises(HardwareError, match="unknown GPU 'B1000'"):
        gpu("B1000 (3nm)")


def test_a_listed_name_with_parentheses_is_a_real_gpu(tmp_path: Path) -> None:
    """The names of users' GPUs may contain parentheses."""
    figures = "bf16_TFLOPs = 200\nmemory_GB = 48\nmemory_GBps = 860\npcie_GBps = 64\n"
    file = tmp_path / "hardware.toml"
    file.write_text(f'[gpus."My GPU (48GB)"]\n{figures}', "utf-8")
    assert gpu("My GPU (48GB)", file).memory_bytes == 48e9
    assert gpu("my gpu (48 GB)", file).name == "My GPU (48GB)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("4.5nm", None, None), r"unknown technology '4.5nm' \(did you mean 5nm .*: choose one of 12nm, 10nm"),
        ((None, "HBM5", None), r"unknown memory 'HBM5' .*: choose one of HBM2, HBM2E"),
        ((None, "LPDDR5X", None), r"has 5 x HBM2E, and LPDDR5X is of another family: name a number"),
        ((None, None, "NVLink 9"), r"unknown network 'NVLink 9' .*: choose one of NVLink 3, NVLink 4"),
        ((None, " ", None), "the name of the memory is empty"),
    ],
)
def test_errors_name_the_known_values(words: tuple[str | None, str | None, str | None], message: str) -> None:
    """Unknown nodes, memories and networks."""
    with pytest.raises(HardwareError, match=message):
        scaled_gpu(A100, *words)


def test_a_gpu_of_unknown_technology_is_refused() -> None:
    """The message lists the GPUs from which others can be derived; a network needs no node."""
    with pytest.raises(HardwareError, match=r"node and the memory of TPU v5e are not known.*choose one of V100"):
        scaled_gpu(gpu("TPU v5e"), "5nm")
    assert scaled_gpu(gpu("TPU v5e"), None, None, "Ethernet 400G").gpu.machine_link.name == "Ethernet 400G"


def test_lists_and_ranges_of_names() -> None:
    """Ranges follow the table in both directions; a name occurs once; every spelling becomes the name of the table."""
    assert technology_names("12nm..5nm") == ["12nm", "10nm", "7nm", "5nm"]
    assert technology_names("3nm..N7, 3nm") == ["3nm", "5nm", "7nm"]
    assert memory_names("hbm3..HBM4,8x hbm4") == ["HBM3", "HBM3E", "HBM4", "8 x HBM4"]
    assert network_names("nvlink4, NVLink 5 + xdr") == ["NVLink 4", "NVLink 5 + InfiniBand XDR"]
    with pytest.raises(HardwareError, match="names nothing: choose from 12nm"):
        technology_names(",")
    with pytest.raises(HardwareError, match="unknown technology 'x'"):
        technology_names("x..5nm")
    with pytest.raises(HardwareError, match=r"8 x HBM3\.\.HBM4: a range has no numbers"):
        memory_names("8 x HBM3..HBM4")
