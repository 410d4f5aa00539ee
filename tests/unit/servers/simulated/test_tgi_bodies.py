"""What a simulated TGI says about bodies that do not fit, and what it says under grammars and with tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loadgen.servers.simulated import serde, tgi_bodies
from loadgen.servers.simulated.grammar import GrammarError, json_text, regex_text
from loadgen.servers.simulated.protocol import ErrorReply
from loadgen.servers.simulated.tgi_tools import call_id, call_pieces, call_text, parse_call

CHAT = "/v1/chat/completions"
SYNTAX = "Failed to parse the request body as JSON: "
TYPE = "Failed to deserialize the JSON body into the target type: "
REFUSED = [
    ("/generate", b"", SYNTAX + "EOF while parsing a value at line 1 column 0"),
    ("/generate", b'{"inputs": ', SYNTAX + "inputs: EOF while parsing a value at line 1 column 11"),
    ("/generate", b'{"inputs": "a', SYNTAX + "inputs: EOF while parsing a string at line 1 column 13"),
    ("/generate", b'{"inputs": "a"', SYNTAX + "EOF while parsing an object at line 1 column 14"),
    ("/generate", b'{"inputs": "a" 5}', SYNTAX + "expected `,` or `}` at line 1 column 16"),
    ("/generate", b'{"inputs": "a",}', SYNTAX + "trailing comma at line 1 column 16"),
    ("/generate", b'{"inputs" "a"}', SYNTAX + "expected `:` at line 1 column 11"),
    ("/generate", b"{5: 5}", SYNTAX + "key must be a string at line 1 column 2"),
    ("/generate", b'{"inputs": nul}', SYNTAX + "inputs: expected ident at line 1 column 15"),
    ("/generate", b'{"a": [1 2]}', SYNTAX + "a: expected `,` or `]` at line 1 column 10"),
    ("/generate", b'{"a": 01}', SYNTAX + "a: invalid number at line 1 column 8"),
    ("/generate", b"[]", TYPE + "invalid type: sequence, expected struct GenerateRequest at line 1 column 0"),
    ("/generate", b"5", TYPE + "invalid type: integer `5`, expected struct GenerateRequest at line 1 column 1"),
    ("/generate", b"{}", TYPE + "missing field `inputs` at line 1 column 2"),
    (
        "/",
        b'{"inputs":"a","stream":1}',
        TYPE + "stream: invalid type: integer `1`, expected a boolean at line 1 column 24",
    ),
    ("/generate", b'{"inputs":["a"]}', TYPE + "inputs: invalid type: sequence, expected a string at line 1 column 10"),
    ("/generate", b'{\n "inputs": null}', TYPE + "inputs: invalid type: null, expected a string at line 2 column 15"),
    (
        "/generate",
        b'{"inputs":"a","parameters":{"max_new_tokens":-1}}',
        TYPE + "parameters.max_new_tokens: invalid value: integer `-1`, expected u32 at line 1 column 47",
    ),
    (
        "/generate",
        b'{"inputs":"a","parameters":{"max_new_tokens":8.5}}',
        TYPE + "parameters.max_new_tokens: invalid type: floating point `8.5`, expected u32 at line 1 column 48",
    ),
    (
        "/generate",
        b'{"inputs":"a","parameters":{"stop":["a",5]}}',
        TYPE + "parameters.stop[1]: invalid type: integer `5`, expected a string at line 1 column 41",
    ),
    (
        CHAT,
        b'{"messages":[{"role":"user"}]}',
        TYPE + "messages[0]: data did not match any variant of untagged enum MessageBody at line 1 column 28",
    ),
    (
        CHAT,
        b'{"messages":[],"stop":"a"}',
        TYPE + 'stop: invalid type: string "a", expected a sequence at line 1 column 25',
    ),
    (
        CHAT,
        b'{"messages":[],"stream_options":null}',
        TYPE + "stream_options: invalid type: null, expected struct StreamOptions at line 1 column 36",
    ),
    (
        CHAT,
        b'{"messages":[],"max_tokens":1,"max_completion_tokens":2}',
        TYPE + "duplicate field `max_tokens` at line 1 column 53",
    ),
    (
        "/v1/completions",
        b'{"prompt":[1]}',
        TYPE + "prompt: data did not match any variant of untagged enum PromptDeserializer at line 1 column 14",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED, ids=[repr(body) for _, body, _ in REFUSED])
def test_a_body_that_does_not_fit_is_refused_with_its_position(path: str, body: bytes, words: str) -> None:
    """The words are serde_json's, with the path to the field; the position is the last byte that was read."""
    with pytest.raises(ErrorReply) as refused:
        serde.read_fields(tgi_bodies.ROUTES, path, body)
    assert refused.value.reply.body.decode() == words
    assert refused.value.reply.status == (400 if words.startswith(SYNTAX) else 422)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": None, "temperature": 1}, "unknown": [{}]}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        (CHAT, {"messages": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (CHAT, {"messages": [], "response_format": {"type": "json_schema", "value": {"schema": {"properties": {}}}}}),
    ],
)
def test_a_body_that_fits_is_read_as_it_is(path: str, body: dict[str, Any]) -> None:
    """Unknown fields are ignored, and null stands for a field that may be missing."""
    assert serde.read_fields(tgi_bodies.ROUTES, path, json.dumps(body).encode()) == body


