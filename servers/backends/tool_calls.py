"""Collects the tool calls of a response from the events of its stream, for each API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.output_check import ToolCall
from loadgen.servers.errors import DECODE_ERRORS


class _Calls:
    """The tool calls of one response, by their index. Names and arguments arrive in pieces."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._arguments: dict[Any, str] = {}

    def add(self, index: Any, name: Any, arguments: Any) -> None:
        """Add a piece of the tool call with the index `index`.

        `name` is a part of the tool's name. `arguments` is a part of the arguments as JSON text, or the complete
        arguments as an object.
        """
        if isinstance(name, str) and name:
            self._names[index] = self._names.get(index, "") + name
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        self._arguments[index] = self._arguments.get(index, "") + (arguments or "")

    def all(self) -> list[ToolCall]:
        return [ToolCall(self._names.get(index, ""), arguments) for index, arguments in self._arguments.items()]


def chat_calls(payloads: Sequence[bytes]) -> list[ToolCall]:
    """Return the tool calls of a chat stream, from the field `tool_calls` or the older field `function_call`."""
    calls = _Calls()
    for event in _events(payloads, b"_call"):
        choices = event.get("choices")
        delta = (
            choices[0].get("delta") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
        )
        if not isinstance(delta, dict):
            continue
        pieces = delta.get("tool_calls")
        for position, piece in enumerate(pieces if isinstance(pieces, list) else []):
            function = _object(_object(piece).get("function"))
            calls.add(_object(piece).get("index", position), function.get("name"), function.get("arguments"))
        function = _object(delta.get("function_call"))
        if function:
            calls.add("function_call", function.get("name"), function.get("arguments"))
    return calls.all()


def responses_calls(payloads: Sequence[bytes]) -> list[ToolCall]:
    """Return the tool calls of a stream of the Responses API."""
    calls = _Calls()
    for event in _events(payloads, b"function_call"):
        item = _object(event.get("item"))
        if event.get("type") == "response.output_item.added" and item.get("type") == "function_call":
            calls.add(event.get("output_index"), item.get("name"), item.get("arguments"))
        elif event.get("type") == "response.function_call_arguments.delta":
            calls.add(event.get("output_index"), None, event.get("delta"))
    return calls.all()


def messages_calls(payloads: Sequence[bytes]) -> list[ToolCall]:
    """Return the tool calls of a stream of the Messages API."""
    calls = _Calls()
    for event in _events(payloads, b"tool_use", b"input_json_delta"):
        block, delta = _object(event.get("content_block")), _object(event.get("delta"))
        if event.get("type") == "content_block_start" and block.get("type") == "tool_use":
            calls.add(event.get("index"), block.get("name"), block.get("input") or None)
        elif delta.get("type") == "input_json_delta":
            calls.add(event.get("index"), None, delta.get("partial_json"))
    return calls.all()


def _events(payloads: Sequence[bytes], *names: bytes) -> list[dict[str, Any]]:
    """Decode the events whose payload contains one of `names`. Payloads that are not JSON objects are left out."""
    events = []
    for payload in payloads:
        if any(name in payload for name in names):
            try:
                event = msgspec.json.decode(payload)
            except DECODE_ERRORS:
                continue
            if isinstance(event, dict):
                events.append(event)
    return events


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
