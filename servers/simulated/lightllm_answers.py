"""The bytes of LightLLM's answers: native, chat and completions, streamed and whole (api_lightllm, api_openai)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servers.simulated import tokenizer
from servers.simulated.bodies import dumps
from servers.simulated.wire import DONE, Events, Generation, Question, Reply, Site, event

_LOGPROB = -1.5
_FAILURE = (event(dumps({"error": {"message": "simulated failure", "type": "server_error", "code": "stream_error"}})),)
"""An error after the stream has begun, and the last there is (api_openai.py, `_safe_stream_wrapper`)."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says to one question: how many tokens, and why it ends."""

    site: Site
    question: Question
    streamed: bool
    prompt_tokens: int
    asked: int
    output: int
    ended: str
    """`length` or `stop`."""

    @property
    def start(self) -> int:
        return self.site.babble.start(self.question.index)

    def ids(self) -> list[int]:
        return self.site.babble.ids[self.start : self.start + self.output]

    def text(self) -> str:
        return tokenizer.decode(self.ids())


def native(said: Said) -> Generation:
    """/generate_stream and /generate. Events have no blank after `data:`, and there is no [DONE]."""
    ids, texts, start = said.site.babble.ids, said.site.babble.texts, said.start
    used = dumps(_input_usage(said))
    counts = b'"prompt_tokens":%d,"logprobs":{}},"generated_text":null,' % said.prompt_tokens
    quiet = b'%b"finished":false,"finish_reason":null,"details":null,"input_usage":%b}\n\n' % (counts, used)
    ended = said.ended.encode()
    over = b'%b"finished":true,"finish_reason":"%b","details":null,"input_usage":%b}\n\n' % (counts, ended, used)

    def event_of(first: int, tokens: int, last: bool) -> bytes:  # noqa: ARG001 - one token per event
        at = start + first
        begin = b'data:{"token":{"id":%d,"text":"%b","logprob":-1.5,"special":false,"count_output_tokens":%d,'
        return begin % (ids[at], texts[at], first + 1) + (over if last else quiet)

    return _generation(said, event_of, lambda _: _native_answer(said))


def chat(said: Said) -> Generation:
    """/v1/chat/completions. The role comes first in an event of its own, together with the first token."""
    texts, start = said.site.babble.texts, said.start
    head = b"data: " + _identity(said, f"chatcmpl-{_number(said):032x}", "chat.completion.chunk")[:-1]
    begin = head + b',"choices":[{"index":0,"delta":{"content":"'
    quiet = b'"},"logprobs":null,"token_ids":null,"finish_reason":null}]}\n\n'
    over = b'"},"finish_reason":"%b","logprobs":null,"token_ids":null,"stop_reason":null}]}\n\n' % said.ended.encode()
    role = b'%b,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    role_chunk = role % head + b'"prompt_token_ids":null}\n\n'

    def event_of(first: int, tokens: int, last: bool) -> bytes:  # noqa: ARG001 - one token per event
        return begin + texts[start + first] + (over if last else quiet)

    def answer(_: float) -> Reply:
        message = {"role": "assistant", "content": said.text(), "reasoning": "", "reasoning_content": None}
        message["tool_calls"] = None
        choice = {"index": 0, "message": message, "finish_reason": said.ended}
        identity = _identity(said, str(_number(said)), "chat.completion")
        return Reply(identity[:-1] + b"," + dumps({"choices": [choice], "usage": _usage(said)})[1:])

    usage = b'%b,"choices":[],"usage":%b}\n\n' % (head, dumps(_usage(said)))
    return _generation(said, event_of, answer, opening=(role_chunk,), role_only=(role_chunk,), closing=(usage, DONE))


def completions(said: Said) -> Generation:
    """/v1/completions. Usage always comes, in a chunk of its own before [DONE]."""
    texts, start = said.site.babble.texts, said.start
    head = b"data: " + _identity(said, str(_number(said)), "text_completion")[:-1]
    begin = head + b',"choices":[{"text":"'
    quiet = b'","index":0,"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    over = b'","index":0,"logprobs":null,"finish_reason":"%b"}],"usage":null}\n\n' % said.ended.encode()

    def event_of(first: int, tokens: int, last: bool) -> bytes:  # noqa: ARG001 - one token per event
        return begin + texts[start + first] + (over if last else quiet)

    def answer(_: float) -> Reply:
        choice = {"text": said.text(), "index": 0, "logprobs": None, "finish_reason": said.ended}
        identity = _identity(said, f"cmpl-{_number(said):08x}", "text_completion")
        return Reply(identity[:-1] + b"," + dumps({"choices": [choice], "usage": _usage(said)})[1:])

    usage = b'%b,"choices":[],"usage":%b}\n\n' % (head, dumps(_usage(said)))
    return _generation(said, event_of, answer, closing=(usage, DONE))


def _generation(
    said: Said,
    event_of: Callable[[int, int, bool], bytes],
    answer: Callable[[float], Reply],
    *,
    opening: Events = (),
    closing: Events = (),
    role_only: Events = (),
) -> Generation:
    return Generation(
        prompt_tokens=said.prompt_tokens,
        output_tokens=said.output,
        asked_tokens=said.asked,
        finish_reason=said.ended,
        streamed=said.streamed,
        event=event_of,
        answer=answer,
        merges=False,
        opening=opening,
        closing=closing,
        role_only=role_only,
        failure=_FAILURE,
    )


def _native_answer(said: Said) -> Reply:
    """No content type is set. `generated_text` is a list."""
    body: dict[str, Any] = {
        "generated_text": [said.text()],
        "count_output_tokens": said.output,
        "finish_reason": said.ended,
        "prompt_tokens": said.prompt_tokens,
    }
    if said.question.body["parameters"].get("return_details"):
        body["tokens"] = [_token(said, place, token) for place, token in enumerate(said.ids())]
    body |= {"logprobs": [{} for _ in range(said.output)], "input_usage": _input_usage(said)}
    return Reply(dumps(body), headers=())


def _token(said: Said, place: int, token: int) -> dict[str, Any]:
    counts = {"count_output_tokens": place + 1, "prompt_tokens": said.prompt_tokens}
    return {"id": token, "logprob": _LOGPROB, "special": False, **counts, "text": tokenizer.decode([token])}


def _input_usage(said: Said) -> dict[str, int]:
    return {"input_text_tokens": said.prompt_tokens, "input_audio_tokens": 0, "input_image_tokens": 0}


def _usage(said: Said) -> dict[str, Any]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.output,
        "total_tokens": said.prompt_tokens + said.output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _identity(said: Said, request: str, kind: str) -> bytes:
    model = said.question.body.get("model", said.site.config.model)
    return dumps({"id": request, "object": kind, "created": said.question.created_s, "model": model})


def _number(said: Said) -> int:
    """Request ids count up in steps of eight (`req_id_generator.py`)."""
    return 8 * (said.question.index + 1)
