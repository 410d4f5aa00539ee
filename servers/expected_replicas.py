"""Waits before a run until the expected number of replicas of a server answers (`--expect-replicas`).

Replicas are distinguished in one of two ways:

- If a balancer names the replica in a response header (`--replica-header`), each value of this header is a replica.
- Otherwise, each address of the URLs is a replica. A host name may have several addresses. Two host names with the same
  address are one replica.

A replica answers if it responds to a request for its list of models, with any HTTP status below 500. A server that is
still loading its model refuses connections or responds with 503.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import OK
from time import monotonic, sleep

import msgspec

from loadgen.servers.auth import Access
from loadgen.servers.errors import UnreachableError
from loadgen.servers.json_client import JsonClient, JsonResponse
from loadgen.servers.replica_identity import replica_name
from loadgen.servers.server_url import API_PATH, parse_server_url
from loadgen.servers.target import Address, address_text, resolve_target
from loadgen.servers.wire.addresses import select_addresses

ROUND_S = 1.0
"""Time in seconds between two rounds of requests."""
ANSWER_LIMIT_S = 5.0
"""Time limit in seconds of a request."""
MIN_LIMIT_S = 0.1
"""Minimum time limit in seconds of a request that is sent right before the waiting ends."""
AT_ONCE = 8
"""Maximum number of requests that are sent at the same time."""
REQUESTS_PER_REPLICA = 10
"""Maximum number of requests in one round, per expected replica and URL, if a balancer chooses the replica. With this
number, a balancer that chooses among eight replicas at random misses one of them in one of 5,000 rounds."""
NAMED = 12
"""Maximum number of replicas that a message lists by name."""
HINT = "Start the missing replicas, or wait longer: --replicas-wait 10m."


class Round(msgspec.Struct):
    """The result of one round of requests: the replicas that answered, and the reasons why requests got no answer."""

    replicas: dict[str, None] = {}
    """Names of the replicas that answered, without duplicates. The dictionary serves as an ordered set."""
    failures: dict[str, str] = {}
    """The reason why a request got no answer, by the URL or address of the request."""
    unnamed: int = 0
    """Number of responses with status 200 that lack the header that names the replica."""
    cut_short: bool = False
    """True if the time limit ended the round before every request was sent."""


def wait_for_replicas(
    urls: Sequence[str], expected: int, header: str, wait_s: float, access: Access, say: Callable[[str], None]
) -> None:
    """Wait until `expected` different replicas answer in one round of requests.

    `header` is the response header that names the replica, or "" if no header names the replica. Replicas are then
    distinguished by their addresses. `say` is called with a line whenever the number of replicas that answer has
    changed. Raises UnreachableError after `wait_s` seconds. If the header is missing from every response, the error is
    raised after the first round, because waiting would not help.
    """
    until_s = monotonic() + wait_s
    answered: int | None = None
    complete: Round | None = None
    while True:
        seen = (
            _round_by_header(urls, expected, header, access, until_s)
            if header
            else _round_by_address(urls, access, until_s)
        )
        count = len(seen.replicas)
        if count >= expected:
            say(f"{count} replicas answer: {_names(seen.replicas)}")
            return
        if header and seen.unnamed and not count and not seen.failures:
            raise UnreachableError(
                f"--expect-replicas {expected}: no response had the header {header}",
                "Name the header by which the balancer states the replica.",
            )
        if not seen.cut_short:
            complete = seen
        if count != answered:
            say(f"{count} of {expected} replicas answer; waiting for the others, at most {wait_s:g} s")
            answered = count
        sleep(min(ROUND_S, max(0.0, until_s - monotonic())))
        if monotonic() >= until_s:
            raise UnreachableError(_shortfall(complete or seen, expected, header, wait_s), HINT)


def _shortfall(seen: Round, expected: int, header: str, wait_s: float) -> str:
    """Return the error message for too few replicas."""
    count = len(seen.replicas)
    text = f"only {count} of {expected} replicas answered within {wait_s:g} s"
    by = f" (by the header {header})" if header else ""
    lines = [f"{text}{by}: {_names(seen.replicas)}" if count else f"{text}{by}"]
    failures = [reason if name in reason else f"{name}: {reason}" for name, reason in [*seen.failures.items()][:NAMED]]
    return "\n".join([*lines, *failures])


def _names(names: Iterable[str]) -> str:
    """Return the names of replicas as text. A long list is shortened."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _round_by_header(urls: Sequence[str], expected: int, header: str, access: Access, until_s: float) -> Round:
    """Send requests until `expected` replicas have answered, and return these replicas.

    Replicas are distinguished by the value of the response header `header`. At most REQUESTS_PER_REPLICA requests per
    expected replica are sent to each URL. No request is sent after `until_s` (CLOCK_MONOTONIC, in seconds).
    """
    seen = Round({}, {})

    def ask(url: str) -> None:
        if len(seen.replicas) >= expected:
            return
        if monotonic() >= until_s:
            seen.cut_short = True
            return
        try:
            response = _answer(url, access, until_s)
        except UnreachableError as error:
            seen.failures[url] = str(error)
            return
        name = replica_name(response.headers.get(header.lower(), ""))
        if name:
            seen.replicas[name] = None
        elif response.status == OK:
            seen.unnamed += 1

    with ThreadPoolExecutor(AT_ONCE) as executor:
        list(executor.map(ask, [*urls] * (REQUESTS_PER_REPLICA * expected)))
    return seen


