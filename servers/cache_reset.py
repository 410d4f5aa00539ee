"""Empties the prefix cache of a server, and checks the result with the server's own counter.

Not every server reports whether the reset succeeded. While requests are running, vLLM and early versions of SGLang do
not empty the cache, but still answer with status 200. The check sends one prompt before and after the reset. The
counter of cached prompt tokens must not grow after the reset.
"""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from typing import Any, Literal

from loadgen.servers.auth import NO_AUTH, Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import Route
from loadgen.servers.errors import CacheResetError, UnauthorizedError
from loadgen.servers.json_client import JsonClient
from loadgen.servers.telemetry import GapError, ServerMetrics

ResetResult = Literal["emptied", "unused", "unchecked"]
"""Result of a reset.

- `emptied`: the server used its cache before the reset, and not afterwards.
- `unused`: the server did not use its cache before either, so it has none or it is turned off.
- `unchecked`: the server has no counter of cached prompt tokens, the counter could not be read, or the server has no
  route for a request of one token."""
PROBE_WORDS = 200
"""Words of the prompt that is sent to check the cache. Caches hold whole blocks of tokens, usually 16."""
COUNTER_LAG_S = 2.0
"""Time after which the counter is expected to include a request."""
POLL_S = 0.1
COUNTER = "cached_prompt_tokens"


def reset_prefix_cache(facts: ServerFacts, access: Access = NO_AUTH, timeout_s: float | None = None) -> ResetResult:
    """Empty the prefix cache of a server, and check that it is empty.

    `timeout_s` is the time limit of each request. Raises CacheResetError if the server cannot empty its cache or has
    not emptied it, and UnreachableError or UnauthorizedError if a request fails."""
    backend = BACKENDS[facts.name]
    reset = backend.cache_reset
    if reset is None:
        raise CacheResetError(
            f"{backend.title} has no route that empties its prefix cache",
            "leave --cold out; a server that was just started has an empty cache",
        )
    with closing(JsonClient(facts.full_url, access, timeout_s)) as client:
        probe = _CacheProbe(client, facts, access)
        with closing(probe):
            uses_cache = probe.uses_cache()
            response = client.request(reset.path, {})
            if response.status in (401, 403):
                raise client.unauthorized(reset.path, response)
            if response.status in (404, 405):
                raise CacheResetError(f"{facts.url} has no route {reset.path}", reset.hint)
            if response.status != 200:
                raise CacheResetError(
                    f"{facts.url} did not empty its cache: {response.words}", "wait until no request runs"
                )
            if uses_cache is None:
                return "unchecked"
            if not uses_cache:
                return "unused"
            still_uses_cache = probe.grows()
            if still_uses_cache is None:
                return "unchecked"
            if still_uses_cache:
                raise CacheResetError(
                    f"{facts.url} answered 200 to {reset.path}, but still uses its prefix cache",
                    "requests of other clients keep it from emptying the cache: wait for them",
                )
            return "emptied"


class _CacheProbe:
    """Sends one prompt repeatedly, and watches the server's counter of cached prompt tokens."""

    def __init__(self, client: JsonClient, facts: ServerFacts, access: Access) -> None:
        self._client = client
        self._facts = facts
        self._prompt = " ".join(secrets.token_hex(2) for _ in range(PROBE_WORDS))
        self._metrics = ServerMetrics(facts.url, facts.name, access, facts.query)
        dialect = BACKENDS[facts.name].dialects[facts.default_endpoint or BACKENDS[facts.name].native]
        self._route: Route[Any] | None = dialect.count_by_running

    def uses_cache(self) -> bool | None:
        """Return True if the server takes a repeated prompt from its cache, or None if this cannot be found out."""
        if self._route is None or self._count() is None:
            return None
        self._send()
        return self.grows()

    def grows(self) -> bool | None:
        """Send the prompt, and return True if the server's counter of cached prompt tokens grows within COUNTER_LAG_S
        seconds.

        Return False if the counter does not grow, and None if it cannot be read before the prompt is sent.
        """
        before = self._count()
        if before is None:
            return None
        self._send()
        until_s = time.monotonic() + COUNTER_LAG_S
        while time.monotonic() < until_s:
            if (self._count() or 0.0) > before:
                return True
            time.sleep(POLL_S)
        return False

    def close(self) -> None:
        self._metrics.close()

    def _send(self) -> None:
        assert self._route is not None
        response = self._client.request(self._route.path, self._route.body(self._prompt, self._facts.model))
        if response.status in (401, 403):
            error: UnauthorizedError = self._client.unauthorized(self._route.path, response)
            raise error
        if response.status != 200:
            raise CacheResetError(
                f"{self._facts.url} refuses the request that checks its cache: {response.words}",
                "send a request with curl to see why",
            )

    def _count(self) -> float | None:
        try:
            value: float | None = self._metrics.read(10.0).get(COUNTER)
        except GapError:
            return None
        return value
