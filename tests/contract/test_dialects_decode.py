"""Every dialect against every transcript, whole and broken: an answer is never called complete without proof."""

from __future__ import annotations

import pytest

from loadgen.servers.wire.sse import split_events
from tests.contract.recorded import STREAMS, TRANSCRIPTS, Stream
from tests.support.dialects import DIALECTS, STREAMED

ERRORS = (
    b'{"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}',
    b'{"error":{"object":"error","message":"boom","type":"BadRequestError","param":null,"code":400}}',
    b'{"object":"error","message":"boom","type":"BadRequestError","param":null,"code":400}',
    b'{"error":"boom","error_type":"generation"}',
    b'{"error":{"message":"boom","http_status_code":422}}',
    b'{"error":{"message":"boom","type":"invalid_request_error"}}',
)
every_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.file.removesuffix(".txt"))
whole_streams = pytest.mark.parametrize(
    "stream",
    [stream for stream in STREAMS if not stream.answer.error_kind],
    ids=lambda stream: stream.file.removesuffix(".txt"),
)


@every_stream
def test_a_transcript_decodes_to_its_answer(stream: Stream) -> None:
    """Tokens of each event, end marker, totals, who counted them, finish reason and error are all as documented."""
    assert stream.dialect.decode(stream.payloads()) == stream.answer


def test_every_written_stream_is_listed() -> None:
    """A transcript that no test reads would prove nothing. `test_recorded_outcomes.py` says the same of recordings."""
    written = {path.relative_to(TRANSCRIPTS).as_posix() for path in (TRANSCRIPTS / "written").rglob("*.txt")}
    metrics = {file for file in written if file.startswith("written/metrics/")}  # test_server_metrics.py reads these
    assert written - metrics <= {stream.file for stream in STREAMS}


def test_every_dialect_has_a_whole_transcript() -> None:
    """No dialect is without an example of a complete answer."""
    assert {stream.key for stream in STREAMS if not stream.answer.error_kind} == set(STREAMED)


@every_stream
def test_a_stream_cut_between_events_has_no_end(stream: Stream) -> None:
    """What came before the cut is kept; the end is seen only once the events that prove it are there."""
    payloads = stream.payloads()
    for kept in range(len(payloads)):
        answer = stream.dialect.decode(payloads[:kept])
        assert (answer.end_event is not None) == (kept >= stream.events_to_prove())
        assert len(answer.tokens) == kept
        assert all(cut <= whole for cut, whole in zip(answer.tokens, stream.answer.tokens, strict=False))
        assert answer.error_kind in {"", stream.answer.error_kind}


@every_stream
def test_a_stream_cut_inside_an_event_has_no_end(stream: Stream) -> None:
    """Bytes of an event that was cut short count for nothing, wherever the cut is."""
    body = stream.body()
    whole, ends, _ = split_events(body)
    for cut in range(len(body)):
        payloads, _, rest = split_events(body[:cut])
        assert payloads == whole[: sum(end <= cut for end in ends)]
        assert body[:cut].endswith(rest)
    for count in range(len(whole)):
        decoded = stream.dialect.decode(whole[:count])
        assert (decoded.end_event is not None) == (count >= stream.events_to_prove())


@whole_streams
@pytest.mark.parametrize("damage", [b"{", b'"x"', b"null", b"[]", b"\xff", b"<html>", b"{" * 5000, b'{"a":1}{}'])
def test_a_damaged_event_is_a_protocol_error(stream: Stream, damage: bytes) -> None:
    """The answer says which event was damaged, keeps what came before it and has no end."""
    payloads = stream.payloads()
    for place in range(len(payloads)):
        answer = stream.dialect.decode([*payloads[:place], damage, *payloads[place + 1 :]])
        assert answer.error_kind == "protocol"
        assert f"event {place} " in answer.error_detail
        assert len(answer.error_detail) <= 300
        assert answer.end_event is None
        assert answer.tokens[place:] == [0] * (len(payloads) - place)
        assert all(kept <= whole for kept, whole in zip(answer.tokens, stream.answer.tokens, strict=True))


