"""A simulated vLLM's answers as bytes: one or several, streamed or whole, with log probabilities and the prompt echoed
where asked. Pieces that do not change are encoded once per request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from loadgen.servers.simulated import protocol, tokenizer, vllm_checks
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, Reply
from loadgen.servers.simulated.state import ServerState

_VERSION = "vllm-0.32.0"  # in a fingerprint, before the word that marks a simulated server
_LIKELY = -0.5  # the log probability of what is said; each place behind it is one less
_NO_CHOICE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))

Prompt = tuple[Sequence[int], str | None]  # ids, and the text where that is what came


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One answer to one prompt."""

    completion: Completion
    prompt: Sequence[int]
    prompt_text: str  # what `echo` puts before it
    stop: str = ""  # the stop string that ended it


def generate_answers(
    state: ServerState, request: CompletionRequest, prompts: Sequence[Prompt], asked: Sequence[int]
) -> list[GeneratedAnswer]:
    """`n` answers to each prompt, of at most so many tokens."""
    body = request.body
    answers, stops = protocol.integer(body.get("n")) or 1, vllm_checks.stop_strings(body)
    keeps, result = bool(body.get("include_stop_str_in_output")), list[GeneratedAnswer]()
    echo = body.get("echo") and not body.get("return_token_ids")
    for (ids, given), limit in zip(prompts, asked, strict=True):
        text = "" if not echo else tokenizer.decode(ids) if given is None else given
        for _ in range(answers):
            said, stop = state.complete(request, len(ids), limit, "stop", len(result)), ""
            if stops:
                said, stop, index = said.cut_at_stop(stops, "stop", anywhere=True)
                back = 0 if keeps else max(map(len, stops)) - 1
                said = replace(said, texts=_withhold_characters(said.texts, index + len(stop) * keeps, back))
            result.append(GeneratedAnswer(said, ids, text, stop))
    return result


def _withhold_characters(texts: Sequence[bytes], length: int, back: int) -> Sequence[bytes]:
    """As vLLM streams texts that a stop string may yet cut: the last `back` characters wait, all are there at the end,
    and what is past `length` never comes."""
    whole, ends = b"".join(texts)[:length], [*accumulate(map(len, texts))]
    ends = [*(max(0, min(end - back, length)) for end in ends[:-1]), length]
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def encode_answers(
    state: ServerState, request: CompletionRequest, answers: Sequence[GeneratedAnswer], *, chat: bool
) -> Encoding:
    """All answers on the wire. They leave together, a token of each at a time."""
    body, made = request.body, [answer.completion for answer in answers]
    prompts = {id(answer.prompt): answer.prompt for answer in answers}.values()
    prompt_tokens, output_tokens = sum(map(len, prompts)), sum(each.output_tokens for each in made)
    known = answers[0].prompt if state.config.clock == "batching" else ()
    completion = replace(made[0], prompt_tokens=prompt_tokens, siblings=tuple(made[1:]), prompt=known)
    completion = replace(completion, cache_salt=str(body.get("cache_salt", "")))
    options = body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    name, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    number = f"{name}-{state.mark_word}-{state.started_s:08x}{request.index:08x}"
    identity = {"id": number, "object": kind, "created": request.created_s, "model": state.config.model}
    stream = b"data: " + protocol.dumps(identity | {"object": "chat.completion.chunk"} if chat else identity)[:-1]
    named = f"{_VERSION}-{state.mark_word}"
    fingerprint = b',"system_fingerprint":"%b"' % named.encode()
    continuous = include_usage and bool(options.get("continuous_usage_stats"))
    looks = _looks(body, stream, b"" if include_usage else fingerprint, continuous=continuous, chat=chat)
    opening = tuple(looks.role(index, each) for index, each in enumerate(answers)) if chat else ()
    counts = b'%b,"choices":[],"usage":%b%b}\n\n' % (stream, usage(prompt_tokens, output_tokens), fingerprint)
    closing = (counts, protocol.DONE) if include_usage else (protocol.DONE,)
    encoders = [looks.encoder(index, each) for index, each in enumerate(answers)]
    encode = encoders[0] if len(encoders) == 1 else partial(protocol.merge_events, made, encoders)
    counted = usage(prompt_tokens, output_tokens)
    answer = partial(_answer, answers, looks, identity, {"system_fingerprint": named}, counted)
    return Encoding(completion, encode, answer, FAILURE, merges=True, opening=opening, closing=closing)


