"""What a server says when it refuses, in every form it is known to come, as one readable line."""

from __future__ import annotations

import pytest

from loadgen.servers.backends.error_messages import error_in, error_inside, error_text, is_rejection
from tests.contract.recorded import response

RECORDED = {
    "vllm-0.32.0/err_401.txt": "Unauthorized",
    "vllm-0.32.0/err_404.txt": "Not Found",
    "vllm-0.32.0/err_405.txt": "Method Not Allowed",
    "vllm-0.32.0/err_wrongmodel.txt": "The model `nope` does not exist. Valid aliases: tiny. (NotFoundError, 404)",
    "vllm-0.32.0/completion_after_kill.txt": (
        "EngineCore encountered an issue. See stack trace (above) for the root cause. (InternalServerError, 500)"
    ),
    "vllm-0.32.0/health_after_kill.txt": "HTTP 503 with nothing readable in the body",
    "lightllm-0.0.1/chat.txt": "Internal Server Error",
    "lightllm-0.0.1/err_404.txt": "Not Found",
    "lightllm-0.0.1/err_badjson.txt": "Expecting value: line 1 column 11 (char 10)",
    "lightllm-0.0.1/err_param.txt": "temperature must > 0.0, got -1",
    "lightllm-0.0.1/err_total.txt": ("the req total len (input len + output len) is too long > max_req_total_len:2048"),
}
FORMS = {
    b'{"object":"error","message":"too long","type":"BadRequestError","code":400}': "too long (BadRequestError, 400)",
    b'{"error":"Model is overloaded","error_type":"overloaded"}': "Model is overloaded (overloaded)",
    b'{"detail":[{"loc":["body","model"],"msg":"Field required","type":"missing"}]}': "Field required (body.model)",
    b'{"error":{"message":"no","type":"bad_request","param":null,"code":"x"}}': "no (bad_request, x)",
    b'{"error":{"code":429}}': '{"code":429}',
    b"Failed to deserialize the JSON body": "Failed to deserialize the JSON body",
    b"<html><head><title>502 Bad Gateway</title><style>a{}</style></head><body><h1>Sorry</h1></body></html>": (
        "502 Bad Gateway: Sorry"
    ),
    b"  \r\n\t": "HTTP 500 with nothing readable in the body",
    b"one\r\ntwo\x00three\x1b[31m": "one two three [31m",
    b"\xff\xfe": "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}",
    b'"just a string"': "just a string",
    b"[]": "HTTP 500 with nothing readable in the body",
}


@pytest.mark.parametrize(
    "file", [*RECORDED, *(f"vllm-0.32.0/err_{name}.txt" for name in ("badjson", "toolong", "type"))]
)
def test_recorded_refusals_read_as_one_line(file: str) -> None:
    """The server's message comes first, its kind behind; nothing of the wrapping is left."""
    status, body = response(file)
    line = error_text(status, body)
    assert line == RECORDED.get(file, line)
    assert "\n" not in line
    assert '{"error"' not in line


@pytest.mark.parametrize(("body", "line"), FORMS.items())
def test_every_form_of_an_error_body_is_read(body: bytes, line: str) -> None:
    """JSON of each server, FastAPI's, HTML and plain text, without control characters."""
    assert error_text(500, body) == line


LONG = (b"x", b"[", b"<", b"<p>", b"<script ", b"<!--", b'{"error":', b'{"detail":')


@pytest.mark.parametrize("body", [b'{"error":"' + b"y" * 100_000 + b'"}', *(piece * 20_000 for piece in LONG)])
def test_an_endless_body_becomes_a_short_line(body: bytes) -> None:
    """300 characters at most, whatever came."""
    assert 0 < len(error_text(500, body)) <= 300


def test_a_long_reason_keeps_its_end() -> None:
    """Its kind stands there; what is left out is the middle."""
    body = b'{"error":{"message":"began%b","type":"InternalServerError","code":500}}' % (b" x" * 5_000)
    line = error_text(500, body)
    assert (line[:5], line[-26:], len(line)) == ("began", "(InternalServerError, 500)", 300)


@pytest.mark.parametrize("depth", [100, 300, 490, 900])
def test_deep_nesting_is_survived(depth: int) -> None:
    """An error within an error within an error costs neither the line nor the process."""
    body = b'{"error":' * depth + b'"boom"' + b"}" * depth
    assert 0 < len(error_text(500, body)) <= 300
    assert len(error_in(body)) <= 300


@pytest.mark.parametrize(
    "payload", [b"[DONE]", b"", b"3", b'"error"', b'{"error":null}', b'{"object":"chat"}', b"\xff"]
)
def test_what_is_no_error_is_not_called_one(payload: bytes) -> None:
    """An event without an error in it says nothing."""
    assert error_in(payload) == ""


