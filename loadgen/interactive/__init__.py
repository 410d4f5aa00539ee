"""Interactive load for `loadgen ui`: Locust's web page and users, with the exact timestamps of loadgen.

session   the state of one Locust process, listeners to Locust's events, and loadgen's section of the page.
live_run  the server under test, and one run from Start to Stop: its file, client health and figures.
user      the base class for locustfiles, and the connection of a user.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from loadgen.errors import PlanError
from loadgen.plan import MAX_REQUESTS, Plan
from loadgen.plan_fields import fields_of, option_name
from loadgen.servers.backends import join_or
from loadgen.traffic import read_tables

WEEK_S = 7 * 86_400
UNUSABLE_IN_TABLES = ("cancel", "connections", "duration_s", "max_in_flight", "warmup")
"""Keys of `[[traffic]]` tables that interactive runs cannot use."""


def interactive_plan(settings: Mapping[str, Any]) -> Plan:
    """Return the Plan of an interactive run with the plan settings `settings`.

    The settings that determine the load, such as `arrivals` and `duration_s`, are replaced. In an interactive run, the
    users on Locust's web page determine the load. Raises PlanError if a setting is invalid.
    """
    _check_classes(read_tables(settings.get("traffic", ()), fields_of(Plan)))
    return Plan(**{**settings, "arrivals": "closed:1", "n": None, "duration_s": WEEK_S, "workers": 1})


def _check_classes(tables: Iterable[Mapping[str, Any]]) -> None:
    """Raise PlanError if a class of traffic has its own load, or a setting that interactive runs cannot use."""
    for table in tables:
        name = table["name"]
        if "weight" not in table:
            raise PlanError(
                f"[[traffic]] {name!r} has its own load, but in loadgen ui the users are the load",
                "Write weight = 30 instead: users choose the class of each request or session by the weights.",
            )
        unusable = [key for key in UNUSABLE_IN_TABLES if key in table]
        if unusable:
            raise PlanError(f"[[traffic]] {name!r}: loadgen ui cannot use {join_or(unusable)}", "Leave it out.")


def check_users(count: int, spawn_rate: float) -> None:
    """Raise PlanError if the number of users, or the number of users to start per second, is invalid."""
    if not 0 <= count <= MAX_REQUESTS:
        raise PlanError(f"{count:,} users: the number of users must be from 0 to {MAX_REQUESTS:,}")
    if not (isfinite(spawn_rate) and spawn_rate > 0):
        raise PlanError(f"{spawn_rate:g} users to start per second: the number must be above 0")


def locust_option(field: str) -> str:
    """Return the option that sets a Plan field under Locust, such as --request-timeout for `timeout_s`.

    The name differs from loadgen's --timeout, because Locust has its own option --timeout.
    """
    return "--request-timeout" if field == "timeout_s" else option_name(field)
