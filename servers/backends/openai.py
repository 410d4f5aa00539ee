"""The OpenAI protocol: `/v1/completions` and `/v1/chat/completions` of any server that implements it.

Requests contain only standard fields, because strict servers refuse unknown fields. The one exception is
`continuous_usage_stats`, which makes many servers report the token count of each chunk. No standard field forces the
output length, so a response may end early. Such a response counts as truncated.

Some servers refuse `continuous_usage_stats` or even standard fields: `stream_options` (transformers), `max_tokens` and
`temperature` (OpenAI's reasoning models). A refused field is left out or sent under its newer name.

The OpenAI routes of vLLM, TGI, LightLLM and SGLang use the same decoder. These servers differ in two points: the
meaning of a chunk without text, and whether every complete stream ends with `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, lt, sub
from typing import Any

import msgspec
from msgspec.structs import replace

from loadgen.servers.backends import base, pooling
from loadgen.servers.backends.audio import speech_dialect, transcription_dialect
from loadgen.servers.backends.dialect import (
    REFUSABLE,
    Answer,
    ChunkCounts,
    Dialect,
    Encode,
    Route,
    TokenCount,
    encode_body,
    no_calls,
)
from loadgen.servers.backends.draft_counts import note_drafts
from loadgen.servers.backends.lenient import end_marker
from loadgen.servers.backends.messages import api_key_headers, messages_dialect
from loadgen.servers.backends.reasoning import contains_tags, note_reasoning, note_tagged_reasoning
from loadgen.servers.backends.repeated_events import drop_repeats, restore_repeats
from loadgen.servers.backends.responses import responses_dialect
from loadgen.servers.backends.stream_events import decode_events, finalise, join_halves, note_error, note_finish
from loadgen.servers.backends.tool_calls import chat_calls
from loadgen.workloads.request import Request


class Usage(msgspec.Struct, gc=False):
    """The `usage` object of a stream event.

    `prompt_tokens` includes special tokens that the server adds. `completion_tokens` includes the end-of-text token if
    it was generated."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None


class Delta(msgspec.Struct, gc=False):
    """The new content in a chat chunk.

    Reasoning and tool calls are generated tokens, like content. `content` may be a list of parts, such as text and
    thinking."""

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
    """One choice of a chunk, with `text` in completions and `delta` in chat.

    vLLM 0.10.2 and later sends `token_ids` on request. Some servers put `usage` or an error into the choice."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    usage: Usage | None = None
    error: Any = None


class Chunk(msgspec.Struct, gc=False):
    """A stream event, with the fields that loadgen reads.

    A chunk has at most one choice, because requests ask for one."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def totals(self) -> Usage | None:
        """The `usage` object of the event or of its choice, or None if there is none."""
        if self.usage is not None or not self.choices:
            return self.usage
        return self.choices[0].usage


class ReasoningCount(msgspec.Struct, gc=False):
    """The object `completion_tokens_details` within `usage`."""

    reasoning_tokens: TokenCount | None = None


class CachedCount(msgspec.Struct, gc=False):
    """The object `prompt_tokens_details` within `usage`."""

    cached_tokens: TokenCount | None = None


