"""Classes of traffic: the `[[traffic]]` tables of a plan file, which run at the same time.

    duration_s = 60

    [[traffic]]
    name = "chat"
    rate = 5

    [[traffic]]
    name = "batch"
    concurrency = 4
    input_tokens = 2000

Each class becomes a separate Plan. The settings of its table override those of the whole plan. A class has either its
own load (`rate`, `arrivals` or `concurrency`) or a `weight`. Classes with a weight share the load of the whole plan,
and the seed decides to which of these classes each request belongs.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from loadgen.errors import LoadgenError, PlanError
from loadgen.load_shorthand import LOAD_KEYS, expand, override
from loadgen.servers.auth import redact_fields, redact_header
from loadgen.workloads.arrival_facts import LoadFacts
from loadgen.workloads.random_streams import random_stream

if TYPE_CHECKING:
    from loadgen.plan import Plan

CLASSES_LIMIT = 32
"""Maximum number of classes. Each class has its own worker processes."""
FIRST_IDS_APART = 10_000_000_000
"""Distance between the request ids of two classes: the first request of the second class has this id."""
CLASS_KEYS = (
    *("name", "weight", *LOAD_KEYS, "n", "duration_s", "max_in_flight", "warmup", "timeout_s"),
    *(
        "workload",
        "repeat_file",
        "input_tokens",
        "output_tokens",
        "batch_size",
        "image",
        "audio_seconds",
        "tokenizer",
        "lengths",
    ),
    *("endpoint", "path", "model", "header", "extra_body", "ignore_eos", "cancel"),
    *("session_header", "session_capture", "connections", "objectives", "goodput"),
)
"""Keys of a `[[traffic]]` table. All but `name` and `weight` are fields of Plan."""
NOT_INHERITED = (
    "traffic",
    "arrivals",
    "n",
    "concurrency",
    "max_in_flight",
    "objectives",
    "goodput",
    "repeats",
    "repeat",
    "at",
    "soak",
    "keep_records_s",
)
"""Fields of a plan that its classes do not take over."""
HINT = "Nothing was sent. Correct the tables of the plan file."
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)


class TrafficClass(msgspec.Struct, frozen=True):
    """One class of traffic of a plan."""

    name: str
    plan: Plan
    """The plan of the class, with its own seed. Its load is that of the whole plan if the class has a weight."""
    share: float
    """Share of the class in the load of the whole plan, by the weights. 0: the class has its own load."""
    first_id: int
    """Id of the first request of the class."""


def read_tables(value: Any, plan_fields: Collection[str]) -> tuple[dict[str, Any], ...]:
    """Check the names and the keys of the `[[traffic]]` tables, and return the tables.

    `plan_fields` contains the names of the fields of Plan. `traffic_classes` checks the values of the settings later.
    Raises PlanError with one line per mistake.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(table, Mapping) for table in value):
        hint = 'Write [[traffic]], and below it name = "chat" and the settings of the class.'
        raise PlanError("traffic: must be a list of tables", hint)
    if len(value) > CLASSES_LIMIT:
        raise PlanError(f"[[traffic]]: {len(value)} tables, but at most {CLASSES_LIMIT} are possible")
    mistakes: list[str] = []
    names: list[str] = []
    for number, table in enumerate(value, 1):
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            has = "has no name" if name is None else f"has the name {name!r}"
            mistakes.append(f'table {number} {has}: write name = "chat", with 1 to 40 letters, digits, . _ or -')
            continue
        if name in names:
            mistakes.append(f"table {number} has the name {name!r} of another table: use each name once")
        names.append(name)
        mistakes += [f"{name!r}: {_unknown_key(key, plan_fields)}" for key in table if key not in CLASS_KEYS]
        mistakes += [
            f"{name!r}: {key} {table[key]!r} is not a list of texts: write {key} = {example}"
            for key, example in {"objectives": '["ttft.p99 < 1s"]', "goodput": '["ttft < 1s"]'}.items()
            if key in table and not _is_texts(table[key])
        ]
    if mistakes:
        raise PlanError("\n".join(f"[[traffic]] {mistake}" for mistake in mistakes), HINT)
    return tuple(dict(table) for table in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(text, str) for text in value))


def _unknown_key(key: str, plan_fields: Collection[str]) -> str:
    """Return the message for a key that a `[[traffic]]` table cannot have."""
    from difflib import get_close_matches

    if key in plan_fields:
        return f"{key} applies to the whole run; write it above the first [[traffic]] table"
    plain = key.strip("-").replace("-", "_")
    similar = [f"{plain}_s"] if f"{plain}_s" in CLASS_KEYS else get_close_matches(plain, CLASS_KEYS, n=1, cutoff=0.7)
    return f"{key}: unknown setting{f'; did you mean {similar[0]}?' if similar else ''}"


