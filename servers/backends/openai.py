"""The OpenAI protocol: `/v1/completions` and `/v1/chat/completions` of any server that offers them.

The request holds nothing but standard fields, since strict servers refuse others; the output length therefore cannot
be forced, and an answer that ends early is truncated. `continuous_usage_stats`, the one exception, has many servers
count the tokens of each chunk. Some refuse it or even a standard field: `stream_options` (transformers), `max_tokens`
and `temperature` (OpenAI's reasoning models); then it is left out, or goes by its newer name. The decoder is shared
by the OpenAI routes of vLLM, TGI and LightLLM, which differ from each other in two points only: what a chunk without
text means, and whether `[DONE]` always comes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, lt, sub
from typing import Any

import msgspec

from loadgen.servers.backends import base, pooling
from loadgen.servers.backends.dialect import Answer, Dialect, Route, TokenCount, encode_body
from loadgen.servers.backends.lenient import end_marker
from loadgen.servers.backends.repeated_events import drop_repeats, restore_repeats
from loadgen.servers.backends.stream_events import decode_events, finalise, join_halves, note_error, note_finish
from loadgen.workloads.request import Request


class Usage(msgspec.Struct, gc=False):
    """`prompt_tokens` includes special tokens the server added, `completion_tokens` a generated end-of-text token."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


class Delta(msgspec.Struct, gc=False):
    """What a chat chunk adds. Reasoning and tool calls are generated tokens as much as content is. Content may be a
    list of parts, such as text and thinking."""

    role: str | None = None
    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    audio: Any = None


class Choice(msgspec.Struct, gc=False):
    """`text` in completions, `delta` in chat; `token_ids` from vLLM 0.10.2 on, when asked for. Some servers put `usage`
    or an error here."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    usage: Usage | None = None
    error: Any = None


class Chunk(msgspec.Struct, gc=False):
    """One event, as far as it matters here; unknown fields are passed over. One choice, as only one is asked for."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def totals(self) -> Usage | None:
        """The usage of the event or of its choice."""
        if self.usage is not None or not self.choices:
            return self.usage
        return self.choices[0].usage


class ReasoningCount(msgspec.Struct, gc=False):
    """`completion_tokens_details`."""

    reasoning_tokens: TokenCount | None = None


class UsageDetails(msgspec.Struct, gc=False):
    """All counts of a usage, of which most events need only the two of Usage."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None
    completion_tokens_details: ReasoningCount | None = None

    @property
    def reasoning(self) -> int:
        """Reasoning tokens as the server states them, 0 where it does not."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or self.reasoning_tokens or 0

    @property
    def generated(self) -> int | None:
        """Generated tokens. Some servers leave reasoning out of `completion_tokens`: it is added where the total of
        prompt and completion shows that, or where there is more reasoning than completion."""
        completion, reasoning = self.completion_tokens, self.reasoning
        both = None
        if self.total_tokens is not None and self.prompt_tokens is not None:
            both = self.total_tokens - self.prompt_tokens
        if completion is None:
            return both if both is None or both > 0 else None
        return completion + reasoning if reasoning > completion or completion + reasoning == both else completion


class ChoiceDetails(msgspec.Struct, gc=False):
    """A choice that may hold the usage."""

    usage: UsageDetails | None = None


class DetailedUsage(msgspec.Struct, gc=False):
    """An event with usage, for its details."""

    usage: UsageDetails | None = None
    choices: list[ChoiceDetails] | None = None


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
_USAGES = msgspec.json.Decoder(DetailedUsage)
_NONE, _NO_DETAILS = Choice(), UsageDetails()  # Of an event without one
_TOKEN_IDS, _USAGE = attrgetter("token_ids"), attrgetter("usage")
_NO_TEXT = frozenset({"type", "id", "index", "role", "format", "signature", "status", "expires_at"})
"""Fields of a part of content that hold no generated text."""
MANY_AT_ONCE = 16
"""Tokens of a chunk beyond which its text is looked at: some may have been generated before it, and hidden."""


