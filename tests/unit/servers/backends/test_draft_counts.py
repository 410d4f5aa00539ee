"""Counts of speculative decoding in the last events of a response, in the forms of several servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.servers.backends import BACKENDS

VLLM = {"num_spec_steps": 43, "num_draft_tokens": 129, "num_accepted_draft_tokens": 10, "mean_acceptance_length": 1.2}
SGLANG = {"spec_verify_ct": 5, "spec_num_proposed_drafts": 20, "spec_num_correct_drafts": 8, "spec_accept_length": 2.6}


def counts(usage: dict[str, Any] | None = None, finish: dict[str, Any] | None = None, **last: Any) -> dict[str, int]:
    """Decode a chat stream whose choice with the finish reason and whose last event have more fields."""
    choices = [{"index": 0, "delta": {"content": text}} for text in ("a b", "c d")]
    choices.append({"index": 0, "delta": {}, "finish_reason": "length"} | (finish or {}))
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 12} | (usage or {})} | last)
    payloads = [json.dumps(event).encode() for event in events]
    return BACKENDS["openai"].dialects["chat"].decode([*payloads, b"[DONE]"]).counts


def details(accepted: int, rejected: int) -> dict[str, Any]:
    fields = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {"completion_tokens_details": fields}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (counts(metrics={"speculative_decoding": VLLM}), (43, 129, 10)),
        (counts(finish={"speculative_decoding_stats": VLLM}), (43, 129, 10)),
        (counts(sglext={"spec_tokens_details": SGLANG}), (5, 20, 8)),
        (counts(usage=details(8, 12)), (None, 20, 8)),
        (counts(finish={"avg_decoded_tokens_per_iter": 3.0}), (4, None, 8)),
        (counts(timings={"predicted_n": 12, "draft_n": 20, "draft_n_accepted": 7}), (5, 20, 7)),
    ],
    ids=["vllm", "vllm choice", "sglang", "usage", "tensorrt", "llama.cpp"],
)
def test_counts_of_each_server_are_read(found: dict[str, int], expected: tuple[int | None, ...]) -> None:
    """A count that the server does not report is missing."""
    names = ("draft_steps", "draft_tokens", "accepted_draft_tokens")
    assert tuple(found.get(name) for name in names) == expected


@pytest.mark.parametrize(
    "found",
    [
        counts(),
        counts(usage=details(0, 0)),
        counts(metrics={"speculative_decoding": None}),
        counts(metrics={"speculative_decoding": "many"}),
        counts(finish={"avg_decoded_tokens_per_iter": 1.0}),
        counts(timings={"predicted_n": 12}),
    ],
    ids=["plain", "zeros", "null", "malformed", "one per step", "no drafts"],
)
def test_a_response_without_drafts_has_no_counts(found: dict[str, int]) -> None:
    """Neither zeros nor malformed fields are counts, and they do not make the response malformed."""
    assert found == {}


@pytest.mark.parametrize(
    "info", [SGLANG, {"spec_verify_ct": 5, "spec_draft_token_num": 20, "spec_accept_token_num": 8}], ids=["new", "old"]
)
def test_the_native_route_of_sglang_has_counts_in_its_last_event(info: dict[str, Any]) -> None:
    """Earlier versions have other names for two of the fields."""
    ends = (
        {"completion_tokens": 5},
        {"completion_tokens": 12, "finish_reason": {"type": "length", "length": 12}, **info},
    )
    payloads = [json.dumps({"text": "a", "meta_info": {"prompt_tokens": 5, **end}}).encode() for end in ends]
    answer = BACKENDS["sglang"].dialects["generate"].decode([*payloads, b"[DONE]"])
    assert answer.counts == {"draft_steps": 5, "draft_tokens": 20, "accepted_draft_tokens": 8}