def traffic_classes(plan: Plan) -> list[TrafficClass]:
    """Return the classes of traffic of a plan.

    Raises PlanError with one line per mistake. Each line names the `[[traffic]]` table.
    """
    result: list[TrafficClass] = []
    mistakes: list[str] = []
    weights = [table["weight"] for table in plan.traffic if isinstance(table.get("weight"), int | float)]
    for number, table in enumerate(plan.traffic):
        try:
            result.append(_traffic_class(plan, table, number * FIRST_IDS_APART, sum(weights)))
        except LoadgenError as error:
            mistakes += [f"[[traffic]] {table['name']!r}: {line}" for line in str(error).splitlines()]
    if mistakes:
        raise PlanError("\n".join(mistakes), HINT)
    return result


def _traffic_class(plan: Plan, table: Mapping[str, Any], first_id: int, weights: float) -> TrafficClass:
    own = {key: value for key, value in table.items() if key not in ("name", "weight")}
    weight = _weight(table.get("weight"))
    own_load = [key for key in LOAD_KEYS if own.get(key) is not None]
    load = {key: value for key, value in own.items() if key != "duration_s"}
    has_load = "n" in own or bool(expand(load).get("arrivals"))
    if weight and own_load:
        raise PlanError(f"has a weight and its own {own_load[0]}: leave one of them out")
    if weight and "n" in own:
        raise PlanError("has a weight and its own n: write n above the first [[traffic]] table, or leave weight out")
    if not weight and not has_load:
        raise PlanError("has no load: write rate = 5, concurrency = 8, arrivals = ..., or weight = 30")
    settings = _inherited(plan)
    if weight:
        if not has_own_load(plan):
            raise PlanError("has a weight, but the plan has no load to share: write rate = 20 above the first table")
        own |= {"arrivals": plan.arrivals, "n": plan.n, "concurrency": plan.concurrency}
        own |= {"max_in_flight": plan.max_in_flight} if "max_in_flight" not in own else {}
        if plan.n is not None and plan.arrival_process.facts.clients:
            raise PlanError("has a weight: limit clients that share a load by duration_s, not by n")
    if "n" in table and "duration_s" not in table:
        settings.pop("duration_s", None)
    _check_goodput(own.get("goodput") or ())
    own["seed"] = class_seed(plan.seed, table["name"])
    class_plan = type(plan)(**override(settings, {key: value for key, value in own.items() if key != "objectives"}))
    return TrafficClass(table["name"], class_plan, weight / weights if weight else 0.0, first_id)


def sends_sessions(plan: Plan) -> bool:
    """Return True if the workload of a plan, or of one of its classes of traffic, consists of sessions."""
    if not plan.traffic:
        return plan.uses_sessions
    return any(traffic_class.plan.uses_sessions for traffic_class in traffic_classes(plan))


def has_own_load(plan: Plan) -> bool:
    """Return True if a plan states a load for all classes of traffic together, outside its `[[traffic]]` tables."""
    return plan.arrivals != type(plan).arrivals or plan.n is not None


def _weight(value: Any) -> float:
    """Return the weight of a class, or 0 if it has none. Raises PlanError if it is not a positive number."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise PlanError(f"weight {value!r} is not a number above 0: write weight = 30")
    return float(value)


def _inherited(plan: Plan) -> dict[str, Any]:
    """Return the settings of the whole plan that apply to its classes. Default values are left out."""
    from loadgen.plan_fields import fields_of

    values = vars(plan)
    return {
        name: values[name]
        for name, field in fields_of(type(plan)).items()
        if name not in NOT_INHERITED and values[name] != field.default_after(values)
    }


def _check_goodput(bounds: Sequence[str] | str) -> None:
    """Raise PlanError if one of `bounds` is invalid. They are the bounds that define goodput for a class of traffic."""
    from loadgen.analysis.objectives import ObjectiveError, parse_bounds

    try:
        parse_bounds([bounds] if isinstance(bounds, str) else bounds)
    except ObjectiveError as error:
        raise PlanError(str(error)) from None


def class_objectives(tables: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the objectives of all classes, each preceded by the name of its class, such as `chat: ttft.p99 < 1s`."""
    for table in tables:
        objectives = table.get("objectives") or ()
        for objective in (objectives,) if isinstance(objectives, str) else objectives:
            yield f"{table['name']}: {objective}"