def decode(
    payloads: Sequence[bytes], *, empty_is_token: EmptyRule | None, always_done: bool, one_per_event: bool = False
) -> Answer:
    """Decode an OpenAI stream.

    A chunk's tokens come from the best evidence in it: token ids, else the growth of a running usage total, else one
    for a chunk with text. The last is a count of tokens only where the server sends `one_per_event`. With
    `always_done` nothing but `[DONE]` proves the end; without, a finish reason does where no `[DONE]` came."""
    retained, chunks, runs, broken = drop_repeats(payloads, _CHUNKS, _by_text)
    choices = [chunk.choices[0] if chunk.choices else _NONE for chunk in chunks]
    tokens = [1 if choice.text and choice.token_ids is None else _tokens_in(choice) for choice in choices]
    answer = Answer(tokens + [0] * (len(retained) - len(chunks)))
    for index in [index for index, chunk in enumerate(chunks) if not chunk.choices or chunk.error]:
        note_error(answer, retained[index])
    for index in [index for index, choice in enumerate(choices) if choice.finish_reason or choice.error]:
        _note_end(answer, index, choices[index], retained[index])
    done = end_marker(retained)
    if done is not None or always_done:
        answer.end_event = done
    usages = [chunk.usage for chunk in chunks]
    if not any(usages) and any(map(_USAGE, choices)):
        usages = [choice.usage for choice in choices]
    details, grown = _last_stated(retained, usages, runs) if any(usages) else (_NO_DETAILS, 0)
    answer.prompt_tokens = details.prompt_tokens or None
    total = None if details.generated is None else details.generated + grown
    held = [index for index, chunk in enumerate(chunks) if chunk.choices]
    running = _read_running_totals(held, choices, usages, answer.tokens)
    hidden = _hidden_reasoning(choices, details) if details.reasoning else 0
    counted = None if total is None else total - sum(runs) - hidden
    if not running and empty_is_token:
        _read_empty(held, choices, answer.tokens, counted, empty_is_token)
    elif not running and counted is not None:
        _read_empty_between(held, choices, answer.tokens, counted)
    if any(map(_TOKEN_IDS, choices)):
        answer.chunk_counts = "ids"
    else:
        answer.chunk_counts = "usage" if running else "event" if one_per_event else "chunk"
    finalise(restore_repeats(answer, runs), total, broken)
    if answer.chunk_counts == "chunk" and answer.counted_by == "wire" and empty_is_token is None:
        answer.counted_by = "chunks"
    if answer.counted_by == "server" or answer.chunk_counts != "chunk":
        _note_hidden(answer, payloads, hidden)
    return answer


def answer_text(payloads: Sequence[bytes]) -> str:
    """What was said. Reasoning and tool calls are left out, as chat templates leave them out of a history."""
    chunks, _ = decode_events(payloads, _CHUNKS)
    choices = (chunk.choices[0] for chunk in chunks if chunk.choices)
    said = "".join(choice.text or (choice.delta and _content_text(choice.delta.content)) or "" for choice in choices)
    return join_halves(said)


def openai_dialect(
    server: str,
    endpoint: str,
    more: Callable[[Request], dict[str, Any]],
    *,
    rule: EmptyRule | None,
    always_done: bool = False,
    one_per_event: bool = False,
    dropped_fields: tuple[str, ...] = (),
    **others: Any,
) -> Dialect:
    """A server's OpenAI route: `more` are the fields that it is sent beside the standard ones, or in their place;
    those `dropped_fields` go by the name that REFUSABLE has for them, if any."""

    def taken(fields: dict[str, Any]) -> dict[str, Any]:
        names = {field: REFUSABLE[field] if field in dropped_fields else field for field in fields}
        return {names[field]: value for field, value in fields.items() if names[field]}

    def one_token(text: str, model: str) -> dict[str, Any]:
        requested = {"messages": messages(text)} if endpoint == "chat" else {"prompt": text}
        return taken({"model": model, **requested, "max_tokens": 1, "temperature": 0})

    return Dialect(
        server,
        endpoint,
        PATHS[endpoint],
        encode=lambda request, model: encode_body(taken(_fields(endpoint, request, model) | more(request)), request),
        decode=partial(decode, empty_is_token=rule, always_done=always_done, one_per_event=one_per_event),
        text=answer_text,
        count_by_running=Route(
            PATHS[endpoint], one_token, lambda answer: int(answer["usage"]["prompt_tokens"]), generates=True
        ),
        dropped_fields=dropped_fields,
        **others,
    )


def messages(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def _fields(endpoint: str, request: Request, model: str) -> dict[str, Any]:
    """The standard body of a streamed answer of fixed maximum length. A chat is one user message if nothing was said
    before, and has `max_tokens` too, as servers before 2024-10 know no other limit."""
    requested: dict[str, Any] = {"model": model, "prompt": request.prompt}
    if endpoint == "chat":
        assert isinstance(request.prompt, str), "chat takes text"
        said = request.messages or (("user", request.prompt),)
        requested = {"messages": [{"role": role, "content": content} for role, content in said], "model": model}
        if request.images:
            urls = ({"type": "image_url", "image_url": {"url": str(image)}} for image in request.images)
            requested["messages"][-1]["content"] = [{"type": "text", "text": request.prompt}, *urls]
    limits = {"max_tokens": request.output_tokens, "temperature": 0.0}
    return {**requested, **limits, "stream": True}


def every_chunk_is_token(_choices: Sequence[Choice], _index: int, _missing: bool) -> bool:
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
    if choice.text:
        return 1
    if delta is None:
        return 0
    content = delta.content
    if content and (content.__class__ is str or _has_text(content)):
        return 1
    if delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.refusal:
        return 1
    return int(any(map(_has_text, (delta.function_call, delta.thinking, delta.reasoning_details, delta.audio))))


def _has_text(value: Any) -> bool:
    """Return whether a part of content, or any part of a list of them, holds text."""
    if isinstance(value, dict):
        return any(_has_text(inner) for field, inner in value.items() if field not in _NO_TEXT)
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str) and bool(value)