class UsageDetails(msgspec.Struct, gc=False):
    """A `usage` object with all of its counts. Most events need only the two counts of `Usage`."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None
    completion_tokens_details: ReasoningCount | None = None
    prompt_tokens_details: CachedCount | None = None

    @property
    def cached(self) -> int | None:
        """Number of prompt tokens that the server read from its prefix cache, or None if the server reports none."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None

    @property
    def reasoning(self) -> int:
        """Number of reasoning tokens that the server reports, or 0 if the server reports none."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or self.reasoning_tokens or 0

    @property
    def reports_reasoning(self) -> bool:
        """True if the server reports the number of reasoning tokens, which may be 0."""
        details = self.completion_tokens_details
        return self.reasoning_tokens is not None or (details is not None and details.reasoning_tokens is not None)

    @property
    def generated(self) -> int | None:
        """Number of generated tokens including reasoning, or None if the server does not report this number.

        The number is usually `completion_tokens`. If this field is missing, it is `total_tokens - prompt_tokens`.

        Some servers do not count reasoning in `completion_tokens`, so the reasoning tokens are added. Such a server is
        recognised by one of these signs:

        - `reasoning > completion_tokens`
        - `prompt_tokens + completion_tokens + reasoning == total_tokens`
        """
        completion = self.completion_tokens
        reasoning = self.reasoning
        by_total = None
        if self.total_tokens is not None and self.prompt_tokens is not None:
            by_total = self.total_tokens - self.prompt_tokens
        if completion is None:
            return None if by_total is not None and by_total <= 0 else by_total
        excludes_reasoning = reasoning > completion or completion + reasoning == by_total
        return completion + reasoning if excludes_reasoning else completion


class ChoiceDetails(msgspec.Struct, gc=False):
    """A choice in an event. Some servers put the `usage` object with all token counts into the choice."""

    usage: UsageDetails | None = None


class LlamaCppTimings(msgspec.Struct, gc=False):
    """The object `timings`, which llama.cpp adds to the event with the usage."""

    cache_n: TokenCount | None = None
    """Number of prompt tokens that were in the prefix cache."""


class DetailedUsage(msgspec.Struct, gc=False):
    """The token counts of a stream event. The other content of the event is not decoded."""

    usage: UsageDetails | None = None
    choices: list[ChoiceDetails] | None = None
    timings: LlamaCppTimings | None = None

    @property
    def details(self) -> UsageDetails:
        """The `usage` object, in which `timings.cache_n` counts as the number of cached prompt tokens.

        Versions of llama.cpp before February 2026 report the cached tokens only in `timings.cache_n`.
        """
        result = self.usage or (self.choices[0].usage if self.choices else None) or _NO_DETAILS
        if self.timings is None or self.timings.cache_n is None or result.cached is not None:
            return result
        return replace(result, prompt_tokens_details=CachedCount(self.timings.cache_n))


EmptyRule = Callable[[Sequence[Choice], int, bool], bool]
"""Function (choices, index, missing) that returns True if choice `index`, which has no text, stands for a generated
token. `missing` is True if the server's total exceeds the tokens counted so far. If a dialect has no rule, no choice
without text is a token."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
INCLUDE_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
RUNNING_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Field that requests `usage` in each chunk and at the end. vLLM, SGLang and TensorRT-LLM can send it in each chunk."""

_CHUNKS = msgspec.json.Decoder(Chunk)
_USAGES = msgspec.json.Decoder(DetailedUsage)
_NO_CHOICE = Choice()
_NO_DETAILS = UsageDetails()
_TOKEN_IDS = attrgetter("token_ids")
_USAGE = attrgetter("usage")
_NO_TEXT = frozenset({"type", "id", "index", "role", "format", "signature", "status", "expires_at"})
"""Fields of a part of content that contain no generated text."""
MANY_AT_ONCE = 16
"""If a chunk has more tokens than this, its text is examined, because some tokens may have been hidden before."""


def decode(
    payloads: Sequence[bytes], *, empty_is_token: EmptyRule | None, always_done: bool, one_per_event: bool = False
) -> Answer:
    """Decode the events of an OpenAI stream into an Answer.

    The token count of a chunk comes from the best evidence that is available:

    1. Token ids in the chunk.
    2. The growth of the running total in `usage`.
    3. One token for a chunk with text. The count is exact only if the server sends one token per event
       (`one_per_event`).

    `empty_is_token` decides whether a chunk without text stands for a token. A stream is complete if it has `[DONE]` or
    a finish reason. With `always_done`, a finish reason is not enough.
    """
    retained, chunks, runs, broken = drop_repeats(payloads, _CHUNKS, _is_plain_token)
    choices = [chunk.choices[0] if chunk.choices else _NO_CHOICE for chunk in chunks]
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
    details, dropped_after = _last_usage(retained, usages, runs) if any(usages) else (_NO_DETAILS, 0)
    answer.prompt_tokens = details.prompt_tokens or None
    generated = details.generated
    total = None if generated is None else generated + dropped_after
    with_choice = [index for index, chunk in enumerate(chunks) if chunk.choices]
    has_running_totals = _read_running_totals(with_choice, choices, usages, answer.tokens)
    hidden = _hidden_reasoning(choices, details) if details.reasoning else 0
    retained_total = None if total is None else total - sum(runs) - hidden
    if not has_running_totals and empty_is_token:
        _read_empty(with_choice, choices, answer.tokens, retained_total, empty_is_token)
    elif not has_running_totals and retained_total is not None:
        _read_empty_between(with_choice, choices, answer.tokens, retained_total)
    if any(map(_TOKEN_IDS, choices)):
        answer.chunk_counts = "ids"
    else:
        by_text: ChunkCounts = "event" if one_per_event else "chunk"
        answer.chunk_counts = "usage" if has_running_totals else by_text
    finalise(restore_repeats(answer, runs), total, broken)
    if answer.chunk_counts == "chunk" and answer.counted_by == "wire" and empty_is_token is None:
        answer.counted_by = "chunks"
    if answer.counted_by == "server" or answer.chunk_counts != "chunk":
        _note_hidden(answer, payloads, hidden, reported=details.reports_reasoning)
    _note_marks(answer, payloads, choices, runs, details)
    note_drafts(answer, payloads)
    return answer


def answer_text(payloads: Sequence[bytes]) -> str:
    """Return the text of a response, without reasoning and tool calls.

    The text becomes part of the chat history of the next turn. Chat templates leave reasoning and tool calls out of the
    history too."""
    chunks, _ = decode_events(payloads, _CHUNKS)
    return join_halves("".join(_answer_text(chunk.choices[0]) for chunk in chunks if chunk.choices))


def openai_dialect(
    server: str,
    endpoint: str,
    extra_fields: Callable[[Request], dict[str, Any]],
    *,
    empty_rule: EmptyRule | None,
    always_done: bool = False,
    one_per_event: bool = False,
    **others: Any,
) -> Dialect:
    """Return the dialect (the request and response format) of a server for the OpenAI endpoint `endpoint`.

    Requests contain the standard fields and those that `extra_fields` returns. `empty_rule`, `always_done` and
    `one_per_event` are arguments of `decode`. `others` are further fields of Dialect.
    """

    def request_form(dropped: tuple[str, ...], test_tokens: int) -> tuple[Encode, Route[int]]:
        def one_token(text: str, model: str) -> dict[str, Any]:
            prompt = {"messages": messages(text)} if endpoint == "chat" else {"prompt": text}
            return _without({"model": model, **prompt, "max_tokens": test_tokens, "temperature": 0}, dropped)

        def encode(request: Request, model: str) -> bytes:
            fields = _standard_fields(endpoint, request, model) | extra_fields(request)
            return encode_body(_without(fields, dropped), request)

        return encode, Route(PATHS[endpoint], one_token, _prompt_tokens, generates=True)

    encode, counting = request_form((), 1)
    used = json.loads(encode(Request(0, "", 0, 1), ""))
    used |= used.get("stream_options") or {}
    return Dialect(
        server,
        endpoint,
        PATHS[endpoint],
        chat=endpoint == "chat",
        calls=chat_calls if endpoint == "chat" else no_calls,
        encode=encode,
        decode=partial(decode, empty_is_token=empty_rule, always_done=always_done, one_per_event=one_per_event),
        text=answer_text,
        count_by_running=counting,
        refusable_fields=tuple(field for field in REFUSABLE if field in used),
        request_form=request_form,
        **others,
    )


def _without(fields: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a request without the fields whose names are in `dropped`.

    If REFUSABLE contains a newer name for a dropped field, the field is renamed instead. `dropped` may also contain the
    names of fields inside `stream_options`.
    """
    if not dropped:
        return fields
    names = {field: REFUSABLE[field] if field in dropped else field for field in fields}
    result = {names[field]: value for field, value in fields.items() if names[field]}
    if "stream_options" in result:
        options = result["stream_options"].items()
        result["stream_options"] = {name: value for name, value in options if name not in dropped}
    return result


