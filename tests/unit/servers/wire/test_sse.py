"""The rules of loadgen.servers.wire.sse and loadgen.servers.backends.lenient, one example each: what is an event of a
stream, and what is accepted in its JSON. `tests/property/test_streams.py` combines them."""

from __future__ import annotations

import json

import pytest

from loadgen.servers.backends.lenient import DONE, end_marker
from loadgen.servers.wire import sse
from loadgen.servers.wire.sse import is_event_stream, split_events
from tests.support.answers import DONE as END
from tests.support.answers import Key, recorded, whole
from tests.support.dialects import DIALECTS

CHAT, COMPLETIONS = ("openai", "chat"), ("openai", "completions")


@pytest.mark.parametrize(
    ("body", "payloads"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\r\n\r\ndata:b\r\r", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b": comment\nid: 1\nretry: 9\nevent: message\ndata: a\n\n", [b"a"]),
        (b'data: {"a":\ndata: 1}\n\n', [b'{"a":\n1}']),
        (b"data\n\ndata:\n\ndata: \n\n", [b"", b"", b""]),
        (b"event: ping\ndata: ping\n\nevent: ping\n\nid: 7\n\n", [b""]),
        (b'event: update\ndata: {"a":1}\n\n', [b'{"a":1}']),
        (b"x-field: error\ndata: a\n\n", [b"a"]),
        (b'data: {"a":1}\ndata: {"b":2}\ndata: [DONE]\n', []),
        (b"data: a\n\ndata: [DO", [b"a"]),
    ],
)
def test_an_event_is_what_the_standard_says(body: bytes, payloads: list[bytes]) -> None:
    """Fields, line ends, comments and heartbeats; what is open at the end is no event."""
    assert split_events(body)[0] == payloads


@pytest.mark.parametrize(
    ("tail", "payloads", "rest"),
    [
        (b"data: [DONE]", [b"[DONE]"], b""),
        (b"data: [DONE]\n", [b"[DONE]"], b""),
        (b"data: [DONE] \r\n", [b"[DONE] "], b""),
        (b'data: {"b":2}', [b'{"b":2}'], b""),
        (b'data: {"b":2}\ndata: [DONE]\n', [b'{"b":2}', b"[DONE]"], b""),
        (b"data: [DON", [], b"data: [DON"),
        (b'data: {"b":', [], b'data: {"b":'),
        (b"dat", [], b"dat"),
        (b"", [], b""),
    ],
)
def test_the_last_event_needs_no_blank_line(tail: bytes, payloads: list[bytes], rest: bytes) -> None:
    """When the response has ended as HTTP says, and the data is whole. Without that end it may have been cut short."""
    body = b'data: {"a":1}\n\n' + tail
    assert split_events(body, closed=True) == ([b'{"a":1}', *payloads], split_events(body, closed=True)[1], rest)
    assert split_events(body)[0] == [b'{"a":1}']
    assert split_events(body)[2] == tail


def test_lines_that_are_events_end_where_they_end() -> None:
    """Their instants are those of their own lines, however much later the blank line comes."""
    body = b'data: {"a":1}\ndata: {"b":2}\n\n'
    assert split_events(body)[:2] == ([b'{"a":1}', b'{"b":2}'], [14, 28])


@pytest.mark.parametrize(
    "block",
    [
        b'error: {"message":"boom"}',
        b"error: boom",
        b"ERROR: boom",
        b"event: error\ndata: boom",
        b"event: model_error\ndata: boom",
        b"event: exception\ndata: boom",
        b'{"error":"boom"}',
        b'{\n "error": "boom"\n}',
        b"502 Bad Gateway: upstream error boom",
    ],
)
def test_an_error_outside_data_is_an_event(block: bytes) -> None:
    """It has the text that the server sent, and stands where it came."""
    payloads, ends, rest = split_events(b'data: {"a":1}\n\n' + block + b"\n\ndata: [DONE]\n\n")
    assert (len(payloads), rest) == (3, b"")
    assert json.loads(payloads[1])["error"]
    assert b"boom" in payloads[1]
    assert ends == sorted(ends)


NAMED = b'event: a.b\ndata: {"x":1}\n\nevent: c\ndata: {"y":"2"}\n\n'


