"""The route /v1/messages (Anthropic's Messages API) of a simulated vLLM.

The content of a response is one block of text, unless the answer contains reasoning or a tool call. The source in vLLM
0.32.0 is entrypoints/anthropic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.simulated import protocol, segments, tokenizer, vllm_checks
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, ErrorReply, Reply, Segment
from loadgen.servers.simulated.state import ServerState

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
_TEXT_BLOCK = {"type": "text", "text": ""}
_DELTAS = {
    "reasoning": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
    "tool_call": (b"input_json_delta", b"partial_json"),
}
"""Type and field of the delta of each kind of segment."""


def messages(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/messages. Raises ErrorReply for an invalid request."""
    body = request.body
    missing = [name for name in ("messages", "max_tokens") if body.get(name) is None]
    if missing:
        raise vllm_checks.missing_fields(body, *missing)
    if not isinstance(body["messages"], list):
        raise vllm_checks.wrong_type("body.messages", body["messages"], "list_type")
    try:
        ids = _prompt_ids(state, body)
        max_tokens = vllm_checks.requested_tokens(state, body["max_tokens"], 0, "max_completion_tokens")
        max_tokens = min(max_tokens, state.max_model_len - len(ids))
        vllm_checks.check_sampling(body, max_tokens)
    except ErrorReply as problem:
        raise ErrorReply(_translated(problem.reply)) from None
    completion = segments.complete(state, request, len(ids), max_tokens)
    stop_reason = _STOP_REASONS[completion.finish_reason]
    usage = {"input_tokens": len(ids), "output_tokens": completion.output_tokens}
    message: dict[str, Any] = {
        "id": f"chatcmpl-{state.mark_word}-{state.started_s:08x}{request.index:08x}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": state.config.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(ids), "output_tokens": 0},
    }
    whole: dict[str, Any] = {"id": message["id"], "type": "message", "role": "assistant"}
    blocks = [
        _block(segment, segments.call_ids(request), text) for segment, text in segments.whole_segments(completion)
    ]
    whole |= {"content": blocks or [{"type": "text", "text": completion.text}], "model": state.config.model}
    whole |= {"stop_reason": stop_reason, "usage": usage}
    start = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"'

    def encode(first: int, tokens: int, _last: bool) -> bytes:
        if not completion.segments:
            return start + b"".join(completion.texts[first : first + tokens]) + b'"},"index":0}\n\n'
        return b"".join(map(_piece_events, segments.pieces(completion, first, tokens)))

    def _piece_events(piece: segments.AnswerPiece) -> bytes:
        """Return the events for `piece`, a part of one content block of the answer.

        There is one event for the start of the block, one for the new text and one for the end of the block. An event
        is left out if the piece does not contain this part.
        """
        block = _block(piece.segment, segments.call_ids(request), "")
        opening = _event("content_block_start", content_block=block, index=piece.segment_index) if piece.begins else b""
        delta_type, field = _DELTAS[piece.segment.kind]
        delta = b'{"type":"%b","%b":"%b"}' % (delta_type, field, piece.text)
        content = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":%b,"index":%d}\n\n'
        shown = content % (delta, piece.segment_index) if piece.text else b""
        return opening + shown + (_event("content_block_stop", index=piece.segment_index) if piece.ends else b"")

    return Encoding(
        completion,
        encode,
        lambda _: protocol.json_reply(whole),
        failure=(_event("error", error={"type": "internal_error", "message": "EngineCore encountered an issue."}),),
        merges=True,
        opening=(
            _event("message_start", message=message),
            *(() if completion.segments else (_event("content_block_start", content_block=_TEXT_BLOCK, index=0),)),
        ),
        closing=(
            *(() if completion.segments else (_event("content_block_stop", index=0),)),
            _event("message_delta", delta={"stop_reason": stop_reason, "stop_sequence": None}, usage=usage),
            _event("message_stop"),
        ),
    )


def _block(segment: Segment, call_id: str, text: str) -> dict[str, Any]:
    """Return the content block for a segment of the answer, with `text` as its content.

    `call_id` is the id of the block if the segment is a tool call. For the start of a block in a stream, `text` is
    empty.
    """
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if segment.kind == "text":
        return {"type": "text", "text": text}
    try:
        arguments = msgspec.json.decode(text) if text else {}
    except DECODE_ERRORS:
        arguments = {}
    return {"type": "tool_use", "id": call_id, "name": segment.name, "input": arguments}


def count_tokens(state: ServerState, fields: Mapping[str, Any]) -> Reply:
    """Return the response to POST /v1/messages/count_tokens: the number of prompt tokens.

    Raises ErrorReply for an invalid request.
    """
    if fields.get("messages") is None:
        raise vllm_checks.missing_fields(fields, "messages")
    if not isinstance(fields["messages"], list):
        raise vllm_checks.wrong_type("body.messages", fields["messages"], "list_type")
    try:
        count = len(_prompt_ids(state, fields))
    except ErrorReply as problem:
        raise ErrorReply(_translated(problem.reply)) from None
    return protocol.json_reply({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def _prompt_ids(state: ServerState, body: Mapping[str, Any]) -> Sequence[int]:
    """Return the token ids of the chat that consists of the fields `system` and `messages`.

    Raises ErrorReply for an unknown model, or for a prompt that is empty or does not fit the context.
    """
    vllm_checks.check_model(state, body)
    chat = list(body["messages"])
    if body.get("system"):
        chat.insert(0, {"role": "system", "content": body["system"]})
    return vllm_checks.prompt_ids(state, tokenizer.chat_text(chat), add_bos=True)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), protocol.dumps({"type": name, **fields}))


def _translated(reply: Reply) -> Reply:
    """Return an error response of the OpenAI routes in the format of `/v1/messages`."""
    error = msgspec.json.decode(reply.body)["error"]
    content = {"type": "error", "error": {"type": error["type"], "message": error["message"]}}
    return Reply(protocol.dumps(content), reply.status)
