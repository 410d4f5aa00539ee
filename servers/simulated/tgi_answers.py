"""Encodes the responses of a simulated TGI, with and without streaming.

On request, a response contains log probabilities, the likeliest tokens at each position and the tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log
from random import Random
from typing import Any

import msgspec

from loadgen.servers.simulated import grammar, protocol, tgi_checks, tgi_tools, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, Events, Headers, Reply
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.state import ServerState
from loadgen.servers.simulated.tgi_checks import Refuse

FAILED = ("Request failed during generation: Server error: simulated failure", "generation")
"""Message and error type of a generation that fails."""
_OPENAI_REASONS = {"eos_token": "stop", "length": "length", "stop_sequence": "stop_sequence"}
_LOGPROB = -1.5
"""Log probability of every token."""
_EOS_TEXT = tokenizer.EOS_TEXT.encode()
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The text of a prompt, and TGI's native parameters for the request."""

    text: str
    parameters: Mapping[str, Any]
    guided: str | None = None
    """The output of the model if the model must call a tool. None: the model need not call a tool."""


@dataclass(frozen=True, slots=True)
class TgiResponse:
    """One response of the simulated model."""

    completion: Completion
    seed: int | None
    texts: list[str] = field(repr=False)
    """The text of each token."""

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """All tokens of the response, in the format of /generate."""
        return [_token(token, text) for token, text in zip(self.completion.ids, self.texts, strict=True)]

    @property
    def finish_details(self) -> dict[str, Any]:
        """Finish reason, number of tokens and seed, as in the field `details` of a response."""
        return {
            "finish_reason": self.completion.finish_reason,
            "generated_tokens": self.completion.output_tokens,
            "seed": self.seed,
        }


def guided_text(grammar_value: Mapping[str, Any] | None, word: str, refuse: Refuse) -> str | None:
    """Return text that matches the grammar of a request, or None if `grammar_value` is None.

    `word` is used for every string that the grammar does not restrict. If the grammar is invalid or not supported, the
    error that `refuse` returns is raised.
    """
    if grammar_value is None:
        return None
    value = grammar_value["value"]
    try:
        if grammar_value["type"] == "regex":
            return grammar.regex_text(value)
        schema = value["schema"] if grammar_value["type"] == "json_schema" else value
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
    state: ServerState, request: CompletionRequest, prompt: TextPrompt, refuse: Refuse, answer: int = 0
) -> TgiResponse:
    """Check a request as TGI's router does, and generate one response.

    `answer` is the index of this response, if the request asks for several. If a check fails, the error that `refuse`
    returns is raised.
    """
    parameters = prompt.parameters
    tgi_checks.check_parameters(parameters, prompt.text, refuse, state.max_model_len)
    prompt_tokens = 1 + tokenizer.count(prompt.text)  # the server puts one token before every text
    truncate = parameters.get("truncate")
    if truncate:
        prompt_tokens = min(prompt_tokens, truncate)
    pieces = tgi_checks.output_pieces(state, prompt_tokens, parameters.get("max_new_tokens"), refuse)
    limit = sum(pieces)
    guided = prompt.guided
    if guided is None:
        guided = guided_text(parameters.get("grammar"), first_word(state), refuse)
    if guided is None:
        completion = _unguided(state, request, prompt_tokens, limit, answer)
    else:
        completion = _guided(request, prompt_tokens, limit, guided)
    stops = [stop for stop in parameters.get("stop") or [] if stop]
    # The stop string stays in the text (tokens.py).
    completion = completion.cut_at_stop(stops, "stop_sequence", anywhere=False)[0]
    # For each piece, the router counts the prompt again, together with the output of the earlier pieces.
    piece_starts = [sum(pieces[:index]) for index in range(len(pieces))]
    metric_requests = tuple(
        (prompt_tokens + start, piece)
        for start, piece in zip(piece_starts, pieces, strict=True)
        if start < completion.output_tokens
    )
    completion = replace(completion, metric_requests=metric_requests)
    seed = _seed(state, request, parameters, answer)
    return TgiResponse(completion, seed, [_unescape(text) for text in completion.texts])


