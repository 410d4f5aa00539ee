"""Tool calls of a simulated TGI: how tools get into the prompt, and how the text of a call becomes events
(router/src/infer/tool_grammar.rs and router/src/chat.rs of 3.3.7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.servers.simulated import grammar
from loadgen.servers.simulated.protocol import ErrorReply
from loadgen.servers.simulated.tgi_checks import flat_error

_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
_ANSWER_INSTEAD = {
    "type": "function",
    "function": {
        "description": "Open ended response with no specific tool selected",
        "name": "no_tool",
        "arguments": '{"type":"object"}',
    },
}


def tool_error(message: str) -> ErrorReply:
    """A mistake in the tools of a request. It is found before a stream begins."""
    return ErrorReply(flat_error(f"Tool error: {message}", "tool_error", 422))


def usable_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools that the model may call; the first is the one that the simulated model calls. Raises ErrorReply."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is None:
        return []
    if body.get("response_format") is not None:
        raise tool_error("Grammar and tools are mutually exclusive")
    name = choice["function"]["name"] if isinstance(choice, Mapping) else choice
    if name == "none":
        return []
    if name in (None, "auto", "required"):
        return list(tools)
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise tool_error(f"Tool with name {name} not found")
    return named[:1]


def with_tools(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages of a chat, the last of them with the tools and the request to call one."""
    messages = list(body["messages"])
    shown = [_shown(tool) for tool in tools]
    if body.get("tool_choice") in (None, "auto"):
        shown.append(_ANSWER_INSTEAD)
    text = (
        f"\n---\n{json.dumps(shown, separators=(',', ':'), ensure_ascii=False)}\n{body.get('tool_prompt') or _PROMPT}"
    )
    if messages and "content" in messages[-1]:
        content = messages[-1]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages[-1] = {**messages[-1], "content": [*parts, {"type": "text", "text": text}]}
    return messages


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    arguments = function.get("arguments", function.get("parameters"))
    written = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    shown = {"description": function.get("description"), "name": function["name"], "arguments": written}
    return {"type": tool["type"], "function": shown}


def call_text(tool: Mapping[str, Any], word: str) -> str:
    """What the model says to call a tool. Raises ErrorReply for a tool whose arguments no text can fit."""
    function = tool["function"]
    schema = function.get("arguments", function.get("parameters"))
    try:
        arguments = json.loads(grammar.json_text(schema, word)) if isinstance(schema, Mapping) else {}
    except grammar.GrammarError as problem:
        raise tool_error(str(problem)) from None
    filled = arguments if isinstance(arguments, dict) else {}
    return json.dumps({"function": {"_name": function["name"], **filled}}, ensure_ascii=False)


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the call that a text is; None for a text that is no call."""
    try:
        function = dict(json.loads(text)["function"])
        return str(function.pop("_name")), function
    except (ValueError, KeyError, TypeError):
        return None


def call_id(messages: Sequence[Any]) -> str:
    """The id of the next call in a stream: one more than the highest that the messages have."""
    given = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    if all(number.isdecimal() for number in given):
        return str(max((int(number) + 1 for number in given), default=0))
    return "00000000-0000-4000-8000-000000000000"  # the real one draws a UUID


def call_pieces(texts: Sequence[str]) -> list[tuple[str | None, str] | None]:
    """For each token of a call what its event holds: a name and a piece of the arguments, or None for no event.

    The token with which the function's name becomes known gives a brace and the name. The tokens behind it give
    themselves, up to the one that completes the call, which loses its last brace. No other token has an event.
    """
    result: list[tuple[str | None, str] | None] = []
    said, begun, complete = "", False, False
    for text in texts:
        said += text
        if complete or not begun:
            call = None if complete else parse_call(said.rstrip(" \t\r\n,}") + "}}")
            begun = begun or call is not None
            result.append((call[0], "{") if call else None)
        elif parse_call(said) is not None:
            complete = True
            result.append((None, text.rstrip().removesuffix("}")))
        else:
            result.append((None, text))
    return result
