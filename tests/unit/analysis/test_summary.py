"""The Structs of a summary hold exactly what summary.json holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis.summary import as_dict
from tests.support.runs import typed

TESTS = Path(__file__).parents[2]
REASONING = ("reasoning", "reasoning_requests", "unanswered_requests")
"""Counts that files of before do not have, and that are 0 in their runs."""
FOUND = [TESTS / "golden/burst/summary.json", *(TESTS / "data/recorded").glob("*/summary.expected.json")]


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.parent.name)
def test_a_summary_survives_its_structs(file: Path) -> None:
    """Every key and figure is there again, and none besides but those that files of before do not have."""
    found = json.loads(file.read_text("utf-8"))
    again = as_dict(typed(found))
    later = (
        "load",
        "audio_seconds",
        "has_audio",
        "batch_size",
        "ignore_eos",
        "going_on",
        "over_limit",
        "seed_choice",
        "cold",
    )
    found["run"] = {name: again["run"][name] for name in later} | found["run"]
    found["delivery"].setdefault("queue_wait", None)
    for turn in found.get("turns", ()):
        turn.setdefault("cached_share", None)
    found["requests"] = {"rejected": 0, "abandoned": 0} | found["requests"]
    for name in ("streamed_by", "unstreamed", "unstreamed_requests", "spread_per_chunk"):
        found["tokens"].setdefault(name, again["tokens"][name])
    for name in ("contradicted_chunks", "contradicted_totals", "without_text", *REASONING):
        found["tokens"].setdefault(name, 0)
    for name in ("output_early", "output_longer", "truncated"):
        found["tokens"].setdefault(name, None)
    if (cache := (found["memory"] or {}).get("kv_cache")) is not None:
        cache |= {"peak_fullest_share": None, "engines": 1}
    for name in ("proxied_to", "proxy", "protocol", "model_accuracy"):
        found["server"].setdefault(name, "")
    found["server"].setdefault("virtual", False)
    later_of_server = {"addresses": [], "addresses_unused": {}, "replicas": {}, "proxy": "", "protocol": ""}
    found["server"] = later_of_server | found["server"]
    rates = ("input_tokens_per_s", "inputs_per_s", "audio_seconds_per_s", "audio_bytes_per_s")
    for name in (*rates, "completed", "output_tokens", "span_s"):
        found["throughput"].setdefault(name, again["throughput"][name])
    newer = (
        "source",
        "lacking",
        "windows",
        "sweep_max_s",
        *("sent_again", "pauses", "paused_s", "socket_rejected", "client_limit"),
        *("cpu_s", "core_wait_s", "core_wait_max_s", "scheduling", "realtime_given_up"),
        *(name for name in again["client"] if name.startswith("ring_")),
    )
    found["requests"].setdefault("warmup_incomplete", again["requests"]["warmup_incomplete"])
    found["client"] = {name: again["client"][name] for name in newer} | found["client"]
    assert again == found


def test_latencies_go_by_key_and_by_attribute() -> None:
    """`ttft_s` as in the file, `ttft` as in Python; another name says which there are."""
    latency = typed(json.loads(FOUND[0].read_text("utf-8"))).latency
    assert latency.ttft.p50 == latency["ttft_s"].p50 == latency["ttft_s"].of("p50")
    assert "ttft_s" in latency
    assert "e2e_due" in dir(latency)
    with pytest.raises(AttributeError, match="no latency 'tftt'; choose one of ttft, "):
        _ = latency.tftt
