"""Bodies that are sent as they are: which fields are added, and which dialect reads the response."""

import json

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.raw_bodies import complete_body, dialect_for_path
from loadgen.servers.backends.whole_response import decode, text

VLLM = BACKENDS["vllm"].dialects


@pytest.mark.parametrize(
    ("endpoint", "body", "sent"),
    [
        ("chat", b'{ "a" : 1 }', b'{ "a" : 1 ,"stream":true,"stream_options":{"include_usage":true}}'),
        ("chat", b"{ }", b'{ "stream":true,"stream_options":{"include_usage":true}}'),
        ("chat", b'{"stream":true}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        ("chat", b'{"stream":true,"stream_options":{}}', b'{"stream":true,"stream_options":{}}'),
        (
            "completions",
            b'{"stream_options":{"include_usage":false}}',
            b'{"stream_options":{"include_usage":false},"stream":true}',
        ),
        ("messages", b'{"max_tokens":3}', b'{"max_tokens":3,"stream":true}'),
        ("embeddings", b'{"input":"a"}', b'{"input":"a"}'),
        ("chat", b'{"stream": false}', b'{"stream": false}'),
    ],
)
def test_a_field_is_added_only_where_it_is_missing(endpoint: str, body: bytes, sent: bytes) -> None:
    """The bytes of the body stay in front, and the result is valid JSON."""
    completed, _ = complete_body(body, VLLM[endpoint])
    assert completed == sent
    json.loads(completed)


def test_a_body_that_asks_for_one_piece_gets_a_dialect_without_a_stream() -> None:
    """The response is one JSON object, so that no token has an arrival time."""
    _, dialect = complete_body(b'{"stream":false}', VLLM["chat"])
    assert (dialect.streams, dialect.generates_in_one_piece, dialect.path) == (False, True, "/v1/chat/completions")


@pytest.mark.parametrize(
    ("server", "path", "endpoint", "streams"),
    [
        ("vllm", "/v1/chat/completions", "chat", True),
        ("vllm", "/v1/completions", "completions", True),
        ("openai", "/openai/deployments/x/chat/completions?api-version=1", "chat", True),
        ("vllm", "/v1/responses", "responses", True),
        ("vllm", "/v1/messages", "messages", True),
        ("vllm", "/v1/embeddings", "embeddings", False),
        ("tgi", "/generate_stream", "generate", True),
        ("tgi", "/generate", "generate", False),
        ("sglang", "/generate", "generate", True),
    ],
)
def test_the_path_chooses_the_dialect(server: str, path: str, endpoint: str, streams: bool) -> None:
    """A path ends like the path of its endpoint, and the request goes to exactly this path."""
    dialect = dialect_for_path(BACKENDS[server].dialects, path)
    assert dialect is not None
    assert (dialect.endpoint, dialect.streams, dialect.path) == (endpoint, streams, path)


def test_an_unknown_path_has_no_dialect() -> None:
    """The caller reports such a path."""
    assert dialect_for_path(VLLM, "/v1/images") is None


@pytest.mark.parametrize(
    ("response", "counts", "reason"),
    [
        (
            {
                "choices": [{"message": {"content": "Hi."}, "finish_reason": "length"}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2},
            },
            (3, 2),
            "length",
        ),
        (
            {
                "content": [{"text": "Hi."}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": 3, "output_tokens": 2},
            },
            (3, 2),
            "end_turn",
        ),
        (
            {"generated_text": "Hi.", "details": {"finish_reason": "length", "generated_tokens": 2}},
            (None, 2),
            "length",
        ),
        (
            {
                "text": "Hi.",
                "meta_info": {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": {"type": "stop"}},
            },
            (3, 2),
            "stop",
        ),
    ],
)
def test_a_response_in_one_piece_is_read(
    response: dict[str, object], counts: tuple[int | None, int], reason: str
) -> None:
    """Its token counts, finish reason and text, in the forms of OpenAI, Anthropic, TGI and SGLang."""
    payloads = [json.dumps(response).encode()]
    answer = decode(payloads)
    assert (answer.prompt_tokens, answer.output_tokens) == counts
    assert (answer.finish_reason, answer.end_event, answer.tokens) == (reason, 0, [0])
    assert text(payloads) == "Hi."


@pytest.mark.parametrize(("payload", "kind"), [(b'{"error":{"message":"no"}}', "in_band_error"), (b"text", "protocol")])
def test_a_response_without_an_answer_is_an_error(payload: bytes, kind: str) -> None:
    """An error object and a body that is not JSON have no end marker."""
    answer = decode([payload])
    assert (answer.error_kind, answer.end_event) == (kind, None)
