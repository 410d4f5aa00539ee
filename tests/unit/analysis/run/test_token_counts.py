"""Which token counts the figures use: streamed tokens for TPOT and ITL, generated tokens for lengths and throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import findings
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.token_counts import Basis, generated_tokens, streamed_tokens
from tests.support.answers import DONE, Key, recorded
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, run_of, said, summarise, typed

CHAT: Key = ("openai", "chat")


def spaced(chunks: int, *, first: int = 50, step: int = 20, **facts: Any) -> Record:
    """A complete record whose chunks come every 20 ms."""
    instants = [(first + step * index) * MS for index in range(chunks)]
    facts = {"tokens": [1] * chunks, "chunk_counts": "chunk"} | facts
    return complete(1, instants, output_tokens_asked=facts.get("output_tokens", chunks), **facts)


def mean_ms(name: str, record: Record) -> float:
    """The mean of a metric over one record."""
    return float(np.mean(METRICS[name].values(build_frame([record])))) * 1e3


@pytest.mark.parametrize(
    ("record", "basis", "tokens", "tpot_ms"),
    [
        pytest.param(spaced(4, output_tokens=4), "chunks", 4, 20, id="one token per chunk"),
        pytest.param(spaced(4, output_tokens=16, step=40), "spread", 16, 10, id="four tokens per chunk"),
        pytest.param(spaced(4, output_tokens=16, step=40, text_bytes=16), "spread", 16, 10, id="short tokens"),
        pytest.param(spaced(4, output_tokens=100, hidden_tokens=96), "hidden", 4, 20, id="hidden, as stated"),
        pytest.param(
            spaced(4, output_tokens=104, hidden_tokens=96), "hidden", 8, 10, id="hidden and several per chunk"
        ),
        pytest.param(spaced(4, output_tokens=100, text_bytes=12), "hidden", 4, 20, id="more tokens than bytes"),
        pytest.param(
            spaced(4, output_tokens=12, text_bytes=24, first=500), "assumed_hidden", 4, 20, id="hidden by time and text"
        ),
        pytest.param(
            spaced(4, output_tokens=12, text_bytes=24, first=500, reasoning_reported=True),
            *("without_text", 12, 20 / 3),
            id="short text, and the server reports no reasoning",
        ),
        pytest.param(
            spaced(4, output_tokens=100, text_bytes=12, reasoning_reported=True),
            *("without_text", 100, 60 / 75),
            id="more tokens than bytes, and the server reports no reasoning",
        ),
        pytest.param(spaced(4, output_tokens=12, text_bytes=24), "spread", 12, 20 / 3, id="no time to hide tokens"),
        pytest.param(
            spaced(4, output_tokens=12, text_bytes=24, phrase_chunks=4, first=500), "spread", 12, 20 / 3, id="phrases"
        ),
        pytest.param(spaced(4, output_tokens=5, finish_reason="stop"), "chunks", 4, 20, id="an end-of-text token"),
        pytest.param(spaced(4, output_tokens=5), "spread", 5, 16, id="one token more at the length limit"),
        pytest.param(spaced(5, output_tokens=4), "spread", 4, 25, id="pieces of tokens"),
        pytest.param(
            spaced(4, tokens=[4, 1, 1, 1], output_tokens=7, chunk_counts="usage"),
            "counted",
            7,
            20,
            id="a running total",
        ),
        pytest.param(
            spaced(4, tokens=[97, 1, 1, 1], output_tokens=100, chunk_counts="usage", hidden_tokens=96),
            *("hidden", 4, 20),
            id="hidden in the first chunk's count",
        ),
        pytest.param(spaced(4, output_tokens=10, chunk_counts="event"), "hidden", 4, 20, id="one event per token"),
        pytest.param(spaced(4, output_tokens=5, chunk_counts="event"), "counted", 4, 20, id="an event without text"),
        pytest.param(
            spaced(4, tokens=[1, 1000, 1000, 1000], output_tokens=4, chunk_counts="usage"),
            *("contradicted", 4, 20),
            id="a running total above the last one",
        ),
        pytest.param(
            spaced(4, tokens=[100_000] * 4, output_tokens=4, chunk_counts="ids"),
            "contradicted",
            4,
            20,
            id="too many ids",
        ),
        pytest.param(
            spaced(4, output_tokens=4, counted_by="chunks", refuted_total=0), "contradicted", 4, 20, id="a total of 0"
        ),
    ],
)
def test_tpot_and_itl_are_of_streamed_tokens(record: Record, basis: Basis, tokens: float, tpot_ms: float) -> None:
    """Time between chunks is divided by the tokens that came in it, and ITL has one sample for each."""
    found = streamed_tokens(record)
    assert (found.basis, found.tokens) == (basis, tokens)
    assert len(found.counts) == len(record.chunk_ns)
    assert mean_ms("tpot_s", record) == pytest.approx(tpot_ms)
    between_ms = (record.chunk_ns[-1] - record.chunk_ns[0]) / MS
    assert mean_ms("itl_s", record) == pytest.approx(between_ms / (max(tokens, len(record.chunk_ns)) - 1))
    assert build_frame([record]).tokens_inside() == generated_tokens(record)


@pytest.mark.parametrize(("state", "counted"), [("complete", 9_999), ("failed", 2), ("truncated", 2)])
def test_a_total_beyond_the_request_counts_only_if_complete(state: Any, counted: int) -> None:
    """A response that failed because it was said to be too long adds the tokens that came."""
    record = Record(
        id=1, state=state, chunk_ns=[1, 2], chunk_tokens=[1, 1], output_tokens=9_999, output_tokens_asked=8,
        counted_by="server", sent_ns=0,
    )  # fmt: skip
    assert generated_tokens(record) == counted
    assert build_frame([record]).output_tokens.tolist() == [counted]


def test_older_run_files_are_read_by_the_same_rule() -> None:
    """They do not say how a chunk's tokens are known: counts above 1 show it, and counts of 1 do not."""
    assert streamed_tokens(spaced(4, tokens=[1, 2, 1, 1], output_tokens=9, chunk_counts="")).basis == "hidden"
    assert streamed_tokens(spaced(4, output_tokens=8, chunk_counts="")).basis == "spread"