def _prompt_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens"])


def messages(text: str) -> list[dict[str, str]]:
    """Return a chat history that consists of one user message."""
    return [{"role": "user", "content": text}]


def _standard_fields(endpoint: str, request: Request, model: str) -> dict[str, Any]:
    """Return the standard fields of a request for a stream of at most `request.output_tokens` tokens.

    A chat request without a history contains one user message. Chat requests use `max_tokens` and not
    `max_completion_tokens`, because servers from before October 2024 support only `max_tokens`.
    """
    if endpoint == "chat":
        assert isinstance(request.prompt, str), "chat accepts only text"
        history = request.messages or (("user", request.prompt),)
        chat: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in history]
        if request.images:
            urls = ({"type": "image_url", "image_url": {"url": str(image)}} for image in request.images)
            chat[-1]["content"] = [{"type": "text", "text": request.prompt}, *urls]
        fields: dict[str, Any] = {"messages": chat, "model": model}
    else:
        fields = {"model": model, "prompt": request.prompt}
    return {**fields, "max_tokens": request.output_tokens, "temperature": 0.0, "stream": True}


def every_chunk_is_token(_choices: Sequence[Choice], _index: int, _missing: bool) -> bool:
    """Return True, because every chunk stands for a token, with or without text.

    This function is an EmptyRule, a rule that decides whether a chunk without text stands for a token."""
    return True


