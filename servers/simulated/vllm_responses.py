"""The route /v1/responses (OpenAI's Responses API) of a simulated vLLM.

The output of a response is one message, unless the answer contains reasoning or a tool call.
The source in vLLM 0.32.0 is entrypoints/openai/responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from loadgen.servers.simulated import protocol, segments, tokenizer, vllm_answers, vllm_checks
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, Reply
from loadgen.servers.simulated.state import ServerState
from loadgen.servers.simulated.vllm_checks import bad_request
from loadgen.servers.simulated.vllm_response_items import ItemEncoder

_CONTENT_POSITION = {"output_index": 0, "content_index": 0}


def responses(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/responses. Raises ErrorReply for an invalid request.

    The prompt consists of the fields `instructions` (a text) and `input` (a text or a list of messages).
    """
    body = request.body
    ids = _prompt_ids(state, body)
    room = state.max_model_len - len(ids)
    max_tokens = min(
        vllm_checks.requested_tokens(state, body.get("max_output_tokens"), room, "max_output_tokens"), room
    )
    vllm_checks.check_sampling(body, max_tokens)
    completion = segments.complete(state, request, len(ids), max_tokens)
    number = f"{state.mark_word}-{state.started_s:08x}{request.index:08x}"
    started = _response(state, request, number, max_tokens)
    item: dict[str, Any] = {
        "id": f"msg_{number}",
        "content": [],
        "role": "assistant",
        "status": "in_progress",
        "type": "message",
        "phase": None,
    }
    part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    item_id = {"item_id": item["id"]}
    sequence_numbers = count()

    def event(event_name: str, /, **fields: Any) -> bytes:
        fields |= {"sequence_number": next(sequence_numbers), "type": f"response.{event_name}"}
        return b"event: response.%b\ndata: %b\n\n" % (event_name.encode(), protocol.dumps(dict(sorted(fields.items()))))

    delta_start = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'
    delta_end = b'","item_id":%b,"logprobs":[],"output_index":0,"sequence_number":' % protocol.dumps(item["id"])

    items = ItemEncoder(completion, event, number)

    def encode(first: int, tokens: int, last: bool) -> bytes:
        if completion.segments:
            return items.events(first, tokens) + (event("completed", response=whole()) if last else b"")
        # The event is joined from parts, because a stream has one per token.
        text = b"".join(completion.texts[first : first + tokens])
        number = b"%d" % next(sequence_numbers)
        delta = delta_start + text + delta_end + number + b',"type":"response.output_text.delta"}\n\n'
        return delta + (final_events() if last else b"")

    def whole() -> dict[str, Any]:
        response = started | {"status": "completed"}
        if completion.finish_reason == "length":
            response |= {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"}
        content = {**part, "text": completion.text, "logprobs": None}
        response["output"] = items.items() or [{**item, "content": [content], "status": "completed"}]
        reasoning = segments.reasoning_tokens(completion)
        response["usage"] = _usage(len(ids), completion.output_tokens, reasoning)
        return response

    def final_events() -> bytes:
        content = {**part, "text": completion.text, "logprobs": None}
        done = {**item, "content": [content], "status": "completed"}
        events = event("output_text.done", **_CONTENT_POSITION, **item_id, text=completion.text, logprobs=[])
        events += event("content_part.done", **_CONTENT_POSITION, **item_id, part=content)
        events += event("output_item.done", output_index=0, item=done)
        return events + event("completed", response=whole())

    opening: tuple[bytes, ...] = (event("created", response=started), event("in_progress", response=started))
    if not completion.segments:
        opening += (
            event("output_item.added", output_index=0, item=item),
            event("content_part.added", **_CONTENT_POSITION, **item_id, part=part),
        )
    answer: Callable[[float], Reply] = lambda _: protocol.json_reply(whole())  # noqa: E731 - the type of Encoding.answer
    return Encoding(completion, encode, answer, vllm_answers.FAILURE, merges=True, opening=opening)


def _prompt_ids(state: ServerState, body: Mapping[str, Any]) -> Sequence[int]:
    """Return the token ids of the prompt in a request body. Raises ErrorReply for an invalid prompt or model."""
    input_ = body.get("input")
    if input_ is not None and not isinstance(input_, str | list):
        raise vllm_checks.wrong_type("body.input", input_, "string_type", "list_type")
    if input_ is None:
        # The real server fills in `tool_choice` before it checks the body.
        raise vllm_checks.missing_fields({**body, "tool_choice": "none"}, "input")
    if body.get("prompt") is not None:
        raise bad_request("prompt template is not supported", "prompt")
    vllm_checks.check_model(state, body)
    return vllm_checks.prompt_ids(state, _text(input_, body.get("instructions")), add_bos=True)


def _text(input_: Any, instructions: Any) -> str:
    """Return the prompt of the chat that consists of `instructions` and `input`."""
    messages = [{"role": "user", "content": input_}] if isinstance(input_, str) else input_
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    return tokenizer.chat_text(messages)


def _usage(prompt_tokens: int, output_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt_tokens + output_tokens,
    }


def _response(state: ServerState, request: CompletionRequest, number: str, max_tokens: int) -> dict[str, Any]:
    """Return the response object at the start of a stream, before it has an output, a usage and a final status."""
    body: Mapping[str, Any] = request.body
    return {
        "id": f"resp_{number}",
        "created_at": request.created_s,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": None,
        "model": state.config.model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature", 1.0),
        "tool_choice": "auto",
        "tools": [],
        "top_p": body.get("top_p", 1.0),
        "background": False,
        "max_output_tokens": max_tokens,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": "in_progress",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "presence_penalty": body.get("presence_penalty", 0.0),
        "frequency_penalty": body.get("frequency_penalty", 0.0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }
