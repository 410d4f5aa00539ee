"""Emptying the prefix cache of a server, and the check that it is empty."""

from __future__ import annotations

import pytest

from loadgen.servers import cache_reset
from loadgen.servers.cache_reset import reset_prefix_cache
from loadgen.servers.discovery import probe
from loadgen.servers.errors import CacheResetError
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.state import ServerState
from tests.support.command import FAST
from tests.support.simulated import running


def batching(server: str) -> SimulatedConfig:
    """A fast simulated server with a scheduler, which has a prefix cache."""
    return SimulatedConfig(server=server, clock="batching", gpu="H100", speed=100)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_cache_is_emptied(server: str) -> None:
    """Before the reset the server takes a repeated prompt from its cache, and after it the server does not."""
    with running(batching(server)) as simulated:
        assert reset_prefix_cache(probe(simulated.url, server)) == "emptied"


def test_a_server_without_a_cache_has_nothing_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter does not grow in the first place."""
    monkeypatch.setattr(cache_reset, "COUNTER_LAG_S", 0.1)
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        assert reset_prefix_cache(probe(simulated.url, "vllm")) == "unused"


def test_a_cache_that_is_still_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM answers 200 although it leaves the cache as it is while requests run."""
    monkeypatch.setattr(ServerState, "__init__", _without_flush(ServerState.__init__))
    with running(batching("vllm")) as simulated, pytest.raises(CacheResetError, match="still uses its prefix cache"):
        reset_prefix_cache(probe(simulated.url, "vllm"))


def _without_flush(original: object) -> object:
    def changed(self: ServerState, config: object, buckets: object, gauges: object, flush_cache: object = None) -> None:
        original(self, config, buckets, gauges)  # type: ignore[operator]

    return changed


def test_a_server_without_the_route_is_an_error() -> None:
    """The message says that this backend has none."""
    expected = pytest.raises(CacheResetError, match="TGI has no route that empties its prefix cache")
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated, expected:
        reset_prefix_cache(probe(simulated.url, "tgi"))