def unless_marker(choices: Sequence[Choice], index: int, missing: bool) -> bool:
    """Return True if chunk number `index`, which has no text, stands for a token.

    A token may have no text, for example if it is half of a character. A chunk without text is therefore a token, with
    two exceptions:

    - A chunk with a role only marks the start of the response, so it is not a token.
    - A chunk with a finish reason usually only marks the end of the response. It is a token if `missing` is True: the
      server's total then exceeds the number of tokens that were counted so far.

    Like `every_chunk_is_token`, this function is an EmptyRule.
    """
    return missing if choices[index].finish_reason else not has_role(choices[index])


def has_role(choice: Choice) -> bool:
    """Return True if the choice comes from a chat chunk with a role."""
    return choice.delta is not None and bool(choice.delta.role)


def _tokens_in(choice: Choice) -> int:
    """Return the number of token ids in a choice. Without ids, return 1 if the choice has text, otherwise 0."""
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
    """Return True if a value in a chunk contains generated text, at any depth of lists and objects."""
    if isinstance(value, dict):
        return any(_has_text(inner) for field, inner in value.items() if field not in _NO_TEXT)
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str) and bool(value)


def _content_text(content: str | list[Any] | None) -> str:
    """Return the text of a message's content, without parts that contain reasoning."""
    if not isinstance(content, list):
        return content or ""
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "".join(part for part in parts if isinstance(part, str))


def _answer_text(choice: Choice) -> str:
    """Return the text of a choice, without reasoning and tool calls."""
    return choice.text or (_content_text(choice.delta.content) if choice.delta else "")


def _all_text(choice: Choice) -> str:
    """Return all generated text in a choice, including reasoning and tool calls."""
    delta = choice.delta or Delta()
    parts = [choice.text, delta.content, delta.reasoning or delta.reasoning_content, delta.refusal]
    parts += [delta.tool_calls, delta.function_call, delta.thinking, delta.audio]
    return "".join(map(_text_in, parts))


def _text_in(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_text_in(inner) for field, inner in value.items() if field not in _NO_TEXT)
    if isinstance(value, list):
        return "".join(map(_text_in, value))
    return value if isinstance(value, str) else ""


def _is_plain_token(chunk: Chunk) -> bool:
    """Return True if a chunk contains exactly one token, as text and without further information.

    A chunk with token ids, a finish reason or an error contains further information.
    """
    choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
    plain_chunk = choice.token_ids is None and not choice.finish_reason and not chunk.error and not choice.error
    return bool(plain_chunk and _tokens_in(choice))


