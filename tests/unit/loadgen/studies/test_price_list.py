"""Price lists: what they cost, and what is said about mistakes in them."""

from __future__ import annotations

from dataclasses import replace
from math import comb, prod
from pathlib import Path

import pytest

from loadgen.analysis.prices import Price
from loadgen.errors import PlanError
from loadgen.studies.price_list import (
    GpuPrice,
    ReplicaPool,
    cheapest,
    down_share,
    gpu_hour,
    read_price_list,
    spare_replicas,
    spares_of_pools,
)

H100 = """[[price]]
gpu = "H100"
region = "us"
on_demand = 2.50
spot = 1.00
interruptions_per_hour = 0.5
recovery_minutes = 12
"""


def write(folder: Path, text: str) -> Path:
    """Write a price list, and return its path."""
    (folder / "prices.toml").write_text(text, "utf-8")
    return folder / "prices.toml"


def test_a_price_list(tmp_path: Path) -> None:
    """Names of GPUs become those of the hardware tables. The currency of the file applies to prices without one."""
    text = f'currency = "EUR"\n{H100}\n[[price]]\ngpu = "L40S"\non_demand = "0.9 EUR"\n'
    first, second = read_price_list(write(tmp_path, text))
    assert first == GpuPrice("H100 SXM", "us", Price(2.5, "EUR"), Price(1.0, "EUR"), 0.5, 12.0)
    assert second == GpuPrice("L40S", "", Price(0.9, "EUR"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[price]] tables"),
        ("price = 3", "no [[price]] tables"),
        ("[[price]", "prices.toml"),
        (H100.replace('"H100"', '"H1000"'), "[[price]] 1: unknown GPU 'H1000'"),
        (H100.replace("on_demand = 2.50", 'on_demand = "cheap"'), "on_demand: cheap is not a price"),
        (H100.replace("on_demand", "ondemand"), "unknown key 'ondemand' (did you mean on_demand?)"),
        (H100.replace("on_demand = 2.50\nspot = 1.00\n", ""), "H100 SXM has neither on_demand nor spot"),
        (H100.replace("interruptions_per_hour = 0.5\n", ""), "needs interruptions_per_hour, such as 0.05"),
        (H100.replace("= 0.5", "= -1"), "interruptions_per_hour must be 0 or a positive number, not -1"),
        (H100.replace("= 12", '= "soon"'), "recovery_minutes must be 0 or a positive number, not 'soon'"),
        (H100 + H100, "a second price of H100 SXM in us; give each region a name"),
        ("currancy = 1\n" + H100, "unknown key 'currancy' (did you mean currency?)"),
        (H100.replace("2.50", '"$2.50"').replace("1.00", '"1 EUR"'), "prices in different currencies ($ and EUR)"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    """The message names the file and the entry, and the hint shows a price list."""
    with pytest.raises(PlanError) as caught:
        read_price_list(write(tmp_path, text))
    assert said in str(caught.value)
    assert "prices.toml" in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Two wrong entries are two parts of one message."""
    text = H100.replace('"H100"', '"H1000"') + H100.replace("2.50", '"cheap"')
    with pytest.raises(PlanError, match=r"\[\[price\]\] 1: .*; \[\[price\]\] 2: "):
        read_price_list(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message is that of the operating system."""
    with pytest.raises(PlanError, match="No such file"):
        read_price_list(tmp_path / "none.toml")


def test_a_replica_is_down_while_it_recovers() -> None:
    """0.5 interruptions per hour of 12 minutes each: a tenth of the working time. Two machines fail twice as often."""
    price = GpuPrice("H100 SXM", interruptions_per_hour=0.5, recovery_minutes=12.0)
    assert down_share(price, 8, 8) == pytest.approx(0.1 / 1.1)
    assert down_share(price, 16, 8) == pytest.approx(0.2 / 1.2)


@pytest.mark.parametrize(("replicas", "down", "spares"), [(1, 0.0, 0), (1, 0.005, 0), (1, 0.05, 1), (10, 0.05, 3)])
def test_spare_replicas(replicas: int, down: float, spares: int) -> None:
    """By the binomial distribution, at 99%: one of two that are down for 5% of the time works for 99.75% of it."""
    assert spare_replicas(replicas, down) == spares


def test_a_spot_price_of_hopeless_replicas_is_not_used() -> None:
    """No number of replicas that never work serves the load. Another price is chosen, or none."""
    assert spare_replicas(1, 1 - 1e-9) is None
    hopeless = GpuPrice("H100 SXM", "us", Price(2.5), Price(0.1), 1e6, 600.0)
    pool = ReplicaPool(1, 1)
    paid = cheapest([hopeless], [pool], spot=True, node_gpus=8)
    assert paid
    assert (paid.amount, paid.spot) == (2.5, False)
    assert cheapest([replace(hopeless, on_demand=None)], [pool], spot=True, node_gpus=8) is None


@pytest.mark.parametrize("down", [0.001, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("replicas", [[1, 1], [3, 10], [40, 7]])
def test_two_pools_work_at_the_same_time(replicas: list[int], down: float) -> None:
    """Both pools have enough replicas for 99% of the time, with as few spare ones as possible."""
    spares = spares_of_pools(replicas, [down, down])
    assert spares
    assert both_work(replicas, spares, down) >= 0.99
    fewer = range(sum(spares))
    assert not any(both_work(replicas, [first, sum(spares) - 1 - first], down) >= 0.99 for first in fewer)


def both_work(replicas: list[int], spares: list[int], down: float) -> float:
    """Return the probability that enough replicas of both pools work, by summing the binomial distribution."""

    def works(needed: int, number: int) -> float:
        chances = (comb(number, up) * (1 - down) ** up * down ** (number - up) for up in range(needed, number + 1))
        return sum(chances)

    return prod(works(needed, needed + extra) for needed, extra in zip(replicas, spares, strict=True))


def test_the_cheapest_purchase_is_chosen() -> None:
    """A spot price wins only if it is cheaper with its spare replicas. Without --spot it is not considered."""
    dollar = Price(2.5, "$")
    us = GpuPrice("H100 SXM", "us", dollar, Price(1.5, "$"), 0.5, 12.0)
    eu = GpuPrice("H100 SXM", "eu", Price(2.2, "$"))
    on_demand = cheapest([us, eu], [ReplicaPool(10, 1)], spot=False, node_gpus=8)
    assert on_demand
    assert (on_demand.amount, on_demand.region, on_demand.spot) == (22.0, "eu", False)
    spot = cheapest([us, eu], [ReplicaPool(10, 1)], spot=True, node_gpus=8)
    assert spot
    assert (spot.spot, spot.spare_gpus, spot.region) == (True, 4, "us")
    assert spot.amount == 14 * 1.5
    one = cheapest([us, eu], [ReplicaPool(1, 1)], spot=True, node_gpus=8)
    assert one
    assert (one.amount, one.spot) == (2.2, False)  # a spare replica would double 1.5
    assert cheapest([], [ReplicaPool(1, 1)], spot=True, node_gpus=8) is None


def test_an_hour_of_a_spot_gpu_includes_the_time_in_which_it_is_down() -> None:
    """1.5 for 10/11 of an hour of work."""
    price = GpuPrice("H100 SXM", "us", Price(2.5), Price(1.5), 0.5, 12.0)
    paid = gpu_hour([price], spot=True)
    assert paid
    assert paid.amount == pytest.approx(1.5 * 1.1)
    assert gpu_hour([price], spot=False) == gpu_hour([GpuPrice("H100 SXM", "us", Price(2.5))], spot=True)
