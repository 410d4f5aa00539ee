"""The LightLLM backend, checked with versions 0.0.1 to 1.2.0.

The endpoints are `/generate_stream` (native), `/v1/chat/completions` and `/v1/completions`.

The server sends status 200 before it validates a request. To refuse the request, the server then closes the connection
(up to version 1.1.0) or sends an error event (since 1.2.0). Only these signs show that a response is complete:

- `/generate_stream`: an event with `finished`.
- `/v1/completions`: `[DONE]`.
- `/v1/chat/completions`: a finish reason or `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from loadgen.servers.backends import base
from loadgen.servers.backends.dialect import Answer, Dialect, Route, TokenCount, VersionRule
from loadgen.servers.backends.openai import (
    Choice,
    decode,
    every_chunk_is_token,
    has_role,
    openai_dialect,
    unless_marker,
)
from loadgen.servers.backends.stream_events import decode_events, finalise, join_halves, note_error, note_finish
from loadgen.servers.backends.tgi import generate_body
from loadgen.workloads.request import Request


class LightllmToken(msgspec.Struct, gc=False):
    """A generated token, with the number of output tokens so far and the number of prompt tokens.

    Both numbers are None or 0 if the server does not send them, as LightLLM did before 2024."""

    count_output_tokens: TokenCount | None = None
    prompt_tokens: TokenCount | None = None
    text: str | None = None
    special: bool | None = None  # A special token, which is not part of the text


class LightllmEvent(msgspec.Struct, gc=False):
    """An event of `/generate_stream`. Every event contains a token. In the last event, `finished` is True.

    If the request fails, an event contains an `error` instead of a token.
    """

    token: LightllmToken | None = None
    finished: bool = False
    finish_reason: str | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(LightllmEvent)


def _decode_generate(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, _EVENTS)
    answer = Answer([0] * len(payloads))
    count = 0
    for index, event in enumerate(events):
        token = event.token
        if event.error or token is None:
            note_error(answer, payloads[index])
        if token is not None and token.count_output_tokens:
            answer.tokens[index] = max(0, token.count_output_tokens - count)
            count = max(count, token.count_output_tokens)
            answer.prompt_tokens = token.prompt_tokens or None
        elif token is not None:
            answer.tokens[index] = 1
            count += bool(count)  # this event has no count: add its token to the last count, if there was one
        if event.finished and answer.end_event is None:
            answer.end_event = index
            note_finish(answer, event.finish_reason or "", payloads[index])
    answer.chunk_counts = "usage" if count else "event"
    return finalise(answer, count or None, broken)


def _text(payloads: Sequence[bytes]) -> str:
    events, _ = decode_events(payloads, _EVENTS)
    return join_halves("".join(event.token.text or "" for event in events if event.token and not event.token.special))


def _exact(request: Request) -> dict[str, Any]:
    # Version 1.1.0 ignores `do_sample` in chat and always samples. A temperature of 0 makes the sampling greedy.
    return {"ignore_eos": request.ignore_eos, "do_sample": bool(request.body.get("temperature"))}


def _chat_empty_is_token(choices: Sequence[Choice], index: int, missing: bool) -> bool:
    """Return True if a chunk of a chat response stands for a generated token, although the chunk has no text.

    `choices` contains the chunks of the response, and `index` is the position of the chunk. `missing` is True if the
    server reports more tokens than were counted so far.

    Up to LightLLM 1.1.0, every chunk has a role, and every chunk stands for a token. Since 1.2.0, only the first chunk
    has a role. The function `unless_marker` then decides.
    """
    every_role = all(map(has_role, choices[:2])) and (len(choices) > 1 or bool(choices[0].finish_reason))
    return every_role or unless_marker(choices, index, missing)


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    name = base.as_dict(get_json("/get_model_name")[1])
    if "model_name" not in name and "logical_max_load" not in base.as_dict(get_json("/token_load")[1]):
        return None
    card = base.first_model_card(get_json("/v1/models")[1])
    # /get_model_name and /tokens were both added in 1.0. A request to /tokens without a text would count as a failed
    # request in the server's metrics.
    routes = ("/tokens",) if "model_name" in name else ()
    model = str(card.get("id") or name.get("model_name", ""))
    limits = base.known_limits(LIGHTLLM.limits, base.as_dict(get_json("/get_server_info")[1]) | card)
    # The server reports no version. It is inferred from the routes, which were added in this order: /get_model_name,
    # /v1/completions, /v1/models.
    if card:
        version = "1.2.0 or later"
    elif base.route_exists(get_json, "/v1/completions"):
        version = "1.1.0"
    else:
        version = "1.0" if routes else "before 1.0"
    return base.ServerFacts("lightllm", url, version, model, limits, routes)


def _token_load(answer: Any) -> float:
    """Return the fraction of the KV cache that is in use, from a response to `/token_load`.

    The server reports one fraction, or a list with one fraction per data-parallel replica. For a list, the result is
    the mean."""
    load = answer["current_load"]
    shares = load if isinstance(load, list) else [load]
    if not shares or not all(isinstance(share, int | float) for share in shares):
        raise ValueError("no current_load")
    return float(sum(shares) / len(shares))


_WITHOUT_DONE = VersionRule(
    lambda version: version in ("before 1.0", "1.0", "1.1.0"),
    decode=partial(decode, empty_is_token=every_chunk_is_token, always_done=False, one_per_event=True),
    misleading_reason="chat streams of LightLLM {version} have no end marker and no token counts, so that an "
    "incomplete stream looks like a complete one",
)


# The server adds special tokens on the native route, but not on /v1/completions (server/api_openai.py).
def _count(parameters: dict[str, Any]) -> Route[int]:
    return Route(
        "/tokens", lambda text, _: {"text": text, "parameters": parameters}, lambda answer: int(answer["ntokens"])
    )


_COUNT_TEXT = _count({"add_special_tokens": False})
_dialect = partial(openai_dialect, "lightllm", extra_fields=_exact, fixed_output=True, one_per_event=True)

LIGHTLLM = base.Backend(
    name="lightllm",
    title="LightLLM",
    native="generate",
    dialects={
        "generate": Dialect(  # 1.0.1 and later accept token ids, earlier versions answer 417
            server="lightllm",
            endpoint="generate",
            path="/generate_stream",
            # `parameters` is mandatory, and 0.0.1 refuses unknown ones. `ignore_eos` is enough for a fixed length.
            encode=lambda request, _: generate_body(request, ignore_eos=request.ignore_eos),
            decode=_decode_generate,
            text=_text,
            count=_count({}),
            count_by_running=Route(  # before 1.0 only the details of a token contain the length of the prompt
                "/generate",
                lambda text, _: {"inputs": text, "parameters": {"max_new_tokens": 1, "return_details": True}},
                lambda answer: int(answer["tokens"][0]["prompt_tokens"]),
                generates=True,
            ),
            fixed_output=True,
        ),
        "completions": _dialect(
            "completions", empty_rule=every_chunk_is_token, always_done=True, count=_COUNT_TEXT, token_ids=True
        ),
        # 1.1.0 never sends [DONE].
        "chat": _dialect("chat", empty_rule=_chat_empty_is_token, count_text=_COUNT_TEXT, versions=(_WITHOUT_DONE,)),
    },
    identify=_identify,
    probe_paths=("/get_model_name", "/token_load", "/get_server_info"),
    limits={
        "max_model_len": base.ServerLimit("--max_req_total_len", "total"),
        "max_total_token_num": base.ServerLimit("--max_total_token_num"),  # KV cache in tokens
        "max_req_total_len": base.ServerLimit("--max_req_total_len"),
        "running_max_req_size": base.ServerLimit(
            "--running_max_req_size"
        ),  # requests above this limit wait in no particular order
    },
    port=8003,
    metrics=base.MetricNames(
        prefix="lightllm_",
        names={
            "running": ("lightllm_batch_current_size", "lightllm_num_running_reqs"),
            "waiting": ("lightllm_queue_size",),
            "paused": ("lightllm_batch_pause_size",),
            "prompt_tokens": ("lightllm_prompt_tokens_total", "lightllm_request_input_length_sum"),
            "output_tokens": ("lightllm_generation_tokens_total", "lightllm_request_generated_tokens_sum"),
            "requests_finished": ("lightllm_request_success_total",),
            "requests_failed": ("lightllm_request_failure_total",),
        },
        kv_used=("/token_load", _token_load),
    ),
    # The limit allows a burst of 1000.
    process=base.ProcessCommand(
        module=("lightllm.server.api_server",),
        arguments=(
            "--model_dir",
            "{model}",
            "--model_name",
            "{name}",
            "--host",
            "{host}",
            "--port",
            "{port}",
            "--running_max_req_size",
            "1024",
            "--disable_dynamic_prompt_cache",
            "--tp",
            "{tensor_parallel}",
        ),
    ),
    simulated="loadgen.servers.simulated.lightllm:PROTOCOL",
    simulated_versions={
        "0.0.1": "loadgen.servers.simulated.lightllm_0_0_1:PROTOCOL",
        "0.0.1-tgi-api": "loadgen.servers.simulated.lightllm_0_0_1:TGI_PROTOCOL",
    },
    # LightLLM takes 90% of the memory in versions 1.0 and 1.1, and 80% in later versions.
    notes={"memory_option": "--mem_fraction", "memory_taken": "80 to 90% by default", "drops_counts": True},
)
