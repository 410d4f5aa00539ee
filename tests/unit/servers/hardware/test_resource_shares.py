"""The parts of a predicted time."""

from __future__ import annotations

import pytest

from loadgen.servers.hardware import Gpu, gpu
from loadgen.servers.hardware.resource_shares import LATENCY, RESOURCES, divide_time, with_fast_resources

H100 = gpu("H100")


def test_parts_that_follow_each_other() -> None:
    """Without overlap, the part of a resource is its own time."""

    def work_s(card: Gpu) -> float:
        return 1e15 / card.flops_per_s + 1e12 / card.memory_bytes_per_s + 1e9 / card.link.bytes_per_s + 0.25

    time = divide_time(work_s, H100)
    assert time.total_s == work_s(H100)
    assert time.parts_s == pytest.approx(
        {"compute": 1e15 / 989.4e12, "memory": 1e12 / 3350e9, "network": 1e9 / 450e9, LATENCY: 0.25}, rel=1e-4
    )
    assert sum(time.parts_s.values()) == pytest.approx(time.total_s)
    assert sum(time.shares.values()) == pytest.approx(1)
    assert time.bound == "compute"


def test_resources_that_hide_each_other_share_what_both_need() -> None:
    """10 s of compute over 8 s of memory: 2 s are saved by compute alone, and 8 s by both together, 4 s each."""

    def work_s(card: Gpu) -> float:
        return max(10 * H100.flops_per_s / card.flops_per_s, 8 * H100.memory_bytes_per_s / card.memory_bytes_per_s)

    time = divide_time(work_s, H100)
    assert time.parts_s == pytest.approx({"compute": 6, "memory": 4, "network": 0, LATENCY: 0}, abs=1e-4)


def test_what_nothing_shortens_is_latency() -> None:
    """All of a constant time."""
    time = divide_time(lambda _: 3.0, H100)
    assert (time.parts_s[LATENCY], time.bound) == (3.0, LATENCY)


def test_a_fast_resource_leaves_the_others() -> None:
    """Every link becomes fast, between machines too; latencies stay."""
    fast = with_fast_resources(H100, ["network"])
    assert fast.link.bytes_per_s > 1e6 * H100.link.bytes_per_s * 0.99
    assert fast.machine_link.bytes_per_s > 1e6 * H100.machine_link.bytes_per_s * 0.99
    assert (fast.link.nccl_s, fast.peaks, fast.memory_bytes_per_s) == (
        H100.link.nccl_s,
        H100.peaks,
        H100.memory_bytes_per_s,
    )
    assert with_fast_resources(H100, RESOURCES).flops_per_s > 1e6 * H100.flops_per_s * 0.99
