"""Finds the end of the reasoning at the beginning of a response.

A server with a reasoning parser streams reasoning in separate fields. A server without a parser streams it as part of
the text, between the tags `<think>` and `</think>`. Many chat templates put the first tag into the prompt, so that only
the second tag is part of the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.servers.backends.dialect import Answer

OPENING_TAG = "<think>"
CLOSING_TAG = "</think>"
TAG_BYTES = b"think>"
ESCAPED_TAG_BYTES = b"think\\u003e"
"""Bytes that both tags contain, without and with the escapes of some JSON encoders."""


def note_reasoning(answer: Answer, first_answer: int | None) -> None:
    """Store in `answer` where the reasoning ends, and the number of chunks with reasoning.

    The response must begin with reasoning. `first_answer` is the index of the first event with other content, or None
    if the response ended during the reasoning.
    """
    answer.counts["reasoning_chunks"] = sum(map(bool, answer.tokens[:first_answer]))
    if first_answer is not None:
        answer.events["first_answer_ns"] = first_answer


def note_tagged_reasoning(answer: Answer, texts: Sequence[str]) -> None:
    """Store in `answer` where the reasoning ends, if the response begins with reasoning between `<think>` and
    `</think>`.

    The first tag may be missing, because many chat templates put it into the prompt. `texts` contains the text of each
    event, and an empty string for an event without text.
    """
    text = "".join(texts)
    before, closing_tag, after = text.partition(CLOSING_TAG)
    opening = before.find(OPENING_TAG)
    if before[: max(0, opening)].strip() or not (closing_tag or opening >= 0):
        return  # the response begins with an answer, which quotes a tag
    if not after.strip():
        note_reasoning(answer, None)
        return
    answer_start = len(text) - len(after.lstrip())
    end = 0
    for index, part in enumerate(texts):
        end += len(part)
        if end > answer_start:
            note_reasoning(answer, index)
            return


def contains_tags(payloads: Sequence[bytes]) -> bool:
    """Return True if the response with the events `payloads` may contain a tag of reasoning, such as `</think>`.

    The response is first searched for a single byte: `>`, or the backslash with which some servers escape this
    character. This search is much faster than a search for a tag, and most responses contain neither byte.
    """
    content = b"".join(payloads)
    if b">" in content and TAG_BYTES in content:
        return True
    return b"\\" in content and ESCAPED_TAG_BYTES in content
