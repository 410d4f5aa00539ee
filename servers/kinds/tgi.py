"""Text Generation Inference: `/generate_stream` (native), `/v1/chat/completions` and `/v1/completions`.

Checked on 1.0.3 to 3.3.7. One event is one token on every route, text or not. No route takes token ids and none can
ignore the end-of-text token, so an answer may be shorter than asked and complete all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from servers.kinds.base import Answer, Dialect
from servers.kinds.errors import error_text
from servers.kinds.events import decode_events, note_broken, note_error, note_finish, settle_count
from servers.kinds.openai import always, chat_fields, completions_fields, decode, text
from workloads.request import Request


class Token(msgspec.Struct, gc=False):
    """That there is one is all that matters."""


class Details(msgspec.Struct, gc=False):
    """In the last event, if asked for. `input_length` since 2.3.0, the special tokens the server added included."""

    finish_reason: str | None = None
    generated_tokens: int | None = None
    input_length: int | None = None


class Event(msgspec.Struct, gc=False):
    """One event of `/generate_stream`. `generated_text` is null in all but the last, which carries a token too."""

    token: Token | None = None
    generated_text: str | None = None
    details: Details | None = None


_EVENTS = msgspec.json.Decoder(Event)


def _encode_generate(request: Request, _model: str) -> bytes:
    assert isinstance(request.prompt, str), "TGI takes text"
    # Any temperature but 1.0 switches sampling on, and 0 is refused: greedy means sending none.
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    parameters = {"max_new_tokens": request.output_tokens, "details": True, **sampling}
    return msgspec.json.encode({"inputs": request.prompt, "parameters": parameters})


def _decode_generate(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, _EVENTS)
    answer = Answer([0] * len(payloads))
    answer.tokens[: len(events)] = [0 if event.token is None else 1 for event in events]
    total = None
    for index, event in enumerate(events):
        if event.token is None:
            note_error(answer, payloads[index])
        if event.generated_text is not None:
            answer.end_event = index
            details = event.details or Details()
            total, answer.prompt_tokens = details.generated_tokens, details.input_length
            note_finish(answer, details.finish_reason or "", payloads[index])
    settle_count(answer, total)
    note_broken(answer, broken)
    return answer


def _text(payloads: Sequence[bytes]) -> str:
    """The last event repeats the whole answer, special tokens left out."""
    events, _ = decode_events(payloads, _EVENTS)
    return "".join(event.generated_text or "" for event in events)


def _encode_completions(request: Request, _model: str) -> bytes:
    assert isinstance(request.prompt, str), "TGI takes text"
    return msgspec.json.encode(completions_fields(request, _BASE_MODEL))


def _encode_chat(request: Request, _model: str) -> bytes:
    fields: dict[str, Any] = chat_fields(request, _BASE_MODEL)
    return msgspec.json.encode({**fields, "stream_options": {"include_usage": True}})


_BASE_MODEL = "tgi"
"""Any other name in `model` is taken for a LoRA adapter's."""

# Before 2.2.0 the OpenAI routes ended without [DONE].
_decode = partial(decode, empty_is_token=always, always_done=False)

GENERATE = Dialect(
    server="tgi",
    endpoint="generate",
    path="/generate_stream",
    token_ids=False,
    fixed_output=False,
    encode=_encode_generate,
    decode=_decode_generate,
    text=_text,
    error_text=error_text,
)
COMPLETIONS = Dialect(
    server="tgi",
    endpoint="completions",
    path="/v1/completions",
    token_ids=False,
    fixed_output=False,
    encode=_encode_completions,
    decode=_decode,
    text=text,
    error_text=error_text,
)
CHAT = Dialect(
    server="tgi",
    endpoint="chat",
    path="/v1/chat/completions",
    token_ids=False,
    fixed_output=False,
    encode=_encode_chat,
    decode=_decode,
    text=text,
    error_text=error_text,
)
