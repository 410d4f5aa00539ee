"""Reads the counts of speculative decoding from a response, in the forms of several servers.

A server with speculative decoding proposes draft tokens in each step and accepts some of them. The last events of a
response may contain the counts of the request:

    vLLM          `metrics.speculative_decoding`, or `speculative_decoding_stats` of the choice
    SGLang        `meta_info`, `sglext.spec_tokens_details`, or `usage.completion_tokens_details`
    TensorRT-LLM  `avg_decoded_tokens_per_iter` of the choice: tokens per step
    llama.cpp     `timings`
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.servers.backends.dialect import Answer, TokenCount
from loadgen.servers.backends.stream_events import decode_events

LAST_EVENTS = 4
"""Number of events at the end of a response that may contain the counts."""
_NAMES = (b"spec", b"prediction_tokens", b"draft_n", b"avg_decoded_tokens")
"""Every event with draft counts contains at least one of these texts."""


class VllmDrafts(msgspec.Struct, gc=False):
    """The counts of speculative decoding for one request to vLLM."""

    num_spec_steps: TokenCount | None = None
    num_draft_tokens: TokenCount | None = None
    num_accepted_draft_tokens: TokenCount | None = None


class VllmMetrics(msgspec.Struct, gc=False):
    """The object `metrics` in a response of vLLM. It contains the counts of speculative decoding."""

    speculative_decoding: VllmDrafts | None = None


class SglangDrafts(msgspec.Struct, gc=False):
    """Counts of speculative decoding for a request to SGLang.

    Versions before 0.5.6 report drafted and accepted tokens in the last two fields of this class.
    """

    spec_verify_ct: TokenCount | None = None
    spec_num_proposed_drafts: TokenCount | None = None
    spec_num_correct_drafts: TokenCount | None = None
    spec_draft_token_num: TokenCount | None = None
    spec_accept_token_num: TokenCount | None = None


class SglangExtension(msgspec.Struct, gc=False):
    """The object `sglext` of a response of SGLang."""

    spec_tokens_details: SglangDrafts | None = None


class PredictedTokens(msgspec.Struct, gc=False):
    """The object `completion_tokens_details` within `usage`. Only its counts of draft tokens are decoded."""

    accepted_prediction_tokens: TokenCount | None = None
    rejected_prediction_tokens: TokenCount | None = None


class UsageWithDrafts(msgspec.Struct, gc=False):
    """A `usage` object. Only its counts of draft tokens are decoded."""

    completion_tokens_details: PredictedTokens | None = None


class LlamaTimings(msgspec.Struct, gc=False):
    """The object `timings` of a response of llama.cpp."""

    predicted_n: TokenCount | None = None
    draft_n: TokenCount | None = None
    draft_n_accepted: TokenCount | None = None


class ChoiceWithDrafts(msgspec.Struct, gc=False):
    """A choice of a response. Only its counts of draft tokens are decoded."""

    speculative_decoding_stats: VllmDrafts | None = None
    avg_decoded_tokens_per_iter: float | None = None


class EventWithDrafts(msgspec.Struct, gc=False):
    """A stream event. Only its counts of draft tokens are decoded."""

    metrics: VllmMetrics | None = None
    choices: list[ChoiceWithDrafts] | None = None
    meta_info: SglangDrafts | None = None
    sglext: SglangExtension | None = None
    usage: UsageWithDrafts | None = None
    timings: LlamaTimings | None = None


_EVENTS = msgspec.json.Decoder(EventWithDrafts)


def note_drafts(answer: Answer, payloads: Sequence[bytes]) -> None:
    """Store the counts of speculative decoding in the answer, if the last events contain them.

    `answer.counts` gets the entries `draft_steps`, `draft_tokens` and `accepted_draft_tokens`. An entry is missing if
    the server does not report this count.
    """
    last = payloads[-LAST_EVENTS:]
    joined = b"".join(last)
    if not any(name in joined for name in _NAMES):
        return
    for payload in last:
        for event in decode_events([payload], _EVENTS)[0]:
            counts = _counts(event, answer.output_tokens or 0)
            if any(counts.values()):
                answer.counts |= {name: count for name, count in counts.items() if count is not None}


def _counts(event: EventWithDrafts, output_tokens: int) -> dict[str, int | None]:
    """Return the draft counts of an event by name. A count is None if the event does not state it.

    `output_tokens` is the token count of the response. It is needed for servers that state only the tokens per step.
    """
    choice = event.choices[0] if event.choices else ChoiceWithDrafts()
    vllm = (event.metrics and event.metrics.speculative_decoding) or choice.speculative_decoding_stats
    if vllm is not None:
        return _named(vllm.num_spec_steps, vllm.num_draft_tokens, vllm.num_accepted_draft_tokens)
    sglang = event.meta_info or (event.sglext.spec_tokens_details if event.sglext else None)
    if sglang is not None:
        drafted = sglang.spec_num_proposed_drafts or sglang.spec_draft_token_num
        accepted = sglang.spec_num_correct_drafts
        accepted = sglang.spec_accept_token_num if accepted is None else accepted
        return _named(sglang.spec_verify_ct, drafted, accepted)
    timings = event.timings
    if timings is not None and timings.draft_n:
        accepted = timings.draft_n_accepted or 0
        return _named(max(0, (timings.predicted_n or 0) - accepted) or None, timings.draft_n, accepted)
    per_step = choice.avg_decoded_tokens_per_iter
    if per_step and per_step > 1 and output_tokens:
        steps = round(output_tokens / per_step)
        return _named(steps, None, output_tokens - steps)
    details = event.usage and event.usage.completion_tokens_details
    if details:
        accepted = details.accepted_prediction_tokens or 0
        return _named(None, accepted + (details.rejected_prediction_tokens or 0), accepted)
    return {}


def _named(steps: int | None, drafted: int | None, accepted: int | None) -> dict[str, int | None]:
    return {"draft_steps": steps, "draft_tokens": drafted, "accepted_draft_tokens": accepted}