def test_an_error_without_words_is_still_an_error() -> None:
    """An empty message or none must not let a failed answer pass."""
    assert error_in(b'{"error":{"message":""}}') == "an error without a message"
    assert error_in(b'{"error":{}}') == "an error without a message"


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b'{"error":{"message":"boom"}}', "boom"),
        (b'{"error":"boom"}', "boom"),
        (b'{"error":["boom","again"]}', "boom; again"),
        (b'{"error":true,"message":"boom"}', "boom"),
        (b'{"errors":[{"message":"boom"}]}', "boom"),
        (b'{"object":"error","message":"boom"}', "boom"),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"boom"}}', "boom (overloaded_error)"),
        (b'{"code":500,"message":"boom","type":"server_error"}', "boom (server_error, 500)"),
        (b'{"code":"InvalidParameter","message":"boom"}', "boom (InvalidParameter)"),
        (b'{"status":502,"msg":"boom"}', "boom"),
        (b'{"detail":"boom"}', "boom"),
        (b'{"success":false,"message":"boom"}', "boom"),
        (b'{"type":"response.failed","response":{"error":{"message":"boom"}}}', "boom"),
        (b'{"choices":[{"text":"a"}],"error":{"message":"boom"}}', "boom"),
    ],
)
def test_an_error_is_found_in_every_form(payload: bytes, said: str) -> None:
    """Servers and proxies write errors in many ways; the words are theirs."""
    assert error_in(payload) == said


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"text":"error"}]}',
        b'{"choices":[{"text":"a"}],"error":{}}',
        b'{"choices":[{"text":"a"}],"code":500,"message":"x"}',
        b'{"usage":{"completion_tokens":3},"status":500,"message":"x"}',
        b'{"type":"ping","message":"still here"}',
        b'{"code":0,"message":"ok"}',
        b'{"code":200,"message":"processing"}',
        b'{"status":"success","message":"x"}',
        b'{"error":false,"errors":[],"message":"x","choices":[{"text":"a"}]}',
    ],
)
def test_an_event_with_content_or_a_good_code_is_no_error(payload: bytes) -> None:
    """Content with an empty error field is content, and a code below 400 is no error."""
    assert error_in(payload) == ""


def test_an_error_inside_a_broken_event_is_found() -> None:
    """A proxy that breaks a stream may write its error into the middle of an event."""
    assert error_inside(b'{"choices":[{"text":"half{"error": {"message":"boom","code":502}}\n\n') == "boom (502)"
    assert error_inside(b'{"choices":[{"text":"half') == ""


REJECTIONS = (
    b'{"error":"Model is overloaded","error_type":"overloaded"}',  # TGI, its own routes
    b'{"error":{"message":"Model is overloaded","http_status_code":422}}',  # TGI, its OpenAI routes up to 3.3
    b'{"error":{"message":"Model is overloaded","http_status_code":429}}',
    b'{"error":"Model is overloaded","error_type":"Overloaded"}',  # TEI
    b'{"message":"Model is overloaded","code":429,"type":"Overloaded"}',  # TEI, its OpenAI route
    b'{"error":{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}',
    b'{"error":{"message":"The server has too many queued requests.","type":"ServiceUnavailableError","code":503}}',
    b'{"object":"error","message":"The server has too many queued requests.","type":"ServiceUnavailableError"}',
    b'{"error":{"message":"litellm.RateLimitError: no","type":"None","param":"None","code":"429"}}',  # LiteLLM
    b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}',  # llama.cpp
    b'{"error":{"message":"Rate limit reached for gpt-x","type":"requests","code":"rate_limit_exceeded"}}',  # OpenAI
    b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',  # Anthropic
    b'{"error":"The request queue is full."}',
)
"""Error bodies and error events of servers and proxies that were too busy to take a request."""

FAILURES = (
    b'{"error":{"message":"`inputs` must have less than 2047 tokens. Given: 3017","http_status_code":422}}',
    b'{"error":"Request failed during generation: Server error: CANCELLED","error_type":"generation"}',
    b'{"error":{"message":"max_tokens must be at least 1","type":"BadRequestError","param":null,"code":400}}',
    b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}',
    b'{"error":{"message":"the prompt says: the model is overloaded","type":"BadRequestError","code":400}}',
    b'{"error":{"message":"boom","code":true}}',
    b'{"detail":[{"loc":["body","overloaded"],"msg":"Field required","type":"missing"}]}',
    b'{"choices":[{"text":"the queue is full"}]}',
    b"Model is overloaded",
    b"[429]",
    b"",
)
"""Bodies with an HTTP status of 200, 400 or 500 that speak of something else."""


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("body", REJECTIONS)
def test_an_error_that_means_overload_is_a_rejection(body: bytes, status: int) -> None:
    """The code, the type or the message in the body tells it, whatever the HTTP status is."""
    assert is_rejection(status, body)


@pytest.mark.parametrize("status", [200, 400, 422, 500, 502])
@pytest.mark.parametrize("body", FAILURES)
def test_an_error_with_another_cause_is_no_rejection(body: bytes, status: int) -> None:
    """A wrong request, a failed server and a text that only speaks of overload are none."""
    assert not is_rejection(status, body)


@pytest.mark.parametrize("body", [b"", b"<html><title>429 Too Many Requests</title></html>", *FAILURES])
@pytest.mark.parametrize("status", [429, 503, 529])
def test_the_status_of_an_overload_is_a_rejection_whatever_the_body_says(body: bytes, status: int) -> None:
    """A proxy answers with a page of its own, or with nothing."""
    assert is_rejection(status, body)
