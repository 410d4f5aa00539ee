"""Every server's /metrics, recorded or written, in one vocabulary."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loadgen.analysis.telemetry import CURVES
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.telemetry import (
    COUNTERS,
    DCGM,
    PHASE_COUNTERS,
    PROCESS_START,
    GapError,
    NotMeasuredError,
    ServerMetrics,
    metric_tables,
    page_values,
    parse_page,
)
from tests.contract.recorded import response
from tests.support.simulated import running

PREFIXES = tuple(metrics.prefix for metrics in metric_tables().values())
NOT_DRAWN = {
    *("paused", "cached_prompt_tokens", "requests_failed", "kv_tokens"),  # figures of the summary
    *PHASE_COUNTERS,  # means in the report
    *("draft_steps", "draft_tokens", "accepted_draft_tokens"),  # the acceptance in the summary
    *("acceptance_length", "acceptance_rate"),
    *("memory_free_bytes", "memory_reserved_bytes", "memory_clock_hz"),
}

PAGES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "vllm-0.32.0/metrics.txt",
        "vllm",
        {"running": 0, "waiting": 0, "kv_used": 0, "prompt_tokens": 2063, "output_tokens": 80}
        | {"cached_prompt_tokens": 0, "preemptions": 0, "rejections": 0, "requests_finished": 9, "requests_failed": 0}
        | {"kv_tokens": 2_097_152, "taken_share": 0.92}
        | {"queue_s_sum": 0.000411465, "prefill_s_sum": 0.074470418, "decode_s_sum": 0.096861853}
        | {"queue_s_count": 9, "prefill_s_count": 9, "decode_s_count": 9},
    ),
    (
        "written/metrics/vllm-0.10.2-two-engines.txt",
        "vllm",
        {"running": 23, "waiting": 3, "kv_used": 0.375, "prompt_tokens": 11_776, "output_tokens": 2944}
        | {
            "kv_used_max": 0.5,
            "engines": 2,
            "cached_prompt_tokens": 80,
            "preemptions": 1,
            "requests_finished": 23,
            "requests_failed": 0,
        }
        | {"kv_tokens": 32_000, "taken_share": 0.9},
    ),
    (
        "written/metrics/vllm-0.6.6.txt",
        "vllm",
        {"running": 12, "waiting": 3, "kv_used": 0.25, "prompt_tokens": 6144, "output_tokens": 1536}
        | {"preemptions": 2, "requests_finished": 10, "requests_failed": 4, "kv_tokens": 16_000, "taken_share": 0.9},
    ),
    (
        "written/metrics/tgi-3.3.7.txt",
        "tgi",
        {"running": 16, "waiting": 4, "prompt_tokens": 12_288, "output_tokens": 2944, "rejections": 5}
        | {"requests_finished": 23, "requests_failed": 2, "draft_steps": 23, "accepted_draft_tokens": 0},
    ),
    (
        "lightllm-0.0.1/metrics.txt",
        "lightllm",
        {"running": 0, "waiting": 0, "paused": 0, "prompt_tokens": 24_022, "output_tokens": 10, "requests_finished": 4},
    ),
    (
        "written/metrics/lightllm-1.2.0.txt",
        "lightllm",
        # The new counters win over the sums, also the one that has no sample yet.
        {"running": 16, "waiting": 4, "paused": 2, "prompt_tokens": 11_776, "output_tokens": 0}
        | {"requests_finished": 23, "requests_failed": 1},
    ),
    (
        "sglang-0.5.23/metrics.txt",
        "sglang",
        # The prefill generates the first token of each of three requests: 9 live tokens, 12 in all.
        {"running": 0, "waiting": 0, "kv_used": 0, "kv_tokens": 1_347_973, "prompt_tokens": 9, "output_tokens": 12}
        | {"cached_prompt_tokens": 3, "live_prompt_tokens": 9, "live_output_tokens": 9, "requests_finished": 3}
        | {"acceptance_length": 0, "acceptance_rate": 0},
    ),
    (
        "tei-1.9.3/embed/metrics.txt",
        "tei",
        {"waiting": 0, "prompt_tokens": 1567, "requests_finished": 14, "requests_failed": 8, "rejections": 0}
        | {"queue_s_sum": 0.012012682, "queue_s_count": 14, "inference_s_sum": 0.138306899, "inference_s_count": 14},
    ),
    (
        # Two engines behind three API server processes, each of which publishes what it last heard of an engine.
        "written/metrics/vllm-0.11.0-api-servers.txt",
        "vllm",
        {"running": 15, "waiting": 4, "kv_used": 0.5, "kv_used_max": 0.9, "engines": 2, "prompt_tokens": 1750}
        | {"requests_finished": 7, "requests_failed": 0, "kv_tokens": 32_000, "taken_share": 0.9},
    ),
]


@pytest.mark.parametrize(("file", "server", "expected"), PAGES)
def test_a_page_in_our_words(file: str, server: str, expected: dict[str, Any]) -> None:
    """Names old and new give the same words. Engines are added up and their shares averaged, ranks and processes of one
    engine count once, and what is not there is left out."""
    page = parse_page(response(file)[1], PREFIXES)
    assert page_values(page, server) == pytest.approx(expected)
    assert page_values(page, "openai") == pytest.approx(expected)


def test_ranks_of_one_engine_count_once() -> None:
    """The ranks that share a model work on the same requests, and each publishes them; data-parallel ranks are engines
    of their own."""
    page = parse_page(response("written/metrics/sglang-0.5.23-ranks.txt")[1], PREFIXES)
    expected = {"running": 10, "waiting": 3, "kv_used": 0.4, "kv_used_max": 0.6, "engines": 2, "prompt_tokens": 700}
    assert page_values(page, "sglang") == pytest.approx(expected)


def test_idle_processes_of_an_engine_do_not_thin_its_figures() -> None:
    """One of eight processes has heard that the cache is 65% full: that is the use of the one engine."""
    lines = ["# TYPE vllm:kv_cache_usage_perc gauge"]
    lines += [f'vllm:kv_cache_usage_perc{{engine="0",pid="{pid}"}} {0.65 * (pid == 3)}' for pid in range(8)]
    assert page_values(parse_page("\n".join(lines).encode(), PREFIXES), "vllm") == {"kv_used": 0.65}


def test_every_word_is_explained() -> None:
    """What a server or a card tells is a curve or a figure of the summary, never neither and never both."""
    words = {word for metrics in metric_tables().values() for word in metrics.names} | DCGM.keys() | {"kv_used_max"}
    drawn = {curve.figure for curve in CURVES} | {curve.live for curve in CURVES if curve.live}
    assert words - NOT_DRAWN <= drawn
    assert words >= COUNTERS
    assert not NOT_DRAWN & drawn


@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm", "sglang", "tei"])
def test_the_simulated_servers_tell_what_the_real_ones_do(server: str) -> None:
    """Each word that the newest real page has is on the simulated one too; LightLLM's cache comes from /token_load."""
    newest = {"vllm": PAGES[0], "tgi": PAGES[3], "lightllm": PAGES[5], "sglang": PAGES[6], "tei": PAGES[7]}[server][2]
    with running(SimulatedConfig(server=server)) as simulated:
        metrics = ServerMetrics(simulated.url, server)
        values = metrics.read(5.0)
        metrics.close()
    assert values.keys() >= newest.keys() - {"kv_tokens", "taken_share"}
    assert ("kv_used" in values) == (server not in ("tgi", "tei"))


