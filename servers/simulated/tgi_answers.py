"""The bytes of TGI's answers: native, chat and completions, streamed and whole (router/src at v3.3.7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servers.simulated import tokenizer
from servers.simulated.bodies import dumps
from servers.simulated.wire import JSON_TYPE, Events, Generation, Headers, Question, Reply, Site, event

VERSION = "3.3.6-dev0"
"""What the tag v3.3.7 calls itself."""
DOCKER_LABEL = "sha-dfb3fbe"
FINGERPRINT = f"{VERSION}-{DOCKER_LABEL}"
STREAM_ACCEL: Headers = (("x-accel-buffering", "no"),)

_LOGPROB = -1.5


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says to one question: where its words begin in the babble, how many tokens, and why it ends."""

    site: Site
    question: Question
    prompt: str
    prompt_tokens: int
    asked: int
    output: int
    ended: str
    """`length` or `eos_token`; the second means that the last token is the end-of-sequence token."""

    @property
    def start(self) -> int:
        return self.site.babble.start(self.question.index)

    @property
    def eos_at(self) -> int:
        """Place of the end-of-sequence token; -1 when there is none."""
        return self.output - 1 if self.ended == "eos_token" else -1

    def ids(self) -> list[int]:
        ids = self.site.babble.ids[self.start : self.start + self.output]
        return [*ids[:-1], tokenizer.EOS_ID] if self.ended == "eos_token" else ids

    def text(self) -> str:
        return tokenizer.decode(self.ids())


def native(said: Said) -> Generation:
    """/generate_stream and /generate."""
    parameters = said.question.body.get("parameters") or {}
    full = f"{said.prompt}{said.text()}" if parameters.get("return_full_text") else said.text()
    details = {
        "finish_reason": said.ended,
        "generated_tokens": said.output,
        "seed": parameters.get("seed") if parameters.get("do_sample") else None,
    }
    wants_details = bool(parameters.get("details"))
    last = dumps(
        {"generated_text": full, "details": {**details, "input_length": said.prompt_tokens} if wants_details else None}
    )
    ids, texts, start, eos_at = said.site.babble.ids, said.site.babble.texts, said.start, said.eos_at

    def event_of(first: int, tokens: int, is_last: bool) -> bytes:  # noqa: ARG001 - one token per event
        at = start + first
        token = _EOS if first == eos_at else (ids[at], texts[at], b"false")
        begin = b'data: {"index":%d,"token":{"id":%d,"text":"%b","logprob":-1.5,"special":%b},' % (first + 1, *token)
        return begin + (last[1:] + b"\n\n" if is_last else b'"generated_text":null,"details":null}\n\n')

    def answer(total_s: float) -> Reply:
        body: dict[str, Any] = {"generated_text": full}
        if wants_details or parameters.get("decoder_input_details"):
            body["details"] = {**details, "prefill": [], "tokens": _tokens(said)}
        return Reply(dumps(body), headers=_timing_headers(said, total_s) + JSON_TYPE)

    return _generation(said, event_of, answer, failure=(event(flat_error(*GENERATION_FAILED)),))


def chat(said: Said) -> Generation:
    """/v1/chat/completions. Every chunk has role and content, so there is no chunk with the role alone."""
    asked_usage = bool(said.question.body.get("stream_options", {}).get("include_usage"))
    ended = "stop" if said.ended == "eos_token" else said.ended
    head = b"data: " + _identity(said, "chat.completion.chunk")[:-1]
    texts, start, eos_at = said.site.babble.texts, said.start, said.eos_at
    begin = head + b',"choices":[{"index":0,"delta":{"role":"assistant","content":"'
    over = b'"},"logprobs":null,"finish_reason":"%b"}],"usage":null}\n\n' % ended.encode()

    def event_of(first: int, tokens: int, is_last: bool) -> bytes:  # noqa: ARG001 - one token per event
        text = b"" if first == eos_at else texts[start + first]
        return begin + text + (over if is_last else b'"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n')

    def answer(total_s: float) -> Reply:
        message = {"role": "assistant", "content": said.text()}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": ended}
        return _openai_answer(said, total_s, "chat.completion", choice)

    usage = head + b',"choices":[],"usage":%b}\n\n' % dumps(_usage(said))
    return _generation(
        said,
        event_of,
        answer,
        closing=((usage,) if asked_usage else ()) + (event(b"[DONE]"),),
        role_only=(begin + b'"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n',),
        failure=(event(openai_error(GENERATION_FAILED[0])), event(b"[DONE]")),
    )


