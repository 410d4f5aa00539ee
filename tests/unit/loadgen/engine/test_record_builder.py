"""What became of one answer: complete only with an end, a token and the length asked for."""

from __future__ import annotations

import pytest

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.pooling import check_inputs
from loadgen.workloads.request import Request
from tests.support.answers import Key, chunk, end_events, ending, recorded, token, whole
from tests.support.dialects import DIALECTS

OPENAI, VLLM, TGI = ((server, "completions") for server in ("openai", "vllm", "tgi"))
every_dialect = pytest.mark.parametrize("key", DIALECTS, ids="-".join)
IMPOSSIBLE = ("-7", "1e30", "36893488147419103232", "true", "NaN", "2.5", "10000001")


@every_dialect
def test_a_whole_answer_is_complete(key: Key) -> None:
    """Three tokens asked for, three tokens and the end: what the tests below spoil."""
    assert ending(key, *whole(key)) == ("complete", "", "")


@pytest.mark.parametrize("key", [key for key in DIALECTS if key[1] != "generate"], ids="-".join)
@pytest.mark.parametrize("total", [None, 0], ids=("end", "total"))
def test_an_answer_without_a_token_is_not_complete(key: Key, total: int | None) -> None:
    """A 200 and an end marker prove nothing when nothing was said."""
    assert ending(key, *end_events(key, total)) == ("truncated", "truncated", "the response ended without a token")


@pytest.mark.parametrize("key", [("tgi", "chat"), ("tgi", "generate"), ("openai", "chat")], ids="-".join)
def test_a_total_of_no_tokens_is_refuted_by_tokens(key: Key) -> None:
    """Tokens came, and the server says that it generated none: the chunks are counted, and the total is kept."""
    record, _ = recorded(key, *whole(key, total=0))
    assert (record.state, record.output_tokens, record.refuted_total) == ("complete", 3, 0)
    assert record.counted_by == ("chunks" if key[0] == "openai" else "wire")


@every_dialect
def test_an_error_beside_a_token_fails_the_answer(key: Key) -> None:
    """Whatever else is in the event; null is no error."""
    first, *rest = whole(key)
    error = '"error":{"message":"boom","type":"InternalServerError","code":500}'
    said = ("failed", "in_band_error", "boom (InternalServerError, 500)")
    assert ending(key, f"{first[:-1]},{error}}}", *rest) == said
    assert ending(key, f'{first[:-1]},"error":null}}', *rest)[0] == "complete"


@every_dialect
def test_tokens_after_the_end_are_a_protocol_error(key: Key) -> None:
    """An end that is not the end proves nothing."""
    one_more = token(key, 4) if key[1] == "generate" else chunk(key, "d")
    assert ending(key, *whole(key), one_more) == ("failed", "protocol", "tokens came after the end marker")


@pytest.mark.parametrize("number", IMPOSSIBLE)
@every_dialect
def test_an_impossible_number_is_a_protocol_error(key: Key, number: str) -> None:
    """Negative, past any context, or no whole number at all: it is in no figure, and what came before it stays."""
    record, _ = recorded(key, *whole(key, total=number))
    assert (record.state, record.error_kind) == ("failed", "protocol")
    assert record.output_tokens == sum(record.chunk_tokens) >= 2


@every_dialect
def test_more_tokens_than_asked_are_a_wrong_length(key: Key) -> None:
    """Not truncated: too long."""
    said = ("failed", "wrong_length", "asked for 3 output tokens, got 4 (length)")
    assert ending(key, *whole(key, 4)) == said


@every_dialect
def test_a_short_answer_is_truncated_unless_the_server_cannot_help_it(key: Key) -> None:
    """TGI has no switch for it: shorter than asked is complete there."""
    said = ("truncated", "truncated", "asked for 3 output tokens, got 2 (stop); --output-tokens max:N allows that")
    assert ending(key, *whole(key, 2, reason="stop")) == (("complete", "", "") if key[0] == "tgi" else said)


@pytest.mark.parametrize("tokens", [2, 4])
def test_chunks_are_no_tokens(tokens: int) -> None:
    """Without a count two chunks may be three tokens, and four chunks no more than three: the finish reason tells."""

    def without_usage(reason: str) -> list[str]:
        return [event for event in whole(OPENAI, tokens, reason=reason) if "usage" not in event]

    record, _ = recorded(OPENAI, *without_usage("length"))
    assert (record.state, record.output_tokens, record.counted_by) == ("complete", tokens, "chunks")
    state, kind, detail = ending(OPENAI, *without_usage("stop"))
    assert (state, kind) == ("truncated", "truncated")
    assert detail.startswith(f"ended by itself (stop) after {tokens} chunks, without a token count; 3 tokens were")


@pytest.mark.parametrize(
    ("inputs", "body", "state", "counted"),
    [(2, {}, "complete", 2), (1, {}, "complete", 2), (3, {}, "failed", 3), (3, {"top_n": 2}, "complete", 3)],
)
def test_fewer_results_than_inputs_are_no_complete_response(
    inputs: int, body: dict[str, object], state: str, counted: int
) -> None:
    """Unless the user asked for the best ones only. Documents of the user are further inputs."""
    answer = Answer([0], counts={"inputs": 2})
    check_inputs(answer, Request(0, "a", 0, 0, inputs=inputs, body=body))
    assert answer.counts == {"inputs": counted}
    assert (answer.error_kind == "protocol") == (state == "failed")
    assert answer.error_detail.endswith("2 of 3") == (state == "failed")


@every_dialect
def test_a_filtered_answer_is_truncated(key: Key) -> None:
    """The filter ended it, not the model, whatever its length."""
    detail = "the server's content filter ended the response (content_filter) after 3 of 3 requested tokens"
    said = ("truncated", "truncated", detail)
    assert ending(key, *whole(key, reason="content_filter")) == said


@every_dialect
def test_what_was_cut_off_says_whether_it_had_tokens(key: Key) -> None:
    """All streams that had some say the same, so that they are counted together."""
    cut = ("cancelled", "cut off by an interrupt")
    said = "cut off by an interrupt, {} and without the end marker"
    assert ending(key, '{"object":"ping"}', cut=cut)[2] == said.format("before any token")
    for tokens in (1, 2):
        assert ending(key, *whole(key)[:tokens], cut=cut)[1:] == ("cancelled", said.format("after tokens had come"))


def test_empty_chunks_that_the_server_did_not_count_are_no_tokens() -> None:
    """Its total covers the text alone, so an empty chunk at the start is no first token."""
    events = [chunk(VLLM, ""), *whole(VLLM)]
    assert DIALECTS[VLLM].decode([event.encode() for event in events]).tokens == [0, 1, 1, 1, 0, 0, 0]


def test_an_event_that_echoes_the_prompt_fills_no_window() -> None:
    """Reads before the first token held no token back; the same size later means that tokens lay unread."""
    first, *rest = whole(VLLM)
    echo = f'{first[:-1]},"prompt_token_ids":[{",".join(["12345"] * 30_000)}]}}'
    assert recorded(VLLM, echo, *rest, full_reads=True)[1]["full_reads"] == 0
    assert recorded(VLLM, first, echo, *rest[1:], full_reads=True)[1]["full_reads"] == 2
