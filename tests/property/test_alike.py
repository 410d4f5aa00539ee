"""Events that are alike are not decoded one by one; what is said of an answer is the same as if they were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.servers.backends import BACKENDS, openai
from loadgen.servers.backends import repeated_events as alike
from loadgen.servers.backends.dialect import Answer

DECODERS = {
    f"{kind}-{endpoint}": BACKENDS[kind].dialects[endpoint].decode
    for kind in ("vllm", "openai", "lightllm")
    for endpoint in ("completions", "chat")
}
ORDINARY = [" tell", "me", "a", " story"] * 4
TEXTS = st.lists(
    st.one_of(st.sampled_from([*ORDINARY, "", '"', "\\", '",', "\n", "%d", "é", "\ud800"]), st.text(max_size=3)),
    max_size=24,
)
BROKEN = st.sampled_from([b"", b"{", b"[DONE]", b'{"error":{"message":"no"}}', b'{"choices":[]}'])


def events(texts: Sequence[str], steps: Sequence[int], *, chat: bool, usage: bool, spaced: bool) -> Iterator[bytes]:
    """One event per text; the total of tokens grows by these steps."""
    total, separators = 0, (", ", ": ") if spaced else (",", ":")
    for text, step in zip(texts, steps, strict=True):
        total += step
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        event: dict[str, Any] = {
            "id": "c-1",
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": None}],
        }
        if usage:
            event["usage"] = {"prompt_tokens": 7, "total_tokens": 7 + total, "completion_tokens": total}
        yield json.dumps(event, ensure_ascii=not spaced, separators=separators).encode("utf-8", "surrogatepass")


def one_by_one(name: str, payloads: Sequence[bytes]) -> Answer:
    with patch.object(alike, "MAX_SHORT_RUNS", 0):
        return DECODERS[name](payloads)


@given(
    st.sampled_from([*DECODERS]),
    TEXTS,
    st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2, 3]), min_size=24, max_size=24),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 23), BROKEN), max_size=2),
)
@example("vllm-completions", ORDINARY, [1] * 24, True, False, [(12, b"{")])
@example("vllm-completions", ORDINARY, [1] * 24, False, False, [(0, b'{"error":{"message":"no"}}'), (0, b"{")])
@example("openai-chat", [*ORDINARY, '\\"', *ORDINARY][:24], [1] * 24, False, True, [(20, b"[DONE]")])
def test_an_answer_is_decoded_as_if_each_event_were(
    name: str, texts: list[str], steps: list[int], usage: bool, spaced: bool, others: list[tuple[int, bytes]]
) -> None:
    """Whatever the texts, the totals and what stands between the events."""
    payloads = [*events(texts, steps[: len(texts)], chat=name.endswith("chat"), usage=usage, spaced=spaced)]
    for place, other in others:
        payloads.insert(place, other)
    assert DECODERS[name](payloads) == one_by_one(name, payloads)


@given(st.sampled_from([*DECODERS]), st.booleans(), st.integers(0, 15), st.integers(0, 200), st.binary(max_size=2))
@example("vllm-completions", True, 8, 43, b"\xff")
@example("vllm-completions", True, 8, 43, b"\x00")
def test_a_spoiled_event_is_not_taken_for_its_neighbour(
    name: str, usage: bool, event: int, place: int, bytes_there: bytes
) -> None:
    """A byte of one event taken away, exchanged, or one put in."""
    payloads = [*events(ORDINARY, [1] * 16, chat=name.endswith("chat"), usage=usage, spaced=False)]
    spoiled = payloads[event]
    payloads[event] = spoiled[:place] + bytes_there + spoiled[place + 1 :]
    assert DECODERS[name](payloads) == one_by_one(name, payloads)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("usage", [True, False])
def test_an_ordinary_answer_is_hardly_decoded(name: str, usage: bool) -> None:
    """The first event, the second, and after a chunk of two tokens one more."""
    steps = [1] * 20 + [2] + [1] * 19
    payloads = [*events(ORDINARY[:2] * 20, steps, chat=name.endswith("chat"), usage=usage, spaced=False)]
    kept, _, runs, _ = alike.drop_repeats(payloads, openai._CHUNKS, openai._is_plain_token)
    assert (len(kept), sum(runs)) == ((3, 37) if usage else (2, 38))
    assert DECODERS[name](payloads).tokens == (steps if usage else [1] * 40)
