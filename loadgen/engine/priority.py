"""The scheduling priority of the thread that sends requests and reads responses.

If a server fills every core of this machine, the client must wait for a core, and requests are sent late. During a run
the client therefore raises its priority as far as it is permitted to:

    normal      no change.
    auto        nice -10 for this thread, and for the autogroup of its session.
    realtime    the same as auto, and additionally the real-time policy SCHED_RR.

If the server accepts only HTTP/2, helper processes translate the requests (loadgen.servers.http2). These processes and
their autogroups get the same nice value as the client.

Linux first shares the cores between sessions, and then between the processes of one session (sched(7), "The autogroup
feature"). The nice value of a process therefore has no effect on a server that was started in another terminal. Each
worker creates a new session, and the autogroup of this session gets the nice value too. Cores are shared between
control groups in the same way. Across containers, only the real-time policy helps.

With the real-time policy, the client preempts the server whenever a packet arrives, which slows the server down: the
median TTFT of a busy server was 0.4 to 0.7 ms longer. This policy is therefore never chosen automatically.
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
from loadgen.servers.http2 import translator_pids
from loadgen.servers.wire.capabilities import take_capability

CAP_SYS_NICE = 23
"""Number of the capability in linux/capability.h."""
NICE_LOWEST = 19
NICE_RAISED = -10
"""Nice value of the client with raised priority. It gives the client nine tenths of a contested core.

Nice -20 was hardly better: requests were sent only a little sooner. The scheduler moved all other processes to the
other cores, and on a machine with other work a burst of 1,000 requests slowed the server down more often.
"""
REALTIME_PRIORITY = 1
"""The lowest priority of SCHED_RR. It preempts every ordinary process, but no kernel thread."""
REALTIME_WITHOUT_PAUSE_US = 200_000
"""Maximum time in us that a real-time client may use a core without a pause. After that it falls back to its nice
value."""
AUTOGROUP = Path("/proc/self/autogroup")
AUTOGROUP_TRIES, AUTOGROUP_AGAIN_S = 30, 0.11
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def core_wait_ns() -> int | None:
    """Return the total time in ns that this thread has been ready to run but had to wait for a core.

    Return None if the kernel does not report it.
    """
    try:
        return int(SCHEDSTAT.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def has_realtime() -> bool:
    """Return True if this thread now runs under a real-time policy."""
    return sys.platform == "linux" and _policy() in (os.SCHED_FIFO, os.SCHED_RR)


def least_raised(facts: Iterable[SchedulingFacts]) -> SchedulingFacts:
    """Return the scheduling facts of the worker with the lowest priority, given the facts of all workers."""
    ranked = sorted(facts, key=lambda worker: (worker.policy != "realtime", worker.nice, worker.refused != ""))
    return ranked[-1] if ranked else SchedulingFacts()


def lower_priority() -> None:
    """Give this process the lowest priority, so that it gets CPU time only when no other process needs a core.

    On Linux, all processes in the autogroup of its session get the lowest priority too. This process must therefore run
    in a separate session. Its disk accesses also get the lowest priority, because of the policy SCHED_IDLE.
    """
    os.nice(NICE_LOWEST)
    if sys.platform != "linux":
        return
    _set_autogroup(NICE_LOWEST)
    _quietly(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def raised_priority(requested: str, *, own_session: bool = False) -> Iterator[SchedulingFacts]:
    """Raise the priority of this thread until the `with` block ends. Yield the resulting scheduling facts.

    `requested` is `auto`, `realtime` or `normal`. With `normal`, nothing is changed. Otherwise the priority is raised
    as far as the system permits.

    `own_session` is True if this process may start a new session. Linux divides the cores among sessions first, and
    only then among the processes of a session. A higher priority in the old session would therefore not help against
    processes of other sessions, such as a server that was started in another terminal.
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
    """Raise the priority of this thread, and return the resulting scheduling facts.

    Nothing is changed if the user has already chosen a real-time policy, for example with chrt.

    - `requested` is `auto` or `realtime`. With `realtime`, the scheduling policy is changed too.
    - With `own_session`, this process starts a new session, whose autogroup gets the higher priority too.
    - `later` registers functions that undo the changes when `raised_priority` ends.
    """
    refused = ""
    autogroup_nice = None
    if not has_realtime():  # otherwise the user has chosen a real-time policy, for example with chrt
        refused = _raise_nice(later)
        if not refused:
            _raise_translators()
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
    """Raise the priority of the calling thread: lower its nice value to NICE_RAISED, or as far as the system permits.

    Return an empty text, or the reason if the nice value cannot be lowered. `later` registers functions that restore
    the previous priority.

    On Linux each thread has a nice value. The flag SCHED_RESET_ON_FORK is set, so that processes and threads started by
    this thread begin with the nice value 0.
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


def _raise_translators() -> None:
    """Give the processes that translate to HTTP/2, and their autogroups, the nice value of this thread.

    Every response passes through a translator before this client reads it. The value is never restored, because a
    translator serves only this client and ends with it.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in translator_pids():
        _quietly(os.setpriority, os.PRIO_PROCESS, pid, nice)
        _quietly(Path(f"/proc/{pid}/autogroup").write_text, str(nice))


def _raise_autogroup(later: Callable[..., Any]) -> int | None:
    """Start a new session, and give its autogroup the nice value of this process.

    An autogroup is the group of processes in one session. Linux shares the cores between autogroups first. Return the
    nice value, or None if the autogroup does not exist or cannot be changed. `later` registers a function that undoes
    the change.
    """
    if not AUTOGROUP.exists():
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setsid()
    except OSError:  # this process already leads a process group
        return None
    if not _set_autogroup(nice):
        return None
    later(_quietly, AUTOGROUP.write_text, "0")
    return nice


def _set_autogroup(nice: int) -> bool:
    """Give the autogroup of this process the nice value `nice`. Return True if this was possible.

    An autogroup is the group of processes in one session. Linux shares the cores between these groups first.
    """
    try:
        for _ in range(AUTOGROUP_TRIES):
            with contextlib.suppress(BlockingIOError):  # without CAP_SYS_ADMIN only one change per 0.1 s is allowed
                AUTOGROUP.write_text(str(nice))
                return True
            time.sleep(AUTOGROUP_AGAIN_S)
    except OSError:
        pass
    return False


def _raise_policy(later: Callable[..., Any]) -> str:
    """Switch this thread to the real-time policy SCHED_RR. Return "", or an error message if this is not permitted.

    A real-time thread that never pauses blocks its core for all other processes. The kernel therefore limits the time
    without a pause (RLIMIT_RTTIME). At the soft limit, which this function sets, the kernel sends a signal. The handler
    of this signal switches back to the ordinary policy. The hard limit, at which the kernel kills the process, is not
    changed.

    `later` registers functions that undo the changes.
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
    """Return the scheduling policy of this thread."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def _set_policy(policy: int, priority: int = 0) -> None:
    """Set the scheduling policy of this thread. Raises OSError if that is not permitted.

    A thread without CAP_SYS_NICE cannot clear the flag SCHED_RESET_ON_FORK once it is set. In this case the flag
    remains set.
    """
    try:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except PermissionError:
        if policy & os.SCHED_RESET_ON_FORK:
            raise
        os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


def _quietly(change: Callable[..., Any], *values: Any) -> None:
    """Call `change` with these values. Errors are ignored, because loadgen also works without the change."""
    with contextlib.suppress(OSError, ValueError):
        change(*values)