def completions(said: Said) -> Generation:
    """/v1/completions. The chunk with the last token always has usage, and only that one."""
    texts, start, eos_at = said.site.babble.texts, said.start, said.eos_at
    object_first = b'data: {"object":"text_completion",'
    rest = _identity(said, "")[len(b'{"object":"",') : -1]
    chunk_tail = dumps({"model": said.site.config.model, "system_fingerprint": FINGERPRINT})[1:]
    created = b'"id":"","created":%d,"choices":[{"index":0,"text":"' % said.question.created_s
    usage = dumps(_usage(said))

    def event_of(first: int, tokens: int, is_last: bool) -> bytes:  # noqa: ARG001 - one token per event
        text = tokenizer.EOS_TEXT.encode() if first == eos_at else texts[start + first]
        if not is_last:
            return b'%b%b%b","logprobs":null,"finish_reason":""}],%b\n\n' % (object_first, created, text, chunk_tail)
        choice = b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":"%b"}]' % (
            text,
            said.ended.encode(),
        )
        return b'%b%b,%b,"usage":%b}\n\n' % (object_first, rest, choice, usage)

    def answer(total_s: float) -> Reply:
        ended = "stop" if said.ended == "eos_token" else said.ended
        choice = {"index": 0, "text": said.text(), "logprobs": None, "finish_reason": ended}
        return _openai_answer(said, total_s, "text_completion", choice)

    failure = (event(openai_error(GENERATION_FAILED[0])), event(b"[DONE]"))
    return _generation(said, event_of, answer, closing=(event(b"[DONE]"),), failure=failure)


def flat_error(message: str, kind: str) -> bytes:
    """The body of every error, and the error event of the native routes."""
    return dumps({"error": message, "error_type": kind})


def openai_error(message: str) -> bytes:
    """The error event of the OpenAI routes: the code is 422 whatever happened."""
    return dumps({"error": {"message": message, "http_status_code": 422}})


GENERATION_FAILED = ("Request failed during generation: Server error: simulated failure", "generation")

_EOS = (tokenizer.EOS_ID, tokenizer.EOS_TEXT.encode(), b"true")


def _generation(
    said: Said,
    event_of: Callable[[int, int, bool], bytes],
    answer: Callable[[float], Reply],
    *,
    failure: Events,
    closing: Events = (),
    role_only: Events = (),
) -> Generation:
    return Generation(
        prompt_tokens=said.prompt_tokens,
        output_tokens=said.output,
        asked_tokens=said.asked,
        finish_reason=said.ended,
        streamed=bool(said.question.body.get("stream")),
        event=event_of,
        answer=answer,
        merges=False,
        closing=closing,
        role_only=role_only,
        failure=failure,
        head=_compute_headers(said) + STREAM_ACCEL,
    )


def _openai_answer(said: Said, total_s: float, kind: str, choice: dict[str, Any]) -> Reply:
    rest = dumps({"choices": [choice], "usage": _usage(said)})
    body = _identity(said, kind)[:-1] + b"," + rest[1:]
    return Reply(body, headers=_timing_headers(said, total_s) + JSON_TYPE)


def _identity(said: Said, kind: str) -> bytes:
    model = said.site.config.model
    made = {"object": kind, "id": "", "created": said.question.created_s, "model": model}
    return dumps(made | {"system_fingerprint": FINGERPRINT})


def _usage(said: Said) -> dict[str, int]:
    total = said.prompt_tokens + said.output
    return {"prompt_tokens": said.prompt_tokens, "completion_tokens": said.output, "total_tokens": total}


def _tokens(said: Said) -> list[dict[str, Any]]:
    return [
        {"id": token, "text": _text_of(token), "logprob": _LOGPROB, "special": token == tokenizer.EOS_ID}
        for token in said.ids()
    ]


def _text_of(token: int) -> str:
    return tokenizer.EOS_TEXT if token == tokenizer.EOS_ID else tokenizer.decode([token])


def _compute_headers(said: Said) -> Headers:
    return (("x-compute-type", "1-a800-80gb"), ("x-compute-characters", str(len(said.prompt))))


def _timing_headers(said: Said, total_s: float) -> Headers:
    """Milliseconds, rounded down; what the simulated server does not know apart counts as inference."""
    total_ms = int(total_s * 1e3)
    return (
        *_compute_headers(said),
        ("x-compute-time", f"{total_s:.9f}"),
        ("x-total-time", str(total_ms)),
        ("x-validation-time", "0"),
        ("x-queue-time", "0"),
        ("x-inference-time", str(total_ms)),
        ("x-time-per-token", str(total_ms // said.output)),
        ("x-prompt-tokens", str(said.prompt_tokens)),
        ("x-generated-tokens", str(said.output)),
    )
