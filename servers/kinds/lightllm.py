"""LightLLM: `/generate_stream` (native), `/v1/chat/completions` and `/v1/completions`. Checked on 0.0.1 to 1.2.0.

A request is checked only after the 200 has been sent: up to 1.1.0 a refused one is a cut connection, from 1.2.0 on an
error event. So nothing but the `finished` event, or the chat's finish reason or `[DONE]`, proves an answer complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from servers.kinds.base import Answer, Dialect
from servers.kinds.errors import error_text
from servers.kinds.events import decode_events, note_broken, note_error, note_finish, settle_count
from servers.kinds.openai import (
    Choice,
    always,
    chat_fields,
    completions_fields,
    decode,
    has_role,
    text,
    unless_marker,
)
from workloads.request import Request


class Token(msgspec.Struct, gc=False):
    """The counts are of the whole answer so far. None or 0 where the server did not know (before 2024, 0.0.1)."""

    count_output_tokens: int | None = None
    prompt_tokens: int | None = None


class Said(msgspec.Struct, gc=False):
    """A token's text; `special` tokens are none of it."""

    text: str | None = None
    special: bool = False


class SaidEvent(msgspec.Struct, gc=False):
    """One event of `/generate_stream` again, read for its text."""

    token: Said | None = None


class Event(msgspec.Struct, gc=False):
    """One event of `/generate_stream`; the one with `finished` carries a token too."""

    token: Token | None = None
    finished: bool = False
    finish_reason: str | None = None


_EVENTS = msgspec.json.Decoder(Event)
_SAID = msgspec.json.Decoder(SaidEvent)


def _encode_generate(request: Request, _model: str) -> bytes:
    # `parameters` is mandatory and, in 0.0.1, strict; `ignore_eos` there is all that a fixed length takes.
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    parameters = {"max_new_tokens": request.output_tokens, "ignore_eos": True, **sampling}
    return msgspec.json.encode({"inputs": request.prompt, "parameters": parameters})


def _decode_generate(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, _EVENTS)
    answer = Answer([0] * len(payloads))
    count = 0
    for index, event in enumerate(events):
        if event.token is None:
            note_error(answer, payloads[index])
        elif event.token.count_output_tokens:
            answer.tokens[index] = max(0, event.token.count_output_tokens - count)
            count = max(count, event.token.count_output_tokens)
            answer.prompt_tokens = event.token.prompt_tokens or None
        else:
            answer.tokens[index] = 1
        if event.finished:
            answer.end_event = index
            note_finish(answer, event.finish_reason or "", payloads[index])
    settle_count(answer, count or None)
    note_broken(answer, broken)
    return answer


def _text(payloads: Sequence[bytes]) -> str:
    events, _ = decode_events(payloads, _SAID)
    return "".join(event.token.text or "" for event in events if event.token and not event.token.special)


def _encode_completions(request: Request, model: str) -> bytes:
    return msgspec.json.encode(completions_fields(request, model) | _exact(request))


def _encode_chat(request: Request, model: str) -> bytes:
    return msgspec.json.encode(chat_fields(request, model) | _exact(request))


def _exact(request: Request) -> dict[str, Any]:
    # 1.1.0 always samples in chat, whatever `do_sample` says; there the temperature of 0 makes it greedy.
    return {"ignore_eos": True, "do_sample": request.temperature > 0}


def _chat_empty_is_token(choices: Sequence[Choice], index: int, missing: bool) -> bool:
    """Up to 1.1.0 every chunk has a role and is a token; from 1.2.0 on the first has one, alone, and is none."""
    every_role = all(map(has_role, choices[:2])) and (len(choices) > 1 or bool(choices[0].finish_reason))
    return every_role or unless_marker(choices, index, missing)


GENERATE = Dialect(
    server="lightllm",
    endpoint="generate",
    path="/generate_stream",
    token_ids=False,  # 1.0.1 and later take them, earlier versions answer 417
    fixed_output=True,
    encode=_encode_generate,
    decode=_decode_generate,
    text=_text,
    error_text=error_text,
)
COMPLETIONS = Dialect(
    server="lightllm",
    endpoint="completions",
    path="/v1/completions",
    token_ids=True,
    fixed_output=True,
    encode=_encode_completions,
    decode=partial(decode, empty_is_token=always, always_done=True),
    text=text,
    error_text=error_text,
)
CHAT = Dialect(
    server="lightllm",
    endpoint="chat",
    path="/v1/chat/completions",
    token_ids=False,
    fixed_output=True,
    encode=_encode_chat,
    decode=partial(decode, empty_is_token=_chat_empty_is_token, always_done=False),  # 1.1.0 never sends [DONE]
    text=text,
    error_text=error_text,
)
