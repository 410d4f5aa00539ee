"""POST /v1/responses of a simulated vLLM: one message, streamed as OpenAI's named events or whole
(entrypoints/openai/responses of 0.32.0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer, vllm_answers, vllm_checks
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, Reply
from loadgen.servers.simulated.state import ServerState
from loadgen.servers.simulated.vllm_checks import bad_request

_PLACE = {"output_index": 0, "content_index": 0}


def responses(state: ServerState, request: CompletionRequest) -> Encoding:
    """The answer to `input`, a text or messages, behind `instructions`."""
    body = request.body
    given = body.get("input")
    if not isinstance(given, str | list):
        raise vllm_checks.missing_fields({**body, "tool_choice": "none"}, "input")  # filled in before it is checked
    if body.get("prompt") is not None:
        raise bad_request("prompt template is not supported", "prompt")
    vllm_checks.check_model(state, body)
    ids = vllm_checks.prompt_ids(state, _text(given, body.get("instructions")), add_bos=True)
    room = state.max_model_len - len(ids)
    requested = min(vllm_checks.requested_tokens(state, body.get("max_output_tokens"), room), room)
    vllm_checks.check_sampling(body, requested)
    said = state.complete(request, len(ids), requested, "stop")
    number = f"{state.mark_word}-{state.started_s:08x}{request.index:08x}"
    begun = _response(state, request, number, requested)
    item: dict[str, Any] = {
        "id": f"msg_{number}",
        "content": [],
        "role": "assistant",
        "status": "in_progress",
        "type": "message",
    }
    item["phase"] = None
    part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    where, places = {"item_id": item["id"]}, count()

    def event(kind: str, **fields: Any) -> bytes:
        told = dict(sorted({**fields, "sequence_number": next(places), "type": f"response.{kind}"}.items()))
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), protocol.dumps(told))

    def encode(first: int, tokens: int, last: bool) -> bytes:
        text = b"".join(said.texts[first : first + tokens]).decode()
        delta = event("output_text.delta", **_PLACE, delta=text, **where, logprobs=[])
        return delta + (ended() if last else b"")

    def whole() -> dict[str, Any]:
        length = said.finish_reason == "length"
        ends = {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"} if length else {}
        content = {**part, "text": said.text, "logprobs": None}
        output = [{**item, "content": [content], "status": "completed"}]
        return (
            begun | {"status": "completed"} | ends | {"output": output, "usage": _usage(len(ids), said.output_tokens)}
        )

    def ended() -> bytes:
        content = {**part, "text": said.text, "logprobs": None}
        done = {**item, "content": [content], "status": "completed"}
        text = event("output_text.done", **_PLACE, **where, text=said.text, logprobs=[])
        text += event("content_part.done", **_PLACE, **where, part=content)
        text += event("output_item.done", output_index=0, item=done)
        return text + event("completed", response=whole())

    opening = (
        event("created", response=begun),
        event("in_progress", response=begun),
        event("output_item.added", output_index=0, item=item),
        event("content_part.added", **_PLACE, **where, part=part),
    )
    answer: Callable[[float], Reply] = lambda _: protocol.json_reply(whole())  # noqa: E731 - the shape of Encoding
    return Encoding(said, encode, answer, vllm_answers.FAILURE, merges=True, opening=opening)


def _text(given: Any, instructions: Any) -> str:
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return tokenizer.chat_text([*([{"role": "system", "content": instructions}] if instructions else []), *messages])


def _usage(prompt: int, output: int) -> dict[str, Any]:
    cached = {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    made = {"reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": []}
    made |= {"tool_output_tokens_per_turn": []}
    counted = {"input_tokens": prompt, "input_tokens_details": cached, "output_tokens": output}
    return counted | {"output_tokens_details": made, "total_tokens": prompt + output}


def _response(state: ServerState, request: CompletionRequest, number: str, asked: int) -> dict[str, Any]:
    """The response as it begins: what was asked, and what is filled in at the end."""
    body: Mapping[str, Any] = request.body
    made = {"id": f"resp_{number}", "created_at": request.created_s, "incomplete_details": None}
    made |= {"instructions": body.get("instructions"), "metadata": None, "model": state.config.model}
    made |= {"object": "response", "output": [], "parallel_tool_calls": True}
    made |= {"temperature": body.get("temperature", 1.0), "tool_choice": "auto", "tools": []}
    made |= {"top_p": body.get("top_p", 1.0), "background": False, "max_output_tokens": asked}
    nothing = ("max_tool_calls", "previous_response_id", "prompt", "reasoning")
    made |= {**dict.fromkeys(nothing), "service_tier": "auto", "status": "in_progress", "text": None}
    made |= {"top_logprobs": None, "truncation": "disabled"}
    made |= {"usage": None, "user": None, "presence_penalty": body.get("presence_penalty", 0.0)}
    made |= {"frequency_penalty": body.get("frequency_penalty", 0.0)}
    return made | dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"))
