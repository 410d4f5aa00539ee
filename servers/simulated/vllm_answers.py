"""Encodes the responses of a simulated vLLM, streamed and non-streamed.

A response contains one or more answers. If the request asks for them, it also contains log probabilities and a copy of
the prompt (`echo`). The parts that all events of a response have in common are encoded only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from loadgen.servers.simulated import protocol, segments, tokenizer, vllm_checks
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, Reply
from loadgen.servers.simulated.state import ServerState

_VERSION = "vllm-0.32.0"
"""First part of the field `system_fingerprint`. The second part identifies a simulated server."""
_LOGPROB = -0.5
"""Log probability of every generated token. It decreases by 1 with every further candidate for the token."""
_EMPTY_MESSAGE_FIELDS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))

Prompt = tuple[Sequence[int], str | None]
"""(token ids, text) of a prompt. The text is None if the request contains token ids."""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One answer of the simulated model to one prompt."""

    completion: Completion
    prompt: Sequence[int]
    prompt_text: str
    """The text that `echo` puts before the answer."""
    stop: str = ""
    """The stop string that ended the answer, or an empty string."""


def generate_answers(
    state: ServerState, request: CompletionRequest, prompts: Sequence[Prompt], limits: Sequence[int], *, chat: bool
) -> list[GeneratedAnswer]:
    """Generate `n` answers to each prompt, where `n` is a field of the request (default 1).

    `chat` is True if answers may contain reasoning and tool calls. `limits` contains the maximum number of output
    tokens for each prompt.
    """
    body = request.body
    answers_per_prompt = protocol.integer(body.get("n")) or 1
    stops = vllm_checks.stop_strings(body)
    shows_stop = bool(body.get("include_stop_str_in_output"))
    echo = bool(body.get("echo")) and not body.get("return_token_ids")
    answers: list[GeneratedAnswer] = []
    for (ids, text), limit in zip(prompts, limits, strict=True):
        prompt_text = ""
        if echo:
            prompt_text = tokenizer.decode(ids) if text is None else text
        for _ in range(answers_per_prompt):
            if chat:
                completion = segments.complete(state, request, len(ids), limit, len(answers))
            else:
                completion = state.complete(request, len(ids), limit, "stop", len(answers))
            stop = ""
            if stops:
                completion, stop, stop_start = completion.cut_at_stop(stops, "stop", anywhere=True)
                length = stop_start + len(stop) if shows_stop else stop_start
                withheld = 0 if shows_stop else max(map(len, stops)) - 1
                completion = replace(completion, texts=_withhold_characters(completion.texts, length, withheld))
            answers.append(GeneratedAnswer(completion, ids, prompt_text, stop))
    return answers


def _withhold_characters(texts: Sequence[bytes], length: int, withheld: int) -> Sequence[bytes]:
    """Return the text that vLLM sends with each token of an answer, for a request with stop strings.

    `texts` contains the text of each token, and `length` is the total number of characters that are sent. After each
    token, vLLM withholds the last `withheld` characters of the text so far, because a stop string may begin with them.
    The event of the last token contains all remaining text.
    """
    whole = b"".join(texts)[:length]
    token_ends = list(accumulate(map(len, texts)))
    ends = [max(0, min(end - withheld, length)) for end in token_ends[:-1]]
    ends.append(length)
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def encode_answers(
    state: ServerState, request: CompletionRequest, answers: Sequence[GeneratedAnswer], *, chat: bool
) -> Encoding:
    """Encode the response with all answers to a request.

    A stream sends all answers in parallel: the first token of every answer, then the second token of every answer, and
    so on.
    """
    body = request.body
    completions = [answer.completion for answer in answers]
    prompts = {id(answer.prompt): answer.prompt for answer in answers}.values()
    prompt_tokens = sum(map(len, prompts))
    output_tokens = sum(completion.output_tokens for completion in completions)
    completion = replace(
        completions[0],
        prompt_tokens=prompt_tokens,
        siblings=tuple(completions[1:]),
        prompt=answers[0].prompt if state.config.clock == "batching" else (),
        cache_salt=str(body.get("cache_salt", "")),
    )
    options = body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    identity = _identity(state, request, chat=chat)
    stream_identity = identity | {"object": "chat.completion.chunk"} if chat else identity
    event_start = b"data: " + protocol.dumps(stream_identity)[:-1]
    fingerprint = f"{_VERSION}-{state.mark_word}"
    fingerprint_field = b',"system_fingerprint":"%b"' % fingerprint.encode()
    style = _response_style(
        body,
        event_start,
        b"" if include_usage else fingerprint_field,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        call_id=segments.call_ids(request),
        chat=chat,
    )
    opening = tuple(style.role_event(index, answer) for index, answer in enumerate(answers)) if chat else ()
    usage = usage_json(prompt_tokens, output_tokens)
    usage_event = b'%b,"choices":[],"usage":%b%b}\n\n' % (event_start, usage, fingerprint_field)
    closing = (usage_event, protocol.DONE) if include_usage else (protocol.DONE,)
    encoders = [style.encoder(index, answer) for index, answer in enumerate(answers)]
    encode = encoders[0] if len(encoders) == 1 else partial(protocol.merge_events, completions, encoders)
    whole_reply = partial(_whole_reply, answers, style, identity, {"system_fingerprint": fingerprint}, usage)
    encoding = Encoding(completion, encode, whole_reply, FAILURE, merges=True, opening=opening, closing=closing)
    if state.config.per_request_metrics and include_usage and len(answers) == 1:
        timed_closing = partial(_timed_closing, usage_event, output_tokens)
        return replace(encoding, timed_closing=timed_closing)
    return encoding


