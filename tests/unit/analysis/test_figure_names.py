"""Suggestions for names of figures that users write from habit."""

from __future__ import annotations

import pytest

from loadgen.analysis.compare.gates import parse_gates
from loadgen.analysis.figure_names import suggest_figure
from loadgen.analysis.metrics import METRICS, Metric
from loadgen.analysis.objectives import ObjectiveError, parse, parse_bounds


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        *((text, "ttft.p99") for text in ("p99 ttft", "ttft_p99", "p99(ttft)", "ttft p99", "TTFT.p99", "ttftp99")),
        *((text, "ttft.p99") for text in ("p99_ttft_ms", "P99 TTFT (ms)", "time_to_first_token", "ttft[p99]")),
        ("ttft_p99_9", "ttft.p99.9"),
        ("mean_ttft_ms", "ttft.mean"),
        ("median tpot", "tpot.p50"),
        ("p(95) latency", "e2e.p95"),
        ("99th percentile latency", "e2e.p99"),
        ("http_req_duration", "e2e.p99"),
        ("http_req_failed", "failed"),
        ("error_rate", "failed"),
        ("request_throughput", "requests_per_s"),
        ("tokens/s", "output_tokens_per_s"),
        ("output_tokens_per_sec", "output_tokens_per_s"),
        ("succes", "complete"),
        ("p(99)", "ttft.p99 or e2e.p99"),
        ("nonsense", None),
        ("", None),
        ("1ms", None),
    ],
)
def test_a_name_from_habit_leads_to_the_figure(text: str, figure: str | None) -> None:
    """Any order, case and separator of statistic and latency, names of other tools, and typing mistakes."""
    assert suggest_figure(text) == figure


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS.values() if metric.judged], ids=lambda metric: metric.key
)
def test_every_metric_is_suggested_by_its_own_name(metric: Metric) -> None:
    """A name in capital letters leads to each figure of the table of metrics."""
    key = metric.key
    suggestion = suggest_figure(key.upper())
    assert suggestion is not None
    assert suggestion.removesuffix(".p99") == key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99 ttft < 500ms", "'p99 ttft' is not a figure of a run; did you mean ttft.p99?"),
        ("ttft.median < 500ms", "or mean, min, max; did you mean ttft.p50?"),
        ("nonsense > 5", "'nonsense' is not a figure of a run"),
    ],
)
def test_an_objective_says_what_was_meant(text: str, message: str) -> None:
    """The message of a wrong objective ends with the suggestion, if there is one."""
    with pytest.raises(ObjectiveError) as error:
        parse([text])
    assert str(error.value).endswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft:500", "did you mean 'ttft < 500ms'?"),
        ("TTFT < 500ms", "did you mean ttft?"),
        ("errors < 5", "is not a latency of single requests"),
    ],
)
def test_a_bound_on_requests_says_what_was_meant(text: str, message: str) -> None:
    """The form of vLLM is translated, and only latencies of single requests are suggested."""
    with pytest.raises(ObjectiveError) as error:
        parse_bounds([text])
    assert str(error.value).endswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p50(tpot) worse by 5%", "did you mean 'tpot.p50 worse by 5%'?"),
        ("tpot_p50 > 5%", "did you mean 'tpot.p50 worse by 5%'?"),
        ("throughput lower by 3%", "did you mean 'output_tokens_per_s worse by 3%'?"),
        ("ttft worse", "did you mean 'ttft.p99 worse'?"),
        ("nonsense worse", "is not a condition"),
    ],
)
def test_a_condition_says_what_was_meant(text: str, message: str) -> None:
    """The suggestion of --fail-if is a whole condition that is accepted."""
    with pytest.raises(ObjectiveError) as error:
        parse_gates([text])
    assert str(error.value).endswith(message)
    if "did you mean" in message:
        assert parse_gates([message.split("'")[1]])
