"""Scales the loads of the classes of traffic of a plan, for the steps of a sweep.

- A sweep over the rate multiplies the rates of all classes by one factor, so that the mix stays the same. Classes
  without a rate, such as closed loops, keep their loads.
- A sweep over the concurrency multiplies the numbers of clients of all closed loops by one factor. Classes with a rate
  keep their loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from loadgen.errors import PlanError
from loadgen.traffic import traffic_classes
from loadgen.workloads import arrivals
from loadgen.workloads.arrival_processes import ClosedLoopArrivals, FixedRate

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.studies.sweep import Over


def class_loads(plan: Plan, over: Over) -> dict[str, float]:
    """Return the load of each class of traffic that the sweep scales, by the name of the class.

    If `over` is `rate`, a load is a rate per second. Otherwise, it is a number of clients. Raises PlanError if the
    sweep scales no class of the plan.
    """
    result = {}
    for traffic_class in traffic_classes(plan):
        amount = _amount(traffic_class.plan.arrivals, over)
        if amount is not None:
            result[traffic_class.name] = float(amount) * (traffic_class.share or 1.0)
    if not result and over == "rate":
        raise PlanError(
            "no class of traffic has a rate that the sweep could change",
            "Write rate = 5 for a class, or use --over concurrency for classes with a concurrency.",
        )
    if not result:
        raise PlanError(
            "no class of traffic has a concurrency that the sweep could change",
            "Write concurrency = 8 for a class, or use --over rate for classes with a rate.",
        )
    return result


def with_total_load(plan: Plan, over: Over, total: float) -> Plan:
    """Return the plan with the loads of its classes of traffic scaled, so that their sum is `total`."""
    loads = class_loads(plan, over)
    if over == "concurrency":
        return _with_clients(plan, divided_clients(loads, round(total)))
    factor = total / sum(loads.values())
    tables = []
    for table, traffic_class in zip(plan.traffic, traffic_classes(plan), strict=True):
        scaled = not traffic_class.share and traffic_class.name in loads
        tables.append(_with_arrivals(table, _times(traffic_class.plan.arrivals, factor)) if scaled else table)
    return plan.replaced(traffic=tuple(tables), arrivals=_times(plan.arrivals, factor))


def divided_clients(loads: Mapping[str, float], clients: int) -> dict[str, int]:
    """Divide `clients` among the classes in proportion to `loads`. Each class gets at least one client."""
    total = sum(loads.values())
    exact = {name: clients * load / total for name, load in loads.items()}
    numbers = {name: max(1, int(share)) for name, share in exact.items()}
    while sum(numbers.values()) < clients:
        name = max(exact, key=lambda name: exact[name] - numbers[name])
        numbers[name] += 1
    while sum(numbers.values()) > max(clients, len(numbers)):
        name = min((name for name in exact if numbers[name] > 1), key=lambda name: exact[name] - numbers[name])
        numbers[name] -= 1
    return numbers


def describe_load(plan: Plan, over: Over) -> str:
    """Return one line about the load that a sweep scales: the total, and the share of each class of traffic.

    For example: `the load of the plan is 10 requests/s: chat 80%, batch 20%`. The line also names the classes whose
    loads do not change.
    """
    loads = class_loads(plan, over)
    total = sum(loads.values())
    shares = ", ".join(f"{name} {100 * load / total:.3g}%" for name, load in loads.items())
    unit = "requests/s" if over == "rate" else "clients"
    constant = [
        f"{traffic_class.name} stays at {traffic_class.plan.arrivals}"
        for traffic_class in traffic_classes(plan)
        if traffic_class.name not in loads
    ]
    return "; ".join([f"the load of the plan is {total:g} {unit}: {shares}", *constant])


def _amount(text: str, over: Over) -> Fraction | None:
    """Return the load of an arrival process as a number, or None if the sweep cannot scale this process.

    `text` describes the process, for example `poisson:20`. `over` is the quantity that the sweep varies:

    - `rate`: the load is the rate. Only processes with a constant rate can be scaled.
    - `concurrency`: the load is the number of clients. Only closed loops can be scaled.
    """
    process = arrivals.parse(text)
    if over == "rate":
        return process.rate if isinstance(process, FixedRate) else None
    return Fraction(process.clients) if isinstance(process, ClosedLoopArrivals) else None


def _times(text: str, factor: float) -> str:
    """Return the arrival process `text` with its rate multiplied by `factor`.

    A process without a constant rate, such as a closed loop, is returned unchanged.
    """
    process = arrivals.parse(text)
    if not isinstance(process, FixedRate):
        return text
    return str(replace(process, rate=Fraction(f"{float(process.rate) * factor:.6g}")))


def _with_arrivals(table: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of a `[[traffic]]` table in which the arrivals are `text`, for example `poisson:20`.

    The copy has no rate and no weight. If the table states a rate or arrivals, its `concurrency` only limits the
    requests in flight, and is kept. Otherwise `concurrency` is the load of the class, and is removed.
    """
    replaced = ("rate", "arrivals", "weight") if "rate" in table or "arrivals" in table else ("concurrency", "weight")
    return {key: value for key, value in table.items() if key not in replaced} | {"arrivals": text}


def _with_clients(plan: Plan, clients: Mapping[str, int]) -> Plan:
    """Return the plan with new numbers of clients for its classes of traffic that are closed loops.

    `clients` maps the name of each of these classes to its new number of clients. In `plan`, some classes may only have
    weights, by which they divide the clients of the whole plan among them. In the result, each of these classes states
    its own number of clients instead of a weight.

    Each worker needs at least one client of every closed loop. If a class has fewer clients than the plan has workers,
    the number of workers is therefore reduced to this number of clients.
    """
    tables = []
    for table, traffic_class in zip(plan.traffic, traffic_classes(plan), strict=True):
        process = arrivals.parse(traffic_class.plan.arrivals)
        if isinstance(process, ClosedLoopArrivals):
            own = replace(process, clients=clients[traffic_class.name])
            tables.append(_with_arrivals(table, str(own)))
        else:
            tables.append(dict(table))
    shared = any(traffic_class.share for traffic_class in traffic_classes(plan))
    is_closed = isinstance(plan.arrival_process, ClosedLoopArrivals)
    changes = {"arrivals": type(plan).arrivals} if shared and is_closed else {}
    return plan.replaced(traffic=tuple(tables), workers=min(plan.workers, *clients.values()), **changes)