def _content_text(content: str | list[Any] | None) -> str:
    """Return the text of content, without thinking."""
    if not isinstance(content, list):
        return content or ""
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "".join(part for part in parts if isinstance(part, str))


def _all_text(choice: Choice) -> str:
    """Return everything in a choice that a model generated as text."""
    delta = choice.delta or Delta()
    result = [choice.text, delta.content, delta.reasoning or delta.reasoning_content, delta.refusal]
    result += [delta.tool_calls, delta.function_call, delta.thinking, delta.audio]
    return "".join(map(_text_in, result))


def _text_in(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_text_in(inner) for field, inner in value.items() if field not in _NO_TEXT)
    if isinstance(value, list):
        return "".join(map(_text_in, value))
    return value if isinstance(value, str) else ""


def _by_text(chunk: Chunk) -> bool:
    """Whether it holds one token, which only its text shows, and ends nothing."""
    choice = chunk.choices[0] if chunk.choices else _NONE
    plain_chunk = choice.token_ids is None and not choice.finish_reason and not chunk.error and not choice.error
    return bool(plain_chunk and _tokens_in(choice))


def _note_end(answer: Answer, index: int, choice: Choice, payload: bytes) -> None:
    """Take a choice with a finish reason or an error."""
    if choice.error:
        note_error(answer, json.dumps({"error": choice.error}).encode())
    if choice.finish_reason:
        answer.end_event = index
        note_finish(answer, choice.finish_reason, payload)


def _last_stated(
    payloads: Sequence[bytes], usages: Sequence[Usage | None], runs: Sequence[int]
) -> tuple[UsageDetails, int]:
    """Return all counts of the last usage that states a number, and by how much its total grew in the events that are
    left out behind it."""
    for index in reversed(range(len(usages))):
        usage = usages[index]
        if usage is not None and (usage.completion_tokens is not None or usage.prompt_tokens is not None):
            (event, *_), _ = decode_events([payloads[index]], _USAGES)
            choice = event.choices[0] if event.choices else ChoiceDetails()
            return event.usage or choice.usage or _NO_DETAILS, runs[index]
    return _NO_DETAILS, 0


def _hidden_reasoning(choices: list[Choice], details: UsageDetails) -> int:
    """Return how many reasoning tokens the server counted and did not stream."""
    return 0 if any(choice.delta and _shows_reasoning(choice.delta) for choice in choices) else details.reasoning


def _note_hidden(answer: Answer, payloads: Sequence[bytes], hidden: int) -> None:
    """Keep what tells tokens that were never streamed from chunks of several tokens, where it may matter. `hidden` is
    the number of reasoning tokens that were not streamed, as far as the server states it."""
    missing = answer.counted_by == "server" and (answer.output_tokens or 0) > sum(answer.tokens)
    many = max(answer.tokens, default=0) > MANY_AT_ONCE
    if not any(answer.tokens) or not (missing or many):
        return
    answer.hidden_tokens = hidden
    if answer.chunk_counts != "chunk" and not many:
        return
    chunks, _ = decode_events(payloads, _CHUNKS)
    texts = [_all_text(chunk.choices[0]) if chunk.choices else "" for chunk in chunks]
    if "think>" in "".join(texts):  # reasoning that came as content
        answer.hidden_tokens = 0
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    if answer.chunk_counts == "chunk":
        answer.text_bytes = sum(sizes)
        answer.phrase_chunks = sum(len(text.split(None, 1)) > 1 for text in texts)
    elif not answer.hidden_tokens:
        # More tokens than bytes of text: all but one were generated before it, and not streamed.
        beyond = [
            tokens - 1 for tokens, size in zip(answer.tokens, sizes, strict=False) if tokens > max(size, MANY_AT_ONCE)
        ]
        answer.hidden_tokens = min(sum(beyond), answer.output_tokens or 0)


def _shows_reasoning(delta: Delta) -> bool:
    if isinstance(delta.content, list):
        return any(isinstance(part, dict) and "thinking" in str(part.get("type")) for part in delta.content)
    return bool(delta.reasoning or delta.reasoning_content or delta.thinking or delta.reasoning_details)


