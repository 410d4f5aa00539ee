"""Interactive load for `loadgen ui`: Locust's web page and users, with the exact timestamps of loadgen.

session   the state of one Locust process, listeners to Locust's events, and loadgen's section of the page.
live_run  the server under test, and one run from Start to Stop: its file, client health and figures.
user      the base class for locustfiles, and the connection of a user.
"""

from collections.abc import Mapping
from typing import Any

from loadgen.plan import Plan
from loadgen.plan_fields import option_name

WEEK_S = 7 * 86_400


def interactive_plan(settings: Mapping[str, Any]) -> Plan:
    """Return the Plan of an interactive run with these settings. Raises PlanError, which names every mistake."""
    return Plan(**{**settings, "arrivals": "closed:1", "n": None, "duration_s": WEEK_S, "workers": 1})


def locust_option(field: str) -> str:
    """Return the name of a Plan field's option under Locust.

    `timeout_s` becomes --request-timeout, because Locust has its own option --timeout.
    """
    return "--request-timeout" if field == "timeout_s" else option_name(field)
