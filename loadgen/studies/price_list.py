"""Reads a price list of GPUs (TOML), and computes what a number of replicas costs on demand or as spot instances.

    currency = "$"

    [[price]]
    gpu = "H100"
    region = "eu-west"               # optional
    on_demand = 2.50                 # per GPU and hour
    spot = 1.10                      # per GPU and hour; optional
    interruptions_per_hour = 0.05    # of one machine; required for a spot price
    recovery_minutes = 8             # until the replica works on another machine; optional

A spot instance may be interrupted at any time. Its replica is down until another machine has loaded the model. Spare
replicas serve the load during this time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from loadgen.analysis.prices import HINT, Price, parse_price
from loadgen.errors import PlanError
from loadgen.servers.errors import read_toml
from loadgen.servers.hardware import HardwareError, gpu

RECOVERY_MINUTES = 10.0
"""Time until a replica works on another machine, if the price list does not say: start a machine and load the model."""
AVAILABILITY = 0.99
"""Share of the time in which enough spot replicas must work, in all pools together."""
MAX_SPARES = 1000
"""Number of spare replicas of a pool that no plan reaches. A spot price that needs as many is not used."""
EXAMPLE = """[[price]]
gpu = "H100"
region = "eu-west"
on_demand = 2.50
spot = 1.10
interruptions_per_hour = 0.05"""
_KEYS = ("gpu", "region", "on_demand", "spot", "interruptions_per_hour", "recovery_minutes")


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """The prices of one GPU type in one region, per GPU and hour."""

    gpu: str
    """GPU name in the hardware tables."""
    region: str = ""
    on_demand: Price | None = None
    spot: Price | None = None
    interruptions_per_hour: float = 0.0
    """Interruptions of one spot machine per hour."""
    recovery_minutes: float = RECOVERY_MINUTES


@dataclass(frozen=True, slots=True)
class Purchase:
    """The price per hour of a number of GPUs in one region. `spot` is True for a spot price."""

    amount: float
    """Cost of all GPUs per hour, including spare replicas."""
    currency: str = ""
    region: str = ""
    spot: bool = False
    spare_gpus: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """The replicas of one type that a load needs at the same time. A replica can also be a prefill or decode worker.

    All replicas of a pool have the same number of GPUs. Spare replicas, which replace failed replicas, are not
    included.
    """

    replicas: int
    gpus: int
    """GPUs per replica."""


def read_price_list(path: Path, hardware: Path | None = None) -> list[GpuPrice]:
    """Return the GPU prices in the TOML file `path`.

    `hardware` is the user's file with additional GPUs. Raises PlanError with a message that lists every mistake in the
    price list.
    """
    try:
        content = read_toml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(f"--prices {path}: {reason}", f"Name a TOML file such as:\n{EXAMPLE}") from None
    mistakes = [_unknown(key, ("currency", "price")) for key in content.keys() - {"currency", "price"}]
    rows = content.get("price")
    currency = str(content.get("currency", ""))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        mistakes.append("no [[price]] tables")
        rows = []
    prices: list[GpuPrice] = []
    for number, row in enumerate(rows, 1):
        try:
            price = _read_row(row, currency, hardware)
        except ValueError as error:
            mistakes.append(f"[[price]] {number}: {error}")
            continue
        if any((other.gpu, other.region) == (price.gpu, price.region) for other in prices):
            where = f" in {price.region}" if price.region else ""
            mistakes.append(f"[[price]] {number}: a second price of {price.gpu}{where}; give each region a name")
        prices.append(price)
    if mistakes:
        raise PlanError(f"--prices {path}: {'; '.join(mistakes)}", f"A price list looks like this:\n{EXAMPLE}")
    check_currencies(prices, f"--prices {path}")
    return prices


def check_currencies(prices: Sequence[GpuPrice], source: str) -> None:
    """Raise PlanError if the prices have different currencies.

    `source` names the origin of the prices in the message, for example `--prices gpus.toml`.
    """
    known = [price for each in prices for price in (each.on_demand, each.spot) if price is not None]
    currencies = sorted({price.currency for price in known})
    if len(currencies) > 1:
        named = " and ".join(currency or "none" for currency in currencies)
        raise PlanError(f"{source}: prices in different currencies ({named})", "Give all prices in the same currency.")


def _unknown(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"unknown key {key!r}" + (f" (did you mean {near[0]}?)" if near else f": choose {', '.join(known)}")


def _read_row(row: Mapping[str, Any], currency: str, hardware: Path | None) -> GpuPrice:
    """Return the prices of one [[price]] table. Raises ValueError for the first mistake."""
    unknown = sorted(row.keys() - set(_KEYS))
    if unknown:
        raise ValueError(_unknown(unknown[0], _KEYS))
    try:
        card = gpu(str(row.get("gpu", "")), hardware)
    except HardwareError as error:
        raise ValueError(str(error).partition(":")[0]) from None
    on_demand, spot = (_read_price(row, key, currency) for key in ("on_demand", "spot"))
    if on_demand is None and spot is None:
        raise ValueError(f"{card.name} has neither on_demand nor spot")
    interruptions = _read_number(row, "interruptions_per_hour", 0.0)
    if spot is not None and "interruptions_per_hour" not in row:
        raise ValueError(f"the spot price of {card.name} needs interruptions_per_hour, such as 0.05")
    recovery = _read_number(row, "recovery_minutes", RECOVERY_MINUTES)
    return GpuPrice(card.name, str(row.get("region", "")), on_demand, spot, interruptions, recovery)


def _read_price(row: Mapping[str, Any], key: str, currency: str) -> Price | None:
    if key not in row:
        return None
    try:
        price = parse_price(row[key])
    except ValueError as error:
        raise ValueError(f"{key}: {error} ({HINT[0].lower()}{HINT[1:]})") from None
    return price if price.currency else Price(price.amount, currency)


def _read_number(row: Mapping[str, Any], key: str, default: float) -> float:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{key} must be 0 or a positive number, not {value!r}")
    return float(value)


def spare_replicas(replicas: int, down_share: float, availability: float = AVAILABILITY) -> int | None:
    """Return how many spare replicas are needed so that at least `replicas` replicas work with the given probability.

    The probability is `availability`. Each replica is down for the share `down_share` of the time, independently of the
    others. Return None if MAX_SPARES or more spare replicas are needed.
    """
    if down_share == 1:
        return None
    # On average, at least `availability * replicas` replicas must work (Markov's inequality).
    first = math.ceil(availability * replicas / (1 - down_share)) - replicas
    for spares in range(max(0, first), MAX_SPARES):
        if _availability(replicas, spares, down_share) >= availability:
            return spares
    return None


def spares_of_pools(replicas: Sequence[int], down_shares: Sequence[float]) -> list[int] | None:
    """Return the number of spare replicas of each pool of replicas.

    For each pool, `replicas` contains the number of replicas that must work, and `down_shares` contains the share of
    the time for which a replica is down. With the spare replicas, enough replicas work in all pools at the same time,
    with a probability of at least AVAILABILITY. Return None if a pool alone needs MAX_SPARES or more spare replicas.
    """
    spares: list[int] = []
    for number, share in zip(replicas, down_shares, strict=True):
        alone = spare_replicas(number, share)
        if alone is None:
            return None
        spares.append(alone)
    while True:
        now = [_availability(*pool) for pool in zip(replicas, spares, down_shares, strict=True)]
        if math.prod(now) >= AVAILABILITY:
            return spares
        # One more replica goes to the pool in which it raises the probability most.
        more = [
            _availability(pool[0], pool[1] + 1, pool[2]) for pool in zip(replicas, spares, down_shares, strict=True)
        ]
        gains = [after / before for before, after in zip(now, more, strict=True)]
        spares[gains.index(max(gains))] += 1


def _availability(replicas: int, spares: int, down_share: float) -> float:
    """Return the probability that at least `replicas` of `replicas + spares` replicas work."""
    return sum(_binomial(replicas + spares, down, down_share) for down in range(spares + 1))


def _binomial(number: int, down: int, down_share: float) -> float:
    """Return the probability that exactly `down` of `number` replicas are down."""
    if not down_share:
        return float(down == 0)
    ways = math.lgamma(number + 1) - math.lgamma(down + 1) - math.lgamma(number - down + 1)
    return math.exp(ways + down * math.log(down_share) + (number - down) * math.log1p(-down_share))


def down_share(price: GpuPrice, gpus: int, node_gpus: int) -> float:
    """Return the share of the time for which a replica of `gpus` GPUs is down because of interruptions of spot
    machines.

    A machine has `node_gpus` GPUs. If one of the replica's machines is interrupted, the whole replica is down for
    `recovery_minutes`.
    """
    machines = math.ceil(gpus / node_gpus)
    down = price.interruptions_per_hour * machines * price.recovery_minutes / 60
    return down / (1 + down)


def cheapest(
    prices: Sequence[GpuPrice], pools: Sequence[ReplicaPool], *, spot: bool, node_gpus: int
) -> Purchase | None:
    """Return the cheapest purchase of the GPUs of all pools in one region, or None if there is no price.

    - `prices`: the prices of the GPU type in each region.
    - `pools`: the pools of replicas. All replicas of all pools must work at the same time.
    - `spot`: True if spot prices are considered too.
    - `node_gpus`: the number of GPUs per machine.

    Spot machines are interrupted at times, so a purchase at a spot price includes spare replicas. A spot price is
    ignored if a pool would need too many spare replicas (see `spares_of_pools`).
    """
    purchases = []
    gpus = sum(pool.replicas * pool.gpus for pool in pools)
    for price in prices:
        if price.on_demand is not None:
            purchases.append(Purchase(gpus * price.on_demand.amount, price.on_demand.currency, price.region))
        if spot and price.spot is not None:
            shares = [down_share(price, pool.gpus, node_gpus) for pool in pools]
            replicas = spares_of_pools([pool.replicas for pool in pools], shares)
            if replicas is None:
                continue
            spares = sum(pool.gpus * number for pool, number in zip(pools, replicas, strict=True))
            amount = (gpus + spares) * price.spot.amount
            purchases.append(Purchase(amount, price.spot.currency, price.region, spot=True, spare_gpus=spares))
    return min(purchases, key=lambda purchase: purchase.amount, default=None)


def gpu_hour(prices: Sequence[GpuPrice], *, spot: bool) -> Purchase | None:
    """Return the lowest price of one GPU for an hour of work, or None if there is no price.

    `prices` contains the prices of the GPU in each region. Spot prices are considered only if `spot` is True. A spot
    machine does no work for a while after an interruption, but this time must be paid too. An hour of work therefore
    costs more than the listed spot price. Spare replicas are not included.
    """
    purchases = [
        Purchase(price.on_demand.amount, price.on_demand.currency, price.region) for price in prices if price.on_demand
    ]
    for price in prices:
        down = down_share(price, 1, 1)
        if spot and price.spot and down < 1:
            amount = price.spot.amount / (1 - down)
            purchases.append(Purchase(amount, price.spot.currency, price.region, spot=True))
    return min(purchases, key=lambda purchase: purchase.amount, default=None)
