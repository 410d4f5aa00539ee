"""The OpenAI protocol: `/v1/completions` and `/v1/chat/completions` of any server that offers them.

The request holds nothing but standard fields, since strict servers refuse others; the output length therefore cannot
be forced, and an answer that ends early is truncated. `continuous_usage_stats`, the one exception, has many servers
count the tokens of each chunk. Some refuse it or even a standard field: `stream_options` (transformers), `max_tokens`
and `temperature` (OpenAI's reasoning models); then it is left out, or goes by its newer name. The decoder is shared
by the OpenAI routes of vLLM, TGI and LightLLM, which differ from each other in two points only: what a chunk without
text means, and whether `[DONE]` always comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, lt, sub
from typing import Any

import msgspec

from servers.kinds import base, pooling
from servers.kinds.alike import condensed, expanded
from servers.kinds.dialect import Answer, Dialect, Route, TokenCount, encoded
from servers.kinds.events import DONE, decode_events, note_error, note_finish, settle
from workloads.request import Request


class Usage(msgspec.Struct, gc=False):
    """`prompt_tokens` includes special tokens the server added, `completion_tokens` a generated end-of-text token."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


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
    error: msgspec.Raw = msgspec.Raw()


EmptyRule = Callable[[Sequence[Choice], int, bool], bool]
"""(choices, index, missing): does choice `index` of the answer, which has no text, stand for a generated token? Without
a rule none does. `missing` is true when the server's total is larger than what the other choices hold."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
INCLUDE_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
RUNNING_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""The tokens of each chunk too, from vLLM, SGLang and TensorRT-LLM."""

REFUSABLE = {
    "continuous_usage_stats": "",  # before the field that it is in: refusals name both
    "stream_options": "",
    "temperature": "",
    "max_tokens": "max_completion_tokens",
}
"""Fields that some server refuses, and what they are called there; empty: nothing takes their place."""

_CHUNKS = msgspec.json.Decoder(Chunk)
_NONE = Choice()  # Of an event without one
_TOKEN_IDS = attrgetter("token_ids")


def decode(payloads: Sequence[bytes], *, empty_is_token: EmptyRule | None, always_done: bool) -> Answer:
    """Decode an OpenAI stream. A chunk's tokens come from the best evidence in it: token ids, else the growth of a
    running usage total, else one for a chunk with text, which counts chunks where nothing is known of the server. With
    `always_done` nothing but `[DONE]` proves the end; without, a finish reason does where no `[DONE]` came."""
    payloads, chunks, runs, broken = condensed(payloads, _CHUNKS, _by_text)
    choices = [chunk.choices[0] if chunk.choices else _NONE for chunk in chunks]
    tokens = [1 if choice.text and choice.token_ids is None else _tokens_in(choice) for choice in choices]
    answer = Answer(tokens + [0] * (len(payloads) - len(chunks)))
    for index in [index for index, chunk in enumerate(chunks) if not chunk.choices or chunk.error]:
        if payloads[index] != DONE:
            note_error(answer, payloads[index])
    for index in [index for index, choice in enumerate(choices) if choice.finish_reason]:
        answer.end_event = index
        note_finish(answer, choices[index].finish_reason or "", payloads[index])
    if DONE in payloads:
        answer.end_event = payloads.index(DONE)
    elif always_done:
        answer.end_event = None
    usages = [chunk.usage for chunk in chunks]
    last = next(filter(None, reversed(usages)), Usage())
    answer.prompt_tokens, total = last.prompt_tokens, last.completion_tokens
    held = [index for index, chunk in enumerate(chunks) if chunk.choices]
    if not _read_running_totals(held, choices, usages, answer.tokens) and empty_is_token:
        _read_empty(held, choices, answer.tokens, total, empty_is_token)
    expanded(settle(answer, total, broken), runs)
    if empty_is_token is None and total is None:
        answer.counted_by = "chunks"
    return answer


def text(payloads: Sequence[bytes]) -> str:
    """What was said. Reasoning and tool calls are left out, as chat templates leave them out of a history."""
    chunks, _ = decode_events(payloads, _CHUNKS)
    said = (chunk.choices[0] for chunk in chunks if chunk.choices)
    return "".join(each.text or (each.delta and each.delta.content) or "" for each in said)


def dialect(
    server: str,
    endpoint: str,
    more: Callable[[Request], dict[str, Any]],
    *,
    rule: EmptyRule | None,
    always_done: bool = False,
    left_out: tuple[str, ...] = (),
    **others: Any,
) -> Dialect:
    """A server's OpenAI route: `more` are the fields that it is sent beside the standard ones, or in their place;
    those `left_out` go by the name that REFUSABLE has for them, if any."""

    def taken(fields: dict[str, Any]) -> dict[str, Any]:
        names = {field: REFUSABLE[field] if field in left_out else field for field in fields}
        return {names[field]: value for field, value in fields.items() if names[field]}

    def one_token(text: str, model: str) -> dict[str, Any]:
        asked = {"messages": messages(text)} if endpoint == "chat" else {"prompt": text}
        return taken({"model": model, **asked, "max_tokens": 1, "temperature": 0})

    return Dialect(
        server,
        endpoint,
        PATHS[endpoint],
        encode=lambda request, model: encoded(taken(_fields(endpoint, request, model) | more(request)), request),
        decode=partial(decode, empty_is_token=rule, always_done=always_done),
        text=text,
        count_by_running=Route(
            PATHS[endpoint], one_token, lambda answer: int(answer["usage"]["prompt_tokens"]), generates=True
        ),
        left_out=left_out,
        **others,
    )


