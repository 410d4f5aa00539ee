"""The steps of a sweep: their loads, when one is ended, and what a sweep does when it is stopped and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.runfile import Footer
from loadgen.engine.client_health import LiveCounters
from loadgen.errors import OutputError, PlanError
from loadgen.plan import Plan
from loadgen.studies import sweep as sweeps
from loadgen.studies.sweep import StepEnd, Sweep, Watch, journal, measured_steps, parse_loads, read_lines, run
from loadgen.studies.sweep.overload import OverloadDetector

PLAN = Plan(server="vllm", arrivals="poisson:1", duration_s=10, seed=5)


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("1,2,5", (1, 2, 5)),
        ("0.5", (0.5,)),
        ("1,2,4,...,16", (1, 2, 4, 8, 16)),
        ("1,2,...,8", (1, 2, 4, 8)),
        ("10,20,30,...,60", (10, 20, 30, 40, 50, 60)),
        ("1,2,4,...,20,100", (1, 2, 4, 8, 16, 20, 100)),
        ("1/s, 2/s,...,8/s", (1, 2, 4, 8)),
    ],
)
def test_loads_are_listed(text: str, loads: tuple[float, ...]) -> None:
    """With `...` they go on by the factor, or by the difference, of those before it."""
    assert parse_loads(text, "--rates", whole=False) == loads


@pytest.mark.parametrize("text", ["", "x", "2,1", "0,1", "...,5", "1,...,5", "1,2,...", "1,2,3,...,1e9", "1.5", "-1"])
def test_what_is_no_list_of_loads_is_refused(text: str) -> None:
    """With how to write one."""
    with pytest.raises(PlanError, match="--concurrency") as caught:
        parse_loads(text, "--concurrency", whole=True)
    assert "1,2,4,...,256" in caught.value.hint


def watched(
    sent_per_s: float,
    back: Callable[[float], float],
    monkeypatch: pytest.MonkeyPatch,
    *,
    sent_for_s: float = 60.0,
    rejected_share: float = 0.0,
    **more: Any,
) -> float:
    """When a run of 60 s is ended that gets so many requests back by then; 60 if it is not."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    backlog = OverloadDetector(lambda _phase, _counts: None, **{"watch_backlog": True, "clock": lambda: now[0], **more})
    for tick in range(600):
        at_s = tick / 10
        now[0] = 1000.0 + at_s
        sent = round(sent_per_s * min(at_s, sent_for_s))
        counts = LiveCounters(sent=sent, complete=round(back(at_s)), rejected=round(rejected_share * sent))
        if backlog("running", counts):
            return at_s
    return 60.0


def test_an_overload_is_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as much less comes back than is sent, and the first answers are long past."""
    assert watched(100, lambda at_s: 20 * max(0.0, at_s - 0.5), monkeypatch) < 15


def test_a_queue_is_not_drained_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor once all was sent: when the rest takes longer than all of the load, it is clear."""
    assert watched(100, lambda at_s: 5 * max(0.0, at_s - 0.5), monkeypatch, sent_for_s=4) < 12
    assert watched(100, lambda at_s: min(400, 60 * at_s), monkeypatch, sent_for_s=4) == 60


