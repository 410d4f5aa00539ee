"""Prompt tokens that the server found in its prefix cache."""

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.findings import cached_prompts_finding
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.summary import Summary
from tests.support.runs import burst, header, healthy, run_of


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
        assert "--seed 17" in finding.sentence


def test_counters_of_the_server_are_used_if_the_responses_state_nothing(tmp_path: Path) -> None:
    """The growth of the counters counts, not their totals."""
    counters = {"prompt_tokens": (1_000, 11_240), "cached_prompt_tokens": (500, 3_060)}
    summary = summary_of(tmp_path, burst(20, 8), counters)
    assert summary.cached_prompts is not None
    assert (summary.cached_prompts.share, summary.cached_prompts.source) == (0.25, "counters")
    finding = cached_prompts_finding(summary)
    assert finding is not None
    assert finding.level == "warning"


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