def _note_end(answer: Answer, index: int, choice: Choice, payload: bytes) -> None:
    """Store the finish reason or the error of a choice in the answer.

    `index` is the index of the event that contains the choice.
    """
    if choice.error:
        note_error(answer, json.dumps({"error": choice.error}).encode())
    if choice.finish_reason:
        answer.end_event = index
        note_finish(answer, choice.finish_reason, payload)


def _note_marks(
    answer: Answer, payloads: Sequence[bytes], choices: Sequence[Choice], runs: Sequence[int], details: UsageDetails
) -> None:
    """Store the number of cached prompt tokens and the end of the reasoning in the answer.

    - `answer.counts` gets the numbers of cached prompt tokens and of reasoning tokens, if the server reports them in
      `details`, its `usage` object.
    - If the response begins with reasoning, the position at which the reasoning ends is stored (see
      loadgen.servers.backends.reasoning).

    `runs[i]` is the number of repeated events that were dropped after event i.
    """
    if details.cached is not None:
        answer.counts["cached_prompt_tokens"] = details.cached
    if details.reasoning:
        answer.counts["reasoning_tokens"] = details.reasoning
    first = next((index for index, choice in enumerate(choices) if _tokens_in(choice)), None)
    if first is None:
        return
    first_delta = choices[first].delta
    if first_delta is not None and _shows_reasoning(first_delta):
        first_answer = next((index for index in range(first, len(choices)) if _shows_answer(choices[index])), None)
        note_reasoning(answer, None if first_answer is None else first_answer + sum(runs[:first_answer]))
    elif contains_tags(payloads):
        chunks, _ = decode_events(payloads, _CHUNKS)
        note_tagged_reasoning(answer, [_answer_text(chunk.choices[0]) if chunk.choices else "" for chunk in chunks])


def _last_usage(
    payloads: Sequence[bytes], usages: Sequence[Usage | None], runs: Sequence[int]
) -> tuple[UsageDetails, int]:
    """Return the last `usage` object with token counts in a stream, and the number of dropped events directly after it.

    A stream can contain events that only repeat the event before them. Such events were dropped, and all other events
    were retained.

    - `payloads[i]` is the text of the retained event i.
    - `usages[i]` is the `usage` object of this event, or None.
    - `runs[i]` is the number of dropped events directly after this event.

    If no `usage` object contains token counts, the result is an empty object and 0.
    """
    for index in reversed(range(len(usages))):
        usage = usages[index]
        if usage is not None and (usage.completion_tokens is not None or usage.prompt_tokens is not None):
            (event, *_), _ = decode_events([payloads[index]], _USAGES)
            return event.details, runs[index]
    return _NO_DETAILS, 0


def _hidden_reasoning(choices: list[Choice], details: UsageDetails) -> int:
    """Return the number of reasoning tokens that the server counted in `details` but did not stream.

    The result is 0 if any of `choices` contains reasoning, because the reasoning was then streamed.
    """
    streamed = any(choice.delta and _shows_reasoning(choice.delta) for choice in choices)
    return 0 if streamed else details.reasoning