def test_what_comes_after_a_body_is_ignored() -> None:
    """axum 0.7 stops reading behind the first value."""
    assert serde.read_fields(tgi_bodies.ROUTES, "/generate", b'{"inputs":"a"} and more') == {"inputs": "a"}


@pytest.mark.parametrize(
    "pattern", ["[ab]{3}", r"(\d{3}-)?[A-Z][^a-c\s]+x*(foo|bar)", r"^\w+@\w+\.com$", ".*", "a|b", ""]
)
def test_a_text_of_a_pattern_matches_it(pattern: str) -> None:
    """The simulated model says something that the regular expression of a request allows."""
    assert re.fullmatch(pattern, regex_text(pattern))


def test_a_pattern_that_no_text_can_be_made_for_is_refused() -> None:
    """An unbalanced bracket, or a look-around."""
    for pattern in ("(", "(?=a)b"):
        with pytest.raises(GrammarError):
            regex_text(pattern)


def test_a_document_of_a_schema_has_its_types() -> None:
    """Objects, lists, references, choices and patterns."""
    schema = {
        "$defs": {"size": {"enum": ["small", "large"]}},
        "properties": {
            "name": {"type": "string"},
            "age": {"type": ["integer", "null"]},
            "sizes": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/size"}},
            "code": {"type": "string", "pattern": "[0-9]{2}"},
            "any": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
    }
    found = json.loads(json_text(schema, "word"))
    assert found == {"name": "word", "age": 7, "sizes": ["small", "small"], "code": "00", "any": True}


def test_a_schema_without_an_end_is_refused() -> None:
    """A schema that refers to itself has no finite document here."""
    with pytest.raises(GrammarError):
        json_text({"properties": {"a": {"$ref": "#"}}}, "word")


def test_a_tool_call_becomes_events() -> None:
    """The name comes with the token that completes it, the last brace is dropped, and the end has no event."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    text = call_text(tool, "x")
    assert parse_call(text) == ("f", {"a": "x"})
    pieces = call_pieces([*text, "</s>"])
    assert pieces[: text.index('f"') + 1] == [None] * (text.index('f"') + 1)
    assert pieces[text.index('f"') + 1] == ("f", "{")
    assert "".join(piece[1] for piece in pieces if piece) == '{, "a": "x"}'
    assert pieces[-1] is None


def test_ids_of_calls_count_up() -> None:
    """A stream's call gets the number behind the highest in the messages."""
    message = {"role": "assistant", "tool_calls": [{"id": "4"}, {"id": "2"}]}
    assert (call_id([]), call_id([{"content": "a"}, message])) == ("0", "5")