def first_word(state: ServerState) -> str:
    """Return the first word of the vocabulary. The simulated model uses it for strings that a grammar does not
    restrict.
    """
    return tokenizer.decode(state.vocabulary.ids[:1]).strip()


def _unguided(
    state: ServerState, request: CompletionRequest, prompt_tokens: int, limit: int, answer: int
) -> Completion:
    """Generate random words without a grammar.

    The output ends when the model stops by itself, or when there are `limit` tokens. `answer` is the index of the
    output among several answers to the same request.
    """
    mean = state.config.eos_mean_tokens
    if mean is not None:
        # The length is geometric: every token is the last one with the same probability.
        uniform = Random(f"eos/{state.config.seed}/{request.index}").random()  # noqa: S311 - not secret
        length = 1 if mean <= 1 else 1 + int(log(1 - uniform) / log(1 - 1 / mean))
        request = replace(request, stop_after=min(length, request.stop_after or length))
    completion = state.complete(request, prompt_tokens, limit, "eos_token", answer)
    if completion.finish_reason == "length":
        return completion
    return replace(completion, ids=[*completion.ids[:-1], tokenizer.EOS_ID], texts=[*completion.texts[:-1], _EOS_TEXT])


def _guided(request: CompletionRequest, prompt_tokens: int, limit: int, text: str) -> Completion:
    """Return a completion that consists of the tokens of `text` and the end-of-text token.

    `text` already matches the grammar of the request. The completion is cut after `limit` tokens, or after
    `request.stop_after` tokens if that is less.
    """
    limit = min(limit, request.stop_after or limit)
    ids = [*tokenizer.encode(text), tokenizer.EOS_ID]
    texts = [_escape(tokenizer.pieces()[token]) for token in ids[:-1]]
    texts.append(_EOS_TEXT)
    reason = "length" if len(ids) > limit else "eos_token"
    return Completion(request.streamed, prompt_tokens, limit, ids[:limit], texts[:limit], reason)


def _escape(piece: bytes) -> bytes:
    """Return the text of a token, escaped for a JSON string. Bytes of an incomplete UTF-8 character are left out."""
    return protocol.dumps(piece.decode("utf-8", "ignore"))[1:-1]


def _unescape(text: bytes) -> str:
    """Return the plain text of a token, given its text as a JSON string with escapes."""
    if b"\\" not in text:
        return text.decode()
    unescaped: str = msgspec.json.decode(b'"%b"' % text)
    return unescaped


def _seed(state: ServerState, request: CompletionRequest, parameters: Mapping[str, Any], answer: int) -> int | None:
    """Return the seed for the field `details`, or None if tokens are not sampled.

    If the request has no seed, a pseudo-random seed is derived from the server's seed and the number of the request.
    """
    if not tgi_checks.is_sampled(parameters):
        return None
    random = Random(f"seed/{state.config.seed}/{request.index}/{answer}")  # noqa: S311 - not secret
    seed = parameters.get("seed")
    return random.randrange(_SEEDS) if seed is None else int(seed)


def _token(token: int, text: str) -> dict[str, Any]:
    return {"id": token, "text": text, "logprob": _LOGPROB, "special": token == tokenizer.EOS_ID}


def _top_tokens(token: int, text: str, number: int) -> list[dict[str, Any]]:
    """Return the `number` likeliest tokens at a position. The first one is the generated token, with the id `token`."""
    others = [(token + index) % tokenizer.VOCABULARY_SIZE for index in range(1, number)]
    return [_token(token, text), *(_token(other, tokenizer.decode([other])) for other in others)][:number]


# The native routes.


