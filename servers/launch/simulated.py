"""A simulated server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from servers.errors import LaunchError
from servers.launch.base import Launched, Say, Wanted


@contextmanager
def launched(wanted: Wanted, say: Say) -> Iterator[Launched]:
    """The simulated server; options are fields of SimulatedConfig.

    Raises LaunchError when it does not come up, and ConfigError for options that no simulated server can work with.
    """
    import time

    from servers.simulated import ConfigError, StartError
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.server import spawn_process

    known = {each.name for each in fields(SimulatedConfig)} - {"server", "model"}
    if unknown := sorted(wanted.options.keys() - known):
        raise ConfigError(f"a simulated server has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    config = SimulatedConfig(server=wanted.server, model=wanted.model, **wanted.options)
    began_s = time.monotonic()
    try:
        with spawn_process(config) as (url, pid):
            say(f"simulated {wanted.server} at {url}")
            facts = {"launch": "simulated", "ready_s": time.monotonic() - began_s, "pid": pid}
            yield Launched(url, facts, (pid,))
    except StartError as problem:
        raise LaunchError(str(problem), "check port and options; `loadgen sim` takes the same ones") from problem
