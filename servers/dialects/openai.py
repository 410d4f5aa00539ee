"""The OpenAI protocol: `/v1/completions` and `/v1/chat/completions` of any server that offers them.

The request holds nothing but standard fields, since strict servers refuse others; the output length therefore
cannot be forced. The decoder is shared by the OpenAI routes of vLLM, TGI and LightLLM, which differ from each
other in two points only: what a chunk without text means, and whether `[DONE]` always comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from servers.dialects.base import Answer, Dialect
from servers.dialects.errors import error_text
from servers.dialects.events import DONE, decode_events, note_broken, note_error, note_finish, settle_count
from workloads.request import Request


class Usage(msgspec.Struct, gc=False):
    """`prompt_tokens` includes special tokens the server added, `completion_tokens` a generated end-of-text token."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct, gc=False):
    """What a chat chunk adds. Reasoning and tool calls are generated tokens as much as content is."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, gc=False):
    """`text` in completions, `delta` in chat; `token_ids` from vLLM 0.10.2 on, when asked for."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event, as far as it matters here; unknown fields are passed over. One choice, as only one is asked for."""

    choices: list[Choice] | None = None
    usage: Usage | None = None


EmptyRule = Callable[[Sequence[Chunk], int, bool], bool]
"""(events, index, missing): does event `index`, which holds a choice without any text, stand for a generated token?
`missing` is true when the server's total is larger than what the other events hold."""

_CHUNKS = msgspec.json.Decoder(Chunk)


def decode(payloads: Sequence[bytes], *, empty_is_token: EmptyRule, always_done: bool) -> Answer:
    """Decode an OpenAI stream. A chunk's tokens come from the best evidence in it: token ids, else the growth of a
    running usage total, else one for a chunk with text.

    With `always_done` nothing but `[DONE]` proves the end; without, a finish reason does where no `[DONE]` came.
    """
    chunks, broken = decode_events(payloads, _CHUNKS)
    answer = Answer([0] * len(payloads))
    empty = _read_choices(chunks, payloads, answer, finish_is_end=not always_done)
    if DONE in payloads:
        answer.end_event = payloads.index(DONE)
    usages = [(index, chunk.usage) for index, chunk in enumerate(chunks) if chunk.usage is not None]
    total = None
    if usages:
        answer.prompt_tokens, total = usages[-1][1].prompt_tokens, usages[-1][1].completion_tokens
    if not _read_running_totals(chunks, usages, answer.tokens):
        for index in empty:
            missing = total is not None and total > sum(answer.tokens)
            answer.tokens[index] = int(empty_is_token(chunks, index, missing))
    settle_count(answer, total)
    note_broken(answer, broken)
    return answer


def completions_fields(request: Request, model: str) -> dict[str, Any]:
    """The standard body of a streamed completion of fixed maximum length."""
    return {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": request.temperature,
        "stream": True,
    }


def chat_fields(request: Request, model: str) -> dict[str, Any]:
    """The same as a chat of one user message. `max_tokens`, as servers before 2024-10 know no other limit."""
    assert isinstance(request.prompt, str), "chat takes text"
    fields = completions_fields(request, model)
    del fields["prompt"]
    return {"messages": [{"role": "user", "content": request.prompt}], **fields}


def never(_chunks: Sequence[Chunk], _index: int, _missing: bool) -> bool:
    """An EmptyRule: no chunk without text is a token."""
    return False


def always(_chunks: Sequence[Chunk], _index: int, _missing: bool) -> bool:
    """An EmptyRule: every chunk is a token, with text or without."""
    return True


def unless_marker(chunks: Sequence[Chunk], index: int, missing: bool) -> bool:
    """An EmptyRule: a chunk without text is a token (half of a character, say), except that one with a role opens the
    answer, and one with a finish reason closes it and is a token only when the server's total lacks one."""
    choice = (chunks[index].choices or [])[0]
    if choice.finish_reason:
        return missing
    return choice.delta is None or not choice.delta.role


def _read_choices(
    chunks: Sequence[Chunk], payloads: Sequence[bytes], answer: Answer, *, finish_is_end: bool
) -> list[int]:
    """Fill in what the choices say. Returns the indices of those of which text alone does not say what they hold."""
    tokens, empty = answer.tokens, []
    for index, chunk in enumerate(chunks):
        if not chunk.choices:
            if payloads[index] != DONE:
                note_error(answer, payloads[index])
            continue
        choice = chunk.choices[0]
        if choice.token_ids is not None:
            tokens[index] = len(choice.token_ids)
        elif choice.text or (choice.delta is not None and _has_text(choice.delta)):
            tokens[index] = 1
        else:
            empty.append(index)
        if choice.finish_reason:
            note_finish(answer, choice.finish_reason, payloads[index])
            answer.end_event = index if finish_is_end else None
    return empty


def _has_text(delta: Delta) -> bool:
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.refusal)


def _read_running_totals(chunks: Sequence[Chunk], usages: Sequence[tuple[int, Usage]], tokens: list[int]) -> bool:
    """Count by running totals if every choice came with one and none with token ids; False, and no change, if not."""
    if len(usages) < 2:
        return False
    choices = [index for index, chunk in enumerate(chunks) if chunk.choices]
    running = [(index, usage.completion_tokens) for index, usage in usages if chunks[index].choices]
    if [index for index, _ in running] != choices or any((chunks[i].choices or [])[0].token_ids for i in choices):
        return False
    before = 0
    for index, total in running:
        tokens[index] = max(0, (total or 0) - before)
        before = max(before, total or 0)
    return True


def _encode_completions(request: Request, model: str) -> bytes:
    fields = completions_fields(request, model)
    return msgspec.json.encode({**fields, "stream_options": {"include_usage": True}})


def _encode_chat(request: Request, model: str) -> bytes:
    fields = chat_fields(request, model)
    return msgspec.json.encode({**fields, "stream_options": {"include_usage": True}})


_decode = partial(decode, empty_is_token=never, always_done=False)

COMPLETIONS = Dialect(
    server="openai",
    endpoint="completions",
    path="/v1/completions",
    token_ids=False,
    fixed_output=False,
    encode=_encode_completions,
    decode=_decode,
    error_text=error_text,
)
CHAT = Dialect(
    server="openai",
    endpoint="chat",
    path="/v1/chat/completions",
    token_ids=False,
    fixed_output=False,
    encode=_encode_chat,
    decode=_decode,
    error_text=error_text,
)
