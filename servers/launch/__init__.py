"""Starting servers: in containers, as processes, simulated, or none because it runs already.

All give the same context manager: up and ready on entry, down on exit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from servers.launch import compose, process, running, simulated
from servers.launch.base import How, Launched, Say, Wanted

__all__ = ["LAUNCHERS", "How", "Launched", "Say", "Wanted", "launched"]

LAUNCHERS: Mapping[str, Callable[[Wanted, Say], AbstractContextManager[Launched]]] = {
    "compose": compose.launched,
    "process": process.launched,
    "simulated": simulated.launched,
    "running": running.launched,
}
"""By `Wanted.how`."""


def launched(wanted: Wanted, say: Say) -> AbstractContextManager[Launched]:
    """The server wanted: up and ready on entry, down on exit. `say` gets lines of progress.

    Raises LaunchError when it does not come up, and what `servers.find.probe` raises.
    """
    return LAUNCHERS[wanted.how](wanted, say)
