"""Replaces short forms of a load, such as `rate` and `concurrency`, by the setting `arrivals`.

    settings of the user          the resulting `arrivals`
    rate=5                        poisson:5
    concurrency=8                 closed:8
    rate=5, concurrency=8         poisson:5 (requests wait while 8 are in flight)
    workload=requests:FILE        at:FILE, if the file contains times
    workload=sessions:FILE        starts:FILE, the start times in the file
    duration_s=30                 closed:1

The last three rows apply only if the user states no load. The last row also requires that the user states neither a
number of requests nor classes of traffic.

In the third row, the plan also stores `concurrency`, as a limit of the requests in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from loadgen.errors import PlanError
from loadgen.workloads import raw_requests
from loadgen.workloads.arrival_processes import RecordedTimes
from loadgen.workloads.spec_syntax import WorkloadError, format_number, parse_rate

LOAD_KEYS = ("arrivals", "rate", "concurrency")
"""Settings that state when to send requests."""
URL_LIST = 'Name every replica in the list: url = ["http://a:8000", "http://b:8000"].'
ONE_AT_A_TIME = "closed:1"
"""Arrivals of a plan that has a duration, but neither arrivals nor a number of requests."""


def expand(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan with short forms of the load replaced by `arrivals`.

    For example, `rate=5` becomes `arrivals=poisson:5`, and `concurrency=8` without a rate becomes `arrivals=closed:8`.
    Raises PlanError for an invalid rate, and if `rate` and `arrivals` are both set.
    """
    result, recorded_times = _with_file_sessions(settings)
    rate = result.pop("rate", None)
    if rate is not None:
        if result.get("arrivals") is not None:
            raise PlanError(
                f"--rate {rate} and --arrivals {result['arrivals']} both say when to send requests",
                f"Write only one: --rate {rate} means --arrivals poisson:{rate}.",
            )
        result["arrivals"] = _arrivals_at(rate)
    if result.get("arrivals") is not None:
        return result
    if result.get("concurrency") is not None:
        result["arrivals"] = f"closed:{result.pop('concurrency')}"
    elif recorded_times:
        result["arrivals"] = recorded_times
    elif str(result.get("workload", "")).startswith("sessions:"):
        result["arrivals"] = "starts:" + str(result["workload"]).removeprefix("sessions:")
    elif result.get("duration_s") is not None and result.get("n") is None and not result.get("traffic"):
        result["arrivals"] = ONE_AT_A_TIME
    return result


def split_urls(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan, with a list of URLs split into the settings `url` and `more_urls`.

    For example, `url=["http://a", "http://b"]` becomes `url="http://a"` and `more_urls=["http://b"]`. Settings from a
    run file are split already, and are returned unchanged. Raises PlanError for an empty list, and for `more_urls`
    without `url`.
    """
    result = dict(settings)
    urls = result.get("url")
    if isinstance(urls, list | tuple):
        if not urls:
            raise PlanError("url: the list is empty", f"{URL_LIST} Leave url out to detect the server.")
        result["url"] = urls[0]
        result["more_urls"] = [*urls[1:]]
    elif result.get("more_urls") and not urls:
        raise PlanError("more_urls without url", URL_LIST)
    return result


def override(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan with the changes applied.

    A load can be written as `rate`, `concurrency` or `arrivals`. Settings that contradict a changed load are removed.
    For example, the change `rate=5` removes `arrivals`, and the change `concurrency=8` removes `arrivals=closed:4`. The
    change `concurrency=8` keeps `arrivals=poisson:20`, because the two can be combined. A changed `url` replaces the
    URLs of all replicas.
    """
    result = dict(settings)
    if "url" in changes:
        result.pop("more_urls", None)
    closed = str(result.get("arrivals", "")).startswith("closed:")
    if "rate" in changes or ("concurrency" in changes and closed):
        result.pop("arrivals", None)
    if "arrivals" in changes:
        result.pop("rate", None)
        if str(changes["arrivals"]).startswith("closed:"):
            result.pop("concurrency", None)
    result.update(changes)
    return result


def _with_file_sessions(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Complete the settings of a workload `requests:FILE` from the first line of the file.

    Return the settings and the text of an arrival process:

    - If the first line names a session, the workload in the returned settings is `requests:FILE,sessions=yes`.
    - If the first line has a time, the arrival process sends the requests at the times in the file. Otherwise its text
      is empty.

    For any other workload, return a copy of the settings and an empty text.
    """
    result = dict(settings)
    kind, _, rest = str(settings.get("workload", "")).strip().partition(":")
    if kind != "requests":
        return result, ""
    try:
        source = raw_requests.raw_requests(rest)
    except WorkloadError:
        return result, ""  # the check of the workload reports the mistake
    first = raw_requests.first_line(source.path)
    if first is None:
        return result, ""
    if first.session is not None and ",sessions=" not in rest:
        source = raw_requests.RawRequests(source.path, sessions=True)
        result["workload"] = str(source)
    return result, "" if first.at_ns is None else str(RecordedTimes(source.path, source.sessions))


def _arrivals_at(rate: str | float) -> str:
    """Return the arrivals for a request rate: `poisson:5` for `5` or `5/s`, and `burst` for `inf`.

    Raises PlanError for any other text.
    """
    text = str(rate).strip()
    if text in ("inf", "infinity"):
        return "burst"
    return f"poisson:{format_number(requests_per_s(text))}"


def requests_per_s(text: str) -> Fraction:
    """Return the requests per second that the value `text` of --rate states, such as `5` or `5/s`.

    Raises PlanError for any other text.
    """
    try:
        return parse_rate(text.strip())
    except WorkloadError as error:
        raise PlanError(f"--rate {text}: {error}", "Write requests per second, such as --rate 5.") from None