def summary_of(folder: Path, record: Record, normal: int = 2) -> Any:
    """The summary of a run of this record and of some without anything special."""
    others = [complete(number, [50 * MS, 70 * MS]) for number in range(2, 2 + normal)]
    return typed(summarise(run_of(folder / "run", [record, *others])))


def test_hidden_tokens_are_reported(tmp_path: Path) -> None:
    """How many tokens were never streamed, and which figures are of which tokens."""
    summary = summary_of(tmp_path, spaced(4, output_tokens=100, hidden_tokens=96))
    assert (summary.tokens.unstreamed, summary.tokens.unstreamed_requests) == (96, 1)
    assert summary.tokens.streamed_by == {"counted": 2, "hidden": 1}
    assert said(summary, "tokens-hidden") == (
        "96 generated tokens were never streamed, in 1 of 3 responses (hidden reasoning, for example). TPOT and ITL "
        "cover the streamed tokens; lengths and throughput cover all tokens."
    )
    (found,) = [finding for finding in findings.findings(summary) if finding.id == "tokens-hidden"]
    assert found.level == "note"


def test_an_assumption_is_a_warning(tmp_path: Path) -> None:
    """That tokens were hidden is a guess where only text and timing say so."""
    summary = summary_of(tmp_path, spaced(4, output_tokens=12, text_bytes=24, first=500))
    (found,) = [finding for finding in findings.findings(summary) if finding.id == "tokens-hidden"]
    assert found.level == "warning"
    assert found.sentence.endswith(
        "For 1 response this is assumed from text and timing: the tokens may also have been streamed without text."
    )


def test_tokens_without_text_are_not_hidden_reasoning(tmp_path: Path) -> None:
    """A server that reports its reasoning tokens is believed: the other tokens were streamed, without text."""
    summary = summary_of(tmp_path, spaced(4, output_tokens=12, text_bytes=24, first=500, reasoning_reported=True))
    assert (summary.tokens.unstreamed, summary.tokens.without_text) == (0, 8)
    assert said(summary, "tokens-without-text") == (
        "8 generated tokens came without text, in 1 of 3 responses: the server reports no hidden reasoning. TPOT and "
        "ITL assume that all tokens are spread evenly over the chunks."
    )
    assert not [finding for finding in findings.findings(summary) if finding.id == "tokens-hidden"]