@pytest.mark.parametrize("stay_s", [0.5, 3.0, 20.0, 100.0])
def test_a_server_that_keeps_up_is_not(stay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its answers take; nor one that is a little behind, nor one of which few requests tell."""
    assert watched(100, lambda at_s: 100 * max(0.0, at_s - stay_s), monkeypatch) == 60
    assert watched(100, lambda at_s: 85 * max(0.0, at_s - stay_s), monkeypatch) == 60
    assert watched(0.5, lambda at_s: 0.2 * max(0.0, at_s - stay_s), monkeypatch) == 60
    assert watched(100, lambda at_s: 0.0 * at_s, monkeypatch, watch_backlog=False) == 60


@pytest.mark.parametrize("at_rate", [True, False])
def test_a_load_that_is_rejected_is_an_overload(at_rate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the requests is rejected, and the rest comes back at once: the run ends early, at a given rate and in
    a closed loop. Few rejections, and a share that an objective allows, end nothing."""
    options: dict[str, Any] = {"watch_backlog": at_rate, "rejected_share": 0.2}
    assert watched(100, lambda at_s: 80 * at_s, monkeypatch, **options) < 15
    assert watched(100, lambda at_s: 80 * at_s, monkeypatch, **options, rejections_allowed=True) == 60
    assert watched(1, lambda at_s: 0.8 * at_s, monkeypatch, **options) == 60
    assert watched(100, lambda at_s: 99 * at_s, monkeypatch, **options | {"rejected_share": 0.01}) == 60


def test_a_run_ends_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-time holds within a step too."""
    assert watched(1, lambda at_s: at_s, monkeypatch, deadline_s=1012.0) == pytest.approx(12.1)


class Fake:
    """A server in no time: its runs are folders, and over its capacity above a load."""

    def __init__(self, folder: Path, carries: float = 10.0) -> None:
        self.folder, self.carries, self.plans = folder, carries, list[Plan]()
        self.interrupt_at: int | None = None
        self.client = "ok"

    def measure(self, plan: Plan, folder: Path, _show: object) -> Footer:
        folder.mkdir(parents=True)
        self.plans.append(plan)
        stop = len(self.plans) == self.interrupt_at
        return Footer(ended_ns=1, sent=1, complete=1, truncated=0, failed=0, dropped=0, interrupted=stop)

    def judge(self, _folder: Path, load: float, _end: StepEnd) -> dict[str, Any]:
        return {"over": float(load > self.carries), "carried": None, "client": self.client}

    def sweep(self, loads: Sequence[float], *, resume: bool = False, **most: Any) -> str:
        asked = Sweep(PLAN, "rate", self.folder, tuple(loads))
        coming: Iterator[float] = iter(loads)

        def next_load(lines: Sequence[dict[str, Any]]) -> float | None:
            done = {line["load"] for line in lines}
            return next((load for load in coming if load not in done), None)

        with journal(self.folder, asked.journal_plan, resume=resume) as book:
            return run(
                asked,
                book,
                measure=self.measure,
                judge=self.judge,
                next_load=next_load,
                watch=Watch(lambda _phase, _counts: None),
                **{"max_runs": 8, **most},
            )


def test_each_step_is_a_run_with_other_prompts(tmp_path: Path) -> None:
    """Of its load, with the next seed, in a folder of its own; the journal has what each said."""
    fake = Fake(tmp_path / "s")
    assert fake.sweep([1, 4, 16]) == "done"
    assert [(plan.arrivals, plan.seed) for plan in fake.plans] == [
        ("poisson:1", 5),
        ("poisson:4", 6),
        ("poisson:16", 7),
    ]
    lines = measured_steps(read_lines(tmp_path / "s"))
    assert [(line["step"], line["load"], line["over"]) for line in lines] == [(1, 1, 0.0), (2, 4, 0.0), (3, 16, 1.0)]
    assert all((tmp_path / f"s/step-{number}").is_dir() for number in (1, 2, 3))


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    """The step that was under way is made again, what it left is kept aside; those that had ended are not repeated."""
    fake = Fake(tmp_path / "s")
    fake.interrupt_at = 2
    assert fake.sweep([1, 4, 16]) == "interrupted"
    with pytest.raises(OutputError, match="already holds a sweep"):
        fake.sweep([1, 4, 16])
    again = Fake(tmp_path / "s")
    assert again.sweep([1, 4, 16], resume=True) == "done"
    assert [plan.arrivals for plan in again.plans] == ["poisson:4", "poisson:16"]
    assert (tmp_path / "s/step-2-unfinished-1").is_dir()
    with pytest.raises(PlanError, match="this sweep was started with a different plan"):
        again.sweep([1, 4, 17], resume=True)


def test_a_sweep_ends_at_its_limits(tmp_path: Path) -> None:
    """At its most runs, when its time is over, and when nobody can tell whether server or client broke an objective."""
    assert Fake(tmp_path / "runs").sweep([1, 2, 3], max_runs=2) == "runs"
    assert Fake(tmp_path / "time").sweep([1, 2, 3], max_time_s=0.0) == "time"
    assert len(measured_steps(read_lines(tmp_path / "time"))) == 0
    limited = Fake(tmp_path / "client")
    limited.client = "limited"
    assert limited.sweep([1, 16, 20]) == "client"
    assert [line["load"] for line in measured_steps(read_lines(tmp_path / "client"))] == [1, 16]
    assert sweeps.step_folder(3) == "step-3"
