"""Marks: facts of a response that a dialect names, from the stream to a metric."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import Metric
from loadgen.analysis.report.tables import latency
from loadgen.analysis.run.record import shift_record
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import Dialect
from tests.support.answers import DONE, recorded
from tests.support.runs import complete, run_of

CHAT = ("openai", "chat")
THINKING = ("reasoning", "reasoning_content")


def delta(**fields: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def end(cached: int | None = None) -> list[str]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return [
        json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}),
        json.dumps({"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": 3} | details}),
        DONE,
    ]


@pytest.mark.parametrize("field", THINKING)
def test_the_first_answer_is_the_first_text_after_reasoning(field: str) -> None:
    """Its instant is that of its chunk. The first token is still the first one of the reasoning."""
    record, _ = recorded(CHAT, delta(**{field: "hm"}), delta(**{field: "so"}), delta(content="42"), *end())
    assert record.state == "complete"
    assert record.marks == {"first_answer_ns": record.chunk_ns[2], "reasoning_chunks": 2}


def test_a_long_run_of_repeated_events_shifts_no_mark() -> None:
    """Repeated events are not decoded one by one, and are counted nevertheless."""
    payloads = [*(delta(reasoning_content=f" w{number}") for number in range(40)), delta(content="42"), *end()]
    answer = BACKENDS["openai"].dialects["chat"].decode([payload.encode() for payload in payloads])
    assert answer.events == {"first_answer_ns": 40}


def test_a_response_without_reasoning_has_no_first_answer() -> None:
    """Its first token is its first answer, and a second name for it would only take space."""
    record, _ = recorded(CHAT, delta(content="4"), delta(content="2"), delta(content="!"), *end())
    assert record.marks == {}


@pytest.mark.parametrize("cached", [0, 48])
def test_cached_prompt_tokens_are_a_mark(cached: int) -> None:
    """A server that states 0 is different from one that states nothing."""
    record, _ = recorded(CHAT, delta(content="4"), delta(content="2"), delta(content="!"), *end(cached))
    assert record.marks == {"cached_prompt_tokens": cached}


@pytest.mark.parametrize(("details", "cached"), [({}, 48), ({"prompt_tokens_details": {"cached_tokens": 16}}, 16)])
def test_cached_tokens_in_the_timings_of_llama_cpp_are_a_mark(details: dict[str, object], cached: int) -> None:
    """A count in the usage, which newer versions have, is used instead."""
    usage = {"prompt_tokens": 64, "completion_tokens": 2, **details}
    last = json.dumps({"choices": [], "usage": usage, "timings": {"cache_n": 48, "prompt_n": 16, "predicted_n": 2}})
    finish = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    record, _ = recorded(CHAT, delta(content="4"), delta(content="2"), finish, last, DONE)
    assert record.marks == {"cached_prompt_tokens": cached}


def test_a_metric_reads_a_mark() -> None:
    """One formula, and no other line of the product: NaN where a response has no such mark."""
    metric = Metric(
        "ttfa_s", "TTFA", "Time to first answer", "", lambda f: (f.mark("first_answer_ns") - f.sent_ns) / 1e9
    )
    records = [complete(number, sent_ns=1_000, chunk_ns=[5_000, 9_000]) for number in range(3)]
    records[1].marks = {"first_answer_ns": 9_000}
    assert metric.rows(build_frame(records)).tolist() == pytest.approx([np.nan, 8e-6, np.nan], nan_ok=True)
    assert np.isnan(metric.rows(build_frame(records[:1]))).all()


@pytest.mark.parametrize("reasons", [True, False])
def test_reports_have_the_latencies_of_reasoning_only_where_there_was_some(reasons: bool, tmp_path: Path) -> None:
    """TTFA is the time to the first answer, and the reasoning lasts from the first token to it."""
    records = [complete(number, sent_ns=1_000, chunk_ns=[10**9, 3 * 10**9, 4 * 10**9]) for number in range(9)]
    for record in records:
        record.marks = {"first_answer_ns": 3 * 10**9} if reasons else {}
    summary = summarise(run_of(tmp_path / "run", records))
    names = [row.key for row in latency([summary], brief=True).rows]
    assert ("ttfa_s" in names, "think_s" in names) == (reasons, reasons)
    assert (summary.latencies["ttfa_s"].n, summary.latencies["think_s"].p50) == ((9, 2.0) if reasons else (0, None))


def test_only_instants_shift_with_the_start() -> None:
    """A warm-up request is shifted to the run's instant 0. Its counts stay."""
    record = complete(0, sent_ns=1_000, chunk_ns=[5_000, 9_000])
    record.marks = {"first_answer_ns": 9_000, "cached_prompt_tokens": 48}
    assert shift_record(record, -10_000).marks == {"first_answer_ns": -1_000, "cached_prompt_tokens": 48}


def test_a_dialect_names_the_headers_of_its_key() -> None:
    """By default a bearer token; nothing without a key."""
    dialect: Dialect = BACKENDS["vllm"].dialects["chat"]
    assert dialect.headers("k") == {"Authorization": "Bearer k"}
    assert dialect.headers("") == {}