def test_spread_tokens_are_reported(tmp_path: Path) -> None:
    """The assumption is named with the number of tokens per chunk."""
    summary = summary_of(tmp_path, spaced(4, output_tokens=16, step=40))
    assert summary.tokens.spread_per_chunk == 4
    assert said(summary, "tokens-spread") == (
        "The server does not say how many tokens the chunks of 1 of 3 responses hold: 4.00 on average. TPOT and ITL "
        "assume that tokens are spread evenly over the chunks."
    )


@pytest.mark.parametrize(
    ("record", "chunks", "totals"),
    [
        (spaced(4, tokens=[1, 1000, 1000, 1000], output_tokens=4, chunk_counts="usage"), 3001, 4),
        (spaced(8, output_tokens=8, counted_by="chunks", refuted_total=0), 8, 0),
    ],
)
def test_contradicting_counts_are_both_reported(record: Record, chunks: int, totals: int, tmp_path: Path) -> None:
    """Both numbers stand in summary and report, with a warning."""
    summary = summary_of(tmp_path, record)
    assert (summary.tokens.contradicted_chunks, summary.tokens.contradicted_totals) == (chunks, totals)
    assert summary.tokens.unstreamed == 0
    (found,) = [finding for finding in findings.findings(summary) if finding.id == "tokens-contradicted"]
    assert found.level == "warning"
    assert f"hold {chunks:,} tokens, and the server's totals are {totals:,}" in found.sentence


def test_nothing_is_said_where_every_token_is_counted(tmp_path: Path) -> None:
    """The usual run has no such finding."""
    summary = summary_of(tmp_path, spaced(4, output_tokens=4))
    assert not [finding.id for finding in findings.findings(summary) if finding.id.startswith("tokens")]


def delta(text: str, **usage: int) -> str:
    """One chunk of a chat, perhaps with a running total."""
    total = f',"usage":{{"prompt_tokens":5,"completion_tokens":{usage["total"]}}}' if usage else ""
    return f'{{"choices":[{{"delta":{{"content":"{text}"}}}}]{total}}}'


def final(completion: int, more: str = "") -> str:
    """The usage event, with more fields."""
    return f'{{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{completion}{more}}}}}'


ROLE = '{"choices":[{"delta":{"role":"assistant","content":""}}]}'
FINISH = '{"choices":[{"delta":{},"finish_reason":"length"}]}'
USAGE_98 = ',"usage":{"prompt_tokens":5,"completion_tokens":98}}'
REASONING = ',"completion_tokens_details":{"reasoning_tokens":96}'


