"""Memory of this machine, and of server processes on it with everything they have started."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from servers.telemetry.source import EXTRA, NotMeasuredError


def on_this_machine(url: str) -> bool:
    """Whether the address behind `url` is one of this machine's: a socket can be bound to it. False when unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


class HostMemory:
    """The host and the processes `pids`. See Source."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """Raises NotMeasuredError where psutil is not installed, or one of the processes does not exist."""
        try:
            self._psutil: Any = importlib.import_module("psutil")
        except ImportError:
            raise NotMeasuredError(f"psutil is not installed: {EXTRA}") from None
        self._pids = tuple(pids)
        if gone := [str(pid) for pid in self._pids if not self._psutil.pid_exists(pid)]:
            raise NotMeasuredError(f"there is no process {', '.join(gone)}")
        self.facts: Mapping[str, Any] = {
            "memory_total_bytes": int(self._psutil.virtual_memory().total),
            "processes": [{"pid": pid, "name": self._name(pid)} for pid in self._pids],
        }

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - reads of /proc: 3 ms, most of it to find descendants
        """See Source. `rss_bytes` adds up the resident memory of a process and its descendants: pages that several of
        them share are counted in each."""
        memory = self._psutil.virtual_memory()
        return {
            "memory_used_bytes": int(memory.total - memory.available),
            "processes": [self._tree(pid) for pid in self._pids],
        }

    def close(self) -> None:
        """See Source: nothing is held."""

    def _tree(self, pid: int) -> dict[str, Any]:
        psutil = self._psutil
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            resident = int(root.memory_info().rss)
        except psutil.Error as error:
            return {"pid": pid, "gap": str(error)}
        for child in family[1:]:
            try:
                resident += int(child.memory_info().rss)
            except psutil.Error:  # it has ended since it was listed, and has no memory any more
                continue
        return {"pid": pid, "rss_bytes": resident, "members": len(family)}

    def _name(self, pid: int) -> str:
        try:
            return str(self._psutil.Process(pid).name())
        except self._psutil.Error:
            return ""
