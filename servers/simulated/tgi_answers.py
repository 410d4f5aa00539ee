"""A simulated TGI's responses as bytes: one or several, streamed or whole, with log probabilities, the likeliest tokens
and the prompt's tokens where a request wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log
from random import Random
from typing import Any

import msgspec

from loadgen.servers.simulated import grammar, protocol, tgi_checks, tgi_tools, tokenizer
from loadgen.servers.simulated.protocol import (
    Completion,
    CompletionRequest,
    Encoding,
    ErrorReply,
    Events,
    Headers,
    Reply,
)
from loadgen.servers.simulated.state import ServerState
from loadgen.servers.simulated.tgi_checks import Refuse

FAILED = ("Request failed during generation: Server error: simulated failure", "generation")
_OPENAI_REASONS = {"eos_token": "stop", "length": "length", "stop_sequence": "stop_sequence"}
_LOGPROB = -1.5  # the model is equally sure of everything that it says
_EOS_TEXT = tokenizer.EOS_TEXT.encode()
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """One text to go on from, with the native parameters for it."""

    text: str
    parameters: Mapping[str, Any]
    guided: str | None = None
    """What the model says, where a grammar or a tool decides it."""


@dataclass(frozen=True, slots=True)
class TgiResponse:
    """One response of the model."""

    completion: Completion
    seed: int | None
    texts: list[str] = field(repr=False)
    """The text of each token."""

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Every token as `/generate` shows it."""
        return [_token(token, text) for token, text in zip(self.completion.ids, self.texts, strict=True)]


def guided_text(given: Mapping[str, Any] | None, word: str, refuse: Refuse) -> str | None:
    """What the model says under a grammar. None without one. Raises the refusal of a grammar that no text can fit."""
    if given is None:
        return None
    kind, value = given["type"], given["value"]
    try:
        if kind == "regex":
            return grammar.regex_text(value)
        schema = value["schema"] if kind == "json_schema" else value
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        if not isinstance(schema, Mapping):
            raise refuse("grammar is not supported")
        if "properties" not in schema and "$functions" not in schema:
            raise refuse("grammar is not valid: Grammar must have a 'properties' field")
        return grammar.json_text(schema, word)
    except (grammar.GrammarError, msgspec.DecodeError) as problem:
        raise refuse(f"grammar is not valid: {problem}") from None


def generate(
    state: ServerState, request: CompletionRequest, prompt: TextPrompt, refuse: Refuse, place: int = 0
) -> TgiResponse:
    """One response, after everything that the router checks. `place`: which of a request's responses. Raises the
    refusal."""
    values = prompt.parameters
    tgi_checks.check_parameters(values, prompt.text, refuse, state.max_model_len)
    prompt_tokens = 1 + tokenizer.count(prompt.text)  # the server puts one token before every text
    if truncate := values.get("truncate"):
        prompt_tokens = min(prompt_tokens, truncate)
    pieces = tgi_checks.output_pieces(state, prompt_tokens, values.get("max_new_tokens"), refuse)
    guided = prompt.guided
    if guided is None:
        guided = guided_text(values.get("grammar"), tokenizer.decode(state.vocabulary.ids[:1]).strip(), refuse)
    limit = sum(pieces)
    made = _guided(request, prompt_tokens, limit, guided) if guided is not None else None
    made = made or _unguided(state, request, prompt_tokens, limit, place)
    stops = [stop for stop in values.get("stop") or [] if stop]
    made = made.cut_at_stop(stops, "stop_sequence", anywhere=False)[0]  # the stop stays in the text (tokens.py)
    # The router counts a prompt again for each piece, with what was said before as a part of it.
    starts = [prompt_tokens + sum(pieces[:number]) for number in range(len(pieces))]
    begun = [start for start in starts if start - prompt_tokens < made.output_tokens]
    made = replace(made, metric_requests=tuple(zip(begun, pieces, strict=False)))
    return TgiResponse(made, _seed(state, request, values, place), [_plain(text) for text in made.texts])