@dataclass(frozen=True, slots=True)
class ResponseStyle:
    """What of a request decides how its answers look."""

    chat: bool
    stream: bytes  # the beginning of every event
    end: bytes  # what only the last event has
    continuous: bool  # every event carries usage
    shows_ids: bool
    logprobs: int | None  # how many are given beside that of the token itself
    echo: bool
    only_echo: bool  # `max_tokens` 0: the prompt and nothing else
    prompt_logprobs: int | None

    def role(self, place: int, answer: GeneratedAnswer) -> bytes:
        """The event that opens an answer of a chat."""
        counted = b',"usage":' + usage(len(answer.prompt), 0) if self.continuous else b""
        given = protocol.dumps(list(answer.prompt) if self.shows_ids else None)
        head = self.stream + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},' % place
        return head + b'"logprobs":null,"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n' % (
            counted,
            given,
        )

    def encoder(self, place: int, answer: GeneratedAnswer) -> protocol.EventEncoder:
        """Events of one answer, joined from pieces."""
        chat, completion, end = self.chat, answer.completion, self.end
        ids, texts, prompt_tokens = completion.ids, completion.texts, len(answer.prompt)
        head = self.stream + b',"choices":[{"index":%d,%b' % (place, b'"delta":{"content":"' if chat else b'"text":"')
        given = protocol.dumps(list(answer.prompt) if self.shows_ids or self.echo else None)
        stop, nothing = protocol.dumps(answer.stop or None), self.logprobs is None
        tail = b'"%b,"logprobs":' % (b"}" * chat)
        inner = b',"finish_reason":null,%b' % (b"" if chat else b'"stop_reason":null,')
        final = b',"finish_reason":"%b","stop_reason":%b,' % (completion.finish_reason.encode(), stop)
        offsets = [0] if nothing else [*accumulate(map(len, texts), initial=0)]

        def encode(first: int, tokens: int, last: bool) -> bytes:
            text = texts[first] if tokens == 1 else b"".join(texts[first : first + tokens])
            shown = protocol.dumps(ids[first : first + tokens]) if self.shows_ids else b"null"
            likely = b"null" if nothing else self.likely(answer, first, tokens, offsets[first])
            if self.echo and not first:
                text = protocol.dumps(answer.prompt_text)[1:-1] + (b"" if self.only_echo else text)
            before = b"" if chat else b'"prompt_token_ids":%b,' % (b"null" if first else given)
            counted = b',"usage":' + usage(prompt_tokens, first + tokens) if self.continuous else b""
            pieces = (head, text, tail, likely, final if last else inner, before, b'"token_ids":', shown, b"}]")
            return b"".join((*pieces, counted, end if last else b"", b"}\n\n"))

        return encode

    def likely(self, answer: GeneratedAnswer, first: int, tokens: int, offset: int) -> bytes:
        """The log probabilities of so many tokens; of an echo the prompt's before them."""
        ids, echoed = answer.completion.ids[first : first + tokens], self.echo and not first
        prompt = list(answer.prompt) if echoed else []
        shown = prompt if echoed and self.only_echo else [*prompt, *ids]
        words = [tokenizer.decode([token]) for token in shown]
        top = self.logprobs or 0
        if self.chat:
            content = [
                {**_word(word, _LIKELY), "top_logprobs": [_word(*each) for each in _ranked(token, top)]}
                for token, word in zip(shown, words, strict=True)
            ]
            return protocol.dumps({"content": content})
        known = [None if echoed and not index else _LIKELY for index in range(len(shown))]
        tops = [known[index] and dict(_ranked(token, max(1, top))) for index, token in enumerate(shown)]
        offset += len(answer.prompt_text) * (self.echo and bool(first))
        offsets = list(accumulate(map(len, words[:-1]), initial=offset))
        return protocol.dumps({"text_offset": offsets, "token_logprobs": known, "tokens": words, "top_logprobs": tops})

    def prompt_likely(self, prompt: Sequence[int]) -> list[Any] | None:
        """`prompt_logprobs` of a whole answer."""
        if self.prompt_logprobs is None:
            return None
        result: list[Any] = [None]
        for token in prompt[1:]:
            words = enumerate(_near(token, max(1, self.prompt_logprobs)), 1)
            told = {str(each): (rank, tokenizer.decode([each])) for rank, each in words}
            result.append(
                {
                    each: {"logprob": _LIKELY + 1 - rank, "rank": rank, "decoded_token": word}
                    for each, (rank, word) in told.items()
                }
            )
        return result