@whole_streams
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_event_anywhere_fails_the_answer(stream: Stream, error: bytes) -> None:
    """Every documented form of an error after a 200 is found, wherever it comes, and its words are kept."""
    payloads = stream.payloads()
    for place in range(len(payloads) + 1):
        answer = stream.dialect.decode([*payloads[:place], error, *payloads[place:]])
        assert answer.error_kind == "in_band_error"
        assert answer.error_detail.startswith("boom")
        assert answer.tokens[place] == 0
        assert sum(answer.tokens) == sum(stream.answer.tokens)


@whole_streams
def test_unknown_events_hold_no_token(stream: Stream) -> None:
    """Fields and events that no version sends today are passed over."""
    payloads = [b'{"object":"ping","created":1}', *stream.payloads()]
    answer = stream.dialect.decode(payloads)
    assert (answer.tokens, answer.error_kind) == ([0, *stream.answer.tokens], "")


def test_the_first_error_is_the_one_reported() -> None:
    """What a server says after its first error is a consequence of it."""
    for stream in STREAMS:
        answer = stream.dialect.decode([b'{"error":"first"}', b'{"error":"second"}'])
        assert answer.error_detail == "first"


@pytest.mark.parametrize(
    ("file", "said", "instead"),
    [
        ("written/vllm-0.33.0/completions_merged.txt", b'"completion_tokens":6', b'"completion_tokens":7'),
        ("written/tgi-3.3.7/generate.txt", b'"generated_tokens":3', b'"generated_tokens":7'),
        ("written/tgi-3.3.7/chat.txt", b'"completion_tokens":3', b'"completion_tokens":7'),
        ("written/lightllm-1.2.0/completions.txt", b'"completion_tokens": 3', b'"completion_tokens": 7'),
    ],
)
def test_the_wire_and_the_server_may_disagree(file: str, said: bytes, instead: bytes) -> None:
    """Both facts are kept: the tokens of each event as they came, and the server's own total."""
    stream = next(stream for stream in STREAMS if stream.file == file)
    answer = stream.dialect.decode([payload.replace(said, instead) for payload in stream.payloads()])
    assert (answer.tokens, answer.output_tokens, answer.counted_by) == (stream.answer.tokens, 7, "server")


@pytest.mark.parametrize("key", [("vllm", "completions"), ("openai", "completions")])
def test_a_total_that_does_not_run_is_not_taken_for_one(key: tuple[str, str]) -> None:
    """Where a server repeats one usage in every chunk, each chunk with text is a token and the total stays its own."""
    chunk = b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":5,"completion_tokens":4}}'
    answer = DIALECTS[key].decode([chunk, chunk, chunk, b"[DONE]"])
    assert (answer.tokens, answer.output_tokens) == ([1, 1, 1, 0], 4)


@pytest.mark.parametrize("key", [("lightllm", "chat"), ("tgi", "chat")])
def test_one_chunk_that_is_first_and_last_is_a_token(key: tuple[str, str]) -> None:
    """Where every chunk has a role, an answer of one empty token is not mistaken for a role chunk."""
    chunk = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":"length"}]}'
    assert DIALECTS[key].decode([chunk]).tokens == [1]


@pytest.mark.parametrize("server", ["vllm", "lightllm", "openai"])
def test_a_role_chunk_is_never_a_token(server: str) -> None:
    """Not even when nothing follows it: counting it would give a time to first token for a token that never came."""
    chunk = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    assert DIALECTS[server, "chat"].decode([chunk]).tokens == [0]


@pytest.mark.parametrize("server", ["vllm", "openai"])
@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "refusal"])
def test_every_kind_of_text_is_a_token(server: str, field: str) -> None:
    """What a model thinks or refuses is generated just as what it answers."""
    chunk = b'{"choices":[{"delta":{"%s":"x"},"finish_reason":null}]}' % field.encode()
    assert DIALECTS[server, "chat"].decode([chunk]).tokens == [1]


