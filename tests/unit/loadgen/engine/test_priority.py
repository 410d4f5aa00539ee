"""The client's scheduling priority: what is raised and restored, and what is reported where it is refused."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.report.findings import priority
from loadgen.analysis.run.runfile import SchedulingFacts
from loadgen.analysis.summary import ClientHealth
from loadgen.engine import priority as module
from loadgen.engine.client_health import Health
from loadgen.engine.priority import least_raised, lower_priority, raised_priority
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, healthy, run_of, summarise

NOT_PERMITTED = PermissionError(errno.EPERM, "Operation not permitted")
RESET = os.SCHED_RESET_ON_FORK
TRANSLATOR = 1 << 22 | 1
"""A process id that no process has."""


class Kernel:
    """A made-up scheduler with the state of one thread. It raises `refusals` by the name of the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.nice = 0
        self.policy = os.SCHED_OTHER
        self.refusals: dict[str, OSError] = {}
        self.nice_limit = -20
        """The lowest nice value that is permitted."""
        self.limits = {resource.RLIMIT_NICE: (0, 0), resource.RLIMIT_RTTIME: (resource.RLIM_INFINITY,) * 2}
        self.handler: Any = signal.SIG_DFL
        self.sessions = 0
        self.others: dict[int, int] = {}
        """Nice values of other processes, by process id."""
        self.autogroup = folder / "autogroup"
        self.autogroup.write_text("0")
        monkeypatch.setattr(module, "AUTOGROUP", self.autogroup)
        monkeypatch.setattr(module, "take_capability", lambda _: None)
        monkeypatch.setattr(os, "getpriority", lambda *_: self.nice)
        monkeypatch.setattr(os, "setpriority", self.setpriority)
        monkeypatch.setattr(os, "sched_getscheduler", lambda _: self.policy)
        monkeypatch.setattr(os, "sched_setscheduler", self.sched_setscheduler)
        monkeypatch.setattr(os, "setsid", self.setsid)
        monkeypatch.setattr(resource, "getrlimit", self.limits.__getitem__)
        monkeypatch.setattr(resource, "setrlimit", self.limits.__setitem__)
        monkeypatch.setattr(signal, "getsignal", lambda _: self.handler)
        monkeypatch.setattr(signal, "signal", self.signal)

    @property
    def state(self) -> tuple[int, int, str, Any, Any]:
        """Everything that a run must leave as it was."""
        return self.nice, self.policy, self.autogroup.read_text(), self.handler, self.limits[resource.RLIMIT_RTTIME]

    def setpriority(self, _which: int, who: int, nice: int) -> None:
        if who:
            self.others[who] = nice
            return
        if nice < min(self.nice, self.nice_limit):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.nice = nice

    def sched_setscheduler(self, _pid: int, policy: int, _parameters: Any) -> None:
        if self.policy & RESET and not policy & RESET and "reset" in self.refusals:
            raise self.refusals["reset"]
        if policy & ~RESET == os.SCHED_RR and "realtime" in self.refusals:
            raise self.refusals["realtime"]
        self.policy = policy

    def setsid(self) -> None:
        if "setsid" in self.refusals:
            raise self.refusals["setsid"]
        self.sessions += 1

    def signal(self, number: int, handler: Any) -> None:
        assert number == signal.SIGXCPU
        self.handler = handler


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernel:
    """A scheduler that permits everything."""
    return Kernel(monkeypatch, tmp_path)


def test_auto_raises_nice_and_the_autogroup(kernel: Kernel) -> None:
    """By default the client runs at nice -10 in an autogroup of its own, and never at a real-time policy."""
    with raised_priority("auto", own_session=True) as facts:
        assert facts == SchedulingFacts(requested="auto", policy="other", nice=-10, autogroup_nice=-10)
        assert (kernel.nice, kernel.policy, kernel.autogroup.read_text()) == (-10, os.SCHED_OTHER | RESET, "-10")
        assert kernel.sessions == 1


@pytest.mark.parametrize(("requested", "nice"), [("auto", {TRANSLATOR: -10}), ("normal", {})])
def test_translators_have_the_priority_of_the_client(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, requested: str, nice: dict[int, int]
) -> None:
    """Every response in HTTP/2 passes through them."""
    monkeypatch.setattr(module, "translator_pids", lambda: [TRANSLATOR])
    with raised_priority(requested):
        assert kernel.others == nice


