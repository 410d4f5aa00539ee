"""The bytes of vLLM's answers: completions and chat, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servers.simulated import tokenizer
from servers.simulated.bodies import dumps
from servers.simulated.wire import DONE, EventOf, Generation, Question, Reply, Site, event

FINGERPRINT = "vllm-0.32.0-4465e90d"


def error_body(message: str, kind: str, code: int, parameter: str | None = None) -> bytes:
    """Every error of the OpenAI routes, before the body starts and inside it."""
    return dumps({"error": {"message": message, "type": kind, "param": parameter, "code": code}})


def generation(site: Site, question: Question, ids: Sequence[int], asked: int, *, chat: bool) -> Generation:
    """The answer to a prompt of `ids`, of `asked` tokens unless the model stops before."""
    body = question.body
    streamed = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    continuous = include_usage and bool(options.get("continuous_usage_stats"))
    output = min(asked, question.stop_after or asked)
    reason = "length" if output == asked else "stop"
    returned = list(ids) if body.get("return_token_ids") else None
    head = _chunk_head(site, question, chat=chat)
    opening = (_role_chunk(head, returned, len(ids) if continuous else None),) if chat else ()
    return Generation(
        prompt_tokens=len(ids),
        output_tokens=output,
        asked_tokens=asked,
        finish_reason=reason,
        streamed=streamed,
        event=_event_of(site, question, head, returned, (len(ids) if continuous else None, include_usage), reason),
        answer=lambda _: _answer(site, question, (ids, output, reason), chat=chat),
        merges=True,
        opening=opening,
        role_only=opening,
        closing=((_usage_chunk(head, len(ids), output),) if include_usage else ()) + (DONE,),
        failure=(event(error_body("Internal server error", "InternalServerError", 500)), DONE),
    )


def _event_of(
    site: Site,
    question: Question,
    head: bytes,
    returned: list[int] | None,
    usage: tuple[int | None, bool],
    reason: str,
) -> EventOf:
    """Events are joined from pieces that are encoded once per request: the JSON of a token costs nothing here.

    `usage` is the prompt's length where every chunk carries usage, and whether a last chunk does.
    """
    chat = head.endswith(b'{"content":"')
    ids, texts, start = site.babble.ids, site.babble.texts, site.babble.start(question.index)
    prompt_tokens, usage_follows = usage
    given = dumps(returned) if returned is not None else b"null"
    prompt_ids = b"" if chat else b'"prompt_token_ids":%b,'
    quiet = b'"%b,"logprobs":null,"finish_reason":null,%b' % (b"}" * chat, b"" if chat else b'"stop_reason":null,')
    over = b'"%b,"logprobs":null,"finish_reason":"%b","stop_reason":null,' % (b"}" * chat, reason.encode())
    fingerprint = b"" if usage_follows else b',"system_fingerprint":"%b"' % FINGERPRINT.encode()

    def event_of(first: int, tokens: int, last: bool) -> bytes:
        at = start + first
        text = texts[at] if tokens == 1 else b"".join(texts[at : at + tokens])
        shown = b"null" if returned is None else dumps(ids[at : at + tokens])
        before = prompt_ids and prompt_ids % (b"null" if first else given)
        counted = b"" if prompt_tokens is None else b',"usage":' + _usage(prompt_tokens, first + tokens)
        end = fingerprint if last else b""
        pieces = (head, text, over if last else quiet, before, b'"token_ids":', shown, b"}]", counted, end, b"}\n\n")
        return b"".join(pieces)

    return event_of


def _chunk_head(site: Site, question: Question, *, chat: bool) -> bytes:
    """A chunk of the stream up to its text."""
    name, kind = ("chatcmpl", "chat.completion.chunk") if chat else ("cmpl", "text_completion")
    begin = _identity(site, question, name, kind)[:-1]
    inner = b'"delta":{"content":"' if chat else b'"text":"'
    return b'data: %b,"choices":[{"index":0,%b' % (begin, inner)


def _role_chunk(head: bytes, returned: list[int] | None, prompt_tokens: int | None) -> bytes:
    begin = head.removesuffix(b'{"content":"')
    usage = b"" if prompt_tokens is None else b',"usage":' + _usage(prompt_tokens, 0)
    return b'%b{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b,%b}\n\n' % (
        begin,
        usage,
        b'"prompt_token_ids":%b,"prompt_text":null' % (dumps(returned) if returned is not None else b"null"),
    )


def _usage_chunk(head: bytes, prompt_tokens: int, output_tokens: int) -> bytes:
    begin = head[: head.index(b'"choices":')]
    usage = _usage(prompt_tokens, output_tokens)
    return b'%b"choices":[],"usage":%b,"system_fingerprint":"%b"}\n\n' % (begin, usage, FINGERPRINT.encode())


def _answer(site: Site, question: Question, said: tuple[Sequence[int], int, str], *, chat: bool) -> Reply:
    prompt_ids, output_tokens, reason = said
    start = site.babble.start(question.index)
    ids = site.babble.ids[start : start + output_tokens]
    text = tokenizer.decode(ids)
    returned = bool(question.body.get("return_token_ids"))
    choice: dict[str, Any] = {"index": 0}
    if chat:
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice["message"] = {"role": "assistant", "content": text, **nothing}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": ids if returned else None}
    prompt: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": list(prompt_ids) if returned else None}
    choice |= {"routed_experts": None} if chat else {**prompt, "routed_experts": None}
    name, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    usage = {
        "prompt_tokens": len(prompt_ids),
        "total_tokens": len(prompt_ids) + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    rest: dict[str, Any] = {
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
    }
    rest |= {**prompt, "prompt_text": None} if chat else {}
    rest |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
    return Reply(_identity(site, question, name, kind)[:-1] + b"," + dumps(rest)[1:])


def _identity(site: Site, question: Question, name: str, kind: str) -> bytes:
    request = f"{name}-{site.started_s:08x}{question.index:08x}"
    return dumps({"id": request, "object": kind, "created": question.created_s, "model": site.config.model})


def _usage(prompt: int, output: int) -> bytes:
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + output, output)