@pytest.mark.parametrize(
    "body",
    [
        NAMED,
        NAMED + b"event: c\ndata: {",
        NAMED + b'event: error\ndata: {"message":"boom"}\n\n',
        NAMED + b"event: ping\ndata: ping\n\n",
        NAMED + b": keep-alive\n\n" + NAMED,
        NAMED + b"\n" + NAMED,
        NAMED + b'event: c\ndata: {"y":\ndata: 2}\n\n',
        NAMED + b'data: {"y":\nevent: c\ndata: {}\n\n',
        NAMED + b'event: c\n\ndata: {"y":2}\nid: 7\n\n',
        NAMED + b"data: [DONE]\n\n",
        NAMED.replace(b"\n", b"\r\n"),
        b"event: c\n\n",
        b"event: ",
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_named_events_are_split_as_line_by_line(body: bytes, closed: bool) -> None:
    """The fast path for streams whose events all have names gives what the standard says."""
    assert split_events(body, closed=closed) == sse._split_exact(body, closed=closed)


def test_a_stream_of_named_events_takes_the_fast_path() -> None:
    """Each event has its payload and its end, and no line is looked at on its own."""
    assert sse._split_named(NAMED) == ([b'{"x":1}', b'{"y":"2"}'], [len(NAMED) - 26, len(NAMED)], b"")


def test_an_error_event_without_data_is_an_error() -> None:
    """A server that has no words failed all the same."""
    payloads = split_events(b"event: error\n\n")[0]
    assert DIALECTS[CHAT].decode(payloads).error_detail == "an error event without a message"


@pytest.mark.parametrize("body", [b"<html>Internal Server Error</html>\n\n", b"error", b"no such error\n"])
def test_words_are_no_error_of_a_stream_that_is_none(body: bytes) -> None:
    """A page of a proxy has no field of an event stream; it is quoted as what it is."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    record, _ = recorded(CHAT, raw=raw)
    assert record.state == "failed"
    assert record.error_kind == ("in_band_error" if body == b"error" else "protocol")


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"data: x", True),
        (b"da", True),
        (b"", True),
        (b"\xef\xbb", True),
        (b"\n\n: x", True),
        (b"event: x\n", True),
        (b"<html>", False),
        (b'{"error":1}', False),
        (b"hello", False),
    ],
)
def test_an_event_stream_is_told_from_its_first_line(body: bytes, answer: bool) -> None:
    """Also where that line was cut short."""
    assert is_event_stream(body) == answer


@pytest.mark.parametrize(("cut", "state"), [("timeout", "failed"), ("truncated", "truncated"), ("cancelled", "failed")])
def test_a_response_that_ends_in_its_first_event_was_cut_off(cut: str, state: str) -> None:
    """It is no response of another kind: the reason is that of the cut."""
    raw = b'HTTP/1.1 200 OK\r\n\r\ndata: {"id": "c", "o'
    record, _ = recorded(CHAT, raw=raw, cut=(cut, "no end after 600 s"))  # type: ignore[arg-type]
    assert (record.state, record.error_kind) == (state, cut)


@pytest.mark.parametrize("payload", [b"[DONE]", b" [DONE]", b"[DONE] \t", b'"[DONE]"'])
def test_the_end_marker_has_many_forms(payload: bytes) -> None:
    """White space and quotation marks around it change nothing."""
    assert end_marker([b"{}", payload]) == 1
    assert end_marker([b"{}"]) is None
    assert end_marker([b" [DONE]", DONE]) == 1


@pytest.mark.parametrize(
    ("field", "tokens"),
    [
        ('"content":"a"', 1),
        ('"content":["a"]', 1),
        ('"content":[{"type":"text","text":"a"}]', 1),
        ('"content":{"type":"text","text":"a"}', 1),
        ('"content":[{"type":"thinking","thinking":[{"type":"text","text":"a"}]}]', 1),
        ('"content":[{"type":"text","text":""}]', 0),
        ('"content":[]', 0),
        ('"content":7', 0),
        ('"function_call":{"name":"f","arguments":""}', 1),
        ('"function_call":{"arguments":"{"}', 1),
        ('"function_call":null', 0),
        ('"audio":{"id":"a1"}', 0),
        ('"audio":{"data":"AAAA"}', 1),
        ('"reasoning_details":[{"type":"reasoning.text","text":"a"}]', 1),
        ('"reasoning_details":[]', 0),
        ('"content":"\\ud83d"', 1),
        ('"content":"\\ude00"', 1),
        ('"role":7,"content":"a"', 1),
    ],
)
def test_a_token_is_text_in_any_form(field: str, tokens: int) -> None:
    """Fields of other types are read as far as they hold text, and never fail the event."""
    answer = DIALECTS[CHAT].decode([f'{{"choices":[{{"delta":{{{field}}}}}]}}'.encode()])
    assert (answer.tokens, answer.error_kind) == ([tokens], "")


def test_bytes_that_are_not_utf8_are_text() -> None:
    """A character whose bytes came in two chunks is a replacement character in each of them."""
    payloads = [b'{"choices":[{"text":"\xf0\x9f"}]}', b'{"choices":[{"text":"\x98\x80"}]}', DONE]
    answer = DIALECTS[COMPLETIONS].decode(payloads)
    assert (answer.tokens, answer.error_kind, answer.end_event) == ([1, 1, 0], "", 2)


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ('{"type":"length","length":8}', "length"),
        ('"length"', "length"),
        ("7", "7"),
        ("false", ""),
        ("[]", ""),
    ],
)
def test_a_finish_reason_may_be_an_object(reason: str, kept: str) -> None:
    """Its type is the reason."""
    answer = DIALECTS[COMPLETIONS].decode([f'{{"choices":[{{"text":"a","finish_reason":{reason}}}]}}'.encode()])
    assert (answer.finish_reason, answer.end_event) == (kept, 0 if kept else None)


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "timeout", "insufficient_system_resource"])
def test_a_server_that_gave_up_says_so_in_its_finish_reason(reason: str) -> None:
    """Such a response is no shorter one."""
    events = [event.encode() for event in whole(COMPLETIONS, reason=reason)]
    assert DIALECTS[COMPLETIONS].decode(events).error_kind == "in_band_error"


@pytest.mark.parametrize(
    ("usage", "output"),
    [
        ('{"completion_tokens":3.0}', 3),
        ('{"completion_tokens":"3"}', 3),
        ('{"completion_tokens":[3]}', None),
        ('{"completion_tokens":null,"prompt_tokens":4,"total_tokens":7}', 3),
        ("[]", None),
        ('"none"', None),
    ],
)
def test_a_count_is_a_number_in_any_form(usage: str, output: int | None) -> None:
    """A count of another type is no count; the response is measured without it."""
    key: Key = COMPLETIONS
    events = [*whole(key)[:4], f'{{"choices":[],"usage":{usage}}}', END]
    record, _ = recorded(key, *events)
    assert record.state == "complete"
    assert (record.output_tokens, record.counted_by) == (3, "chunks" if output is None else "server")


def test_an_error_behind_a_broken_event_is_quoted() -> None:
    """What the server said is worth more than how its stream broke."""
    for payloads in (
        [b'{"choices":[{"text":"half', b'{"error":{"message":"boom"}}'],
        [b'{"choices":[{"text":"half{"error":{"message":"boom"}}'],
    ):
        answer = DIALECTS[COMPLETIONS].decode(payloads)
        assert answer.error_kind == "protocol"
        assert answer.error_detail.startswith("boom; event 0 is not of this dialect")


def test_an_error_in_a_choice_fails_the_response() -> None:
    """Routers put the error of a provider there."""
    event = b'{"choices":[{"delta":{"content":""},"error":{"code":502,"message":"boom"}}]}'
    answer = DIALECTS[CHAT].decode([event, DONE])
    assert (answer.error_kind, answer.error_detail) == ("in_band_error", "boom (502)")


@pytest.mark.parametrize("number", [2, 40])
def test_many_odd_events_are_read_in_linear_time(number: int) -> None:
    """Each odd event is read once, and the events behind it are decoded once."""
    payloads = [b'{"choices":[{"text":"\\ud83d"}]}', b'{"choices":[{"text":"a"}]}'] * number + [DONE]
    assert DIALECTS[COMPLETIONS].decode(payloads).tokens == [1] * (2 * number) + [0]