def _looks(body: Mapping[str, Any], stream: bytes, end: bytes, *, continuous: bool, chat: bool) -> ResponseStyle:
    logprobs = protocol.integer(body.get("logprobs"))
    if chat:
        logprobs = protocol.integer(body.get("top_logprobs")) or 0 if body.get("logprobs") else None
    echo = bool(body.get("echo")) and not chat
    prompt_logprobs = protocol.integer(body.get("prompt_logprobs"))
    if prompt_logprobs is None and echo:
        prompt_logprobs = logprobs
    only, ids = echo and protocol.integer(body.get("max_tokens")) == 0, bool(body.get("return_token_ids"))
    return ResponseStyle(chat, stream, end, continuous, ids, logprobs, echo, only, prompt_logprobs)


def _ranked(token: int, most: int) -> Iterator[tuple[str, float]]:
    """The likeliest tokens in a token's place, itself first: the model is sure of what it says."""
    for index, each in enumerate(_near(token, most)):
        yield tokenizer.decode([each]), _LIKELY - index


def _near(token: int, most: int) -> list[int]:
    return [(token + index) % tokenizer.VOCABULARY_SIZE for index in range(most)]


def _word(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _answer(
    answers: Sequence[GeneratedAnswer],
    looks: ResponseStyle,
    identity: Mapping[str, Any],
    named: Mapping[str, Any],
    counted: bytes,
    _: float,
) -> Reply:
    """All answers whole, and the same things in another order than in a stream."""
    chat, choices = looks.chat, []
    for index, each in enumerate(answers):
        completion, prompt = each.completion, list(each.prompt) if looks.shows_ids else None
        text = completion.text
        if looks.echo:
            text = each.prompt_text + ("" if looks.only_echo else text)
        message = {"role": "assistant", "content": text, **_NO_CHOICE}
        likely = None if looks.logprobs is None else looks.likely(each, 0, completion.output_tokens, 0)
        choice: dict[str, Any] = {"index": index, **({"message": message} if chat else {"text": text})}
        choice |= {"logprobs": None if likely is None else msgspec.Raw(likely)}
        choice |= {"finish_reason": completion.finish_reason, "stop_reason": each.stop or None}
        choice |= {"token_ids": list(completion.ids) if looks.shows_ids else None}
        about = {"prompt_logprobs": looks.prompt_likely(each.prompt), "prompt_token_ids": prompt}
        choices.append(choice | ({} if chat else about) | {"routed_experts": None})
    details = b',"prompt_tokens_details":null,"completion_tokens_details":null}'
    rest: dict[str, Any] = {"service_tier": None, **named}
    rest |= {"usage": msgspec.Raw(counted[:-1] + details)}
    rest |= {**about, "prompt_text": None} if chat else {}
    rest |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
    return protocol.json_reply({**identity, "choices": choices, **rest})


def usage(prompt: int, output: int) -> bytes:
    """Counts as JSON."""
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + output, output)


def failure(status: int) -> Reply:
    """503 and 429 in the words of the queue limits (v1/engine/async_llm.py); vLLM itself has no 429."""
    if status == 500:
        gone = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return protocol.openai_error(gone, "InternalServerError", 500)
    kind = "ServiceUnavailableError" if status == 503 else "RateLimitError"
    return protocol.openai_error("The server is overloaded, please try again later.", kind, status)


FAILURE = (
    protocol.sse_event(protocol.openai_error("Internal server error", "InternalServerError", 500).body),
    protocol.DONE,
)
"""What ends a stream whose engine is gone."""