def _read_running_totals(held: list[int], choices: list[Choice], usages: list[Usage | None], tokens: list[int]) -> bool:
    """Count by running totals if every choice with text came with one that grew as it should; if not, change nothing.
    A choice without text may come without a total: it opens or closes the stream, and adds no token."""
    totals = [usage.completion_tokens or 0 for index in held if (usage := usages[index])]
    if not totals or any(map(_TOKEN_IDS, choices)):
        return False
    if len(totals) < len(held):
        totals = _totals_of_text(held, usages, tokens)
    if not totals:
        return False
    grown, shown = [*map(sub, totals, [0, *totals])], [*map(tokens.__getitem__, held)]
    if any(map(lt, grown, shown)):
        return False  # a total given once, at the end or at the start, and not a running one
    for index, new in zip(held, grown, strict=True) if grown != shown else ():
        # Many tokens in a chunk without text were not streamed: a total that includes hidden ones ends the stream.
        tokens[index] = 0 if new > MANY_AT_ONCE and not tokens[index] else new
    return True


def _totals_of_text(held: list[int], usages: list[Usage | None], tokens: list[int]) -> list[int]:
    """Return the total after each choice held; none where a choice with text lacks one, or no choice has text."""
    totals, total, any_text = list[int](), 0, False
    for index in held:
        usage = usages[index]
        if usage is not None and usage.completion_tokens is not None:
            total = usage.completion_tokens
        elif tokens[index]:
            return []
        any_text = any_text or tokens[index] > 0
        totals.append(total)
    return totals if any_text else []


def _read_empty(held: list[int], choices: list[Choice], tokens: list[int], total: int | None, rule: EmptyRule) -> None:
    """Count the choices without text or token ids by the dialect's rule, unless the server's total does not cover them
    all: nobody knows which of them it counted."""
    choices, empty, known = [choices[index] for index in held], list[int](), sum(tokens)
    for position, index in enumerate(held):
        shown = tokens[index] or choices[position].token_ids is not None
        if not shown and rule(choices, position, total is not None and total > known + len(empty)):
            empty.append(index)
    if total is None or known + len(empty) <= total:
        for index in empty:
            tokens[index] = 1


def _read_empty_between(held: list[int], choices: list[Choice], tokens: list[int], total: int) -> None:
    """Count the choices without text that follow a text and end nothing (half of a character, say) as a token each, if
    the server's total is exactly the number of tokens then."""
    missing = total - sum(tokens)
    if missing <= 0:
        return
    first = next((index for index in held if tokens[index]), len(tokens))
    ended = next((index for index in held if choices[index].finish_reason), len(tokens))
    between = [index for index in held if first < index < ended and not tokens[index]]
    empty = [index for index in between if choices[index].text is not None or choices[index].delta is not None]
    if len(empty) == missing and not any(choices[index].token_ids is not None for index in empty):
        for index in empty:
            tokens[index] = 1


def _recognise(ask: base.GetJson, url: str) -> base.ServerFacts | None:
    status, models = ask("/v1/models")
    card = base.first_model_card(models)
    if status != 200 or "id" not in card:
        return None
    # transformers serve and many hosted ones have chat only. llama.cpp answers 404 to a GET of either.
    chat_only = base.route_exists(ask, PATHS["chat"]) and not base.route_exists(ask, PATHS["completions"])
    limits = base.known_limits(OPENAI.limits, card)
    return base.ServerFacts("openai", url, "", str(card["id"]), limits, endpoint="chat" if chat_only else "")


def _generic(endpoint: str, dropped_fields: tuple[str, ...] = ()) -> Dialect:
    def drop_refused_field(words: str) -> Dialect | None:
        named = next((field for field in REFUSABLE if field in words and field not in dropped_fields), None)
        return _generic(endpoint, (*dropped_fields, named)) if named else None

    usage = INCLUDE_USAGE if "continuous_usage_stats" in dropped_fields else RUNNING_USAGE
    return openai_dialect(
        *("openai", endpoint, lambda _: usage),
        rule=None,
        dropped_fields=dropped_fields,
        drop_refused_field=drop_refused_field,
        fixed_output=True,
    )


OPENAI = base.Backend(
    name="openai",
    title="OpenAI-style",
    phrase="an OpenAI-style server",
    native="completions",
    dialects={endpoint: _generic(endpoint) for endpoint in PATHS}
    | {endpoint: pooling.pooling_dialect("openai", endpoint) for endpoint in pooling.PATHS},
    identify=_recognise,
    limits={"max_model_len": base.ServerLimit("--max-model-len", "total")},
    # Of a server that is spoken to by this protocol only. They have not been tried against a real one.
    metrics=base.MetricNames(
        prefix="sglang:",
        owner="sglang",
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