def _timed_closing(usage_event: bytes, output_tokens: int, times: protocol.RequestTimes) -> protocol.Events:
    """Return the last events of a stream: the usage with the times of the request, and `[DONE]`.

    vLLM adds the times with the option `--enable-per-request-metrics`.
    """
    inference_s = times.prefill_s + times.decode_s
    metrics = {
        "time_to_first_token_ms": times.prefill_s * 1e3,
        "generation_time_ms": times.decode_s * 1e3,
        "queue_time_ms": times.queue_s * 1e3,
    }
    if output_tokens > 1:
        metrics["mean_itl_ms"] = times.decode_s / (output_tokens - 1) * 1e3
    if inference_s > 0:
        metrics["tokens_per_second"] = output_tokens / inference_s
    event = usage_event.removesuffix(b"}\n\n") + b',"metrics":%b}\n\n' % protocol.dumps(metrics)
    return event, protocol.DONE


def _identity(state: ServerState, request: CompletionRequest, *, chat: bool) -> dict[str, Any]:
    """Return the first fields of a response: id, object, created and model.

    For a chat request (`chat`), the id begins with `chatcmpl` and the object is `chat.completion`. For any other
    request, the id begins with `cmpl` and the object is `text_completion`.
    """
    prefix, object_name = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    return {
        "id": f"{prefix}-{state.mark_word}-{state.started_s:08x}{request.index:08x}",
        "object": object_name,
        "created": request.created_s,
        "model": request.body.get("model") or state.config.model,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStyle:
    """Options of a request that determine the format of the response."""

    chat: bool
    event_start: bytes
    """The beginning of every event."""
    last_event_end: bytes
    """Fields that only the last event of an answer has."""
    continuous_usage: bool
    """True if every event contains the usage."""
    shows_ids: bool
    logprobs: int | None
    """Number of alternatives for each token. None: the response contains no log probabilities."""
    echo: bool
    call_id: str
    """Id of the tool call."""
    only_echo: bool
    """True if `max_tokens` is 0, so that the response contains only the prompt."""
    prompt_logprobs: int | None

    def role_event(self, index: int, answer: GeneratedAnswer) -> bytes:
        """Return the first event of an answer in a chat stream, which contains only the role."""
        usage = b',"usage":' + usage_json(len(answer.prompt), 0) if self.continuous_usage else b""
        prompt_ids = protocol.dumps(list(answer.prompt) if self.shows_ids else None)
        start = self.event_start + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},' % index
        return start + b'"logprobs":null,"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n' % (
            usage,
            prompt_ids,
        )

    def encoder(self, index: int, answer: GeneratedAnswer) -> protocol.EventEncoder:
        """Return a function that encodes the events of one answer.

        `index` is the index of the answer among all answers to its request. Most parts of the events are already
        encoded here, so that the function only joins them.
        """
        chat = self.chat
        completion = answer.completion
        ids = completion.ids
        texts = completion.texts
        prompt_tokens = len(answer.prompt)
        last_event_end = self.last_event_end
        no_logprobs = self.logprobs is None
        text_key = b'"delta":{"content":"' if chat else b'"text":"'
        delta_start = self.event_start + b',"choices":[{"index":%d,' % index
        start = delta_start + text_key
        prompt_ids = protocol.dumps(list(answer.prompt) if self.shows_ids or self.echo else None)
        first_prompt_field = b"" if chat else b'"prompt_token_ids":%b,' % prompt_ids
        later_prompt_field = b"" if chat else b'"prompt_token_ids":null,'
        after_text = b'"},"logprobs":' if chat else b'","logprobs":'
        unfinished = b',"finish_reason":null,' if chat else b',"finish_reason":null,"stop_reason":null,'
        stop = protocol.dumps(answer.stop or None)
        finished = b',"finish_reason":"%b","stop_reason":%b,' % (completion.finish_reason.encode(), stop)
        offsets = [0] if no_logprobs else [*accumulate(map(len, texts), initial=0)]

        def encode(first: int, tokens: int, last: bool) -> bytes:
            text = texts[first] if tokens == 1 else b"".join(texts[first : first + tokens])
            token_ids = protocol.dumps(ids[first : first + tokens]) if self.shows_ids else b"null"
            logprobs = b"null" if no_logprobs else self.logprobs_json(answer, first, tokens, offsets[first])
            if self.echo and not first:
                text = protocol.dumps(answer.prompt_text)[1:-1] + (b"" if self.only_echo else text)
            usage = b',"usage":' + usage_json(prompt_tokens, first + tokens) if self.continuous_usage else b""
            before_logprobs: tuple[bytes, ...] = (start, text, after_text)
            if completion.segments:
                delta = segments.openai_delta(completion, first, tokens, b"reasoning", self.call_id)
                before_logprobs = (delta_start, delta, b',"logprobs":')
            return b"".join(
                (
                    *before_logprobs,
                    logprobs,
                    finished if last else unfinished,
                    later_prompt_field if first else first_prompt_field,
                    b'"token_ids":',
                    token_ids,
                    b"}]",
                    usage,
                    last_event_end if last else b"",
                    b"}\n\n",
                )
            )

        return encode

    def logprobs_json(self, answer: GeneratedAnswer, first: int, tokens: int, offset: int) -> bytes:
        """Encode the log probabilities of some tokens of an answer as JSON.

        - `first` is the index of the first of these tokens, and `tokens` is their number.
        - `offset` is the position of the first of these tokens in the text of the answer, in characters.

        If the request has `echo` and `first` is 0, the log probabilities of the prompt are put in front.
        """
        echoed = self.echo and not first
        ids = list(answer.prompt) if echoed else []
        if not (echoed and self.only_echo):
            ids += answer.completion.ids[first : first + tokens]
        texts = [tokenizer.decode([token]) for token in ids]
        alternatives = self.logprobs or 0
        if self.chat:
            content = []
            for token, text in zip(ids, texts, strict=True):
                top = [_chat_logprob(*candidate) for candidate in _candidates(token, alternatives)]
                content.append({**_chat_logprob(text, _LOGPROB), "top_logprobs": top})
            return protocol.dumps({"content": content})
        # The first token of a prompt has no log probability.
        token_logprobs = [None if echoed and not index else _LOGPROB for index in range(len(ids))]
        top_logprobs = [
            None if token_logprobs[index] is None else dict(_candidates(token, max(1, alternatives)))
            for index, token in enumerate(ids)
        ]
        if self.echo and first:
            offset += len(answer.prompt_text)
        text_offsets = list(accumulate(map(len, texts[:-1]), initial=offset))
        return protocol.dumps(
            {
                "text_offset": text_offsets,
                "token_logprobs": token_logprobs,
                "tokens": texts,
                "top_logprobs": top_logprobs,
            }
        )

    def prompt_logprobs_of(self, prompt: Sequence[int]) -> list[Any] | None:
        """Return the field `prompt_logprobs` of a non-streamed response.

        Return None if the request does not ask for this field.
        """
        if self.prompt_logprobs is None:
            return None
        result: list[Any] = [None]
        for token in prompt[1:]:
            candidates = {}
            for rank, candidate in enumerate(_candidate_ids(token, max(1, self.prompt_logprobs)), 1):
                text = tokenizer.decode([candidate])
                candidates[str(candidate)] = {"logprob": _LOGPROB + 1 - rank, "rank": rank, "decoded_token": text}
            result.append(candidates)
        return result


