"""A simulated TGI, as 3.3.7 speaks (router/src/server.rs at that tag) and batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from loadgen.servers.simulated import protocol, tgi_answers, tgi_bodies, tgi_checks, tgi_tools, tokenizer
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, exponential_buckets
from loadgen.servers.simulated.tgi_answers import ChatOptions, TextPrompt
from loadgen.servers.simulated.tgi_checks import (
    MAX_BEST_OF,
    MAX_CLIENT_BATCH_SIZE,
    MAX_STOP_SEQUENCES,
    Refuse,
    flat_error,
)

VERSION, SHA = "3.3.6-dev0", "dfb3fbe78e0d1d69251bd33065591c61bafdfaa8"  # what the tag v3.3.7 calls itself
_SAMPLED: Mapping[str, Any] = {"do_sample": True}  # the parameters of a request that has none


def native(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST on NATIVE."""
    body, compat = request.body, request.path == "/"
    parameters: Mapping[str, Any] = body.get("parameters", _SAMPLED)
    if compat and parameters.get("return_full_text") is None:
        parameters = {**parameters, "return_full_text": True}
    prompt = TextPrompt(body["inputs"], parameters)
    refuse = _refusing(request, [prompt])
    best_of = parameters.get("best_of")
    if request.streamed:
        if best_of not in (None, 1):
            raise refuse("`best_of` != 1 is not supported when streaming tokens")
        if parameters.get("decoder_input_details"):
            raise refuse("`decoder_input_details` == true is not supported when streaming tokens")
    answers = best_of if best_of and not request.streamed else 1
    if answers > MAX_BEST_OF:
        raise refuse(f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {answers}")
    said = [tgi_answers.generate(state, request, prompt, refuse, index) for index in range(answers)]
    return tgi_answers.native(said, prompt, listed=compat, mark=state.mark)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/chat/completions."""
    body = request.body
    prompt, tools = _chat_prompt(body)
    if tools:
        word = tokenizer.decode(state.vocabulary.ids[:1]).strip()
        prompt = TextPrompt(prompt.text, prompt.parameters, tgi_tools.call_text(tools[0], word))
    said = tgi_answers.generate(state, request, prompt, _refusing(request, [prompt]))
    named = body.get("model")
    identity = _identity(state, request, "chat.completion", state.config.model if named in (None, "tgi") else named)
    wish = ChatOptions(
        logprobs=bool(body.get("logprobs")),
        top=body.get("top_logprobs") or 0,
        usage=bool(body.get("stream_options", {}).get("include_usage")),
        tool_id=tgi_tools.call_id(body["messages"]) if tools else None,
    )
    return tgi_answers.chat(said, prompt, identity, wish)


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/completions."""
    body = request.body
    if body.get("suffix") is not None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise ErrorReply(flat_error(message, "suffix not supported", 422))
    texts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if len(texts) > MAX_CLIENT_BATCH_SIZE:
        message = f"Number of prompts exceeds the maximum allowed batch size of {MAX_CLIENT_BATCH_SIZE}"
        raise ErrorReply(flat_error(message, "batch size exceeded", 422))
    parameters = _openai_parameters(body) | {"repetition_penalty": body.get("repetition_penalty")}
    prompts = [TextPrompt(text, parameters) for text in texts]
    refuse = _refusing(request, prompts)
    said = [tgi_answers.generate(state, request, prompt, refuse, index) for index, prompt in enumerate(prompts)]
    identity = _identity(state, request, "text_completion", state.config.model)
    return tgi_answers.completions(said, prompts, identity)


def _chat_prompt(body: Mapping[str, Any]) -> tuple[TextPrompt, list[Mapping[str, Any]]]:
    """The prompt of a chat, and the tools that the model may call. Raises ErrorReply."""
    tools = tgi_tools.usable_tools(body)
    messages = tgi_tools.with_tools(body, tools) if tools else body["messages"]
    penalty = body.get("presence_penalty")
    parameters = _openai_parameters(body) | {
        "repetition_penalty": None if penalty is None else penalty + 2.0,
        "top_n_tokens": body.get("top_logprobs"),
        "grammar": body.get("response_format"),
        # Completions have no such alias: there the real server ignores the field, whatever its type.
        "max_new_tokens": body.get("max_tokens", body.get("max_completion_tokens")),
    }
    return TextPrompt(tokenizer.chat_text(messages), parameters), tools


def _openai_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """The native parameters that the OpenAI routes make. A temperature of zero is the legal way to ask for greedy."""
    temperature = body.get("temperature")
    return {
        "temperature": temperature or None,
        "do_sample": temperature != 0,
        "top_p": body.get("top_p"),
        "frequency_penalty": body.get("frequency_penalty"),
        "stop": body.get("stop"),
        "seed": body.get("seed"),
        "max_new_tokens": body.get("max_tokens"),
    }


def _refusing(request: CompletionRequest, prompts: list[TextPrompt]) -> Refuse:
    """What makes the refusals of this request."""
    head = tgi_checks.stream_headers(sum(len(prompt.text) for prompt in prompts))
    openai = request.path.startswith("/v1/")

    def refuse(message: str) -> ErrorReply:
        said = f"Input validation error: {message}"
        return ErrorReply(tgi_checks.refusal(said, "validation", 422, head, streamed=request.streamed, openai=openai))

    return refuse


def _overloaded(refused: Encoding) -> Reply:
    streamed, openai = refused.completion.streamed, bool(refused.closing)
    return tgi_checks.refusal(*tgi_checks.OVERLOADED, 429, refused.head, streamed=streamed, openai=openai)


def _failure(status: int) -> Reply:
    said = {500: ("Incomplete generation", "incomplete_generation"), 503: ("unhealthy", "healthcheck")}
    return flat_error(*said.get(status, tgi_checks.OVERLOADED), status)


def _label(state: ServerState) -> str:
    """The label of the image. A real one has a commit there."""
    return state.mark_word


def _identity(state: ServerState, request: CompletionRequest, kind: str, model: str) -> dict[str, Any]:
    made = {"object": kind, "id": "", "created": request.created_s, "model": model}
    return made | {"system_fingerprint": f"{VERSION}-{_label(state)}"}


def _info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    names = {"model_id": config.model, "model_sha": None, "model_pipeline_tag": None}
    limits = {"max_concurrent_requests": config.max_concurrent_requests, "max_best_of": MAX_BEST_OF}
    limits |= {
        "max_stop_sequences": MAX_STOP_SEQUENCES,
        "max_input_tokens": state.max_model_len - 1,
    }  # launcher/src/main.rs
    limits |= {
        "max_total_tokens": state.max_model_len,
        "validation_workers": 2,
        "max_client_batch_size": MAX_CLIENT_BATCH_SIZE,
    }
    version = {"version": VERSION, "sha": SHA, "docker_label": _label(state)}
    return protocol.json_reply({**names, **limits, "router": "text-generation-router", **version, **state.mark})


def _tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    return protocol.json_reply(_token_list(fields["inputs"]))


def _chat_tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    text = _chat_prompt(fields)[0].text
    return protocol.json_reply({"tokenize_response": _token_list(text), "templated_text": text})


def _token_list(text: str) -> list[dict[str, Any]]:
    """With the token that the server puts before every text; it has no place in it."""
    places = ((tokenizer.BOS_ID, 0, 0), *tokenizer.offsets(text))
    return [{"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in places]


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Counters carry no `_total`, and nothing carries a model name. What we do not know is left out."""
    failures = {**state.refused_by_reason, "dropped": state.finished_by_reason["abort"]}
    failed = {("err", kind): times for kind, times in failures.items() if times}
    page = state.metrics("tgi_", {}, {"failed_by_kind": failed})
    return Reply(page + state.mark_metrics(), headers=protocol.TEXT_TYPE)


_EMPTY = Reply(headers=())
_PAGES: Mapping[str, Page | Reply] = {  # axum answers HEAD wherever it answers GET
    "/": _EMPTY,
    "/health": _EMPTY,
    "/ping": _EMPTY,
    "/info": _info,
    "/v1/models": lambda state, _: state.models(state.config.model, created=0),
    "/metrics": _metrics,
}

PROTOCOL = ServerProtocol(
    head_prefix="date: {date}\r\n",
    head_suffix=(
        "vary: origin, access-control-request-method, access-control-request-headers\r\n"
        "access-control-allow-origin: *\r\n"
    ),
    hyper_order=True,
    stream_headers=tgi_checks.STREAM_TYPE,
    keep_alive_s=3600,
    body_limit=2_000_000,
    generate={"/v1/chat/completions": chat, "/v1/completions": completions}
    | dict.fromkeys(protocol.NATIVE_ROUTES, native),
    pages={
        **{(method, path): page for path, page in _PAGES.items() for method in ("GET", "HEAD")},
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/chat_tokenize"): _chat_tokenize,
    },
    wrong_content_type=Reply(b"Expected request with `Content-Type: application/json`", 415, protocol.TEXT_TYPE),
    read_body=tgi_bodies.read,
    too_large=Reply(b"Failed to buffer the request body: length limit exceeded", 413, protocol.TEXT_TYPE),
    not_found=Reply(status=404, headers=()),
    not_allowed=lambda methods: Reply(status=405, headers=(("allow", methods.replace(", ", ",")),)),
    reason_phrases={413: "Payload Too Large", 422: "Unprocessable Entity"},
    failure=_failure,
    unhealthy=_failure(503),
    generation_failure=flat_error(*tgi_answers.FAILED, 424),
    overloaded=_overloaded,
    needs_api_key=lambda path: path not in ("/health", "/ping", "/info", "/metrics", "/v1/models", "/chat_tokenize"),
    unauthorized=Reply(status=401, headers=()),
    default_limit=128,  # --max-concurrent-requests (launcher/src/main.rs)
    buckets=partial(exponential_buckets, 0.0001),
)
