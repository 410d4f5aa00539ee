"""Tool calls and JSON in responses, checked against the schema in the body of the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.servers.backends import output_check
from loadgen.servers.backends.output_check import OutputVerdict, ToolCall, check_output, expected_output
from loadgen.servers.backends.tool_calls import chat_calls, messages_calls, responses_calls

SCHEMA = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def verdict(body: dict[str, Any], text: str = "", *calls: ToolCall, cut: bool = False) -> OutputVerdict:
    """Check a response to a request with this body."""
    expected = expected_output(json.dumps(body).encode())
    assert expected is not None
    return check_output(expected, text, calls, cut=cut)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"sampling_params": {"json_schema": json.dumps(SCHEMA)}},
        {"parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_schema_is_found_in_the_form_of_each_api(body: dict[str, Any]) -> None:
    """And the response is compared with it. Reasoning before the answer does not count."""
    assert verdict(body, '{"days": 3}') == OutputVerdict("valid")
    assert verdict(body, '<think>hm</think>\n{"days": 3}') == OutputVerdict("valid")
    assert verdict(body, '{"days": "3"}') == OutputVerdict("invalid", "JSON do not fit the schema: `type` at $.days")
    assert verdict(body, '{"days": 3') == OutputVerdict("invalid", "JSON do not parse")
    assert verdict(body, '{"days": 3', cut=True) == OutputVerdict("invalid", "cut off at the limit of output tokens")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [CHAT_TOOL]},
        {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
        {"tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"functions": [{"name": "weather", "parameters": SCHEMA}]},
    ],
    ids=["chat", "responses", "messages", "functions"],
)
def test_a_call_is_compared_with_the_schema_of_its_tool(body: dict[str, Any]) -> None:
    """A response without a call is neither valid nor invalid, if the request permits text."""
    assert verdict(body, "", ToolCall("weather", '{"days": 3}')) == OutputVerdict("valid")
    assert verdict(body, "", ToolCall("weather", "{}")).reason == "arguments do not fit the schema: `required` at $"
    assert verdict(body, "", ToolCall("weather", "{")).reason == "arguments do not parse"
    assert verdict(body, "", ToolCall("whether", '{"days": 3}')).reason == "call of an unknown tool"
    both = ToolCall("weather", '{"days": 3}'), ToolCall("weather", "no")
    assert verdict(body, "", *both).verdict == "invalid"
    assert verdict(body, "It rains.") == OutputVerdict("no_call")


@pytest.mark.parametrize("choice", ["required", {"type": "any"}, {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_must_be_there(choice: Any) -> None:
    """Text instead of a call is invalid."""
    body = {"tools": [CHAT_TOOL], "tool_choice": choice}
    assert verdict(body, "It rains.") == OutputVerdict("invalid", "no tool call")


def test_a_tool_without_arguments_and_a_json_object_without_a_schema() -> None:
    """No arguments are an empty object. Any object fits, and nothing else does."""
    assert verdict({"tools": [{"name": "now"}]}, "", ToolCall("now", "")) == OutputVerdict("valid")
    anything = {"response_format": {"type": "json_object"}}
    assert verdict(anything, '{"a": 1}') == OutputVerdict("valid")
    assert verdict(anything, "[1]").reason == "JSON are no object"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a"}',
        b'{"prompt":"use \\"tools\\""}',
        b'{"tools":[]}',
        b'{"tools":',
        b'["tools"]',
        b'{"tools":[{"name":"a"}],"tool_choice":"none"}',
    ],
)
def test_a_request_without_a_schema_expects_nothing(body: bytes) -> None:
    """Neither does a malformed one."""
    assert expected_output(body) is None


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x.json"}])
def test_a_schema_that_cannot_be_used_proves_nothing(schema: dict[str, Any]) -> None:
    """A wrong schema, and one that refers to another file, are faults of the request and not of the response.

    Nothing is loaded from the network."""
    assert verdict({"guided_json": schema}, '{"days": 3}').verdict == "unchecked"
    assert verdict({"guided_json": schema}, "no").verdict == "invalid"


def test_without_the_library_a_response_is_only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what to install. JSON that does not parse is invalid all the same."""
    monkeypatch.setattr(output_check, "can_check_schemas", lambda: False)
    result = verdict({"guided_json": SCHEMA}, '{"days": 3}')
    assert (result.verdict, "pip install" in result.reason) == ("unchecked", True)
    assert verdict({"guided_json": SCHEMA}, "{").verdict == "invalid"


def test_the_calls_of_each_api_are_collected() -> None:
    """Names and arguments arrive in pieces, also of several calls at a time."""
    pieces = [
        {
            "tool_calls": [
                {"index": 0, "function": {"name": "a", "arguments": ""}},
                {"index": 1, "function": {"name": "b"}},
            ]
        },
        {
            "tool_calls": [
                {"index": 1, "function": {"arguments": "[]"}},
                {"index": 0, "function": {"arguments": '{"x":'}},
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    chat = [json.dumps({"choices": [{"delta": delta}]}).encode() for delta in pieces]
    assert chat_calls([*chat, b"[DONE]", b'{"tool_calls":']) == [ToolCall("a", '{"x":1}'), ToolCall("b", "[]")]
    legacy = [{"function_call": {"name": "a", "arguments": "{"}}, {"function_call": {"arguments": "}"}}]
    events = [json.dumps({"choices": [{"delta": delta}]}).encode() for delta in legacy]
    assert chat_calls(events) == [ToolCall("a", "{}")]
    item = {"type": "function_call", "name": "a", "arguments": ""}
    typed: list[dict[str, Any]] = [
        {"type": "response.output_item.added", "output_index": 2, "item": item},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "{}"},
        {"type": "response.function_call_arguments.done", "output_index": 2, "arguments": "{}"},
    ]
    assert responses_calls([json.dumps(event).encode() for event in typed]) == [ToolCall("a", "{}")]
    block = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
    typed = [
        {"type": "content_block_start", "index": 1, "content_block": block},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    ]
    assert messages_calls([json.dumps(event).encode() for event in typed]) == [ToolCall("a", "{}")]
