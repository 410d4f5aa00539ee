"""Processes in a group of their own: started, looked at and ended by id, never by name.

Linux only: a process id alone says little, because ids come round again, so each goes with the instant at which the
kernel started it (/proc/PID/stat, field 22).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

END_TIMEOUT_S = 15.0
"""After SIGTERM; engines that hold streams open wait for them, and a test must not."""
HELPERS_TIMEOUT_S = 5.0
"""For what is left of its group, such as Python's resource tracker, which removes shared memory."""
_POLL_S = 0.05


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Start `command` in a session and process group of its own, both its outputs going to `log`; its process id.

    `env` is added to this process's environment. Raises OSError when the program or the folder of the log is missing.
    """
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawnp(
        command[0],
        [*command],
        os.environ | dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), write | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),
    )


def exit_code(pid: int) -> int | None:
    """The exit code of a child of this process, negative for a signal; None while it runs. Asked once it has ended,
    the kernel forgets it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def end(pid: int, *, timeout_s: float = END_TIMEOUT_S) -> None:
    """SIGTERM to the process, then to what it leaves behind, and SIGKILL for whatever of its group will not end.

    `pid` leads a group of its own, as `start` makes them. Ending what has ended already is no error.
    """
    _signal(os.kill, pid, signal.SIGTERM)
    if _wait(lambda: started_ticks(pid) is None, timeout_s):
        _signal(os.killpg, pid, signal.SIGTERM)
        _wait(lambda: not group(pid), HELPERS_TIMEOUT_S)
    if group(pid):
        _signal(os.killpg, pid, signal.SIGKILL)
        _wait(lambda: not group(pid), HELPERS_TIMEOUT_S)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of ours would stay a zombie


def started_ticks(pid: int) -> int | None:
    """When the kernel started this process, in clock ticks since boot; None when it has ended (a zombie has)."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def group(pid: int) -> tuple[int, ...]:
    """The living processes of the group that `pid` leads, itself included."""
    ids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return tuple(each for each in ids if (fields := _stat(each)) and int(fields[2]) == pid and fields[0] not in "ZX")


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 (state) on: the name before it may hold blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except (OSError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        send(pid, number)


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is done within that time."""
    deadline_s = time.monotonic() + timeout_s
    while not (ended := done()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return ended
