"""What became of one answer: complete only with an end, a token and the length asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loadgen.engine.clock import ClockPairs
from loadgen.engine.decode import record_of
from loadgen.engine.health import Health
from loadgen.record import Record
from servers.wire.connection import READ_BYTES
from servers.wire.transport import Exchange, WireError
from tests.dialects import DIALECTS
from workloads.request import Request

CHAT, COMPLETIONS = ("openai", "chat"), ("openai", "completions")
EVERY = [*DIALECTS]
ASKED = 3


def usage(output: int | str, prompt: int = 5) -> str:
    return f'{{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output}}}}}'


def text(*words: str, end: str = "") -> list[str]:
    """OpenAI completions of one chunk per word; the last one has the finish reason."""
    chunks = [f'{{"choices":[{{"text":"{word}"}}]}}' for word in words]
    return [*chunks, f'{{"choices":[{{"text":"","finish_reason":"{end}"}}]}}'] if end else chunks


def tgi(number: int, said: str = "null", generated: str = "3") -> str:
    details = f'{{"finish_reason":"length","generated_tokens":{generated},"input_length":5}}'
    return f'{{"token":{{"id":{number}}},"generated_text":{said},"details":{"null" if said == "null" else details}}}'


def lightllm(number: int | str, *, finished: bool = False) -> str:
    token = f'{{"count_output_tokens":{number},"prompt_tokens":5}}'
    return f'{{"token":{token},"finished":{str(finished).lower()},"finish_reason":"length"}}'


def recorded(
    key: tuple[str, str], *events: str, reads: int = 0, cut: WireError | None = None
) -> tuple[Record, dict[str, Any]]:
    """The Record of an answer of these events, and the worker's health. It came in one read, or in pieces as large as
    a read can be; with `cut` it ended so."""
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\n\r\n" if cut else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    exchange = Exchange(cast(Any, None), lambda _: None, sent_ns=0, sent_end_ns=1, given_up_ns=10**9)
    exchange.raw += head + body
    step = READ_BYTES if reads else len(exchange.raw)
    for number, end in enumerate(range(step, len(exchange.raw) + step, step)):
        exchange.sizes.append(min(end, len(exchange.raw)))
        exchange.user.append(1000 * (number + 1))
        exchange.kernel += bytes(16)
    exchange.framing.scan(exchange.raw)
    if cut:
        exchange.error_kind, exchange.error_detail = cut, "cut off by an interrupt"
    health = Health()
    request = Request(0, "text", 5, ASKED)
    return record_of(exchange, request, DIALECTS[key], ClockPairs(), 0, health), health.sample()


def ending(key: tuple[str, str], *events: str, cut: WireError | None = None) -> tuple[str, str, str]:
    record, _ = recorded(key, *events, cut=cut)
    return record.state, record.error_kind, record.error_detail


WHOLE = {
    key: (*text("a", "b", "c", end="length"), usage(3), "[DONE]")
    if key[1] == "completions"
    else (*(f'{{"choices":[{{"delta":{{"content":"{word}"}}}}]}}' for word in "abc"), usage(3), "[DONE]")
    for key in DIALECTS
    if key[1] != "generate"
} | {
    ("tgi", "generate"): (tgi(1), tgi(2), tgi(3, '"abc"')),
    ("lightllm", "generate"): (lightllm(1), lightllm(2), lightllm(3, finished=True)),
}


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_a_whole_answer_is_complete(key: tuple[str, str]) -> None:
    """Three tokens asked for, three tokens and the end: what the tests below spoil."""
    assert ending(key, *WHOLE[key]) == ("complete", "", "")


@pytest.mark.parametrize("key", [key for key in EVERY if key[1] != "generate"], ids="-".join)
@pytest.mark.parametrize("events", [("[DONE]",), (usage(0), "[DONE]")])
def test_an_answer_without_a_token_is_not_complete(key: tuple[str, str], events: tuple[str, ...]) -> None:
    """A 200 and an end marker prove nothing when nothing was said."""
    assert ending(key, *events) == ("truncated", "truncated", "the answer ended without a token")


@pytest.mark.parametrize("key", [("tgi", "chat"), CHAT])
def test_a_total_of_no_tokens_is_not_complete(key: tuple[str, str]) -> None:
    """Text came, and the server says that it generated nothing: one of the two is wrong."""
    events = (*WHOLE[key][:3], usage(0), "[DONE]")
    assert ending(key, *events) == ("truncated", "truncated", "asked for 3 output tokens, got 0")


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_an_error_beside_a_token_fails_the_answer(key: tuple[str, str]) -> None:
    """Whatever else is in the event."""
    first, *rest = WHOLE[key]
    broken = f'{first[:-1]},"error":{{"message":"boom","type":"InternalServerError","code":500}}}}'
    assert ending(key, broken, *rest) == ("failed", "in_band_error", "boom (InternalServerError, 500)")
    assert ending(key, f'{first[:-1]},"error":null}}', *rest)[0] == "complete"


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_tokens_after_the_end_are_a_protocol_error(key: tuple[str, str]) -> None:
    """An end that is not the end proves nothing."""
    one_more = lightllm(4) if key == ("lightllm", "generate") else WHOLE[key][0]
    said = ("failed", "protocol", "tokens came after the end marker")
    assert ending(key, *WHOLE[key], one_more) == said


IMPOSSIBLE = ("-7", "1e30", "36893488147419103232", "true", "NaN", "2.5", "10000001")


@pytest.mark.parametrize("number", IMPOSSIBLE)
@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_an_impossible_number_is_a_protocol_error(key: tuple[str, str], number: str) -> None:
    """Negative, past any context, or no whole number at all: it is in no figure, and what came before it stays."""
    native = {"tgi": tgi(3, '"abc"', number), "lightllm": lightllm(number, finished=True)}
    last = native[key[0]] if key[1] == "generate" else usage(number)
    record, _ = recorded(key, *WHOLE[key][:2], last, "[DONE]")
    assert (record.state, record.error_kind, sum(record.chunk_tokens)) == ("failed", "protocol", 2)
    assert record.output_tokens == 2


@pytest.mark.parametrize("key", [("vllm", "completions"), ("tgi", "completions"), COMPLETIONS], ids="-".join)
def test_more_tokens_than_asked_are_a_wrong_length(key: tuple[str, str]) -> None:
    """Not truncated: it is too long."""
    events = (*text("a", "b", "c", "d", end="length"), usage(4), "[DONE]")
    assert ending(key, *events) == ("failed", "wrong_length", "asked for 3 output tokens, got 4 (length)")


def test_a_short_answer_of_an_openai_server_is_truncated() -> None:
    """By the server's own count, or by its word where nobody counted."""
    said = ("truncated", "truncated", "asked for 3 output tokens, got 2 (stop)")
    assert ending(COMPLETIONS, *text("a", "b", end="stop"), usage(2), "[DONE]") == said
    assert ending(COMPLETIONS, *text("a", "b", end="stop"), "[DONE]") == said