def _response_style(
    body: Mapping[str, Any],
    event_start: bytes,
    last_event_end: bytes,
    *,
    continuous_usage: bool,
    call_id: str,
    chat: bool,
) -> ResponseStyle:
    logprobs = protocol.integer(body.get("logprobs"))
    if chat:
        logprobs = (protocol.integer(body.get("top_logprobs")) or 0) if body.get("logprobs") else None
    echo = bool(body.get("echo")) and not chat
    prompt_logprobs = protocol.integer(body.get("prompt_logprobs"))
    if prompt_logprobs is None and echo:
        prompt_logprobs = logprobs
    return ResponseStyle(
        chat=chat,
        event_start=event_start,
        last_event_end=last_event_end,
        continuous_usage=continuous_usage,
        shows_ids=bool(body.get("return_token_ids")),
        logprobs=logprobs,
        echo=echo,
        call_id=call_id,
        only_echo=echo and protocol.integer(body.get("max_tokens")) == 0,
        prompt_logprobs=prompt_logprobs,
    )


def _candidates(token: int, number: int) -> Iterator[tuple[str, float]]:
    """Yield the `number` most likely candidates for one generated token, each as a pair: text and log probability.

    The first candidate is the token that was generated. Its id is `token`.
    """
    for index, candidate in enumerate(_candidate_ids(token, number)):
        yield tokenizer.decode([candidate]), _LOGPROB - index