@pytest.mark.parametrize(
    ("events", "facts"),
    [
        pytest.param(
            [delta("w "), delta("w "), FINISH, final(98, REASONING)],
            {"output_tokens": 98, "hidden_tokens": 96, "chunk_tokens": [1, 1]},
            id="reasoning that was not streamed",
        ),
        pytest.param(
            [delta("w "), delta("w "), FINISH, final(2, REASONING + ',"total_tokens":103')],
            {"output_tokens": 98, "hidden_tokens": 96, "chunk_tokens": [1, 1]},
            id="reasoning that the completion leaves out",
        ),
        pytest.param(
            ['{"choices":[{"delta":{"reasoning_content":"r s t"}}]}', delta("w "), FINISH, final(98, REASONING)],
            {"output_tokens": 98, "hidden_tokens": 0, "text_bytes": 7, "phrase_chunks": 1, "reasoning_reported": True},
            id="reasoning that was streamed",
        ),
        pytest.param(
            [delta("<think>a"), delta("b</think> w"), FINISH, final(98, REASONING)],
            {"output_tokens": 98, "hidden_tokens": 0},
            id="reasoning in the content",
        ),
        pytest.param(
            [delta("w "), delta("w "), FINISH, final(98, REASONING.replace("96", "0"))],
            {"hidden_tokens": 0, "text_bytes": 4, "reasoning_reported": True},
            id="a report of no reasoning",
        ),
        pytest.param(
            [delta("w "), delta("w "), FINISH, final(98)],
            {"hidden_tokens": 0, "text_bytes": 4, "reasoning_reported": False},
            id="no report of reasoning",
        ),
        pytest.param(
            [*(delta("w ", total=total) for total in (1, 2, 98, 99)), FINISH, final(99, REASONING.replace("96", "0"))],
            {"hidden_tokens": 0, "chunk_tokens": [1, 1, 96, 1]},
            id="a running total that jumps, and a report of no reasoning",
        ),
        pytest.param(
            [delta("w ", total=97), delta("w ", total=98), FINISH, final(98)],
            {"output_tokens": 98, "hidden_tokens": 96, "chunk_counts": "usage"},
            id="a running total that starts high",
        ),
        pytest.param(
            [*(delta("w ", total=total) for total in (1, 2, 98, 99)), FINISH, final(99)],
            {"output_tokens": 99, "hidden_tokens": 95, "chunk_tokens": [1, 1, 96, 1]},
            id="a running total that jumps",
        ),
        pytest.param(
            [delta("w ", total=1), delta("w ", total=2), FINISH[:-1] + USAGE_98],
            {"output_tokens": 98, "hidden_tokens": 0, "chunk_tokens": [1, 1], "chunk_counts": "usage"},
            id="a running total that jumps at the end",
        ),
        pytest.param(
            [ROLE, delta("one two", total=2), delta("a b c", total=5), FINISH, final(5)],
            {"output_tokens": 5, "chunk_tokens": [2, 3], "chunk_counts": "usage"},
            id="a running total without one beside the role and the finish reason",
        ),
        pytest.param(
            [delta("two toks ")] * 6 + [
                '{"choices":[{"delta":{},"finish_reason":"length","usage":{"prompt_tokens":19,"completion_tokens":12}}]}'
            ],
            {"output_tokens": 12, "prompt_tokens": 19, "phrase_chunks": 6},
            id="usage inside the choice",
        ),
        pytest.param(
            [delta("x ")] * 30 + [
                '{"choices":[{"delta":{},"finish_reason":"length","usage":{"prompt_tokens":19,"completion_tokens":60}}]}'
            ],
            {"output_tokens": 60, "prompt_tokens": 19},
            id="usage inside the choice of a long response",
        ),
        pytest.param(
            [delta("w")] * 8 + [FINISH, final(0, ',"total_tokens":13' + REASONING.replace("96", "8"))],
            {"output_tokens": 8, "counted_by": "server", "refuted_total": None},
            id="a total of 0 beside eight reasoning tokens",
        ),
        pytest.param(
            [delta("w")] * 8 + [FINISH, final(0)],
            {"output_tokens": 8, "counted_by": "chunks", "refuted_total": 0},
            id="a total of 0",
        ),
        pytest.param(
            [delta("w", total=total) for total in (1, 1001, 2001, 3001)] + [FINISH, final(4)],
            {"output_tokens": 4, "chunk_tokens": [1, 1000, 1000, 1000]},
            id="a running total above the last one",
        ),
        pytest.param(
            [delta("a"), delta(""), delta(""), delta("b"), FINISH, final(4)],
            {"output_tokens": 4, "chunk_tokens": [1, 1, 1, 1]},
            id="parts of characters",
        ),
        pytest.param(
            [delta(""), delta("a"), delta("b"), FINISH, final(3)],
            {"output_tokens": 3, "chunk_tokens": [1, 1]},
            id="an empty chunk at the start",
        ),
        pytest.param(
            [delta("a"), FINISH, final(0).replace('"prompt_tokens":5', '"prompt_tokens":0')],
            {"prompt_tokens": None},
            id="a prompt of no tokens",
        ),
    ],
)  # fmt: skip
def test_the_evidence_of_a_stream_is_kept(events: list[str], facts: dict[str, Any]) -> None:
    """Totals, counts of chunks, hidden tokens and the look of the text, as far as they are needed."""
    record, _ = recorded(CHAT, *events, DONE, asked=facts.get("output_tokens", 3))
    assert {name: getattr(record, name) for name in facts} == facts


@pytest.mark.parametrize("server", ["openai", "vllm", "lightllm"])
def test_a_finish_reason_is_no_token_of_hidden_ones(server: str) -> None:
    """Where the server counts hidden reasoning, its total is no proof that the last chunk held a token."""
    events = [ROLE, delta("w "), delta("w "), FINISH, final(98, REASONING), DONE]
    record, _ = recorded((server, "chat"), *events, asked=98)
    assert (record.state, record.chunk_tokens, streamed_tokens(record).basis) == ("complete", [1, 1], "hidden")