def _round_by_address(urls: Sequence[str], access: Access, until_s: float) -> Round:
    """Send one request to each address of the URLs, and return the result.

    Each address counts as one replica. No request is sent after `until_s` (CLOCK_MONOTONIC, in seconds).
    """
    seen = Round({}, {})
    places: dict[object, tuple[str, str, Address | None]] = {}
    """The name, the URL and the address of each replica, by what distinguishes the replicas. The address is None if the
    URL has a single address."""
    for url in urls:
        if monotonic() >= until_s:
            seen.cut_short = True
            break
        server = parse_server_url(url)
        base = server.base
        try:
            target = select_addresses(resolve_target(base, access.tls, access.proxy))
        except OSError as error:
            seen.failures[base] = error.strerror or str(error)
            continue
        if access.proxy:  # the addresses are those of the proxy
            places[base, server.query] = base, url, None
            continue
        single = len(target.addresses) == 1
        for address in target.addresses:
            name = base if single else f"{base} {address_text(address)}"
            places.setdefault((address, target.path, server.query), (name, url, None if single else address))

    def ask(place: tuple[str, str, Address | None]) -> None:
        name, url, address = place
        if monotonic() >= until_s:
            seen.cut_short = True
            return
        try:
            _answer(url, access, until_s, address)
        except UnreachableError as error:
            seen.failures[name] = str(error)
        else:
            seen.replicas[name] = None

    with ThreadPoolExecutor(AT_ONCE) as executor:
        list(executor.map(ask, places.values()))
    seen.replicas = {name: None for name, _, _ in places.values() if name in seen.replicas}
    return seen


def _answer(url: str, access: Access, until_s: float, address: Address | None = None) -> JsonResponse:
    """Return the response of a server, on a new connection to the given address (default: any).

    Raises UnreachableError if no server answers, or if it answers with a status of 500 or above. The time limit is
    ANSWER_LIMIT_S, or less if `until_s` (CLOCK_MONOTONIC, in seconds) is earlier.
    """
    limit_s = min(ANSWER_LIMIT_S, max(MIN_LIMIT_S, until_s - monotonic()))
    with closing(JsonClient(parse_server_url(url).url, access, limit_s, retry=False, address=address)) as client:
        response = client.request(f"{API_PATH}/models")
    if response.status >= 500:
        raise UnreachableError(f"answers {response.words}", "")
    return response