def test_normal_changes_nothing(kernel: Kernel) -> None:
    """`--client-priority normal` is the off switch."""
    before = kernel.state
    with raised_priority("normal", own_session=True) as facts:
        assert facts == SchedulingFacts(requested="normal")
        assert (kernel.state, kernel.sessions) == (before, 0)


@pytest.mark.parametrize("requested", ["auto", "realtime"])
@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError, None])
def test_everything_is_restored(kernel: Kernel, requested: str, end: type[BaseException] | None) -> None:
    """However the run ends, nice, policy, autogroup, limit and signal handler are what they were."""
    before = kernel.state

    def leave() -> None:
        with raised_priority(requested, own_session=True):
            assert kernel.state != before
            if end is not None:
                raise end

    if end is None:
        leave()
    else:
        with pytest.raises(end):
            leave()
    assert kernel.state == before


def test_a_client_without_the_right_stays_as_it_is(kernel: Kernel) -> None:
    """Where nothing is permitted nothing changes, no session is left, and the facts hold the system's reason."""
    kernel.nice_limit = 0
    before = kernel.state
    with raised_priority("auto", own_session=True) as facts:
        assert (kernel.state, kernel.sessions) == (before, 0)
    assert facts == SchedulingFacts(requested="auto", refused="nice -10: Permission denied")


def test_nice_is_as_low_as_the_limit_permits(kernel: Kernel) -> None:
    """RLIMIT_NICE may permit less than nice -10: 20 minus the limit is the lowest nice value."""
    kernel.nice_limit = -5
    kernel.limits[resource.RLIMIT_NICE] = (25, 25)
    with raised_priority("auto", own_session=True) as facts:
        assert (facts.nice, facts.autogroup_nice, facts.refused) == (-5, -5, "")
    assert kernel.nice == 0


def test_realtime_is_on_top_of_nice(kernel: Kernel) -> None:
    """`realtime` raises nice too, which is what remains when the policy is given up."""
    with raised_priority("realtime", own_session=True) as facts:
        assert (facts.policy, facts.nice) == ("realtime", -10)
        assert kernel.policy == os.SCHED_RR | RESET
        soft, hard = kernel.limits[resource.RLIMIT_RTTIME]
        assert (soft, hard) == (module.REALTIME_WITHOUT_PAUSE_US, resource.RLIM_INFINITY)
        kernel.handler(signal.SIGXCPU, None)
        assert (kernel.policy, kernel.nice) == (os.SCHED_OTHER | RESET, -10)
    assert kernel.state == (0, os.SCHED_OTHER, "0", signal.SIG_DFL, (resource.RLIM_INFINITY,) * 2)


def test_realtime_that_is_refused_leaves_nice(kernel: Kernel) -> None:
    """A kernel that refuses the policy may permit nice: the facts have both."""
    kernel.refusals["realtime"] = NOT_PERMITTED
    with raised_priority("realtime") as facts:
        assert (facts.policy, facts.nice, facts.refused) == ("other", -10, "SCHED_RR: Operation not permitted")


def test_the_policy_is_restored_without_the_right_to_clear_the_flag(kernel: Kernel) -> None:
    """Who may not clear SCHED_RESET_ON_FORK leaves the real-time policy all the same."""
    kernel.refusals["reset"] = NOT_PERMITTED
    with raised_priority("realtime"):
        assert kernel.policy == os.SCHED_RR | RESET
    assert kernel.policy == os.SCHED_OTHER | RESET


def test_a_priority_that_the_user_has_chosen_stays(kernel: Kernel) -> None:
    """A loadgen that was started with chrt is real-time already: nothing is changed, and the facts say so."""
    kernel.policy = os.SCHED_FIFO
    before = kernel.state
    with raised_priority("auto", own_session=True) as facts:
        assert (kernel.state, kernel.sessions) == (before, 0)
    assert (facts.policy, facts.refused) == ("realtime", "")


def test_a_session_leader_keeps_its_session(kernel: Kernel) -> None:
    """A process that cannot make a session runs at nice -10 in the autogroup that it has."""
    kernel.refusals["setsid"] = NOT_PERMITTED
    with raised_priority("auto", own_session=True) as facts:
        assert (facts.nice, facts.autogroup_nice, kernel.autogroup.read_text()) == (-10, None, "0")


def test_a_run_over_several_workers_has_the_priority_of_the_least(kernel: Kernel) -> None:
    """One worker that was refused is what the header tells of."""
    raised, refused = SchedulingFacts(nice=-10), SchedulingFacts(refused="nice -10: Permission denied")
    realtime = SchedulingFacts(nice=-10, policy="realtime")
    assert least_raised([realtime, raised, refused]) == refused
    assert least_raised([realtime, raised]) == raised
    assert least_raised([]) == SchedulingFacts()