def native(responses: Sequence[TgiResponse], prompt: TextPrompt, *, listed: bool, mark: Mapping[str, Any]) -> Encoding:
    """Encode the response to a request on a native route: /generate, /generate_stream or /.

    - `responses`: usually one response. With the field `best_of`, there are several, and the first one is the best.
    - `listed`: True if the body of a non-streamed response is a list with one object, as on the route /.
    - `mark`: the fields that mark the response as simulated.
    """
    best = responses[0]
    parameters = prompt.parameters
    ids = best.completion.ids
    texts = best.completion.texts
    text = best.completion.text
    prompt_text = prompt.text if parameters.get("return_full_text") else ""
    top = parameters.get("top_n_tokens") or 0
    details = None
    if parameters.get("details"):
        details = {**best.finish_details, "input_length": best.completion.prompt_tokens}
    final_fields = protocol.dumps({"generated_text": prompt_text + text, "details": details})[1:-1]
    first_event_end = b",%b}\n\n" % protocol.dumps(mark)[1:-1]

    def encode(index: int, _tokens: int, last: bool) -> bytes:
        token = ids[index]
        special = b"true" if token == tokenizer.EOS_ID else b"false"
        start = b'data: {"index":%d,"token":{"id":%d,"text":"%b","logprob":-1.5,"special":%b},'
        event = start % (index + 1, token, texts[index], special)
        if top:
            event += b'"top_tokens":%b,' % protocol.dumps(_top_tokens(token, best.texts[index], top))
        event += final_fields if last else b'"generated_text":null,"details":null'
        return event + (b"}\n\n" if index else first_event_end)

    def whole() -> Any:
        answer: dict[str, Any] = {"generated_text": prompt_text + text}
        if parameters.get("details") or parameters.get("decoder_input_details"):
            whole_details = _details(best, prompt)
            if len(responses) > 1:
                whole_details["best_of_sequences"] = [
                    {"generated_text": prompt_text + response.completion.text, **_details(response, prompt)}
                    for response in responses[1:]
                ]
            if top:
                whole_details["top_tokens"] = [
                    _top_tokens(token, token_text, top) for token, token_text in zip(ids, best.texts, strict=True)
                ]
            answer["details"] = whole_details
        answer |= mark
        return [answer] if listed else answer

    return _encoding(responses, [prompt], encode, whole)


def _details(response: TgiResponse, prompt: TextPrompt) -> dict[str, Any]:
    """Return the field `details` of a non-streamed response."""
    prefill: list[dict[str, Any]] = []
    if prompt.parameters.get("decoder_input_details"):
        ids = [tokenizer.BOS_ID, *tokenizer.encode(prompt.text)][-response.completion.prompt_tokens :]
        for index, token in enumerate(ids):
            text = "<s>" if token == tokenizer.BOS_ID else tokenizer.decode([token])
            prefill.append({"id": token, "text": text, "logprob": _LOGPROB if index else None})
    return {**response.finish_details, "prefill": prefill, "tokens": response.tokens}


