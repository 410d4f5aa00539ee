"""The scheduling priority of the thread that sends requests and reads responses.

A server that fills every core of this machine makes the client wait for a core, so that requests leave late. During a
run the client therefore raises its priority as far as it is permitted to:

    normal      nothing is changed
    auto        nice -10, and a separate autogroup with nice -10
    realtime    what auto does, and the real-time policy SCHED_RR

Linux first shares the cores between sessions, and then between the processes of one session (sched(7), "The autogroup
feature"). The nice value of a process therefore has no effect on a server that was started in another terminal. Each
worker makes a new session, whose autogroup gets the nice value too. Cores are shared between control groups in the
same way: across containers only the real-time policy helps.

The real-time policy lets the client preempt the server whenever a packet arrives. With SCHED_RR the median TTFT of a
busy server was 0.4 to 0.7 ms longer, so it is never chosen automatically.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from loadgen.analysis.run.runfile import SchedulingFacts
from loadgen.servers.wire.capabilities import take_capability

CAP_SYS_NICE = 23
"""linux/capability.h."""
NICE_RAISED = -10
"""It gives the client nine tenths of a contested core. With nice -20 requests left little sooner, and the scheduler
moved everything else to the other cores: next to other work, a burst of 1,000 slowed the server down more often."""
REALTIME_PRIORITY = 1
"""The lowest of SCHED_RR: it preempts every ordinary process, and no thread of the kernel."""
REALTIME_WITHOUT_PAUSE_US = 200_000
"""A real-time client that uses a core for longer without a pause falls back to its nice value."""
AUTOGROUP = Path("/proc/self/autogroup")
AUTOGROUP_TRIES, AUTOGROUP_AGAIN_S = 30, 0.11
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def core_wait_ns() -> int | None:
    """Return how long this thread has been ready to run and waited for a core; None where the kernel does not say."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def has_realtime() -> bool:
    """Return whether this thread runs under a real-time policy now."""
    return sys.platform == "linux" and _policy() in (os.SCHED_FIFO, os.SCHED_RR)


def least_raised(facts: Iterable[SchedulingFacts]) -> SchedulingFacts:
    """Return the facts of the worker whose priority was raised least."""
    ranked = sorted(facts, key=lambda worker: (worker.policy != "realtime", worker.nice, worker.refused != ""))
    return ranked[-1] if ranked else SchedulingFacts()


@contextlib.contextmanager
def raised_priority(requested: str, *, own_session: bool = False) -> Iterator[SchedulingFacts]:
    """Raise the priority of this thread within the block, as far as it is permitted. Yield the priority in force.

    `own_session`: this process may leave its session, so that its autogroup is of this process alone.
    """
    if requested == "normal" or sys.platform != "linux":
        refused = "" if requested == "normal" else f"{requested} needs Linux"
        yield SchedulingFacts(requested=requested, nice=os.getpriority(os.PRIO_PROCESS, 0), refused=refused)
        return
    undo = contextlib.ExitStack()
    with undo:
        take_capability(CAP_SYS_NICE)
        yield _raise(requested, own_session, undo.callback)


def _raise(requested: str, own_session: bool, later: Callable[..., Any]) -> SchedulingFacts:
    """Raise the priority, and register what restores it."""
    refused = ""
    autogroup_nice = None
    if not has_realtime():  # else the caller has chosen it, with chrt for example
        refused = _raise_nice(later)
        if own_session and not refused:
            autogroup_nice = _raise_autogroup(later)
        if requested == "realtime":
            refused = _raise_policy(later)
    return SchedulingFacts(
        requested=requested,
        policy="realtime" if has_realtime() else "other",
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        autogroup_nice=autogroup_nice,
        refused=refused,
    )


def _raise_nice(later: Callable[..., Any]) -> str:
    """Lower the nice value as far as it is permitted. Returns why it stayed as it was, else an empty string.

    On Linux the nice value is that of the calling thread. Processes and threads that it starts begin at 0 again.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    reason = ""
    for nice in (NICE_RAISED, 20 - resource.getrlimit(resource.RLIMIT_NICE)[0]):
        if not NICE_RAISED <= nice < before:
            continue
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError as error:
            reason = reason or f"nice {NICE_RAISED}: {error.strerror}"
        else:
            later(_quietly, os.setpriority, os.PRIO_PROCESS, 0, before)
            if _policy() == os.SCHED_OTHER:
                _quietly(_set_policy, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK)
                later(_quietly, _set_policy, os.SCHED_OTHER)
            return ""
    return reason


def _raise_autogroup(later: Callable[..., Any]) -> int | None:
    """Make a new session, whose autogroup gets the nice value that is in force. Returns it; None without autogroups."""
    if not AUTOGROUP.exists():
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setsid()
        for _ in range(AUTOGROUP_TRIES):
            with contextlib.suppress(BlockingIOError):  # one change in 0.1 s, by any process without CAP_SYS_ADMIN
                AUTOGROUP.write_text(str(nice))
                break
            time.sleep(AUTOGROUP_AGAIN_S)
        else:
            return None
    except OSError:  # it leads its process group already, or may not be nicer
        return None
    later(_quietly, AUTOGROUP.write_text, "0")
    return nice


def _raise_policy(later: Callable[..., Any]) -> str:
    """Take the real-time policy. Returns why it is not permitted, else an empty string.

    A client that never paused would hold its core for good: the kernel reports it (RLIMIT_RTTIME), and `fall_back`
    gives the policy up. The hard limit, beyond which the kernel would kill the process, stays as it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    handler = signal.getsignal(signal.SIGXCPU)
    policy = _policy()

    def fall_back(number: int, _frame: FrameType | None) -> None:
        if has_realtime():
            _quietly(_set_policy, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK)
        else:  # RLIMIT_CPU sends the same signal
            signal.signal(number, handler)
            os.kill(os.getpid(), number)

    limit = REALTIME_WITHOUT_PAUSE_US if hard == resource.RLIM_INFINITY else min(hard, REALTIME_WITHOUT_PAUSE_US)
    signal.signal(signal.SIGXCPU, fall_back)
    later(signal.signal, signal.SIGXCPU, handler)
    resource.setrlimit(resource.RLIMIT_RTTIME, (limit, hard))
    later(_quietly, resource.setrlimit, resource.RLIMIT_RTTIME, (soft, hard))
    try:
        _set_policy(os.SCHED_RR | os.SCHED_RESET_ON_FORK, REALTIME_PRIORITY)
    except OSError as error:
        return f"SCHED_RR: {error.strerror}"
    later(_quietly, _set_policy, policy)
    return ""


def _policy() -> int:
    """Return the policy of this thread."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def _set_policy(policy: int, priority: int = 0) -> None:
    """Set the policy of this thread. Without CAP_SYS_NICE, SCHED_RESET_ON_FORK stays once it is set. Raises OSError."""
    try:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except PermissionError:
        if policy & os.SCHED_RESET_ON_FORK:
            raise
        os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


def _quietly(change: Callable[..., Any], *values: Any) -> None:
    """Make a change that nothing depends on."""
    with contextlib.suppress(OSError, ValueError):
        change(*values)