def messages(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def _fields(endpoint: str, request: Request, model: str) -> dict[str, Any]:
    """The standard body of a streamed answer of fixed maximum length. A chat is one user message if nothing was said
    before, and has `max_tokens` too, as servers before 2024-10 know no other limit."""
    asked: dict[str, Any] = {"model": model, "prompt": request.prompt}
    if endpoint == "chat":
        assert isinstance(request.prompt, str), "chat takes text"
        said = request.messages or (("user", request.prompt),)
        asked = {"messages": [{"role": role, "content": content} for role, content in said], "model": model}
        if request.images:
            urls = ({"type": "image_url", "image_url": {"url": str(image)}} for image in request.images)
            asked["messages"][-1]["content"] = [{"type": "text", "text": request.prompt}, *urls]
    limits = {"max_tokens": request.output_tokens, "temperature": 0.0}
    return {**asked, **limits, "stream": True}


def always(_choices: Sequence[Choice], _index: int, _missing: bool) -> bool:
    """An EmptyRule: every chunk is a token, with text or without."""
    return True


def unless_marker(choices: Sequence[Choice], index: int, missing: bool) -> bool:
    """An EmptyRule: a chunk without text is a token (half of a character, say), except that one with a role opens the
    answer, and one with a finish reason closes it and is a token only when the server's total lacks one."""
    return missing if choices[index].finish_reason else not has_role(choices[index])


def has_role(choice: Choice) -> bool:
    """Whether this is a chat chunk that names who speaks."""
    return choice.delta is not None and bool(choice.delta.role)


def _tokens_in(choice: Choice) -> int:
    """Generated tokens in a choice, as far as it shows them itself."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    shown = delta and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.refusal)
    return 1 if choice.text or shown else 0


def _by_text(chunk: Chunk) -> bool:
    """Whether it holds one token, which only its text shows, and ends nothing."""
    choice = chunk.choices[0] if chunk.choices else _NONE
    return bool(choice.token_ids is None and _tokens_in(choice) and not choice.finish_reason and not chunk.error)


def _read_running_totals(held: list[int], choices: list[Choice], usages: list[Usage | None], tokens: list[int]) -> bool:
    """Count by running totals if every choice held came with one that grew as it should; if not, change nothing."""
    totals = [usage.completion_tokens or 0 for index in held if (usage := usages[index])]
    if len(totals) < len(held) or any(map(_TOKEN_IDS, choices)):
        return False
    grown, shown = [*map(sub, totals, [0, *totals])], [*map(tokens.__getitem__, held)]
    if any(map(lt, grown, shown)):
        return False  # a total given once, at the end or at the start, and not a running one
    for index, new in zip(held, grown, strict=True) if grown != shown else ():
        tokens[index] = new
    return True


def _read_empty(held: list[int], choices: list[Choice], tokens: list[int], total: int | None, rule: EmptyRule) -> None:
    """Count the choices without text or token ids by the dialect's rule, unless the server's total does not cover them
    all: nobody knows which of them it counted."""
    choices, empty, known = [choices[index] for index in held], list[int](), sum(tokens)
    for place, index in enumerate(held):
        shown = tokens[index] or choices[place].token_ids is not None
        if not shown and rule(choices, place, total is not None and total > known + len(empty)):
            empty.append(index)
    if total is None or known + len(empty) <= total:
        for index in empty:
            tokens[index] = 1


def _recognise(ask: base.Ask, url: str) -> base.ServerFacts | None:
    status, models = ask("/v1/models")
    card = base.first_card(models)
    if status != 200 or "id" not in card:
        return None
    # transformers serve and many hosted ones have chat only. llama.cpp answers 404 to a GET of either.
    chat_only = base.exists(ask, PATHS["chat"]) and not base.exists(ask, PATHS["completions"])
    limits = base.stated(OPENAI.limits, card)
    return base.ServerFacts("openai", url, "", str(card["id"]), limits, endpoint="chat" if chat_only else "")


def _generic(endpoint: str, left_out: tuple[str, ...] = ()) -> Dialect:
    def refused(words: str) -> Dialect | None:
        named = next((field for field in REFUSABLE if field in words and field not in left_out), None)
        return _generic(endpoint, (*left_out, named)) if named else None

    usage = INCLUDE_USAGE if "continuous_usage_stats" in left_out else RUNNING_USAGE
    return dialect(
        *("openai", endpoint, lambda _: usage), rule=None, left_out=left_out, refused=refused, fixed_output=True
    )


OPENAI = base.ServerKind(
    name="openai",
    title="OpenAI-style",
    phrase="an OpenAI-style server",
    native="completions",
    dialects={endpoint: _generic(endpoint) for endpoint in PATHS}
    | {endpoint: pooling.dialect("openai", endpoint) for endpoint in pooling.PATHS},
    recognise=_recognise,
    limits={"max_model_len": base.ServerLimit("--max-model-len", "total")},
    # Of a server that is spoken to by this protocol only. They have not been tried against a real one.
    metrics=base.MetricNames(
        prefix="sglang:",
        of="sglang",
        names={
            "running": ("sglang:num_running_reqs",),
            "waiting": ("sglang:num_queue_reqs",),
            "kv_used": ("sglang:token_usage",),
            "prompt_tokens": ("sglang:prompt_tokens_total",),
            "output_tokens": ("sglang:generation_tokens_total",),
            "cached_prompt_tokens": ("sglang:cached_tokens_total",),
        },
    ),
)