FORKED = """
import os, sys
from loadgen.engine.priority import raised_priority
with raised_priority(sys.argv[1], own_session=True) as facts:
    print(facts.policy, facts.nice, facts.refused, flush=True)
    if os.fork() == 0:
        print(os.sched_getscheduler(0) == os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0), flush=True)
        os._exit(0)
    os.wait()
"""
BUSY = """
import os, time
from loadgen.engine.priority import has_realtime, raised_priority
with raised_priority("realtime") as facts:
    before = has_realtime()
    deadline = time.monotonic() + 30
    while has_realtime() and time.monotonic() < deadline:
        pass
    print(before, has_realtime(), os.getpriority(os.PRIO_PROCESS, 0))
print(os.sched_getscheduler(0) == os.SCHED_OTHER)
"""


def printed(code: str, *arguments: str, before: tuple[str, ...] = ()) -> list[str]:
    """The lines that a Python process prints."""
    command = [*before, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


@pytest.mark.parametrize("requested", ["auto", "realtime"])
def test_processes_that_the_client_starts_do_not_inherit_its_priority(requested: str) -> None:
    """Whatever is in force in the client, a process that it forks runs at normal priority."""
    assert printed(FORKED, requested)[1] == "True 0"


def test_a_client_that_never_pauses_gives_up_realtime() -> None:
    """The kernel sends SIGXCPU to a real process that holds its core, and the process goes on at nice -10."""
    permitted = subprocess.run(["chrt", "-r", "1", "true"], capture_output=True, check=False).returncode == 0
    assert printed(BUSY) == ["True False -10" if permitted else "False False 0", "True"]


def test_a_process_without_the_capability_reports_it() -> None:
    """The kernel's own refusal reaches the facts, and the command goes on."""
    lines = printed(FORKED, "realtime", before=("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"))
    assert lines[0] == "other 0 SCHED_RR: Operation not permitted"


def test_health_samples_have_the_wait_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each sample has the wait since the sample before it, as the kernel counts it, and none where it does not."""
    counter = tmp_path / "schedstat"
    monkeypatch.setattr(module, "SCHEDSTAT", counter)
    counter.write_text("100 5000 7\n")
    samples = Health()
    counter.write_text("200 9000 8\n")
    assert samples.sample()["core_wait_ns"] == 4000
    assert samples.sample()["core_wait_ns"] == 0
    counter.unlink()
    assert "core_wait_ns" not in samples.sample()
    counter.write_text("300 9500 9\n")
    assert "core_wait_ns" not in samples.sample()


@pytest.mark.parametrize(
    ("facts", "given_up", "level", "sentence"),
    [
        ({"requested": "auto", "nice": -10}, None, "note", "The client ran at nice -10."),
        ({"requested": "realtime", "policy": "realtime"}, 0, "note", "The client ran at real-time priority."),
        (
            {"requested": "realtime", "policy": "realtime", "nice": -10},
            2,
            "warning",
            "2 workers gave up real-time priority after 200 ms on a core without a pause, and went on at nice -10.",
        ),
        (
            {"requested": "realtime", "nice": -10, "refused": "SCHED_RR: Operation not permitted"},
            None,
            "warning",
            "The client ran at nice -10: real-time priority is not permitted (SCHED_RR: Operation not permitted). Run "
            "it as root, grant CAP_SYS_NICE, or raise `ulimit -r`.",
        ),
    ],
    ids=["raised", "realtime", "given-up", "refused"],
)
def test_the_report_says_at_which_priority_the_client_ran(
    facts: dict[str, Any], given_up: int | None, level: str, sentence: str
) -> None:
    """One sentence, and a warning where it is not what was asked for."""
    client = ClientHealth(stamps="ring", scheduling=SchedulingFacts(**facts), realtime_given_up=given_up)
    finding = priority(client)
    assert finding is not None
    assert (finding.level, finding.sentence) == (level, sentence)


@pytest.mark.parametrize(
    "facts",
    [None, {"requested": "normal"}, {"requested": "auto", "refused": "nice -10: Permission denied"}],
    ids=["older-run", "switched-off", "default-refused"],
)
def test_the_usual_priority_is_not_mentioned(facts: dict[str, Any] | None) -> None:
    """Where nobody asked for more, a refusal is no complaint."""
    scheduling = None if facts is None else SchedulingFacts(**facts)
    assert priority(ClientHealth(stamps="ring", scheduling=scheduling)) is None


LATE = [complete(1, [900 * MS], sent_ns=50 * MS)]
SEPARATE = "give client and server separate cores (`taskset`), or run the client on another host"


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({"requested": "auto", "nice": -10}, "; use --client-priority realtime (`chrt -r 1 loadgen ...`), "),
        (
            {"requested": "auto", "refused": "nice -10: Permission denied"},
            "; loadgen may not raise its priority (nice -10: Permission denied): run it as root, grant CAP_SYS_NICE, "
            "or start it with `sudo chrt -r 1 loadgen ...`; or ",
        ),
        ({"requested": "normal"}, "; remove --client-priority normal, "),
        ({"requested": "realtime", "policy": "realtime"}, "; "),
        (None, "; raise its priority (`chrt -r 1 loadgen ...` as root), "),
    ],
    ids=["raised", "refused", "switched-off", "realtime", "unknown"],
)
def test_a_wait_for_a_core_is_named_with_its_remedy(tmp_path: Path, facts: dict[str, Any] | None, remedy: str) -> None:
    """Requests that left late because other processes used all cores: the reason has that cause, not --workers."""
    client = {"stamps": "socket"} | ({} if facts is None else {"scheduling": facts})
    samples = healthy(2, core_wait_ns=400 * MS)
    reasons = summarise(run_of(tmp_path / "run", LATE, telemetry=samples, client=client))["client"]["reasons"]
    cause = "the client waited 800 ms for a CPU core: other processes, probably the server, use all cores"
    assert len(reasons) == 1
    assert f"requests were sent late; {cause}{remedy}" in reasons[0]
    assert reasons[0].endswith(SEPARATE)
    assert "--workers" not in reasons[0]


@pytest.mark.parametrize(
    "values",
    [{}, {"core_wait_ns": 0}, {"core_wait_ns": 20 * MS}, {"core_wait_ns": 100 * MS, "cpu_ns": 900 * MS}],
    ids=["older-run", "no-wait", "too-short", "busy-itself"],
)
def test_a_client_that_was_busy_itself_is_told_to_use_more_workers(tmp_path: Path, values: dict[str, int]) -> None:
    """Without a wait that explains the delay, the client's own work does."""
    reasons = summarise(run_of(tmp_path / "run", LATE, telemetry=healthy(2, **values)))["client"]["reasons"]
    assert reasons == [
        "dispatch delay (p99) relative to the median E2E 5.9% (limit 5.0%): requests were sent late; use more --workers"
    ]


def test_a_wait_for_a_core_explains_stalls_too(tmp_path: Path) -> None:
    """The remedy is stated once; the other figures that the wait has spoiled name the cause alone."""
    samples = healthy(2, core_wait_ns=400 * MS, stall_ns_max=300 * MS)
    reasons = summarise(run_of(tmp_path / "run", LATE, telemetry=samples))["client"]["reasons"]
    assert [SEPARATE in reason for reason in reasons] == [True, False]
    assert reasons[1].endswith("tokens that arrived meanwhile share a timestamp; the client waited for a CPU core")


def test_several_workers_may_have_waited_for_each_other(tmp_path: Path) -> None:
    """More workers than cores use all cores themselves, which the reason does not hide."""
    samples = [sample for worker in (0, 1) for sample in healthy(2, core_wait_ns=400 * MS)]
    for sample in samples[2:]:
        sample.worker = 1
    (reason,) = summarise(run_of(tmp_path / "run", LATE, telemetry=samples))["client"]["reasons"]
    assert "other processes, probably the server, or its 2 workers use all cores" in reason


def test_workers_that_gave_up_realtime_are_counted(tmp_path: Path) -> None:
    """A worker whose samples say that it is not real-time any more has given the policy up."""
    facts = {"requested": "realtime", "policy": "realtime", "nice": -10}
    samples = healthy(3, realtime=True)
    samples[2].values["realtime"] = False
    client = {"stamps": "socket", "scheduling": facts}
    run = run_of(tmp_path / "run", LATE, telemetry=samples, client=client)
    assert summarise(run)["client"]["realtime_given_up"] == 1


def test_the_lowest_priority_is_that_of_the_autogroup_too(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the autogroup, a process in its own session would take half of a contested core."""
    values: list[int] = []
    monkeypatch.setattr(os, "nice", values.append)
    lower_priority()
    assert (values, kernel.autogroup.read_text(), kernel.policy) == ([19], "19", os.SCHED_IDLE)
