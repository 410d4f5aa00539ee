"""Prompt tokens that the server found in its prefix cache."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.objectives import parse
from loadgen.analysis.report import tables
from loadgen.analysis.report.findings import cached_prompts_finding
from loadgen.analysis.run.canary import Canary
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.slo import judge
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary
from tests.support.runs import burst, complete, header, healthy, run_of


def summary_of(folder: Path, records: list[Record], counters: dict[str, tuple[int, int]], **plan: Any) -> Summary:
    """Return the summary of a run. `counters` maps counters of the server to their values before and after the run."""
    telemetry = [
        Telemetry(source="server", at_ns=at_ns, values={"moment": moment} | {k: v[i] for k, v in counters.items()})
        for i, (at_ns, moment) in enumerate(((-1, "idle"), (100_000_000_000, "after")))
    ]
    facts = {**header(len(records)).plan, **plan}
    return summarise(run_of(folder / "run", records, telemetry=[*healthy(), *telemetry], plan=facts))


def with_cached(records: list[Record], cached: int) -> list[Record]:
    """Return the records with this number of cached prompt tokens in each response."""
    for record in records:
        record.marks = {"cached_prompt_tokens": cached}
    return records


def test_a_server_that_reports_nothing_has_no_figure(tmp_path: Path) -> None:
    """Without counts there is neither a figure nor a finding."""
    summary = summary_of(tmp_path, burst(20, 8), {})
    assert summary.cached_prompts is None
    assert cached_prompts_finding(summary) is None


@pytest.mark.parametrize(("cached", "level"), [(0, None), (20, "note"), (26, "warning"), (512, "warning")])
def test_responses_state_their_cached_tokens(tmp_path: Path, cached: int, level: str | None) -> None:
    """A run of new prompts gets a warning from 5% on, with both numbers, the seed and a remedy."""
    records = with_cached(burst(20, 8), cached)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in records)
    summary = summary_of(tmp_path, records, {}, seed=17)
    assert summary.cached_prompts is not None
    assert (summary.cached_prompts.tokens, summary.cached_prompts.prompt_tokens) == (20 * cached, prompt_tokens)
    assert summary.cached_prompts.source == "responses"
    finding = cached_prompts_finding(summary)
    assert (None if finding is None else finding.level) == level
    if level == "warning":
        assert finding is not None
        assert f"{20 * cached:,} of {prompt_tokens:,} prompt tokens" in finding.sentence
        assert "Another run with --seed 17 probably sent the same prompts" in finding.sentence


@pytest.mark.parametrize(
    ("client", "seed_choice", "cause"),
    [
        ({"sent_before": "2026-11-27T09:15:02+00:00"}, "stated", "sent the prompts of --seed 17 to this server before"),
        ({}, "stated", "Another run with --seed 17 probably sent the same prompts"),
        ({}, "random", "The seed of this run is new, so the prompts have a common beginning"),
    ],
)
def test_the_cause_of_cached_prompts_is_named(
    tmp_path: Path, client: dict[str, str], seed_choice: str, cause: str
) -> None:
    """An earlier run of this machine is known by its time. A random seed excludes earlier runs."""
    plan = header(20).plan | {"seed": 17, "seed_choice": seed_choice}
    facts = header(20).client | client
    finding = cached_prompts_finding(
        summarise(run_of(tmp_path / "run", with_cached(burst(20, 8), 512), plan=plan, client=facts))
    )
    assert finding is not None
    assert cause in finding.sentence


def test_responses_and_counters_are_both_reported(tmp_path: Path) -> None:
    """The counters include the requests of other clients, so that the two shares may differ."""
    counters = {"prompt_tokens": (0, 10_240), "cached_prompt_tokens": (0, 2_560)}
    summary = summary_of(tmp_path, with_cached(burst(20, 8), 256), counters)
    assert summary.cached_prompts is not None
    assert (summary.cached_prompts.share, summary.cached_prompts.server_share) == (0.5, 0.25)
    finding = cached_prompts_finding(summary)
    assert finding is not None
    assert "(50%) came from the server's prefix cache (25% by the server's counters)" in finding.sentence


@pytest.mark.parametrize(
    ("cached", "verdict", "said"), [(0, "pass", "0%"), (20, "pass", "3.91%"), (51, "fail", "9.96%")]
)
def test_an_objective_limits_the_share_of_cached_tokens(tmp_path: Path, cached: int, verdict: str, said: str) -> None:
    """`--assert 'cached < 5%'` fails a run whose prompts were not new."""
    run = run_of(tmp_path / "run", with_cached(burst(20, 8), cached))
    (result,) = judge(parse(["cached < 5%"]), frame_of_run(run), summarise(run))
    assert (result.verdict, result.said) == (verdict, said)


def test_an_objective_fails_if_the_server_reports_no_cached_tokens(tmp_path: Path) -> None:
    """A run that cannot show that its prompts were new does not pass."""
    run = run_of(tmp_path / "run", burst(20, 8))
    (result,) = judge(parse(["cached < 5%"]), frame_of_run(run), summarise(run))
    assert (result.verdict, result.said) == ("fail", "the run does not have this figure")


def test_every_turn_of_a_session_has_a_share(tmp_path: Path) -> None:
    """The share of the first turn shows whether sessions share a beginning, and that of later turns shows the cache."""
    records = []
    for session in range(30):
        for turn in range(2):
            record = complete(2 * session + turn, [10**6, 2 * 10**6], session=2 * session, turn=turn, prompt_tokens=512)
            record.marks = {"cached_prompt_tokens": 384 * turn}
            records.append(record)
    run = run_of(tmp_path / "run", records, plan=header(60).plan | {"workload": "multi-turn:turns=2"})
    summary = summarise(run)
    assert [turn.cached_share for turn in summary.turns] == [0.0, 0.75]
    (first, second) = tables.turns([summary]).rows
    assert [str(cell) for row in (first, second) for cell in row.cells if "%" in str(cell)]


def test_counters_of_the_server_are_used_if_the_responses_state_nothing(tmp_path: Path) -> None:
    """The growth of the counters counts, not their totals."""
    counters = {"prompt_tokens": (1_000, 11_240), "cached_prompt_tokens": (500, 3_060)}
    summary = summary_of(tmp_path, burst(20, 8), counters)
    assert summary.cached_prompts is not None
    assert (summary.cached_prompts.share, summary.cached_prompts.source) == (0.25, "counters")
    finding = cached_prompts_finding(summary)
    assert finding is not None
    assert finding.level == "warning"


def test_canaries_do_not_count_as_cached_prompts(tmp_path: Path) -> None:
    """Canaries during the load repeat prompts, which the server finds in its cache. The prompts of the load are new."""
    canary = {"number": 0, "code": "x", "state": "complete", "prompt_tokens": 40}
    canaries = [Canary(moment="before", **canary), *(Canary(moment="during", **canary) for _ in range(20))]
    counters = {"prompt_tokens": (0, 10_240 + 21 * 40), "cached_prompt_tokens": (0, 20 * 32)}
    telemetry = [
        Telemetry(source="server", at_ns=at_ns, values={"moment": moment} | {k: v[i] for k, v in counters.items()})
        for i, (at_ns, moment) in enumerate(((-1, "idle"), (100_000_000_000, "after")))
    ]
    run = run_of(tmp_path / "run", burst(20, 8), telemetry=[*healthy(), *telemetry])
    run.canaries = canaries
    cached = summarise(run).cached_prompts
    assert cached is not None
    assert (cached.tokens, cached.prompt_tokens) == (0, 10_240)


def test_counters_that_were_reset_say_nothing(tmp_path: Path) -> None:
    """A server that was restarted lost its counts."""
    counters = {"prompt_tokens": (10_000, 240), "cached_prompt_tokens": (5_000, 60)}
    assert summary_of(tmp_path, burst(20, 8), counters).cached_prompts is None


@pytest.mark.parametrize(
    "plan",
    [
        {"workload": "shared-prefix:groups=2,tokens=100"},
        {"workload": "multi-turn:turns=3"},
        {"workload": "jsonl:prompts.jsonl"},
        {"arrivals": "trace:trace.jsonl"},
    ],
)
def test_prompts_that_repeat_on_purpose_are_no_warning(tmp_path: Path, plan: dict[str, str]) -> None:
    """Shared prefixes, sessions, files and traces may find their prompts in the cache."""
    summary = summary_of(tmp_path, with_cached(burst(20, 8), 256), {}, **plan)
    finding = cached_prompts_finding(summary)
    assert finding is not None
    assert finding.level == "note"
