"""Waiting until a server that was started answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from servers.calls import Caller
from servers.errors import ServerError
from servers.find import probe
from servers.kinds.base import ServerFacts
from servers.launch.base import Say

SAY_EVERY_S = 10.0


def wait(url: str, watch: Callable[[], str], say: Say, *, timeout_s: float, poll_s: float) -> float | None:
    """Seconds until `url` answers its health route, or None after `timeout_s`.

    `watch` is called before each look, every `poll_s`: it raises LaunchError once the server has ended, and returns
    what there is to say, which goes to `say` every ten seconds.
    """
    began_s = time.monotonic()
    said_s = began_s
    while True:
        state = watch()
        now_s = time.monotonic()
        if _answers(url):
            return now_s - began_s
        if now_s - began_s > timeout_s:
            return None
        if now_s - said_s >= SAY_EVERY_S:
            said_s = now_s
            say(f"{now_s - began_s:.0f} s: {state or 'no word in its log yet'}")
        time.sleep(poll_s)


def facts_of(url: str, server: str, api_key: str | None) -> ServerFacts:
    """What the server that has just become ready says about itself. Raises what `probe` raises."""
    return probe(url, server, api_key=api_key)


def _answers(url: str) -> bool:
    """Whether the server is ready: its health route says so, or it has none (vLLM 0.2.0) but answers at all."""
    try:
        with closing(Caller(url)) as ask:
            status, _ = ask("/health")
    except ServerError:
        return False
    return status in (200, 404)
