"""Interactive load: Locust's web page and its users, timed by the measuring transport in gevent's hub.

session   the state of one Locust process, Locust's events, and loadgen's part of the page
live_run  the target of the users, and one run from Start to Stop: its file, client health and figures
user      the base class for locustfiles, and a user's connection
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
    """Return the option name of a Plan field under Locust, which has its own --timeout."""
    return "--request-timeout" if field == "timeout_s" else option_name(field)
