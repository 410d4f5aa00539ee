"""Decodes streams of typed events into an Answer, for OpenAI's Responses API and Anthropic's Messages API.

In both protocols, the server sends one event for each piece of generated content, and an event that ends the response.
It reports the number of generated tokens once for the whole response, and never per event. Each piece therefore counts
as one token. If the server's number is larger, some pieces contain several tokens, or some tokens were not streamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.reasoning import contains_tags, note_reasoning, note_tagged_reasoning
from loadgen.servers.backends.stream_events import finalise, join_halves, note_error


class GeneratedPiece(NamedTuple):
    """The generated content of one event. The text may be empty, for example if a token is half of a character."""

    text: str
    reasoning: bool = False
    tool_call: bool = False

    @property
    def answers(self) -> bool:
        """True if the text belongs to the answer, and not to reasoning or to a tool call."""
        return not (self.reasoning or self.tool_call)


class Totals(NamedTuple):
    """The token counts that the server reported for a response. A count is None if the server did not report it."""

    prompt: int | None = None
    output: int | None = None
    reasoning: int | None = None  # Part of `output`
    cached: int | None = None  # Part of `prompt` that was in the server's prefix cache


def build_answer(payloads: Sequence[bytes], pieces: Sequence[GeneratedPiece | None], totals: Totals) -> Answer:
    """Return an Answer for the events of a stream. It contains the number of tokens in each event.

    - `payloads` contains the events.
    - `pieces` contains what was generated in each event, or None for an event without generated content. It ends before
      the first unreadable event, so it may be shorter than `payloads`.
    - `totals` contains the token counts that the server reported.

    The Answer is not complete. The caller must set its `end_event` and then call `finish_answer`.
    """
    tokens = [int(piece is not None and piece.text != "") for piece in pieces]
    answer = Answer(tokens + [0] * (len(payloads) - len(pieces)), chunk_counts="chunk")
    answer.prompt_tokens = totals.prompt or None
    if totals.cached is not None:
        answer.counts["cached_prompt_tokens"] = totals.cached
    if totals.reasoning:
        answer.counts["reasoning_tokens"] = totals.reasoning
    _count_empty_pieces(answer, pieces, totals, _hidden_reasoning(pieces, totals))
    _note_reasoning(answer, payloads, pieces)
    for index, piece in enumerate(pieces):
        if piece is None:
            note_error(answer, payloads[index])
    return answer


def finish_answer(answer: Answer, pieces: Sequence[GeneratedPiece | None], totals: Totals, broken: str) -> Answer:
    """Set the total token counts of `answer`, and return `answer`.

    The caller got `answer` from `build_answer`, and has set `answer.end_event`. `pieces` and `totals` are the arguments
    of `build_answer`. `broken` describes an unreadable event ("" if there is none).

    The server may have counted more tokens than the number of pieces that it sent. There are two possible reasons: some
    pieces contain several tokens, or some tokens were not streamed. A later check decides between them by the length of
    the text, which is therefore stored in `answer`.
    """
    finalise(answer, totals.output, broken)
    if answer.counted_by == "wire":
        answer.counted_by = "chunks"
    if any(answer.tokens) and answer.counted_by == "server" and (answer.output_tokens or 0) > sum(answer.tokens):
        texts = [piece.text for piece in pieces if piece is not None]
        streams_thinking = "think>" in "".join(texts)  # reasoning that was streamed as the answer
        answer.hidden_tokens = 0 if streams_thinking else _hidden_reasoning(pieces, totals)
        answer.reasoning_reported = totals.reasoning is not None
        answer.text_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        answer.phrase_chunks = sum(len(text.split(None, 1)) > 1 for text in texts)
    return answer


def answer_text(pieces: Sequence[GeneratedPiece | None]) -> str:
    """Return the text of a response for the next turn of a chat, without reasoning and tool calls."""
    return join_halves("".join(piece.text for piece in pieces if piece is not None and piece.answers))


def without_fields(fields: Mapping[str, Any], dropped: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request without the fields whose names are in `dropped`.

    The server refuses these fields.
    """
    return {name: value for name, value in fields.items() if name not in dropped}


def _hidden_reasoning(pieces: Sequence[GeneratedPiece | None], totals: Totals) -> int:
    """Return the number of reasoning tokens that the server counted but did not stream."""
    streamed = any(piece is not None and piece.reasoning for piece in pieces)
    return 0 if streamed else totals.reasoning or 0


def _count_empty_pieces(answer: Answer, pieces: Sequence[GeneratedPiece | None], totals: Totals, hidden: int) -> None:
    """Count each piece without text as one token, if this gives the total that the server reported.

    The pieces are counted only if two numbers are equal:

    - The number of missing tokens: the server's total, minus `hidden`, minus the tokens that were counted so far.
      `hidden` is the number of tokens that the server counted but did not stream.
    - The number of pieces without text after the first piece with text.
    """
    missing = (totals.output or 0) - hidden - sum(answer.tokens)
    first = next((index for index, tokens in enumerate(answer.tokens) if tokens), len(pieces))
    empty = [index for index, piece in enumerate(pieces) if index > first and piece is not None and not piece.text]
    if len(empty) == missing:
        for index in empty:
            answer.tokens[index] = 1


def _note_reasoning(answer: Answer, payloads: Sequence[bytes], pieces: Sequence[GeneratedPiece | None]) -> None:
    """Store where the reasoning ends, if the response begins with reasoning. See loadgen.servers.backends.reasoning."""
    with_text = [(index, piece) for index, piece in enumerate(pieces) if piece is not None and piece.text]
    if with_text and with_text[0][1].reasoning:
        note_reasoning(answer, next((index for index, piece in with_text if not piece.reasoning), None))
    elif with_text and contains_tags(payloads):
        note_tagged_reasoning(answer, [piece.text if piece is not None and piece.answers else "" for piece in pieces])