def _unguided(state: ServerState, request: CompletionRequest, prompt_tokens: int, limit: int, place: int) -> Completion:
    """Words of the vocabulary, up to where the model ends by itself."""
    if (mean := state.config.eos_mean_tokens) is not None:
        # Where the model ends by itself: geometric, as if each token were the last with the same probability.
        uniform = Random(f"eos/{state.config.seed}/{request.index}").random()  # noqa: S311 - not secret
        ends = 1 if mean <= 1 else 1 + int(log(1 - uniform) / log(1 - 1 / mean))
        request = replace(request, stop_after=min(ends, request.stop_after or ends))
    made = state.complete(request, prompt_tokens, limit, "eos_token", place)
    if made.finish_reason != "length":
        made = replace(made, ids=[*made.ids[:-1], tokenizer.EOS_ID], texts=[*made.texts[:-1], _EOS_TEXT])
    return made


def _guided(request: CompletionRequest, prompt_tokens: int, limit: int, text: str) -> Completion:
    """A text that a grammar decides, and the end-of-text token, if the limit does not come first."""
    limit = min(limit, request.stop_after or limit)
    ids = [*tokenizer.encode(text), tokenizer.EOS_ID]
    texts = [_escaped(tokenizer.pieces()[token]) for token in ids[:-1]]
    reason = "length" if len(ids) > limit else "eos_token"
    return Completion(request.streamed, prompt_tokens, limit, ids[:limit], [*texts, _EOS_TEXT][:limit], reason)


def _escaped(piece: bytes) -> bytes:
    """A token's text as it stands inside a JSON string. Half of a character has none."""
    return protocol.dumps(piece.decode("utf-8", "ignore"))[1:-1]


def _plain(text: bytes) -> str:
    """A token's text as it stands inside a JSON string, as a text again."""
    if b"\\" not in text:
        return text.decode()
    plain: str = msgspec.json.decode(b'"%b"' % text)
    return plain


def _seed(state: ServerState, request: CompletionRequest, values: Mapping[str, Any], place: int) -> int | None:
    """The seed that the details show: none without sampling, and a random one where a request gives none."""
    if not tgi_checks.is_sampled(values):
        return None
    drawn = Random(f"seed/{state.config.seed}/{request.index}/{place}").randrange(_SEEDS)  # noqa: S311 - not secret
    given = values.get("seed")
    return drawn if given is None else int(given)


def _token(token: int, text: str) -> dict[str, Any]:
    return {"id": token, "text": text, "logprob": _LOGPROB, "special": token == tokenizer.EOS_ID}


def _likeliest(token: int, text: str, number: int) -> list[dict[str, Any]]:
    """The likeliest tokens in a token's place, the token itself first."""
    near = [(token + index) % tokenizer.VOCABULARY_SIZE for index in range(1, number)]
    return [_token(token, text), *(_token(each, tokenizer.decode([each])) for each in near)][:number]


# The native routes.


def native(said: Sequence[TgiResponse], prompt: TextPrompt, *, listed: bool, mark: Mapping[str, Any]) -> Encoding:
    """`/generate`, `/generate_stream` and `/`; `listed`: a whole response is a list of one. The first of several
    responses is the best."""
    first, values = said[0], prompt.parameters
    full = prompt.text if values.get("return_full_text") else ""
    top = values.get("top_n_tokens") or 0
    ended = {
        "finish_reason": first.completion.finish_reason,
        "generated_tokens": first.completion.output_tokens,
        "seed": first.seed,
    }
    shown = {**ended, "input_length": first.completion.prompt_tokens} if values.get("details") else None
    final = protocol.dumps({"generated_text": full + first.completion.text, "details": shown})[1:-1]
    ids, texts, marked = first.completion.ids, first.completion.texts, b",%b}\n\n" % protocol.dumps(mark)[1:-1]

    def encode(place: int, _tokens: int, last: bool) -> bytes:
        token = ids[place]
        special = b"true" if token == tokenizer.EOS_ID else b"false"
        begin = b'data: {"index":%d,"token":{"id":%d,"text":"%b","logprob":-1.5,"special":%b},'
        event = begin % (place + 1, token, texts[place], special)
        if top:
            event += b'"top_tokens":%b,' % protocol.dumps(_likeliest(token, first.texts[place], top))
        event += final if last else b'"generated_text":null,"details":null'
        return event + (b"}\n\n" if place else marked)

    def whole() -> Any:
        answer: dict[str, Any] = {"generated_text": full + first.completion.text}
        if values.get("details") or values.get("decoder_input_details"):
            details = _details(first, prompt)
            if len(said) > 1:
                others = [
                    {"generated_text": full + each.completion.text, **_details(each, prompt)} for each in said[1:]
                ]
                details["best_of_sequences"] = others
            if top:
                details["top_tokens"] = _all_likeliest(first, top)
            answer["details"] = details
        answer |= mark
        return [answer] if listed else answer

    return _encoding(said, [prompt], encode, whole)


