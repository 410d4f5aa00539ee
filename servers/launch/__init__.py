"""Launches a server with one of four launch methods.

- `compose`: start the server in a container.
- `process`: start the server as a process of this machine.
- `simulated`: start a simulated server.
- `running`: use a server that already runs.

Every launch method is a context manager. The server is ready on entry. On exit, the server is stopped, except with the
method `running`.
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
    """Return a context manager that starts the server of `spec` on entry and stops it on exit.

    The launch method `running` neither starts nor stops the server. `say` receives progress messages. Raises
    LaunchError if the server does not start, and the errors of `loadgen.servers.discovery.probe`."""
    return LAUNCHERS[spec.method](spec, say)


@contextmanager
def _simulated(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """Run a simulated server in a separate process.

    The options of `spec` are fields of SimulatedConfig. Raises ConfigError for any other option."""
    from loadgen.servers.simulated import ConfigError, StartError
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn_process

    known = {field.name for field in fields(SimulatedConfig)} - {"server", "model"}
    unknown = sorted(spec.options.keys() - known)
    if unknown:
        raise ConfigError(f"a simulated server has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    config = SimulatedConfig(server=spec.server, model=spec.model, **spec.options)
    start_s = time.monotonic()
    try:
        with spawn_process(config) as (url, pid):
            say(f"simulated {spec.server} at {url}")
            facts = {"launch": "simulated", "ready_s": time.monotonic() - start_s, "pid": pid}
            yield RunningServer(url, facts, (pid,))
    except StartError as problem:
        raise LaunchError(
            str(problem), "check the port and the options, which are those of `loadgen mock-server`"
        ) from problem


@contextmanager
def _running(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """Yield a server that already runs, and leave it running when the `with` block ends.

    The option `url` of `spec` is the server's URL. The option `api_key_env` is the name of the environment variable
    that contains the server's API key.
    """
    url = spec.options.get("url")
    if not url:
        raise LaunchError(f"the URL of the running {spec.server} is missing", "set it with url = ...")
    facts = probe(url, spec.server, access=spec.access)
    say(f"{spec.server} {facts.version} at {facts.url}")
    yield RunningServer(facts.url, {"launch": "running"})


LAUNCHERS: Mapping[str, Callable[[LaunchSpec, Say], AbstractContextManager[RunningServer]]] = {
    "compose": compose.launched_server,
    "process": process.launched_server,
    "simulated": _simulated,
    "running": _running,
}
"""Functions that start a server, by `LaunchSpec.method`."""