def _note_hidden(answer: Answer, payloads: Sequence[bytes], hidden: int, *, reported: bool) -> None:
    """Store in `answer` how many tokens the server generated and counted, but did not stream (hidden tokens).

    - `payloads`: the events of the response.
    - `hidden`: the number of hidden reasoning tokens that the server reports. 0 if it reports none.
    - `reported`: True if the server reports how many tokens are reasoning. All other tokens must then have been
      streamed.

    Two signs show that tokens may be hidden. Without such a sign, nothing is stored.

    - The total that the server reports is larger than the sum of the token counts of the chunks.
    - A chunk has more than MANY_AT_ONCE tokens. The server may have included the hidden tokens in the count of the next
      chunk, so the sum can be equal to the total.

    If the chunks contain no token counts, every chunk with text counts as one token. The total may then be larger than
    the number of chunks for another reason: a chunk contains several tokens. The size of the text is stored too,
    because a later check needs it to tell the two reasons apart.
    """
    missing = answer.counted_by == "server" and (answer.output_tokens or 0) > sum(answer.tokens)
    has_large_chunk = max(answer.tokens, default=0) > MANY_AT_ONCE
    if not any(answer.tokens) or not (missing or has_large_chunk):
        return
    answer.hidden_tokens = hidden
    if answer.chunk_counts != "chunk" and not has_large_chunk:
        return
    chunks, _ = decode_events(payloads, _CHUNKS)
    texts = [_all_text(chunk.choices[0]) if chunk.choices else "" for chunk in chunks]
    if "think>" in "".join(texts):  # reasoning that was streamed as content
        answer.hidden_tokens = 0
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    if answer.chunk_counts == "chunk":
        answer.reasoning_reported = reported
        answer.text_bytes = sum(sizes)
        answer.phrase_chunks = sum(len(text.split(None, 1)) > 1 for text in texts)
    elif not answer.hidden_tokens and not reported:
        # If a chunk has more tokens than bytes of text, all but one were generated before it and not streamed.
        unstreamed = [
            tokens - 1 for tokens, size in zip(answer.tokens, sizes, strict=False) if tokens > max(size, MANY_AT_ONCE)
        ]
        answer.hidden_tokens = min(sum(unstreamed), answer.output_tokens or 0)


def _shows_reasoning(delta: Delta) -> bool:
    if isinstance(delta.content, list):
        return any(isinstance(part, dict) and "thinking" in str(part.get("type")) for part in delta.content)
    return bool(delta.reasoning or delta.reasoning_content or delta.thinking or delta.reasoning_details)


def _shows_answer(choice: Choice) -> bool:
    """Return True if `choice` contains a part of the answer: text, a refusal, a tool call or audio.

    Reasoning does not count as answer. A choice with both the end of the reasoning and the beginning of the answer
    counts.
    """
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    if _content_text(delta.content) or delta.refusal or delta.tool_calls:
        return True
    return _has_text(delta.function_call) or _has_text(delta.audio)


def _read_running_totals(
    with_choice: list[int], choices: list[Choice], usages: list[Usage | None], tokens: list[int]
) -> bool:
    """Set the token count of each event in `tokens` from the running totals in `usages`, if these totals are usable.

    `with_choice` lists the indices of the events that have a choice. Each event with text must have a running total.
    The total must be larger than the previous one by at least the tokens that are already counted for this event.
    Events without text need no total. Return True if the totals are usable. Otherwise `tokens` stays unchanged, and the
    result is False.
    """
    totals = [usage.completion_tokens or 0 for index in with_choice if (usage := usages[index])]
    if not totals or any(map(_TOKEN_IDS, choices)):
        return False
    if len(totals) < len(with_choice):
        totals = _totals_of_text(with_choice, usages, tokens)
    if not totals:
        return False
    growth = [*map(sub, totals, [0, *totals])]
    shown = [*map(tokens.__getitem__, with_choice)]
    if any(map(lt, growth, shown)):
        return False  # the server stated its total once, at the start or the end, and not as a running total
    if growth != shown:
        for index, new in zip(with_choice, growth, strict=True):
            # A chunk without text that adds many tokens streams none of them. The total at its end includes hidden
            # tokens.
            tokens[index] = 0 if new > MANY_AT_ONCE and not tokens[index] else new
    return True


def _totals_of_text(with_choice: list[int], usages: list[Usage | None], tokens: list[int]) -> list[int]:
    """Return the server's running total of generated tokens after each event that has a choice.

    - `with_choice` contains the indices of these events.
    - `usages` contains the running total that each event reports. An event without text may report none.
    - `tokens` contains the token count of each event, which is 0 for an event without text.

    The result is an empty list if an event with text reports no total, or if no event has text.
    """
    totals: list[int] = []
    total = 0
    any_text = False
    for index in with_choice:
        usage = usages[index]
        if usage is not None and usage.completion_tokens is not None:
            total = usage.completion_tokens
        elif tokens[index]:
            return []
        any_text = any_text or tokens[index] > 0
        totals.append(total)
    return totals if any_text else []


