"""The end of the reasoning in a response: separate fields, tags in the text, and both kinds of text in one event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import Answer


def decode(*deltas: dict[str, Any], endpoint: str = "chat", total: int | None = None) -> Answer:
    """Decode a stream whose events have these deltas, followed by the finish reason and the usage."""
    if endpoint == "completions":
        choices: list[dict[str, Any]] = [{"index": 0, "text": delta["content"]} for delta in deltas]
        finish: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
    else:
        choices = [{"index": 0, "delta": delta} for delta in deltas]
        finish = {"index": 0, "delta": {}, "finish_reason": "length"}
    usage = {"prompt_tokens": 5, "completion_tokens": len(deltas) if total is None else total}
    events = [{"choices": [choice]} for choice in (*choices, finish)] + [{"choices": [], "usage": usage}]
    payloads = [json.dumps(event).encode() for event in events]
    return BACKENDS["openai"].dialects[endpoint].decode([*payloads, b"[DONE]"])


def content(*texts: str) -> list[dict[str, Any]]:
    return [{"content": text} for text in texts]


def test_an_event_with_the_end_of_the_reasoning_and_the_beginning_of_the_answer_is_the_first_answer() -> None:
    """Servers that send several tokens per event produce such events."""
    answer = decode({"reasoning": "hm"}, {"reasoning": "so", "content": "42"}, {"content": "!"})
    assert (answer.counts["reasoning_chunks"], answer.events) == (1, {"first_answer_ns": 1})


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"name": "now", "arguments": ""}}]},
        {"function_call": {"name": "now", "arguments": ""}},
        {"refusal": "no"},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_a_tool_call_or_a_refusal_is_an_answer(delta: dict[str, Any]) -> None:
    """The reasoning ends with it."""
    assert decode({"reasoning_content": "hm"}, delta).events == {"first_answer_ns": 1}


def test_a_response_that_ends_during_its_reasoning_has_no_answer() -> None:
    """All of its chunks are reasoning."""
    answer = decode({"reasoning": "hm"}, {"reasoning": "so"})
    assert (answer.counts, answer.events) == ({"reasoning_chunks": 2}, {})


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("texts", "chunks", "first_answer"),
    [
        (("<think>", "a", "b", "</think>", "\n\n", "42", "!"), 5, 5),
        (("a", "b", "</think>", "42"), 3, 3),
        (("a", "b", "</think>4", "2"), 2, 2),
        (("<think>", "a", "b"), 3, None),
        (("a", " </think>\n"), 2, None),
    ],
    ids=["both tags", "opening tag in the prompt", "tag and answer in one event", "no end", "nothing after the tag"],
)
def test_reasoning_between_tags_ends_where_the_answer_begins(
    endpoint: str, texts: tuple[str, ...], chunks: int, first_answer: int | None
) -> None:
    """A server without a reasoning parser streams reasoning as text."""
    answer = decode(*content(*texts), endpoint=endpoint)
    assert answer.counts["reasoning_chunks"] == chunks
    assert answer.events == ({} if first_answer is None else {"first_answer_ns": first_answer})


@pytest.mark.parametrize("texts", [("The tag ", "<think>", " begins", " reasoning"), ("a", "b"), ("I think>", "so")])
def test_an_answer_that_quotes_a_tag_has_no_reasoning(texts: tuple[str, ...]) -> None:
    """Reasoning is at the beginning of a response."""
    answer = decode(*content(*texts))
    assert (answer.counts, answer.events) == ({}, {})


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_tags_in_the_text_of_typed_events_are_found(endpoint: str) -> None:
    """Also if the API has separate events for reasoning, which the server does not use."""
    if endpoint == "responses":
        events = [{"type": "response.output_text.delta", "delta": text} for text in ("<think>", "a", "</think>", "b")]
    else:
        texts = ("<think>", "a", "</think>", "b")
        events = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}} for text in texts]
    answer = BACKENDS["openai"].dialects[endpoint].decode([json.dumps(event).encode() for event in events])
    assert (answer.counts, answer.events) == ({"reasoning_chunks": 3}, {"first_answer_ns": 3})


def test_tags_are_found_if_the_server_escapes_them() -> None:
    """Some JSON encoders write `<` and `>` as escapes."""
    texts = ("<think>", "a", "</think>", "b")
    events = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    escaped = [event.replace("<", "\\u003c").replace(">", "\\u003e").encode() for event in events]
    answer = BACKENDS["openai"].dialects["chat"].decode([*escaped, b"[DONE]"])
    assert answer.events == {"first_answer_ns": 3}