@pytest.mark.parametrize(
    ("body", "lasting"),
    [
        (b"<html><body>Not here</body></html>", True),
        (b'{"error":"Not Found"}', True),
        (b'vllm:num_requests_running{engine="0"', False),
        (b"vllm:num_requests_running twelve\n", False),
        (b"\xff\xfe\x00", True),
    ],
)
def test_what_is_no_page_is_a_gap(body: bytes, lasting: bool) -> None:
    """A page of another kind, which will not change, or one broken off in a line of ours: never read as zeros."""
    with pytest.raises(GapError, match="not in the text format") as raised:
        parse_page(body, PREFIXES)
    assert isinstance(raised.value, NotMeasuredError) == lasting


def test_a_page_without_anything_of_ours_says_nothing() -> None:
    """TGI publishes a name when it first has something to count: before, its page is empty, and that is no gap."""
    assert page_values(parse_page(b"", PREFIXES), "tgi") == {}
    assert page_values(parse_page(b"# TYPE python_info gauge\npython_info 1.0\n", PREFIXES), "tgi") == {}


def test_a_figure_that_is_no_number_is_left_out() -> None:
    """NaN and infinities are not figures."""
    body = b"vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running +Inf\nvllm:num_requests_waiting 2\n"
    assert page_values(parse_page(body, PREFIXES), "vllm") == {"waiting": 2}


@pytest.mark.parametrize("file", ["vllm-0.32.0/metrics.txt", "lightllm-0.0.1/metrics.txt"])
def test_the_start_of_the_process_is_read(file: str) -> None:
    """The recorded pages of vLLM and LightLLM have the start time of their process, by which a restart is found."""
    page = parse_page(response(file)[1], (*PREFIXES, PROCESS_START))
    assert page_values(page, "vllm")["process_start_s"] == pytest.approx(1.795e9, rel=1e-3)


@pytest.mark.parametrize("server", ["vllm", "lightllm"])
def test_simulated_servers_have_a_start_time_too(server: str) -> None:
    """The simulated server started a moment ago, by its own metrics."""
    with running(SimulatedConfig(server=server)) as simulated:
        metrics = ServerMetrics(simulated.url, server)
        values = metrics.read(5.0)
        metrics.close()
    assert values["process_start_s"] == pytest.approx(time.time(), abs=600)
