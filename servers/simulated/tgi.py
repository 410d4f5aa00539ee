"""The HTTP API of a simulated TGI 3.3.7 (source: router/src/server.rs of this version)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from loadgen.servers.simulated import protocol, serde, tgi_answers, tgi_bodies, tgi_checks, tgi_tools, tokenizer
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, SumAndCount, exponential_buckets
from loadgen.servers.simulated.tgi_answers import ChatOptions, TextPrompt
from loadgen.servers.simulated.tgi_checks import (
    MAX_BEST_OF,
    MAX_CLIENT_BATCH_SIZE,
    MAX_STOP_SEQUENCES,
    Refuse,
    flat_error,
)

# The tag v3.3.7 reports this version and commit.
VERSION = "3.3.6-dev0"
SHA = "dfb3fbe78e0d1d69251bd33065591c61bafdfaa8"
_DEFAULT_PARAMETERS: Mapping[str, Any] = {"do_sample": True}


def native(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to a POST request on a native route (`NATIVE_ROUTES`).

    Raises ErrorReply for a request that TGI refuses.
    """
    body = request.body
    compatible = request.path == "/"
    parameters: Mapping[str, Any] = body.get("parameters", _DEFAULT_PARAMETERS)
    if compatible and parameters.get("return_full_text") is None:
        parameters = {**parameters, "return_full_text": True}
    prompt = TextPrompt(body["inputs"], parameters)
    refuse = _refuse_for(request, [prompt])
    best_of = parameters.get("best_of")
    if request.streamed:
        if best_of not in (None, 1):
            raise refuse("`best_of` != 1 is not supported when streaming tokens")
        if parameters.get("decoder_input_details"):
            raise refuse("`decoder_input_details` == true is not supported when streaming tokens")
    answers = best_of if best_of and not request.streamed else 1
    if answers > MAX_BEST_OF:
        raise refuse(f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {answers}")
    responses = [tgi_answers.generate(state, request, prompt, refuse, index) for index in range(answers)]
    return tgi_answers.native(responses, prompt, listed=compatible, mark=state.mark)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/chat/completions. Raises ErrorReply for a request that TGI refuses."""
    body = request.body
    prompt, tools = _chat_prompt(body)
    if tools:
        call = tgi_tools.call_text(tools[0], tgi_answers.first_word(state))
        prompt = TextPrompt(prompt.text, prompt.parameters, call)
    response = tgi_answers.generate(state, request, prompt, _refuse_for(request, [prompt]))
    model = body.get("model")
    if model in (None, "tgi"):
        model = state.config.model
    options = ChatOptions(
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs") or 0,
        include_usage=bool(body.get("stream_options", {}).get("include_usage")),
        tool_call_id=tgi_tools.call_id(body["messages"]) if tools else None,
    )
    return tgi_answers.chat(response, prompt, _identity(state, request, "chat.completion", model), options)


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/completions. Raises ErrorReply for a request that TGI refuses."""
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
    refuse = _refuse_for(request, prompts)
    responses = [tgi_answers.generate(state, request, prompt, refuse, index) for index, prompt in enumerate(prompts)]
    identity = _identity(state, request, "text_completion", state.config.model)
    return tgi_answers.completions(responses, prompts, identity)


def _chat_prompt(body: Mapping[str, Any]) -> tuple[TextPrompt, list[Mapping[str, Any]]]:
    """Return the prompt of a chat request, and the tools that the model may call.

    Raises ErrorReply if the tools are invalid.
    """
    tools = tgi_tools.usable_tools(body)
    messages = tgi_tools.with_tools(body, tools) if tools else body["messages"]
    presence_penalty = body.get("presence_penalty")
    parameters = _openai_parameters(body) | {
        "repetition_penalty": None if presence_penalty is None else presence_penalty + 2.0,
        "top_n_tokens": body.get("top_logprobs"),
        "grammar": body.get("response_format"),
        # On /v1/completions, max_completion_tokens is no alias: the real server ignores this field, whatever its type.
        "max_new_tokens": body.get("max_tokens", body.get("max_completion_tokens")),
    }
    return TextPrompt(tokenizer.chat_text(messages), parameters), tools


def _openai_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return TGI's native parameters for a request to an OpenAI route.

    A temperature of zero selects greedy decoding.
    """
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


def _refuse_for(request: CompletionRequest, prompts: list[TextPrompt]) -> Refuse:
    """Return a function that takes a message and returns TGI's validation error for this request.

    The format of the error depends on the route, and on whether the request is streamed.
    """
    head = tgi_checks.stream_headers(sum(len(prompt.text) for prompt in prompts))
    openai = request.path.startswith("/v1/")

    def refuse(message: str) -> ErrorReply:
        text = f"Input validation error: {message}"
        return ErrorReply(tgi_checks.refusal(text, "validation", 422, head, streamed=request.streamed, openai=openai))

    return refuse


def _overloaded(encoding: Encoding) -> Reply:
    """Return the refusal of a request that exceeds the limit on concurrent requests.

    `encoding` is the response that the request would have received.
    """
    return tgi_checks.refusal(
        *tgi_checks.OVERLOADED,
        429,
        encoding.head,
        streamed=encoding.completion.streamed,
        openai=bool(encoding.closing),
    )


def _failure(status: int) -> Reply:
    errors = {500: ("Incomplete generation", "incomplete_generation"), 503: ("unhealthy", "healthcheck")}
    message, error_type = errors.get(status, tgi_checks.OVERLOADED)
    return flat_error(message, error_type, status)


def _docker_label(state: ServerState) -> str:
    """Return the label of the server's Docker image.

    The label of a real server contains a commit. That of the simulated server is a word that says that it is simulated.
    """
    return state.mark_word


def _identity(state: ServerState, request: CompletionRequest, object_name: str, model: str) -> dict[str, Any]:
    return {
        "object": object_name,
        "id": "",
        "created": request.created_s,
        "model": model,
        "system_fingerprint": f"{VERSION}-{_docker_label(state)}",
    }


def _info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    return protocol.json_reply(
        {
            "model_id": config.model,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": config.max_concurrent_requests,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOP_SEQUENCES,
            "max_input_tokens": state.max_model_len - 1,  # launcher/src/main.rs
            "max_total_tokens": state.max_model_len,
            "validation_workers": 2,
            "max_client_batch_size": MAX_CLIENT_BATCH_SIZE,
            "router": "text-generation-router",
            "version": VERSION,
            "sha": SHA,
            "docker_label": _docker_label(state),
            **state.mark,
        }
    )


def _tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    return protocol.json_reply(_token_list(fields["inputs"]))


def _chat_tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    text = _chat_prompt(fields)[0].text
    return protocol.json_reply({"tokenize_response": _token_list(text), "templated_text": text})


def _token_list(text: str) -> list[dict[str, Any]]:
    """Return the tokens of a text, in the format of /tokenize.

    The first token is the BOS token, which the server puts before every text. The text of the BOS token is empty.
    """
    spans = ((tokenizer.BOS_ID, 0, 0), *tokenizer.offsets(text))
    return [{"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in spans]


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the metrics page, without the metrics that are not simulated.

    As in the real server, counters have no suffix `_total`, and no metric has a label with the model name.
    """
    failures = {**state.refused_by_reason, "dropped": state.finished_by_reason["abort"]}
    failed_by_kind = {("err", reason): number for reason, number in failures.items() if number}
    accepted = state.gauges().accepted_draft_tokens
    streaming = sum(stream.completion.generated_tokens(stream.token_count) for stream in state.streams)
    # Each step generates one token and the accepted draft tokens.
    skipped = SumAndCount(accepted, state.output_tokens + streaming - accepted)
    page = state.metrics("tgi_", {}, {"failed_by_kind": failed_by_kind, "skipped_tokens": skipped})
    return Reply(page + state.mark_metrics(), headers=protocol.TEXT_TYPE)


_EMPTY = Reply(headers=())
_PAGES: Mapping[str, Page | Reply] = {  # axum answers HEAD on every GET route
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
    generate={
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        **dict.fromkeys(protocol.NATIVE_ROUTES, native),
    },
    pages={
        **{(method, path): page for path, page in _PAGES.items() for method in ("GET", "HEAD")},
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/chat_tokenize"): _chat_tokenize,
    },
    wrong_content_type=Reply(b"Expected request with `Content-Type: application/json`", 415, protocol.TEXT_TYPE),
    read_body=partial(serde.read_fields, tgi_bodies.ROUTES),
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
