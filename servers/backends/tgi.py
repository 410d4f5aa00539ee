"""The Text Generation Inference (TGI) backend, checked with versions 1.0.3 to 3.3.7.

The endpoints are `/generate_stream` (native), `/v1/chat/completions` and `/v1/completions`.

On every endpoint, one event is one token, with or without text. No endpoint accepts token ids, and no field makes the
server ignore the end-of-text token. A complete response may therefore be shorter than requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from loadgen.servers.backends import base
from loadgen.servers.backends.dialect import Answer, Dialect, Route, TokenCount, VersionRule
from loadgen.servers.backends.openai import INCLUDE_USAGE, decode, every_chunk_is_token, messages, openai_dialect
from loadgen.servers.backends.stream_events import decode_events, finalise, join_halves, note_error, note_finish
from loadgen.workloads.request import Request, merged


class TgiToken(msgspec.Struct, gc=False):
    """A generated token. Only its presence matters, so none of its fields is decoded."""


class Details(msgspec.Struct, gc=False):
    """The object `details` in the last event of a response. The server sends it only if the request asks for details.

    `input_length` is the number of prompt tokens, including special tokens that the server adds. It is None for servers
    before version 2.3.0, which do not send it.
    """

    finish_reason: str | None = None
    generated_tokens: TokenCount | None = None
    input_length: TokenCount | None = None


class TgiEvent(msgspec.Struct, gc=False):
    """An event of `/generate_stream`. Only the last event has `generated_text`, and this event also has a token."""

    token: TgiToken | None = None
    generated_text: str | None = None
    details: Details | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(TgiEvent)
_TOP_LEVEL_FIELDS = ("parameters", "add_special_tokens", "multimodal_params")


def generate_body(request: Request, **defaults: bool) -> bytes:
    """Return the JSON body of a request to `/generate_stream` of TGI or LightLLM.

    The server ignores unknown fields outside `parameters`. The user's fields are therefore put into `parameters`,
    except for those in _TOP_LEVEL_FIELDS. `defaults` are further entries of `parameters`, which the user can
    override."""
    top_level = {name: value for name, value in request.body.items() if name in _TOP_LEVEL_FIELDS}
    users = {name: value for name, value in request.body.items() if name not in top_level}
    users |= top_level.pop("parameters", {})
    # Any temperature except 1.0 enables sampling, and the server refuses 0. For greedy decoding, none is sent.
    do_sample = bool(users.get("temperature"))
    if not do_sample:
        users.pop("temperature", None)
    parameters = merged({"max_new_tokens": request.output_tokens, **defaults, "do_sample": do_sample}, users)
    return msgspec.json.encode({"inputs": request.prompt, "parameters": parameters, **top_level})


def _encode_generate(request: Request, _model: str) -> bytes:
    assert isinstance(request.prompt, str), "TGI accepts only text"
    return generate_body(request, details=True)


def _decode_generate(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, _EVENTS)
    answer = Answer([0] * len(payloads), chunk_counts="event")
    answer.tokens[: len(events)] = [0 if event.token is None else 1 for event in events]
    total = None
    for index, event in enumerate(events):
        if event.error or event.token is None:
            note_error(answer, payloads[index])
        if event.generated_text is not None and answer.end_event is None:
            answer.end_event = index
            details = event.details or Details()
            total = details.generated_tokens
            answer.prompt_tokens = details.input_length
            note_finish(answer, details.finish_reason or "", payloads[index])
    return finalise(answer, total, broken)


def _text(payloads: Sequence[bytes]) -> str:
    """Return the text of a response, which is the field `generated_text` of the last event.

    The text contains no special tokens.
    """
    events, _ = decode_events(payloads, _EVENTS)
    return join_halves("".join(event.generated_text or "" for event in events))


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    status, answer = get_json("/info")
    info = base.as_dict(answer)
    if status != 200 or "model_id" not in info or "max_concurrent_requests" not in info:
        return None
    if "model_type" in info:
        return None  # Text Embeddings Inference, which has a similar page
    # A release may report a development version (3.3.7 reports 3.3.6-dev0). The label identifies the build.
    label = base.version_text(info.get("docker_label"))
    version = base.version_text(info.get("version")) + (f" ({label})" if label else "")
    renamed = {"max_input_tokens": info["max_input_length"]} if "max_input_length" in info else {}
    routes = tuple(path for path in ("/tokenize", "/chat_tokenize") if base.route_exists(get_json, path))
    notes = {"prompt_piece_tokens": PIECE_TOKENS} if _IN_PIECES.applies_to(version) else {}
    limits = base.known_limits(TGI.limits, renamed | info)
    return base.ServerFacts("tgi", url, version, str(info["model_id"]), limits, routes, notes=notes)


_BASE_MODEL = {"model": "tgi"}  # The server takes any other name in `model` for a LoRA adapter

# Since 2.2.0 every stream ends with [DONE], so a stream that stops after its finish reason is incomplete. Earlier
# versions did not send [DONE] on the OpenAI routes.
_ALWAYS_DONE = VersionRule(
    lambda version: base.version_at_least(version, 2, 2, 0),
    decode=partial(decode, empty_is_token=every_chunk_is_token, always_done=True, one_per_event=True),
)

# Longer responses are generated in pieces. The router requests the full number of tokens again for each piece
# (router/src/infer/mod.rs; DEFAULT_GENERATION_LENGTH in router/src/validation.rs).
PIECE_TOKENS = 1024
_IN_PIECES = VersionRule(lambda version: base.version_at_least(version, 3, 0, 0), piece_tokens=PIECE_TOKENS)

# These routes tokenise as generation does, including special tokens (router/src/validation.rs).
_COUNT_TEXT: Route[int] = Route("/tokenize", lambda text, _: {"inputs": text}, len)
_COUNT_CHAT = Route(
    "/chat_tokenize",
    lambda text, model: {"model": model, "messages": messages(text)},
    lambda answer: len(answer["tokenize_response"]),
)

_dialect = partial(
    openai_dialect, "tgi", empty_rule=every_chunk_is_token, one_per_event=True, versions=(_ALWAYS_DONE, _IN_PIECES)
)

TGI = base.Backend(
    name="tgi",
    title="TGI",
    request_times="TGI states them only in responses that are not streamed.",
    native="generate",
    dialects={
        "generate": Dialect(
            server="tgi",
            endpoint="generate",
            path="/generate_stream",
            encode=_encode_generate,
            decode=_decode_generate,
            text=_text,
            versions=(_IN_PIECES,),
            count=_COUNT_TEXT,
            count_by_running=Route(  # for versions before 1.4.0: `prefill` has one entry per prompt token
                "/generate",
                lambda text, _: {
                    "inputs": text,
                    "parameters": {"max_new_tokens": 1, "details": True, "decoder_input_details": True},
                },
                lambda answer: len(answer["details"]["prefill"]),
                generates=True,
            ),
        ),
        "completions": _dialect("completions", extra_fields=lambda _: _BASE_MODEL, count=_COUNT_TEXT),
        "chat": _dialect("chat", extra_fields=lambda _: _BASE_MODEL | INCLUDE_USAGE, count=_COUNT_CHAT),
    },
    identify=_identify,
    probe_paths=("/info", "/tokenize", "/chat_tokenize"),
    limits={
        "max_input_tokens": base.ServerLimit("--max-input-tokens", "prompt"),
        "max_total_tokens": base.ServerLimit("--max-total-tokens", "total"),
        "max_concurrent_requests": base.ServerLimit(
            "--max-concurrent-requests", "requests"
        ),  # the server refuses requests above this limit
        "max_batch_total_tokens": base.ServerLimit("--max-batch-total-tokens"),  # in 1.x and 2.x
    },
    port=8002,
    metrics=base.MetricNames(
        prefix="tgi_",
        names={
            "running": ("tgi_batch_current_size",),
            "waiting": ("tgi_queue_size",),
            "prompt_tokens": ("tgi_request_input_length_sum",),
            "output_tokens": ("tgi_request_generated_tokens_sum",),
            "rejections": ("tgi_request_failure{err=overloaded}",),
            "requests_finished": ("tgi_request_success",),
            "requests_failed": ("tgi_request_failure{err=validation|generation|incomplete|dropped|template}",),
            # One value per step of a request, prefill included: the number of accepted draft tokens.
            "draft_steps": ("tgi_request_skipped_tokens_count",),
            "accepted_draft_tokens": ("tgi_request_skipped_tokens_sum",),
            "queue_s_sum": ("tgi_request_queue_duration_sum",),
            "queue_s_count": ("tgi_request_queue_duration_count",),
            "inference_s_sum": ("tgi_request_inference_duration_sum",),
            "inference_s_count": ("tgi_request_inference_duration_count",),
        },
    ),
    simulated="loadgen.servers.simulated.tgi:PROTOCOL",
    notes={
        "memory_option": "--cuda-memory-fraction",
        "memory_taken": "all that is left",
        "ignores_eos": False,
        "counts_prefill_steps": True,
    },
)