def _details(said: TgiResponse, prompt: TextPrompt) -> dict[str, Any]:
    """`details` of a whole response."""
    prefill: list[dict[str, Any]] = []
    if prompt.parameters.get("decoder_input_details"):
        ids = [tokenizer.BOS_ID, *tokenizer.encode(prompt.text)][-said.completion.prompt_tokens :]
        pieces = ["<s>" if token == tokenizer.BOS_ID else tokenizer.decode([token]) for token in ids]
        prefill = [
            {"id": token, "text": text, "logprob": _LOGPROB if index else None}
            for index, (token, text) in enumerate(zip(ids, pieces, strict=True))
        ]
    completion = said.completion
    ended = {"finish_reason": completion.finish_reason, "generated_tokens": completion.output_tokens, "seed": said.seed}
    return {**ended, "prefill": prefill, "tokens": said.tokens}


def _all_likeliest(said: TgiResponse, number: int) -> list[list[dict[str, Any]]]:
    ids = said.completion.ids
    return [_likeliest(token, text, number) for token, text in zip(ids, said.texts, strict=True)]


# /v1/chat/completions


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What of a chat request decides how its response looks."""

    logprobs: bool
    top: int
    usage: bool
    tool_id: str | None
    """The id of the call, where the response is one."""


def chat(said: TgiResponse, prompt: TextPrompt, identity: Mapping[str, Any], wish: ChatOptions) -> Encoding:
    """Every event has role and content, so no event has the role alone."""
    completion = said.completion
    ended = _OPENAI_REASONS[completion.finish_reason]
    streamed = {**identity, "object": "chat.completion.chunk"}

    def chunk(delta: Mapping[str, Any], place: int, reason: str | None) -> dict[str, Any]:
        shown = {"content": [_logprob(said, place, wish.top)]} if wish.logprobs else None
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "logprobs": shown, "finish_reason": reason}
        return {**streamed, "choices": [choice], "usage": None}

    usage = protocol.json_event({**streamed, "choices": [], "usage": completion.usage})
    closing = (usage, protocol.DONE) if wish.usage else (protocol.DONE,)
    shown = [
        b"" if token == tokenizer.EOS_ID else text for token, text in zip(completion.ids, completion.texts, strict=True)
    ]
    text = {"content": protocol.TEXT}
    if wish.tool_id is not None:
        encode = _listed_events(_call_events(said, wish.tool_id, chunk))
    elif wish.logprobs:
        last = len(shown) - 1
        contents = [_plain(each) for each in shown]
        chunks = [chunk({"content": each}, at, ended if at == last else None) for at, each in enumerate(contents)]
        encode = _listed_events([protocol.json_event(chunk) for chunk in chunks])
    else:
        encode = protocol.text_events(shown, chunk(text, 0, None), chunk(text, 0, ended))
    made = _encoding([said], [prompt], encode, partial(_whole_chat, said, identity, wish), closing)
    role_only = () if wish.tool_id is not None else (protocol.json_event(chunk({"content": ""}, 0, None)),)
    return replace(made, role_only=role_only, silent=wish.tool_id is not None)


def _listed_events(events: Sequence[bytes]) -> protocol.EventEncoder:
    """Events that are known beforehand."""
    return lambda place, _tokens, _last: events[place]


def _call_events(
    said: TgiResponse, number: str, chunk: Callable[[Mapping[str, Any], int, str | None], Any]
) -> list[bytes]:
    """The events of a tool call; empty for tokens that have none."""
    events = []
    for index, piece in enumerate(tgi_tools.call_pieces(said.texts)):
        if piece is None:
            events.append(b"")
            continue
        name, arguments = piece
        call = {"index": 0, "id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        events.append(protocol.json_event(chunk({"tool_calls": [call]}, index, None)))
    return events


def _logprob(said: TgiResponse, place: int, top: int) -> dict[str, Any]:
    token, text = said.completion.ids[place], said.texts[place]
    near = [{"token": each["text"], "logprob": each["logprob"]} for each in _likeliest(token, text, top)]
    return {"token": text, "logprob": _LOGPROB, "top_logprobs": near}


def _whole_chat(said: TgiResponse, identity: Mapping[str, Any], wish: ChatOptions) -> dict[str, Any]:
    completion = said.completion
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if wish.tool_id is not None:
        call = tgi_tools.parse_call(completion.text)
        if call is None:
            written = protocol.dumps(completion.text).decode()
            raise tgi_tools.tool_error(f"Failed to parse generated text: EOF while parsing an object {written}")
        function = {"description": None, "name": call[0], "arguments": protocol.dumps(call[1]).decode()}
        message = {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}
    logprobs = {"content": [_logprob(said, at, wish.top) for at in range(completion.output_tokens)]}
    choice = {"index": 0, "message": message, "logprobs": logprobs if wish.logprobs else None}
    choice |= {"finish_reason": _OPENAI_REASONS[completion.finish_reason]}
    return {**identity, "object": "chat.completion", "choices": [choice], "usage": completion.usage}


# /v1/completions


def completions(said: Sequence[TgiResponse], prompts: Sequence[TextPrompt], identity: Mapping[str, Any]) -> Encoding:
    """The event with the last token of a response always has usage, and only that one."""
    encoders = [_completion_events(each.completion, place, identity) for place, each in enumerate(said)]
    made = [each.completion for each in said]
    encode = encoders[0] if len(encoders) == 1 else partial(protocol.merge_events, made, encoders)

    def whole() -> dict[str, Any]:
        choices = [_choice(index, each.text, _OPENAI_REASONS[each.finish_reason]) for index, each in enumerate(made)]
        usage = {name: sum(each.usage[name] for each in made) for name in made[0].usage}
        return {**identity, "choices": choices, "usage": usage}

    return _encoding(said, prompts, encode, whole, (protocol.DONE,), timed=False)


def _choice(place: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}


def _completion_events(made: Completion, place: int, identity: Mapping[str, Any]) -> protocol.EventEncoder:
    """In an inner event the choices stand in another place than in the last."""
    inner = {name: identity[name] for name in ("object", "id", "created")}
    inner |= {
        "choices": [_choice(place, protocol.TEXT, "")],
        **{name: identity[name] for name in identity if name not in inner},
    }
    final = {**identity, "choices": [_choice(place, protocol.TEXT, made.finish_reason)], "usage": made.usage}
    return protocol.text_events(made.texts, inner, final)


def _encoding(
    said: Sequence[TgiResponse],
    prompts: Sequence[TextPrompt],
    encode: protocol.EventEncoder,
    whole: Callable[[], Any],
    closing: Events = (),
    *,
    timed: bool = True,
) -> Encoding:
    """All that the routes have in common. `timed`: a whole response says in seconds how long it took."""
    made = [each.completion for each in said]
    completion = replace(made[0], siblings=tuple(made[1:]))
    if len(prompts) > 1:  # each has a prompt of its own
        completion = replace(completion, prompt_tokens=sum(each.prompt_tokens for each in made))
    completion = replace(completion, metric_requests=tuple(count for each in made for count in each.metric_requests))
    characters = sum(len(prompt.text) for prompt in prompts)
    one = tuple(map(protocol.sse_event, tgi_checks.error_payloads(*FAILED, openai=bool(closing))))
    failure = one[:1] * len(prompts) + one[1:]

    def answer(total_s: float) -> Reply:
        """Milliseconds, rounded down; what the simulated server does not know apart counts as inference."""
        total_ms, output = int(total_s * 1e3), made[0].output_tokens
        spent: dict[str, Any] = {"total-time": total_ms, "validation-time": 0, "queue-time": 0}
        spent |= {"inference-time": total_ms, "time-per-token": total_ms // output}
        spent |= {"prompt-tokens": completion.prompt_tokens}
        spent |= {"generated-tokens": output if len(prompts) == 1 else sum(each.output_tokens for each in made)}
        kind, counted = tgi_checks.compute_headers(characters)
        compute: Headers = (kind, ("x-compute-time", f"{total_s:.9f}"), counted) if timed else (kind, counted)
        times: Headers = tuple((f"x-{name}", str(value)) for name, value in spent.items())
        return protocol.json_reply(whole(), protocol.JSON_TYPE + compute + times)

    head = tgi_checks.stream_headers(characters)
    return Encoding(completion, encode, answer, failure, closing=closing, head=head)


__all__ = [
    "ChatOptions",
    "ErrorReply",
    "TextPrompt",
    "TgiResponse",
    "chat",
    "completions",
    "generate",
    "guided_text",
    "native",
]
