"""Tool calls of a simulated TGI: the description of the tools in the prompt, and the events of a streamed call.

Sources: router/src/infer/tool_grammar.rs and router/src/chat.rs of TGI 3.3.7.
"""

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
_NO_TOOL = {
    "type": "function",
    "function": {
        "description": "Open ended response with no specific tool selected",
        "name": "no_tool",
        "arguments": '{"type":"object"}',
    },
}


def tool_error(message: str) -> ErrorReply:
    """Return the error response to a request with invalid tools.

    The response has status 422 even if the request asks for a stream, because the router finds the error before the
    stream begins.
    """
    return ErrorReply(flat_error(f"Tool error: {message}", "tool_error", 422))


def usable_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools that the model may call. The simulated model calls the first of these tools.

    Raises ErrorReply if the request chooses an unknown tool, or has both tools and a grammar.
    """
    tools = body.get("tools")
    choice = body.get("tool_choice")
    if tools is None:
        return []
    if body.get("response_format") is not None:
        raise tool_error("Grammar and tools are mutually exclusive")
    name = choice["function"]["name"] if isinstance(choice, Mapping) else choice
    if name == "none":
        return []
    if name in (None, "auto", "required"):
        return list(tools)
    matching = [tool for tool in tools if tool["function"]["name"] == name]
    if not matching:
        raise tool_error(f"Tool with name {name} not found")
    return matching[:1]


def with_tools(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the messages of a chat request, with descriptions of `tools` added to the last message.

    The added text also instructs the model to call a tool.
    """
    messages = list(body["messages"])
    descriptions = [_description(tool) for tool in tools]
    if body.get("tool_choice") in (None, "auto"):
        descriptions.append(_NO_TOOL)
    instruction = body.get("tool_prompt") or _PROMPT
    text = f"\n---\n{_compact_json(descriptions)}\n{instruction}"
    if messages and "content" in messages[-1]:
        content = messages[-1]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages[-1] = {**messages[-1], "content": [*parts, {"type": "text", "text": text}]}
    return messages


def _description(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    arguments = function.get("arguments", function.get("parameters"))
    return {
        "type": tool["type"],
        "function": {
            "description": function.get("description"),
            "name": function["name"],
            "arguments": _compact_json(arguments),
        },
    }


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def call_text(tool: Mapping[str, Any], word: str) -> str:
    """Return the output of the model for a call of `tool`.

    String values that the tool's schema does not restrict are set to `word`. Raises ErrorReply if the schema is not
    supported.
    """
    function = tool["function"]
    schema = function.get("arguments", function.get("parameters"))
    try:
        arguments = json.loads(grammar.json_text(schema, word)) if isinstance(schema, Mapping) else {}
    except grammar.GrammarError as problem:
        raise tool_error(str(problem)) from None
    if not isinstance(arguments, dict):
        arguments = {}
    return json.dumps({"function": {"_name": function["name"], **arguments}}, ensure_ascii=False)


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (function name, arguments) of a tool call, or None if `text` is not a tool call."""
    try:
        function = dict(json.loads(text)["function"])
        return str(function.pop("_name")), function
    except (ValueError, KeyError, TypeError):
        return None


def call_id(messages: Sequence[Any]) -> str:
    """Return the id of the next tool call: the highest id of the tool calls in the messages, plus 1.

    If the messages contain no tool call, the id is `0`. If one of the ids is not a number, the result is a fixed UUID.
    """
    ids = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    if all(number.isdecimal() for number in ids):
        return str(max((int(number) + 1 for number in ids), default=0))
    return "00000000-0000-4000-8000-000000000000"  # the real server draws a UUID


def call_pieces(texts: Sequence[str]) -> list[tuple[str | None, str] | None]:
    """Return what each token of a streamed tool call adds to the call. `texts` contains the texts of the tokens.

    The result has one entry per token. An entry is a pair: the name of the function, and a part of the arguments.

    - The token that completes the name of the function: the name and an opening brace.
    - Each later token up to the end of the call: None and the text of the token.
    - The token that completes the call: None and the text of the token without its last brace.

    The entry of any other token is None instead of a pair, because no event is sent for this token.
    """
    pieces: list[tuple[str | None, str] | None] = []
    so_far = ""
    started = complete = False
    for text in texts:
        so_far += text
        if complete or not started:
            call = None if complete else parse_call(so_far.rstrip(" \t\r\n,}") + "}}")
            started = started or call is not None
            pieces.append((call[0], "{") if call else None)
        elif parse_call(so_far) is not None:
            complete = True
            pieces.append((None, text.rstrip().removesuffix("}")))
        else:
            pieces.append((None, text))
    return pieces