def test_chunks_are_no_tokens() -> None:
    """Without a count two chunks may be three tokens, and four chunks no more than three."""
    for words in (("a", "b"), ("a", "b", "c", "d")):
        record, _ = recorded(COMPLETIONS, *text(*words, end="length"), "[DONE]")
        assert (record.state, record.output_tokens, record.counted_by) == ("complete", len(words), "chunks")


@pytest.mark.parametrize("key", [("tgi", "completions"), COMPLETIONS], ids="-".join)
def test_a_filtered_answer_is_truncated(key: tuple[str, str]) -> None:
    """The filter ended it, not the model, whatever its length."""
    events = (*text("a", "b", "c", end="content_filter"), usage(3), "[DONE]")
    assert ending(key, *events) == ("truncated", "truncated", "asked for 3 output tokens, got 3 (content_filter)")


def test_a_tgi_answer_may_end_by_itself() -> None:
    """TGI has no switch for it: shorter than asked is complete."""
    assert ending(("tgi", "completions"), *text("a", end="eos_token"), usage(1), "[DONE]") == ("complete", "", "")


def test_what_was_cut_off_says_whether_it_had_tokens() -> None:
    """All streams that had some say the same, so that they are counted together."""
    said = "cut off by an interrupt, {} and without the end marker"
    for words in ("a", "ab"):
        cut = ending(("vllm", "completions"), *text(*words), cut="cancelled")
        assert cut == ("failed", "cancelled", said.format("after tokens had come"))
    role = '{"choices":[{"delta":{"role":"assistant","content":""}}]}'
    assert ending(("vllm", "chat"), role, cut="cancelled")[2] == said.format("before any token")


def test_empty_chunks_that_the_server_did_not_count_are_no_tokens() -> None:
    """Its total covers the text alone, so an empty chunk at the start is no first token."""
    empty = '{"choices":[{"text":""}]}'
    answer = DIALECTS["vllm", "completions"].decode(
        [event.encode() for event in (empty, *text("a", "b", "c"), usage(3), "[DONE]")]
    )
    assert answer.tokens == [0, 1, 1, 1, 0, 0]


def test_an_event_that_echoes_the_prompt_fills_no_window() -> None:
    """Reads before the first token held no token back; the same size later means that tokens lay unread."""
    echo = f'{{"choices":[{{"text":"a","prompt_token_ids":[{",".join(["12345"] * 30_000)}]}}]}}'
    key = ("vllm", "completions")
    _, health = recorded(key, echo, *text("b", "c", end="length"), "[DONE]", reads=1)
    assert health["full_reads"] == 0
    _, health = recorded(key, *text("a"), echo, *text("c", end="length"), "[DONE]", reads=1)
    assert health["full_reads"] == 2
