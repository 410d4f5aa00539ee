"""The output items of a simulated response of /v1/responses that contains reasoning or a tool call.

Each segment of the answer is one output item. The source in vLLM 0.32.0 is entrypoints/openai/responses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgen.servers.simulated import segments
from loadgen.servers.simulated.protocol import Completion, Segment

Event = Callable[..., bytes]
"""Function that encodes one event, from its name and its fields."""
_DELTA_NAMES = {
    "reasoning": "reasoning_text.delta",
    "text": "output_text.delta",
    "tool_call": "function_call_arguments.delta",
}


class ItemEncoder:
    """Encodes the output items of one response, such as text and tool calls. Every item id contains `number`."""

    def __init__(self, completion: Completion, event: Event, number: str) -> None:
        self._completion = completion
        self._event = event
        self._number = number
        self._texts = [text for _, text in segments.whole_segments(completion)]

    def events(self, first: int, tokens: int) -> bytes:
        """Return the events of `tokens` tokens, from token `first` on."""
        return b"".join(map(self._piece_events, segments.pieces(self._completion, first, tokens)))

    def items(self) -> list[dict[str, Any]]:
        """Return all output items in their completed form, for the response object at the end of a stream."""
        shown = zip(self._completion.segments, self._texts, strict=True)
        return [self._item(segment, text, done=True) for segment, text in shown]

    def _piece_events(self, piece: segments.AnswerPiece) -> bytes:
        segment, event = piece.segment, self._event
        position: dict[str, Any] = {"output_index": piece.segment_index, "item_id": self._id(segment)}
        content = {} if segment.kind == "tool_call" else {"content_index": 0}
        result = b""
        if piece.begins:
            result += event(
                "output_item.added", output_index=piece.segment_index, item=self._item(segment, "", done=False)
            )
            if segment.kind == "reasoning":
                result += event("reasoning_part.added", **position, **content, part=_part(segment, ""))
            elif segment.kind == "text":
                result += event("content_part.added", **position, **content, part=_part(segment, ""))
        text = segments.unescaped(piece.text)
        if text:
            logprobs: dict[str, Any] = {"logprobs": []} if segment.kind == "text" else {}
            result += event(_DELTA_NAMES[segment.kind], **position, **content, **logprobs, delta=text)
        if piece.ends:
            result += self._final_events(piece, position, content)
        return result

    def _final_events(self, piece: segments.AnswerPiece, position: dict[str, Any], content: dict[str, Any]) -> bytes:
        segment, text, event = piece.segment, self._texts[piece.segment_index], self._event
        if segment.kind == "reasoning":
            result = event("reasoning_text.done", **position, **content, text=text)
            result += event("reasoning_part.done", **position, **content, part=_part(segment, text))
        elif segment.kind == "text":
            result = event("output_text.done", **position, **content, text=text, logprobs=[])
            result += event("content_part.done", **position, **content, part=_part(segment, text))
        else:
            result = event("function_call_arguments.done", **position, arguments=text, name=segment.name)
        return result + event(
            "output_item.done", output_index=piece.segment_index, item=self._item(segment, text, done=True)
        )

    def _id(self, segment: Segment) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}[segment.kind]
        return f"{prefix}_{self._number}"

    def _item(self, segment: Segment, text: str, *, done: bool) -> dict[str, Any]:
        fields = {"id": self._id(segment), "status": "completed" if done else "in_progress"}
        if segment.kind == "tool_call":
            call = {"call_id": f"call_{self._number}", "name": segment.name, "arguments": text}
            return {**fields, **call, "type": "function_call"}
        if segment.kind == "reasoning":
            return {**fields, "summary": [], "type": "reasoning", "content": [_part(segment, text)] if done else None}
        return {**fields, "content": [_part(segment, text)] if done else [], "role": "assistant", "type": "message"}


def _part(segment: Segment, text: str) -> dict[str, Any]:
    if segment.kind == "reasoning":
        return {"text": text, "type": "reasoning_text"}
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": []}