def _candidate_ids(token: int, number: int) -> list[int]:
    return [(token + index) % tokenizer.VOCABULARY_SIZE for index in range(number)]


def _chat_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _whole_reply(
    answers: Sequence[GeneratedAnswer],
    style: ResponseStyle,
    identity: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    usage: bytes,
    _duration_s: float,
) -> Reply:
    """Return the non-streamed response, which contains all answers.

    As in vLLM, the order of the fields differs from the order in the events of a stream.
    """
    choices = []
    prompt_fields: dict[str, Any] = {}
    for index, answer in enumerate(answers):
        completion = answer.completion
        text = completion.text
        if style.echo:
            text = answer.prompt_text + ("" if style.only_echo else text)
        logprobs = None
        if style.logprobs is not None:
            logprobs = msgspec.Raw(style.logprobs_json(answer, 0, completion.output_tokens, 0))
        choice: dict[str, Any] = {"index": index}
        if completion.segments:
            message = segments.openai_message(completion, "reasoning", style.call_id)
            choice["message"] = {"role": "assistant", **_EMPTY_MESSAGE_FIELDS, **message}
        elif style.chat:
            choice["message"] = {"role": "assistant", "content": text, **_EMPTY_MESSAGE_FIELDS}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": answer.stop or None,
            "token_ids": list(completion.ids) if style.shows_ids else None,
        }
        prompt_fields = {
            "prompt_logprobs": style.prompt_logprobs_of(answer.prompt),
            "prompt_token_ids": list(answer.prompt) if style.shows_ids else None,
        }
        if not style.chat:
            choice |= prompt_fields
        choice["routed_experts"] = None
        choices.append(choice)
    details = b',"prompt_tokens_details":null,"completion_tokens_details":null}'
    response: dict[str, Any] = {**identity, "choices": choices, "service_tier": None, **fingerprint}
    response["usage"] = msgspec.Raw(usage[:-1] + details)
    if style.chat:  # all answers of a chat have the same prompt
        response |= {**prompt_fields, "prompt_text": None}
    response |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
    return protocol.json_reply(response)


def usage_json(prompt_tokens: int, output_tokens: int) -> bytes:
    """Encode the token counts of a response as the value of the field `usage`."""
    total_tokens = prompt_tokens + output_tokens
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        prompt_tokens,
        total_tokens,
        output_tokens,
    )


def failure(status: int) -> Reply:
    """Return an error response with status 429, 500 or 503.

    Responses with status 429 and 503 have the message of vLLM's queue limits (v1/engine/async_llm.py). The real server
    never sends status 429.
    """
    if status == 500:
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return protocol.openai_error(message, "InternalServerError", 500)
    error_type = "ServiceUnavailableError" if status == 503 else "RateLimitError"
    return protocol.openai_error("The server is overloaded, please try again later.", error_type, status)


FAILURE = (
    protocol.sse_event(protocol.openai_error("Internal server error", "InternalServerError", 500).body),
    protocol.DONE,
)
"""The events that end a stream when the engine fails."""
