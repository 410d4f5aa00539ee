"""Dialects on events that no server should send: whatever comes is an Answer, never an exception."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.error_messages import error_text
from loadgen.servers.wire.sse import split_events
from tests.contract.recorded import STREAMS, Stream
from tests.support.dialects import DIALECTS

OPENAI_KEYS = "choices usage delta text finish_reason token_ids completion_tokens prompt_tokens role error message"
NATIVE_KEYS = "token generated_text details generated_tokens finished count_output_tokens input_length"
TYPED_KEYS = "type response item status input_tokens output_tokens message content_block stop_reason thinking name"
KEYS = st.sampled_from(f"{OPENAI_KEYS} {NATIVE_KEYS} {TYPED_KEYS}".split())
TYPES = st.sampled_from(
    [
        *("response.output_text.delta", "response.completed", "response.output_item.added", "response.x.delta"),
        *("message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TYPED_EVENTS = st.builds(
    lambda type_, value: {"type": type_, **value}, TYPES, st.dictionaries(KEYS, VALUES, max_size=4)
)
EVENTS = st.one_of(
    (VALUES | TYPED_EVENTS).map(lambda value: json.dumps(value).encode()), st.binary(max_size=20), st.just(b"[DONE]")
)


@given(st.lists(EVENTS, max_size=6))
def test_any_events_decode(payloads: list[bytes]) -> None:
    """JSON of any shape under the field names that count, and bytes that are not JSON, give an Answer."""
    for dialect in DIALECTS.values():
        _check(dialect.decode(payloads), payloads)


@given(st.sampled_from(STREAMS), st.data())
def test_a_real_stream_with_any_byte_changed_decodes(stream: Stream, data: st.DataObject) -> None:
    """One wrong byte anywhere in a real answer is taken for what it is or for damage, and never raises."""
    body = bytearray(stream.body())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    payloads = split_events(bytes(body))[0]
    _check(stream.dialect.decode(payloads), payloads)


@given(st.integers(100, 599), st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_refusal_is_one_line(status: int, body: bytes) -> None:
    """Printable, not empty, at most 300 characters."""
    line = error_text(status, body)
    assert line.isprintable()
    assert 0 < len(line) <= 300


def _check(answer: Answer, payloads: Sequence[bytes]) -> None:
    assert len(answer.tokens) == len(payloads)
    assert all(tokens >= 0 for tokens in answer.tokens)
    assert answer.end_event is None or 0 <= answer.end_event < len(payloads)
    assert answer.counted_by in {"server", "wire", "chunks"}
    assert bool(answer.error_kind) == bool(answer.error_detail)
    assert len(answer.error_detail) <= 300
