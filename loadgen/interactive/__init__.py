"""Load by hand: Locust's web page and its users, timed by the measuring transport in gevent's hub.

session   what one Locust process shares, Locust's events, and our part of its page
live_run  whom users ask and what; one run from Start to Stop: its file, its client's health, its figures
user      the base of a locustfile, and a user's connection
"""

from collections.abc import Mapping
from typing import Any

from loadgen.plan import Plan
from loadgen.plan_fields import option_name

WEEK_S = 7 * 86_400


def interactive_plan(settings: Mapping[str, Any]) -> Plan:
    """The Plan of these settings, for users that come and go by hand. Raises PlanError that names every mistake."""
    return Plan(**{**settings, "arrivals": "closed:1", "n": None, "duration_s": WEEK_S, "workers": 1})


def locust_option(field: str) -> str:
    """What a field of the Plan is called among Locust's options, which have a timeout of their own."""
    return "--request-timeout" if field == "timeout_s" else option_name(field)
