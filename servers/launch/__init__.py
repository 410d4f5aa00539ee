"""Starting servers: in containers, as processes, simulated, or none because it runs already.

All give the same context manager: up and ready on entry, down on exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields

from loadgen.servers.discovery import probe
from loadgen.servers.errors import LaunchError
from loadgen.servers.launch import compose, process
from loadgen.servers.launch.spec import LaunchMethod, LaunchSpec, RunningServer, Say

__all__ = ["LAUNCHERS", "LaunchMethod", "LaunchSpec", "RunningServer", "Say", "launched_server"]


def launched_server(spec: LaunchSpec, say: Say) -> AbstractContextManager[RunningServer]:
    """The server of `spec`: up and ready on entry, down on exit. `say` gets lines of progress. Raises LaunchError when
    it does not come up, and what `loadgen.servers.discovery.probe` raises."""
    return LAUNCHERS[spec.how](spec, say)


@contextmanager
def _simulated(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """A simulated server in a process of its own; options are fields of SimulatedConfig. Raises ConfigError for options
    that no simulated server can work with."""
    from loadgen.servers.simulated import ConfigError, StartError
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn_process

    known = {field.name for field in fields(SimulatedConfig)} - {"server", "model"}
    if unknown := sorted(spec.options.keys() - known):
        raise ConfigError(f"a simulated server has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    config = SimulatedConfig(server=spec.server, model=spec.model, **spec.options)
    began_s = time.monotonic()
    try:
        with spawn_process(config) as (url, pid):
            say(f"simulated {spec.server} at {url}")
            facts = {"launch": "simulated", "ready_s": time.monotonic() - began_s, "pid": pid}
            yield RunningServer(url, facts, (pid,))
    except StartError as problem:
        raise LaunchError(str(problem), "check port and options; `loadgen sim` takes the same ones") from problem


@contextmanager
def _running(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """A server at options["url"] that somebody else started; options["api_key_env"] names the environment variable with
    its key. Ends nothing."""
    url = spec.options.get("url")
    if not url:
        raise LaunchError(f"the URL of the running {spec.server} is missing", "name it as url = ...")
    facts = probe(url, spec.server, access=spec.access)
    say(f"{spec.server} {facts.version} at {facts.url}")
    yield RunningServer(facts.url, {"launch": "running"})


LAUNCHERS: Mapping[str, Callable[[LaunchSpec, Say], AbstractContextManager[RunningServer]]] = {
    "compose": compose.launched_server,
    "process": process.launched_server,
    "simulated": _simulated,
    "running": _running,
}
"""By `LaunchSpec.how`."""