# /v1/chat/completions


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The fields of a chat request that determine the format of the response."""

    logprobs: bool
    top_logprobs: int
    include_usage: bool
    tool_call_id: str | None
    """The id of the tool call in a stream. None: the response is not a tool call."""


def chat(response: TgiResponse, prompt: TextPrompt, identity: Mapping[str, Any], options: ChatOptions) -> Encoding:
    """Encode the response to a chat request. `identity` contains the first fields of the response.

    Every event of a stream contains the role, so there is no separate event for the role.
    """
    completion = response.completion
    finish_reason = _OPENAI_REASONS[completion.finish_reason]
    chunk_identity = {**identity, "object": "chat.completion.chunk"}

    def chunk(delta: Mapping[str, Any], index: int, reason: str | None) -> dict[str, Any]:
        logprobs = {"content": [_chat_logprob(response, index, options.top_logprobs)]} if options.logprobs else None
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "logprobs": logprobs, "finish_reason": reason}
        return {**chunk_identity, "choices": [choice], "usage": None}

    closing: Events = (protocol.DONE,)
    if options.include_usage:
        usage_event = protocol.json_event({**chunk_identity, "choices": [], "usage": completion.usage})
        closing = (usage_event, protocol.DONE)
    texts = [
        b"" if token == tokenizer.EOS_ID else text for token, text in zip(completion.ids, completion.texts, strict=True)
    ]
    role_only: Events = (protocol.json_event(chunk({"content": ""}, 0, None)),)
    if options.tool_call_id is not None:
        encode = _listed_events(_tool_call_events(response, options.tool_call_id, chunk))
        role_only = ()
    elif options.logprobs:
        last = len(texts) - 1
        encode = _listed_events(
            [
                protocol.json_event(
                    chunk({"content": _unescape(text)}, index, finish_reason if index == last else None)
                )
                for index, text in enumerate(texts)
            ]
        )
    else:
        content = {"content": protocol.TEXT}
        encode = protocol.text_events(texts, chunk(content, 0, None), chunk(content, 0, finish_reason))
    whole = partial(_whole_chat, response, identity, options)
    encoding = _encoding([response], [prompt], encode, whole, closing)
    return replace(encoding, role_only=role_only, silent=options.tool_call_id is not None)


def _listed_events(events: Sequence[bytes]) -> protocol.EventEncoder:
    """Return an encoder that looks up the event of each token in `events`, a list with one entry per token."""
    return lambda index, _tokens, _last: events[index]


def _tool_call_events(
    response: TgiResponse, call_id: str, chunk: Callable[[Mapping[str, Any], int, str | None], Any]
) -> list[bytes]:
    """Return the events of a streamed tool call as a list with one entry per token.

    The entry of a token without an event is empty. `chunk` builds the content of an event from its delta and the index
    of its token.
    """
    events = []
    for index, piece in enumerate(tgi_tools.call_pieces(response.texts)):
        if piece is None:
            events.append(b"")
            continue
        name, arguments = piece
        call = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        events.append(protocol.json_event(chunk({"tool_calls": [call]}, index, None)))
    return events


def _chat_logprob(response: TgiResponse, index: int, top: int) -> dict[str, Any]:
    text = response.texts[index]
    top_logprobs = [
        {"token": candidate["text"], "logprob": candidate["logprob"]}
        for candidate in _top_tokens(response.completion.ids[index], text, top)
    ]
    return {"token": text, "logprob": _LOGPROB, "top_logprobs": top_logprobs}


def _whole_chat(response: TgiResponse, identity: Mapping[str, Any], options: ChatOptions) -> dict[str, Any]:
    """Return the body of a non-streamed chat response. `identity` contains its first fields.

    Raises ErrorReply if a tool call is incomplete because of the limit on output tokens.
    """
    completion = response.completion
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if options.tool_call_id is not None:
        call = tgi_tools.parse_call(completion.text)
        if call is None:
            text_json = protocol.dumps(completion.text).decode()
            raise tgi_tools.tool_error(f"Failed to parse generated text: EOF while parsing an object {text_json}")
        name, arguments = call
        function = {"description": None, "name": name, "arguments": protocol.dumps(arguments).decode()}
        message = {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}
    logprobs = None
    if options.logprobs:
        positions = range(completion.output_tokens)
        logprobs = {"content": [_chat_logprob(response, index, options.top_logprobs) for index in positions]}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": _OPENAI_REASONS[completion.finish_reason],
    }
    return {**identity, "object": "chat.completion", "choices": [choice], "usage": completion.usage}


# /v1/completions


def completions(
    responses: Sequence[TgiResponse], prompts: Sequence[TextPrompt], identity: Mapping[str, Any]
) -> Encoding:
    """Encode the response to POST /v1/completions.

    In a stream, only the event with the last token of each response contains the usage.
    """
    encoded = [response.completion for response in responses]
    encoders = [_completion_events(completion, index, identity) for index, completion in enumerate(encoded)]
    encode = encoders[0] if len(encoders) == 1 else partial(protocol.merge_events, encoded, encoders)

    def whole() -> dict[str, Any]:
        choices = [
            _choice(index, completion.text, _OPENAI_REASONS[completion.finish_reason])
            for index, completion in enumerate(encoded)
        ]
        usage = {name: sum(completion.usage[name] for completion in encoded) for name in encoded[0].usage}
        return {**identity, "choices": choices, "usage": usage}

    return _encoding(responses, prompts, encode, whole, (protocol.DONE,), timed=False)


def _choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _completion_events(completion: Completion, index: int, identity: Mapping[str, Any]) -> protocol.EventEncoder:
    """Return the event encoder of one response.

    As in the real server, the position of the field `choices` in the last event differs from that in other events.
    """
    inner: dict[str, Any] = {name: identity[name] for name in ("object", "id", "created")}
    inner["choices"] = [_choice(index, protocol.TEXT, "")]
    inner |= {name: value for name, value in identity.items() if name not in inner}
    final_choice = _choice(index, protocol.TEXT, completion.finish_reason)
    final = {**identity, "choices": [final_choice], "usage": completion.usage}
    return protocol.text_events(completion.texts, inner, final)


def _encoding(
    responses: Sequence[TgiResponse],
    prompts: Sequence[TextPrompt],
    encode: protocol.EventEncoder,
    whole: Callable[[], Any],
    closing: Events = (),
    *,
    timed: bool = True,
) -> Encoding:
    """Return the encoding of one or several responses, with the headers and error events that all routes share.

    - `encode` encodes the events of a stream.
    - `closing` contains the last events of a stream.
    - `whole` builds the body of a non-streamed response.
    - `timed` is True if a non-streamed response has the header x-compute-time.
    """
    completions_ = [response.completion for response in responses]
    first = completions_[0]
    prompt_tokens = first.prompt_tokens
    generated_tokens = first.output_tokens
    if len(prompts) > 1:  # otherwise all responses have the same prompt
        prompt_tokens = sum(completion.prompt_tokens for completion in completions_)
        generated_tokens = sum(completion.output_tokens for completion in completions_)
    completion = replace(
        first,
        siblings=tuple(completions_[1:]),
        prompt_tokens=prompt_tokens,
        metric_requests=tuple(request for completion in completions_ for request in completion.metric_requests),
    )
    characters = sum(len(prompt.text) for prompt in prompts)
    error_events = tuple(map(protocol.sse_event, tgi_checks.error_payloads(*FAILED, openai=bool(closing))))
    failure = error_events[:1] * len(prompts) + error_events[1:]  # one error per prompt, and [DONE] on OpenAI routes

    jobs: list[Job] = []

    def answer(duration_s: float) -> Reply:
        total_ms = int(duration_s * 1e3)  # rounded down, as all times of TGI
        queue_ms = min(total_ms, jobs[0].queue_ns // 1_000_000) if jobs else 0  # a refused request never queued
        values = {
            "total-time": total_ms,
            "validation-time": 0,
            "queue-time": queue_ms,
            "inference-time": total_ms - queue_ms,
            "time-per-token": total_ms // first.output_tokens,
            "prompt-tokens": prompt_tokens,
            "generated-tokens": generated_tokens,
        }
        compute_type, compute_characters = tgi_checks.compute_headers(characters)
        compute: Headers = (compute_type, compute_characters)
        if timed:
            compute = (compute_type, ("x-compute-time", f"{duration_s:.9f}"), compute_characters)
        times: Headers = tuple((f"x-{name}", str(value)) for name, value in values.items())
        return protocol.json_reply(whole(), protocol.JSON_TYPE + compute + times)

    head = tgi_checks.stream_headers(characters)
    return Encoding(completion, encode, answer, failure, closing=closing, head=head, on_job=jobs.append)
