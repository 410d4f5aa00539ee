"""The recorded and written streams under `transcripts/`, each with the dialect that reads it and what it must say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import Answer, ChunkCounts, Dialect
from loadgen.servers.wire.sse import split_events

TRANSCRIPTS = Path(__file__).parent / "transcripts"
USUALLY_COUNTED_BY: dict[tuple[str, str], ChunkCounts] = {
    ("tgi", "generate"): "event",
    ("tgi", "completions"): "event",
    ("tgi", "chat"): "event",
    ("lightllm", "generate"): "usage",
    ("lightllm", "completions"): "event",
    ("lightllm", "chat"): "event",
    ("sglang", "generate"): "usage",
}
"""How the tokens of a chunk are known in nearly all streams of a dialect: TGI and LightLLM send one event per token."""


CACHED_TOKENS = {
    "sglang-0.5.23/stream-interval-4/chat_stream_cont.txt": 19,
    "sglang-0.5.23/stream-interval-4/chat_stream_usage.txt": 19,
    "sglang-0.5.23/overload_chat_stream_usage.txt": 0,
    "sglang-0.5.23/generate_ids.txt": 0,
    "sglang-0.5.23/generate_stream.txt": 3,
    "sglang-0.5.23/generate_stop_stream.txt": 3,
    "sglang-0.5.23/generate_incremental.txt": 3,
    "sglang-0.5.23/stream-interval-4/generate_stream.txt": 3,
    "sglang-0.5.23/responses_stream.txt": 19,
    "sglang-0.5.23/messages_full_stream.txt": 19,
    "sglang-0.5.23/stream-interval-4/messages_stream.txt": 19,
    "sglang-0.5.23/stream-interval-4/responses_stream.txt": 19,
    "vllm-0.32.0/responses_stream.txt": 0,
    "vllm-0.32.0/responses_ignore_eos.txt": 0,
    "written/vllm-0.33.0/responses.txt": 0,
    "written/vllm-0.33.0/responses_reasoning.txt": 0,
    "written/vllm-0.33.0/responses_tools.txt": 0,
    "written/openai/responses_summary.txt": 0,
    "written/openai/responses_filtered.txt": 0,
    "written/anthropic/messages_thinking.txt": 12,
    "written/lightllm-1.2.0/chat.txt": 0,
    "written/lightllm-1.2.0/completions.txt": 0,
    "written/lightllm-00eb78eb/completions_usage_after_done.txt": 0,
}
"""Transcripts whose usage states how many prompt tokens were cached."""
REASONING_TOKENS = {
    "sglang-0.5.23/stream-interval-4/chat_stream_cont.txt": 8,
    "sglang-0.5.23/stream-interval-4/chat_stream_usage.txt": 8,
    "sglang-0.5.23/stream-interval-4/responses_stream.txt": 6,
    "written/vllm-0.33.0/responses_reasoning.txt": 2,
    "written/openai/responses_summary.txt": 64,
}
"""Transcripts whose usage states how many tokens were reasoning."""
REASONING_CHUNKS = {
    "sglang-0.5.23/stream-interval-4/chat_stream_cont.txt": 3,
    "sglang-0.5.23/stream-interval-4/chat_stream_usage.txt": 3,
    "sglang-0.5.23/stream-interval-4/messages_stream.txt": 3,
    "sglang-0.5.23/stream-interval-4/responses_stream.txt": 3,
    "written/vllm-0.33.0/chat_reasoning.txt": 2,
    "written/vllm-0.33.0/responses_reasoning.txt": 2,
    "written/vllm-0.33.0/messages_thinking.txt": 2,
    "written/anthropic/messages_thinking.txt": 1,
}
"""Transcripts that begin with reasoning: the number of chunks that contain reasoning."""
FIRST_ANSWER = {
    "written/vllm-0.33.0/chat_reasoning.txt": 3,
    "written/vllm-0.33.0/responses_reasoning.txt": 11,
    "written/vllm-0.33.0/messages_thinking.txt": 7,
    "written/anthropic/messages_thinking.txt": 7,
}
"""Transcripts in which an answer follows the reasoning: the first event of the answer."""


@dataclass(frozen=True)
class Stream:
    """One response. `proven` is how many of its events prove it complete, where that is not the end marker's place.
    `by` says where the tokens of each chunk come from, where that is not as in other streams of the dialect."""

    file: str
    key: tuple[str, str]
    answer: Answer
    proven: int = 0
    by: ChunkCounts = ""

    def __post_init__(self) -> None:
        self.answer.chunk_counts = self.by or USUALLY_COUNTED_BY.get(self.key, "chunk")
        if self.file in CACHED_TOKENS:
            self.answer.counts = {"cached_prompt_tokens": CACHED_TOKENS[self.file]}
        if self.file in REASONING_TOKENS:
            self.answer.counts["reasoning_tokens"] = REASONING_TOKENS[self.file]
        if self.file in REASONING_CHUNKS:
            self.answer.counts["reasoning_chunks"] = REASONING_CHUNKS[self.file]
        if self.file in FIRST_ANSWER:
            self.answer.events = {"first_answer_ns": FIRST_ANSWER[self.file]}

    @property
    def dialect(self) -> Dialect:
        return BACKENDS[self.key[0]].dialects[self.key[1]]

    def body(self) -> bytes:
        return response(self.file)[1]

    def payloads(self) -> list[bytes]:
        return split_events(self.body())[0]

    def events_to_prove(self) -> int:
        """How many events must have come before this answer counts as ended; past all of them if it never does."""
        if self.answer.end_event is None:
            return len(self.answer.tokens) + 1
        return self.proven or self.answer.end_event + 1


def response(file: str) -> tuple[int, bytes]:
    """Status and body of a transcript, recorded (head and body) or written (body only)."""
    raw = (TRANSCRIPTS / file).read_bytes()
    if not raw.startswith(b"HTTP/"):
        return 200, raw
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


def _server(tokens: list[int], end_event: int, prompt: int | None, output: int, finish: str, error: str = "") -> Answer:
    kind = "in_band_error" if error else ""
    return Answer(tokens, end_event, prompt, output, "server", finish, kind, error)


def _wire(tokens: list[int], end_event: int | None, finish: str, error: str = "") -> Answer:
    kind = "in_band_error" if error else ""
    return Answer(tokens, end_event, None, sum(tokens), "wire", finish, kind, error)


def _chunks(tokens: list[int], end_event: int | None, prompt: int | None, finish: str, error: str) -> Answer:
    """A failed stream of a protocol whose usage comes at the end: the pieces are no count of tokens."""
    return Answer(tokens, end_event, prompt, sum(tokens), "chunks", finish, "in_band_error", error)


def _several(
    tokens: list[int],
    end_event: int,
    prompt: int,
    output: int,
    *,
    text_bytes: int,
    phrases: int,
    finish: str = "length",
) -> Answer:
    """A stream of chunks that hold several tokens, of which only the total is known."""
    answer = _server(tokens, end_event, prompt, output, finish)
    answer.text_bytes, answer.phrase_chunks = text_bytes, phrases
    return answer


def _counted(answer: Answer, **counts: int) -> Answer:
    """An answer with further counts of the server."""
    answer.counts = counts
    return answer


def _rejected(events: int, end_event: int | None, said: str) -> Answer:
    """A stream with status 200 that holds no token: the server was too busy to take the request."""
    return Answer([0] * events, end_event, None, 0, "wire", "", "rejected", said)


_TOO_LONG = "the input prompt token len 12001 is too long > 2047 (invalid_request_error)"
_COMPLETIONS, _CHAT = ("vllm", "completions"), ("vllm", "chat")
_GENERATE = ("sglang", "generate")
_RESPONSES, _MESSAGES = ("openai", "responses"), ("openai", "messages")
_TRANSCRIPT, _OPENAI_TRANSCRIPT = ("vllm", "transcriptions"), ("openai", "transcriptions")
_TOO_LONG_CHAT = "The input (6017 tokens) is longer than the model's context length (4096 tokens)."


def _hidden(answer: Answer, hidden: int, text_bytes: int) -> Answer:
    """An answer with tokens that the server counted and did not stream."""
    answer.hidden_tokens, answer.text_bytes = hidden, text_bytes
    return answer


def _with_reasoning_count(answer: Answer) -> Answer:
    """An answer whose usage has the number of reasoning tokens, which may be 0."""
    answer.reasoning_reported = True
    return answer


def _ended(answer: Answer, finish: str) -> Answer:
    answer.finish_reason = finish
    return answer


STREAMS = (
    # vLLM: recorded
    Stream("vllm-0.32.0/completion_stream.txt", _COMPLETIONS, _server([1] * 8 + [0, 0], 9, 8, 8, "length")),
    Stream("vllm-0.32.0/chat_stream.txt", _CHAT, _server([0, 1, 1, 1, 1, 1, 0, 0], 7, 20, 5, "length")),
    Stream("vllm-0.32.0/continuous_usage.txt", _COMPLETIONS, _server([1, 1, 1, 0, 0], 4, 4, 3, "length"), by="usage"),
    Stream("vllm-0.32.0/token_ids.txt", _COMPLETIONS, _wire([1, 1, 1, 0], 3, "length"), by="ids"),
    Stream("vllm-0.32.0/stream_nousage.txt", _COMPLETIONS, _wire([1, 1, 1, 0], 3, "length")),
    # vLLM: written
    Stream("written/vllm-0.2.0/completions.txt", _COMPLETIONS, _wire([1, 1, 0, 0], 3, "length")),
    Stream("written/vllm-0.2.0/chat.txt", _CHAT, _wire([0, 1, 1, 0, 0], 4, "length")),
    Stream("written/vllm-0.6.6/completions_eos.txt", _COMPLETIONS, _server([1, 1, 1, 0, 0], 4, 5, 3, "stop")),
    Stream(
        "written/vllm-0.6.6/error.txt",
        _COMPLETIONS,
        _wire([1, 0, 0], 2, "", "Prompt is not valid. (BadRequestError, 400)"),
    ),
    Stream(
        "written/vllm-0.6.6/error_flat.txt",
        _COMPLETIONS,
        _wire([0, 0], 1, "", "This model's maximum context length is 2048 tokens. (BadRequestError, 400)"),
    ),
    Stream(
        "written/vllm-0.33.0/completions_merged.txt",
        _COMPLETIONS,
        _server([2, 1, 3, 0, 0], 4, 5, 6, "length"),
        by="ids",
    ),
    Stream(
        "written/vllm-0.33.0/continuous_usage_merged.txt",
        _COMPLETIONS,
        _server([2, 1, 3, 0, 0], 4, 5, 6, "length"),
        by="usage",
    ),
    Stream("written/vllm-0.33.0/chat_reasoning.txt", _CHAT, _server([0, 1, 1, 1, 1, 0, 0], 6, 5, 4, "length")),
    Stream("written/vllm-0.33.0/chat_tools.txt", _CHAT, _server([0, 1, 1, 0, 0, 0], 5, 5, 2, "tool_calls")),
    Stream(
        "written/vllm-0.33.0/completions_killed.txt",
        _COMPLETIONS,
        _wire([1, 1, 0, 0], 3, "", "Internal server error (InternalServerError, 500)"),
        by="ids",
    ),
    Stream(
        "written/vllm-0.33.0/completions_rejected.txt",
        _COMPLETIONS,
        _rejected(2, 1, "The server has too many queued requests. (ServiceUnavailableError, 503)"),
    ),
    Stream(
        "written/vllm-0.33.0/completions_aborted.txt",
        _COMPLETIONS,
        _server([1, 0, 0, 0], 3, 5, 1, "abort", "the server ended the response with finish reason 'abort'"),
        by="ids",
    ),
    # TGI: written
    Stream("written/tgi-1.1.1/generate.txt", ("tgi", "generate"), _server([1, 1], 1, None, 2, "length")),
    Stream("written/tgi-3.3.7/generate.txt", ("tgi", "generate"), _server([1, 1, 1], 2, 4, 3, "length")),
    Stream("written/tgi-3.3.7/generate_eos.txt", ("tgi", "generate"), _server([1, 1], 1, 4, 2, "eos_token")),
    Stream(
        "written/tgi-3.3.7/generate_overloaded.txt",
        ("tgi", "generate"),
        _rejected(1, None, "Model is overloaded (overloaded)"),
    ),
    Stream(
        "written/tgi-3.3.7/generate_failed.txt",
        ("tgi", "generate"),
        _wire([1, 0], None, "", "Request failed during generation: Server error: CANCELLED (generation)"),
    ),
    Stream("written/tgi-3.3.7/chat.txt", ("tgi", "chat"), _server([1, 1, 1, 0, 0], 4, 4, 3, "length"), proven=3),
    Stream("written/tgi-2.0.4/chat.txt", ("tgi", "chat"), _wire([1, 1], 1, "stop")),
    Stream("written/tgi-3.3.7/chat_overloaded.txt", ("tgi", "chat"), _rejected(2, 1, "Model is overloaded")),
    Stream(
        "written/tgi-3.3.7/completions.txt",
        ("tgi", "completions"),
        _server([1, 1, 1, 0], 3, 4, 3, "eos_token"),
        proven=3,
    ),
    # TGI: recorded
    Stream(
        "tgi-3.3.7/err_overloaded_stream.txt",
        ("tgi", "generate"),
        _rejected(1, None, "Model is overloaded (overloaded)"),
    ),
    Stream("tgi-3.3.7/err_overloaded_chat_stream.txt", ("tgi", "chat"), _rejected(2, 1, "Model is overloaded")),
    Stream(
        "tgi-3.3.7/err_overloaded_completions_stream.txt",
        ("tgi", "completions"),
        _rejected(2, 1, "Model is overloaded"),
    ),
    Stream("tgi-3.3.7/chat_stream_usage.txt", ("tgi", "chat"), _server([1] * 8 + [0, 0], 9, 20, 8, "length"), proven=8),
    Stream("tgi-3.3.7/chat_tool_stream.txt", ("tgi", "chat"), _server([1] * 15 + [0, 0], 16, 373, 45, "")),
    Stream(
        "tgi-3.3.7/completions_stream.txt",
        ("tgi", "completions"),
        _server([1] * 8 + [0], 8, 4, 8, "length"),
        proven=8,
    ),
    Stream("tgi-3.3.7/generate_stream.txt", ("tgi", "generate"), _wire([1] * 8, 7, "")),
    Stream("tgi-3.3.7/generate_stream_details.txt", ("tgi", "generate"), _server([1] * 8, 7, 4, 8, "length")),
    Stream("tgi-3.3.7/generate_grammar_stream.txt", ("tgi", "generate"), _server([1] * 3, 2, 1, 3, "eos_token")),
    # SGLang: recorded
    Stream(
        "sglang-0.5.23/chat_stream_cont.txt",
        ("sglang", "chat"),
        _server([0] + [1] * 8 + [0] * 3, 11, 20, 8, "length"),
        by="usage",
    ),
    Stream(
        "sglang-0.5.23/stream-interval-4/chat_stream_cont.txt",
        ("sglang", "chat"),
        _server([0, 1, 4, 3, 0, 0, 0], 6, 20, 8, "length"),
        by="usage",
    ),
    Stream(
        "sglang-0.5.23/stream-interval-4/chat_stream_usage.txt",
        ("sglang", "chat"),
        _with_reasoning_count(_several([0, 1, 1, 1, 0, 0, 0], 6, 20, 8, text_bytes=54, phrases=2)),
    ),
    Stream(
        "sglang-0.5.23/completions_stream_usage.txt",
        ("sglang", "completions"),
        _server([1] * 8 + [0, 0], 9, 4, 8, "length"),
    ),
    Stream(
        "sglang-0.5.23/completions_token_ids.txt",
        ("sglang", "completions"),
        _server([1, 1, 1, 0, 0], 4, 4, 3, "length"),
        by="ids",
    ),
    Stream(
        "sglang-0.5.23/overload_chat_stream_usage.txt",
        ("sglang", "chat"),
        Answer(
            [0, 0, 0], 2, None, 0, "server", "", "rejected", "The request queue is full. (SERVICE_UNAVAILABLE, 503)"
        ),
    ),
    Stream("sglang-0.5.23/completions_eos.txt", ("sglang", "completions"), _server([1, 0, 0], 2, 4, 1, "stop")),
    Stream("sglang-0.5.23/completions_stream.txt", ("sglang", "completions"), _wire([1] * 8 + [0], 8, "length")),
    Stream("sglang-0.5.23/generate_ids.txt", _GENERATE, _server([1] * 8 + [0], 8, 4, 8, "length")),
    Stream("sglang-0.5.23/generate_stream.txt", _GENERATE, _server([1] * 8 + [0], 8, 4, 8, "length")),
    Stream("sglang-0.5.23/generate_stop_stream.txt", _GENERATE, _server([1, 0], 1, 4, 1, "stop")),
    Stream("sglang-0.5.23/generate_incremental.txt", _GENERATE, _server([1, 3, 3, 2, 0], 4, 4, 9, "length")),
    Stream("sglang-0.5.23/stream-interval-4/generate_stream.txt", _GENERATE, _server([1, 4, 3, 0], 3, 4, 8, "length")),
    Stream(
        "sglang-0.5.23/err_long_gen_stream.txt",
        _GENERATE,
        _wire(
            [0, 0],
            1,
            "",
            "The input (6001 tokens) is longer than the model's context length (4096 tokens). "
            "(invalid_request_error, 400)",
        ),
    ),
    # LightLLM: recorded, then written
    Stream("lightllm-0.0.1/stream.txt", ("lightllm", "generate"), _server([1, 1, 1], 2, None, 3, "length")),
    Stream("written/lightllm-2023-09/generate.txt", ("lightllm", "generate"), _wire([1, 1], 1, ""), by="event"),
    Stream("written/lightllm-1.2.0/generate.txt", ("lightllm", "generate"), _server([1, 1, 1], 2, 4, 3, "length")),
    Stream(
        "written/lightllm-1.2.0/generate_refused.txt",
        ("lightllm", "generate"),
        _wire([0], None, "", _TOO_LONG),
        by="event",
    ),
    Stream(
        "written/lightllm-1.2.0/generate_failed.txt",
        ("lightllm", "generate"),
        _server([1, 1], 1, 4, 2, "error", "the server ended the response with finish reason 'error'"),
    ),
    Stream("written/lightllm-1.1.0/chat.txt", ("lightllm", "chat"), _wire([1, 1, 1], 2, "length")),
    Stream(
        "written/lightllm-1.2.0/chat.txt",
        ("lightllm", "chat"),
        _server([0, 1, 1, 1, 0, 0], 5, 4, 4, "length"),
        proven=4,
    ),
    Stream("written/lightllm-1.2.0/chat_refused.txt", ("lightllm", "chat"), _wire([0], None, "", _TOO_LONG)),
    Stream("written/lightllm-1.1.0/completions.txt", ("lightllm", "completions"), _wire([1, 1, 1, 0], 3, "length")),
    Stream(
        "written/lightllm-1.2.0/completions.txt",
        ("lightllm", "completions"),
        _server([1, 1, 1, 0, 0], 4, 4, 3, "length"),
    ),
    Stream(
        "written/lightllm-00eb78eb/completions_usage_after_done.txt",
        ("lightllm", "completions"),
        _server([1, 1, 1, 0, 0], 3, 4, 3, "length"),
    ),
    # Servers that follow OpenAI: written
    Stream("written/openai/chat.txt", ("openai", "chat"), _server([0, 1, 1, 0, 0, 0], 5, 4, 2, "length"), proven=4),
    Stream(
        "written/transformers-5.19/chat.txt",
        ("openai", "chat"),
        _several([0, 1, 1, 0], 3, 4, 5, text_bytes=9, phrases=1),
    ),
    Stream(
        "written/transformers-5.19/completions.txt",
        ("openai", "completions"),
        _several([1, 0], 1, 4, 3, text_bytes=6, phrases=1),
    ),
    Stream(
        "written/transformers-5.19/chat_failed.txt",
        ("openai", "chat"),
        Answer([0, 1, 0], None, None, 1, "chunks", "", "in_band_error", "CUDA out of memory"),
    ),
    # The Responses API and the Messages API: recorded, then written
    Stream("sglang-0.5.23/responses_stream.txt", _RESPONSES, _server([0] * 4 + [1] * 6 + [0] * 4, 13, 20, 6, "length")),
    Stream("sglang-0.5.23/messages_stream.txt", _MESSAGES, _server([0, 0] + [1] * 8 + [0] * 3, 12, 20, 8, "length")),
    Stream("sglang-0.5.23/messages_full_stream.txt", _MESSAGES, _server([0, 0, *[1] * 4, 0, 0, 0], 8, 20, 4, "length")),
    Stream(
        "sglang-0.5.23/stream-interval-4/messages_stream.txt",
        _MESSAGES,
        _several([0, 0, 1, 1, 1, 0, 0, 0], 7, 20, 8, text_bytes=32, phrases=2),
    ),
    Stream(
        "sglang-0.5.23/stream-interval-4/responses_stream.txt",
        _RESPONSES,
        _with_reasoning_count(_several([0] * 4 + [1] * 3 + [0] * 4, 10, 20, 6, text_bytes=27, phrases=1)),
    ),
    Stream(
        "sglang-0.5.23/err_long_messages_stream.txt",
        _MESSAGES,
        _chunks([0, 0, 0], 2, None, "", f"{_TOO_LONG_CHAT} (invalid_request_error)"),
    ),
    Stream(
        "sglang-0.5.23/err_long_responses_stream.txt",
        _RESPONSES,
        _chunks([0, 0, 0], 2, None, "failed", f"{_TOO_LONG_CHAT} (server_error)"),
    ),
    Stream(
        "vllm-0.32.0/responses_stream.txt",
        ("vllm", "responses"),
        _with_reasoning_count(_several([0] * 4 + [1] * 4 + [0] * 4, 11, 8, 8, text_bytes=36, phrases=1)),
    ),
    Stream(
        "vllm-0.32.0/responses_ignore_eos.txt",
        ("vllm", "responses"),
        _server([0] * 4 + [1] * 16 + [0] * 4, 23, 8, 16, "length"),
    ),
    Stream(
        "vllm-0.32.0/messages_stream.txt", ("vllm", "messages"), _server([0, 0, *[1] * 8, 0, 0, 0], 12, 8, 8, "length")
    ),
    Stream(
        "vllm-0.32.0/messages_system.txt",
        ("vllm", "messages"),
        _server([0, 0, *[1] * 16, 0, 0, 0], 20, 12, 16, "length"),
    ),
    Stream(
        "written/vllm-0.33.0/responses.txt",
        ("vllm", "responses"),
        _with_reasoning_count(_several([0] * 4 + [1] * 3 + [0] * 4, 10, 5, 4, text_bytes=17, phrases=1)),
    ),
    Stream(
        "written/vllm-0.33.0/responses_reasoning.txt",
        ("vllm", "responses"),
        _server([0] * 4 + [1, 1] + [0] * 5 + [1, 1, 1, 0, 0], 15, 5, 5, "stop"),
    ),
    Stream(
        "written/vllm-0.33.0/responses_tools.txt",
        ("vllm", "responses"),
        _server([0, 0, 1, 1, 1, 0, 0, 0], 7, 5, 3, "stop"),
    ),
    Stream(
        "written/openai/responses_summary.txt",
        _RESPONSES,
        _with_reasoning_count(_hidden(_server([0] * 9 + [1, 1, 0, 0], 12, 8, 66, "stop"), hidden=64, text_bytes=4)),
    ),
    Stream(
        "written/openai/responses_failed.txt",
        _RESPONSES,
        _chunks([0, 1, 0], 2, None, "failed", "The server had an error. (server_error)"),
    ),
    Stream("written/openai/responses_filtered.txt", _RESPONSES, _server([0, 0, 1, 0], 3, 8, 1, "content_filter")),
    Stream(
        "written/openai/responses_error.txt",
        _RESPONSES,
        _chunks([0, 0], None, None, "", "The server had an error. (error, server_error)"),
    ),
    Stream("written/vllm-0.33.0/messages.txt", ("vllm", "messages"), _server([0, 0, 1, 1, 0, 0, 0], 6, 5, 2, "length")),
    Stream(
        "written/vllm-0.33.0/messages_thinking.txt",
        ("vllm", "messages"),
        _server([0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0], 11, 5, 4, "stop"),
    ),
    Stream(
        "written/vllm-0.33.0/messages_tools.txt",
        ("vllm", "messages"),
        _server([0, 1, 1, 1, 0, 0, 0], 6, 5, 3, "tool_use"),
    ),
    Stream(
        "written/anthropic/messages_thinking.txt",
        _MESSAGES,
        _ended(_several([0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0], 11, 19, 5, text_bytes=12, phrases=1), "stop"),
    ),
    Stream(
        "written/anthropic/messages_overloaded.txt",
        _MESSAGES,
        Answer([0, 0], None, 8, 0, "chunks", "", "rejected", "Overloaded (overloaded_error)"),
    ),
    Stream(
        "written/anthropic/messages_failed.txt",
        _MESSAGES,
        _chunks([0, 0, 0, 1, 0], None, 8, "", "Internal server error (api_error)"),
    ),
    Stream("written/anthropic/messages_refused.txt", _MESSAGES, _server([0, 0, 1, 0, 0, 0], 5, 8, 1, "content_filter")),
    # Transcriptions: recorded, then written
    Stream(
        "vllm-0.32.0-whisper/transcription_stream.txt",
        _TRANSCRIPT,
        _server([3, 1, 1, 1, 0, 0], 5, 304, 6, "length"),
        by="usage",
    ),
    Stream("vllm-0.32.0-whisper/transcription_stream_nousage.txt", _TRANSCRIPT, _wire([1, 1, 0], 2, "length")),
    Stream(
        "vllm-0.32.0-whisper/transcription_long_stream.txt",
        _TRANSCRIPT,
        _server([3, 1, 3, 1, 0, 0], 5, 4004, 8, "length"),
        by="usage",
    ),
    Stream(
        "written/openai/transcriptions.txt",
        _OPENAI_TRANSCRIPT,
        _several([1, 1, 0], 2, 30, 3, text_bytes=6, phrases=0, finish=""),
    ),
    Stream(
        "written/openai/transcriptions_done.txt",
        _OPENAI_TRANSCRIPT,
        _counted(Answer([1, 0, 0], 1, None, 1, "chunks"), audio_us=4_000_000),
    ),
    Stream(
        "written/openai/transcriptions_failed.txt",
        _OPENAI_TRANSCRIPT,
        _chunks([1, 0], None, None, "", "The server had an error. (server_error)"),
    ),
)