def redacted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `[[traffic]]` table without secrets, for the run file."""
    result = dict(table)
    if "header" in result:
        lines = result["header"]
        result["header"] = [redact_header(line) for line in ([lines] if isinstance(lines, str) else lines)]
    if isinstance(result.get("extra_body"), dict):
        result["extra_body"] = redact_fields(result["extra_body"])
    return result


def class_seed(seed: int, name: str) -> int:
    """Return the seed of a class of traffic. Classes have different seeds, so that their prompts and times differ."""
    return int.from_bytes(hashlib.sha256(f"{seed}/traffic/{name}".encode()).digest()[:6])


def shared_due_times(classes: Sequence[TrafficClass], due_ns: Sequence[int], seed: int) -> dict[str, array[int]]:
    """Divide the due times `due_ns` among the classes of traffic that share the load of the plan.

    Return the due times of each class by its name. For each due time, a class is drawn at random with the shares as
    probabilities. The random numbers depend only on `seed`.
    """
    sharing = [traffic_class for traffic_class in classes if traffic_class.share]
    limits = list(accumulate(traffic_class.share for traffic_class in sharing))
    result = {traffic_class.name: array("q") for traffic_class in sharing}
    names = list(result)
    draw = random_stream(seed, "traffic")
    for due in due_ns:
        result[names[min(bisect(limits, draw() * limits[-1]), len(names) - 1)]].append(due)
    return result


def scaled_load(load: LoadFacts, share: float) -> LoadFacts:
    """Return the load of one class of traffic.

    A class may get a share of the load of the plan. `load` is then the load of the plan, and `share` is the share, such
    as 0.2. Otherwise, the class has a separate load. `load` is then this load, and `share` is 0.

    - A separate load is returned unchanged.
    - A closed loop is returned unchanged, because its clients were already divided among the classes.
    - The rate of any other load is multiplied by the share. If the arrivals of the whole load are Poisson, those of the
      class are Poisson too. For other arrival processes, the distribution of the gaps in the class is unknown.
    """
    if not share or load.clients:
        return load
    rate_per_s = None if load.rate_per_s is None else load.rate_per_s * share
    is_poisson = load.law == "gamma" and load.cv == 1
    return replace(
        load,
        text=f"{share * 100:.3g}% of {load.text}",
        rate_per_s=rate_per_s,
        cv=1.0 if is_poisson else None,
        law=load.law if is_poisson else "",
    )


def load_of_traffic(loads: Mapping[str, LoadFacts]) -> LoadFacts:
    """Return the properties of the load of all classes of traffic together. `loads` contains the load of each class."""
    parts = loads.values()
    rates = [load.rate_per_s for load in parts]
    steady = all(load.steady and load.open_loop for load in parts)
    return LoadFacts(
        kind="traffic",
        text=", ".join(f"{name} {load.text}" for name, load in loads.items()),
        open_loop=all(load.open_loop for load in parts),
        burst=all(load.burst for load in parts),
        finite=True,
        steady=steady,
        rate_per_s=sum(rate or 0 for rate in rates) if steady and None not in rates else None,
        clients=sum(load.clients for load in parts),
    )


def with_shared_clients(classes: Sequence[TrafficClass], clients: int) -> list[TrafficClass]:
    """Divide the `clients` of a closed loop among the classes of traffic in proportion to their shares.

    Return the classes with their numbers of clients. Classes without a share are not changed. Each number is first
    rounded down. The clients that remain go to the classes whose numbers lost the largest fractions. Raises PlanError
    if a class would get no client.
    """
    exact = {traffic_class.name: clients * traffic_class.share for traffic_class in classes if traffic_class.share}
    numbers = {name: int(share) for name, share in exact.items()}
    by_fraction = sorted(exact, key=lambda name: numbers[name] - exact[name])
    for name in by_fraction[: clients - sum(numbers.values())]:
        numbers[name] += 1
    result = []
    for traffic_class in classes:
        number = numbers.get(traffic_class.name)
        if number == 0:
            raise PlanError(
                f"[[traffic]] {traffic_class.name!r}: its weight gives it none of the {clients} clients",
                "Use more clients, or a larger weight.",
            )
        if number is None:
            result.append(traffic_class)
            continue
        _, _, think = traffic_class.plan.arrivals.partition(",")
        arrivals = f"closed:{number}" + (f",{think}" if think else "")
        result.append(replace(traffic_class, plan=traffic_class.plan.replaced(arrivals=arrivals)))
    return result