def _read_empty(
    with_choice: list[int], choices: list[Choice], tokens: list[int], total: int | None, rule: EmptyRule
) -> None:
    """Count each empty choice as one token, if `rule` says that the choice stands for a token.

    An empty choice has neither text nor token ids.

    - `with_choice` contains the indices of the events with a choice.
    - `tokens` contains the token count of each event. The function changes this list.
    - `total` is the server's token count, or None.

    If the new counts would add up to more than `total`, nothing is changed. The server then counts only some of the
    empty choices as tokens, and it is unknown which ones.
    """
    choices = [choices[index] for index in with_choice]
    empty: list[int] = []
    known = sum(tokens)
    for position, index in enumerate(with_choice):
        shown = tokens[index] or choices[position].token_ids is not None
        if not shown and rule(choices, position, total is not None and total > known + len(empty)):
            empty.append(index)
    if total is None or known + len(empty) <= total:
        for index in empty:
            tokens[index] = 1


def _read_empty_between(with_choice: list[int], choices: list[Choice], tokens: list[int], total: int) -> None:
    """Count each choice without text as one token, if the counts of all events then add up to the server's count.

    A choice without text can stand for a token, for example if this token is only half of a character. Only choices
    between the first text and the end of the stream are considered.

    `with_choice` lists the indices of the events with a choice, and `choices` contains the choice of each event.
    `tokens` contains the token count of each event, and is changed in place. `total` is the server's count.
    """
    missing = total - sum(tokens)
    if missing <= 0:
        return
    first = next((index for index in with_choice if tokens[index]), len(tokens))
    end = next((index for index in with_choice if choices[index].finish_reason), len(tokens))
    between = [index for index in with_choice if first < index < end and not tokens[index]]
    empty = [index for index in between if choices[index].text is not None or choices[index].delta is not None]
    if len(empty) == missing and not any(choices[index].token_ids is not None for index in empty):
        for index in empty:
            tokens[index] = 1


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    status, models = get_json("/v1/models")
    card = base.first_model_card(models)
    if status != 200 or "id" not in card:
        return None
    return base.ServerFacts("openai", url, "", str(card["id"]), base.known_limits(OPENAI.limits, card))


def _token_count(answer: Any) -> int:
    """Return the number of tokens from the response of a tokenize route.

    Raises LookupError or TypeError if the response contains no such number.
    """
    return len(answer["tokens"]) if "count" not in answer else int(answer["count"])


# Each server reads the fields that it knows: llama.cpp `content` and `add_special`, SGLang and vLLM `prompt`.
_TOKENIZE = Route(
    "/tokenize",
    lambda text, model: {"model": model, "prompt": text, "content": text, "add_special": True},
    _token_count,
)

_dialect = partial(openai_dialect, "openai", extra_fields=lambda _: RUNNING_USAGE, empty_rule=None, fixed_output=True)

OPENAI = base.Backend(
    name="openai",
    title="OpenAI-style",
    phrase="an OpenAI-style server",
    native="completions",
    dialects={
        "completions": _dialect("completions", count=_TOKENIZE),
        "chat": _dialect("chat", count_text=_TOKENIZE),
        "responses": responses_dialect("openai", extra_fields=lambda _: {}, count_text=_TOKENIZE),
        "messages": messages_dialect("openai", headers=api_key_headers, count_text=_TOKENIZE),
        "transcriptions": transcription_dialect(
            "openai", partial(decode, empty_is_token=None, always_done=False), answer_text, {}
        ),
        "speech": speech_dialect("openai", {"voice": "alloy"}),
    }
    | {endpoint: pooling.pooling_dialect("openai", endpoint) for endpoint in pooling.PATHS},
    identify=_identify,
    tested_count=_TOKENIZE,
    limits={"max_model_len": base.ServerLimit("--max-model-len", "total")},
)