@every_stream
@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (b"\n", b"\r\n"),
        (b"\n", b"\r"),
        (b"data: ", b"data:"),
        (b"\n\n", b"\n\n: keep-alive\n\n"),
        (b"\n\n", b"\nevent: message\nid: 7\n\n"),
    ],
    ids=("crlf", "cr", "no space", "keep-alives", "other fields"),
)
def test_the_way_events_are_written_changes_nothing(stream: Stream, said: bytes, instead: bytes) -> None:
    """Line ends, the space after the colon, keep-alives and other fields are the writer's choice."""
    payloads, _, rest = split_events(stream.body().replace(said, instead))
    assert stream.dialect.decode(payloads) == stream.answer
    assert rest == b""


def test_tokens_that_lightllm_lost_are_counted_by_its_running_count() -> None:
    """Where an event's count is two above the one before, two tokens had been generated when it came."""
    events = [
        b'{"token":{"count_output_tokens":%d},"finished":%s}' % (n, b"true" if n == 4 else b"false") for n in (1, 3, 4)
    ]
    answer = DIALECTS["lightllm", "generate"].decode(events)
    assert (answer.tokens, answer.output_tokens, answer.end_event) == ([1, 2, 1], 4, 2)


def test_a_tgi_answer_without_details_is_counted_on_the_wire() -> None:
    """The end is seen all the same; there is just no total and no reason."""
    answer = DIALECTS["tgi", "generate"].decode([b'{"token":{"id":1},"generated_text":"a","details":null}'])
    assert (answer.end_event, answer.output_tokens, answer.counted_by, answer.finish_reason) == (0, 1, "wire", "")


def test_an_end_without_a_single_token_is_counted_as_none() -> None:
    """Zero tokens is a count, so that a server which says nothing and then `[DONE]` does not pass for complete."""
    answer = DIALECTS["vllm", "completions"].decode([b"[DONE]"])
    assert (answer.end_event, answer.output_tokens, answer.counted_by) == (0, 0, "wire")


def test_an_empty_text_ends_a_tgi_answer_too() -> None:
    """`generated_text` is "" when every token was a special one; only null means that more is to come."""
    events = [b'{"token":{"id":2,"special":true},"generated_text":"","details":{"generated_tokens":1}}']
    assert DIALECTS["tgi", "generate"].decode(events).end_event == 0


def test_token_ids_are_better_evidence_than_a_running_total() -> None:
    """They are the tokens themselves."""
    chunk = b'{"choices":[{"text":"ab","token_ids":[7,8]}],"usage":{"completion_tokens":3}}'
    assert DIALECTS["vllm", "completions"].decode([chunk]).tokens == [2]


@pytest.mark.parametrize(("server", "counted_by"), [("openai", "chunks"), ("tgi", "wire")])
def test_chunks_of_a_server_that_nothing_is_known_of_are_no_tokens(server: str, counted_by: str) -> None:
    """Without a total its answer's length is not known, however many chunks came; TGI's chunks are tokens."""
    payloads = [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"b","finish_reason":"length"}]}', b"[DONE]"]
    answer = DIALECTS[server, "completions"].decode(payloads)
    assert (answer.output_tokens, answer.counted_by) == (2, counted_by)


def test_one_chunk_with_its_usage_holds_all_its_tokens() -> None:
    """A server that answers in one piece and says how many tokens it was is believed."""
    chunk = b'{"choices":[{"text":"ab"}],"usage":{"prompt_tokens":1,"completion_tokens":3}}'
    assert DIALECTS["openai", "completions"].decode([chunk]).tokens == [3]


def test_an_error_is_not_hidden_by_the_damage_behind_it() -> None:
    """What the server said is worth more than how its answer broke off."""
    answer = DIALECTS["vllm", "completions"].decode([b'{"error":{"message":"boom"}}', b"{"])
    assert (answer.error_kind, answer.error_detail, answer.end_event) == ("in_band_error", "boom", None)
