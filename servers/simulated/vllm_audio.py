"""The audio routes of a simulated vLLM: /v1/audio/transcriptions and /v1/audio/speech.

The words of a transcript have no meaning, but their number depends on the length of the recording. Speech is a hum
whose length depends on the length of the text. A speech model generates audio in frames, so this module counts a frame
as a token.

The transcription route follows entrypoints/speech_to_text in vLLM 0.32.0. vLLM itself has no route for speech, so this
route follows vLLM-Omni, which streams only if the request has the field `stream`
(entrypoints/openai/protocol/audio.py).
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loadgen.servers.simulated import protocol, vllm_answers, vllm_checks
from loadgen.servers.simulated.protocol import (
    Completion,
    CompletionRequest,
    Encoding,
    EventEncoder,
    Events,
    Headers,
    Reply,
)
from loadgen.servers.simulated.state import ServerState
from loadgen.workloads.recordings import wav_facts, wav_header

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SPEECH = "/v1/audio/speech"
DECODER_PROMPT_TOKENS = 4
AUDIO_TOKENS_PER_S = 100
"""Prompt tokens per second of audio that Whisper models report."""
WORD_TOKENS_PER_S = 3
TRANSCRIPT_TOKENS_MAX = 448
_DEFAULT_FIELDS = {
    *("prompt", "response_format", "timestamp_granularities[]", "stream", "stream_include_usage"),
    *("stream_continuous_usage_stats", "use_beam_search", "n", "length_penalty", "include_stop_str_in_output"),
    *("temperature", "frequency_penalty", "presence_penalty"),
}
"""Form fields that have a value even if the request lacks them. An error message counts them."""
_FORMATS = ("json", "text", "verbose_json")
_STREAM_OPTIONS = ("stream_include_usage", "stream_continuous_usage_stats")
_FLAGS = ("stream", *_STREAM_OPTIONS)
_FIELD_NAME = re.compile(rb'\bname="([^"]*)"')
_COMPRESSED = (b"ID3", b"fLaC", b"OggS")
"""Beginnings of compressed files, which the simulated server does not decode."""
COMPRESSED_BYTES_PER_S = 16_000
"""Bytes per second of compressed audio, whose length the simulated server estimates from its size."""
_BAD_AUDIO = (
    "Invalid or corrupted audio data. Ensure the input is a valid audio or video file (e.g. a complete WAV, MP3, or "
    "MP4)."
)
SAMPLES_PER_S, SAMPLE_BYTES = 24_000, 2
FRAMES_PER_S = 12.5
FRAME_BYTES = round(SAMPLES_PER_S * SAMPLE_BYTES / FRAMES_PER_S)
CHARACTERS_PER_S = 15
HUM = array(
    "h",
    (round(8000 * math.sin(math.tau * 200 * index / SAMPLES_PER_S)) for index in range(FRAME_BYTES // SAMPLE_BYTES)),
).tobytes()
"""The samples of one frame: a hum of 200 Hz, of which whole periods fit the frame."""
STREAMED_BYTES = 0xFFFFFFFF - 36
"""Number of bytes that the header of a streamed WAV file announces, because the length is not known yet."""


def read_form(body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the fields of a `multipart/form-data` body: texts, flags, and the bytes of `file`.

    The first line of the body must be the separator of its parts. Otherwise the result is empty.
    """
    content = bytes(body)
    separator = content.partition(b"\r\n")[0]
    if not separator.startswith(b"--"):
        return {}
    fields: dict[str, Any] = {}
    for part in content.split(separator)[1:-1]:
        head, _, value = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = _FIELD_NAME.search(head)
        if name:
            value = value.removesuffix(b"\r\n")
            fields[name[1].decode()] = value if b"filename=" in head else value.decode("utf-8", "replace")
    return fields | {name: fields[name].lower() in ("true", "1", "yes", "on") for name in _FLAGS if name in fields}


def transcriptions(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/audio/transcriptions. Raises ErrorReply for an invalid request."""
    seconds = _checked_seconds(state, request.body)
    limit = protocol.integer(request.body.get("max_completion_tokens")) or TRANSCRIPT_TOKENS_MAX
    tokens = max(1, min(limit, round(seconds * WORD_TOKENS_PER_S)))
    prompt_tokens = DECODER_PROMPT_TOKENS + math.ceil(seconds * AUDIO_TOKENS_PER_S)
    # The scheduler has a context for text. A recording may be longer, because Whisper's encoder reads it in pieces.
    completion = state.complete(request, min(prompt_tokens, state.max_model_len - 1), tokens, "stop")
    if tokens < limit:
        completion = replace(completion, finish_reason="stop")
    form = _openai_stream if state.config.openai_transcripts else _vllm_stream
    encode, closing = form(state, request, completion, prompt_tokens)

    def answer(_duration_s: float) -> Reply:
        if request.body.get("response_format") == "verbose_json":
            language = request.body.get("language", "en")
            fields = {"duration": seconds, "language": language, "text": completion.text}
            return protocol.json_reply({**fields, "segments": list[Any](), "words": None})
        usage = {"type": "duration", "seconds": math.ceil(seconds)}
        return protocol.json_reply({"text": completion.text, "usage": usage})

    return Encoding(completion, encode, answer, vllm_answers.FAILURE, merges=True, closing=closing)


def _checked_seconds(state: ServerState, body: Mapping[str, Any]) -> float:
    """Check the fields of a request, and return the length of its recording in seconds.

    Raises ErrorReply if a check fails.
    """
    file = body.get("file")
    if not isinstance(file, bytes):
        raise vllm_checks.missing_fields(dict.fromkeys((*_DEFAULT_FIELDS, *body)), "file")
    for option in _STREAM_OPTIONS:
        if body.get(option) and not body.get("stream"):
            raise vllm_checks.bad_request("Stream options can only be defined when `stream=True`.", option)
    vllm_checks.check_model(state, body)
    response_format = body.get("response_format", "json")
    if response_format not in _FORMATS:
        allowed = "`text`, `json`, `verbose_json` or `diarized_json`"
        raise vllm_checks.request_error(f"Currently only support response_format: {allowed}", None)
    if response_format == "verbose_json" and body.get("stream"):
        raise vllm_checks.request_error("verbose_json format doesn't support streaming case", None)
    facts = wav_facts(file[:4096])
    if facts is not None:
        return (len(file) - facts.data_start) / facts.bytes_per_s
    if file.startswith(_COMPRESSED):
        return len(file) / COMPRESSED_BYTES_PER_S
    raise vllm_checks.request_error(_BAD_AUDIO, None)


def _vllm_stream(
    state: ServerState, request: CompletionRequest, completion: Completion, prompt_tokens: int
) -> tuple[EventEncoder, Events]:
    """Return the encoder of the chunks of a transcript, and the events after the last chunk."""
    identity = {
        "id": f"transcribe-{state.mark_word}-{state.started_s:08x}{request.index:08x}",
        "object": "transcription.chunk",
        "created": request.created_s,
        "model": state.config.model,
    }

    def usage(output_tokens: int) -> dict[str, int]:
        total = prompt_tokens + output_tokens
        return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output_tokens}

    start = protocol.dumps(identity)[:-1] + b',"choices":[{"delta":{"content":"'
    end = b',"finish_reason":%b,"stop_reason":null' % protocol.dumps(completion.finish_reason)

    def encode(first: int, count: int, last: bool) -> bytes:
        text = b"".join(completion.texts[first : first + count])
        counts = b""
        if request.body.get("stream_continuous_usage_stats"):
            counts = b',"usage":' + protocol.dumps(usage(first + count))
        return protocol.sse_event(b'%b%b"}%b}]%b}' % (start, text, end if last else b"", counts))

    if not request.body.get("stream_include_usage"):
        return encode, (protocol.DONE,)
    total = protocol.json_event({**identity, "choices": [], "usage": usage(completion.output_tokens)})
    return encode, (total, protocol.DONE)


def _openai_stream(
    _state: ServerState, _request: CompletionRequest, completion: Completion, prompt_tokens: int
) -> tuple[EventEncoder, Events]:
    """Return the encoder of the text events of a transcript, and the last event, which contains the usage."""

    def encode(first: int, count: int, _last: bool) -> bytes:
        text = b"".join(completion.texts[first : first + count])
        return b'data: {"type":"transcript.text.delta","delta":"%b"}\n\n' % text

    usage = {"type": "tokens", "input_tokens": prompt_tokens, "output_tokens": completion.output_tokens}
    usage |= {"total_tokens": prompt_tokens + completion.output_tokens}
    return encode, (protocol.json_event({"type": "transcript.text.done", "text": completion.text, "usage": usage}),)


def speech(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/audio/speech. Raises ErrorReply for an invalid request."""
    body = request.body
    vllm_checks.check_model(state, body)
    text = body.get("input")
    if not isinstance(text, str) or not text.strip():
        raise vllm_checks.bad_request("Input text cannot be empty", "input")
    response_format = body.get("response_format", "wav")
    if response_format not in ("wav", "pcm"):
        raise vllm_checks.bad_request("the simulated server has only wav and pcm", "response_format", response_format)
    frames = max(1, round(len(text) / CHARACTERS_PER_S * FRAMES_PER_S))
    completion = state.complete(request, max(1, len(text) // 4), frames, "stop")
    is_wav = response_format == "wav"
    media: Headers = (("content-type", f"audio/{response_format}"),)
    header = wav_header(completion.output_tokens * FRAME_BYTES, SAMPLES_PER_S) if is_wav else b""
    return Encoding(
        completion,
        lambda _first, count, _last: HUM * count,
        lambda _: Reply(header + HUM * completion.output_tokens, headers=media),
        failure=(),
        merges=True,
        opening=(wav_header(STREAMED_BYTES, SAMPLES_PER_S),) if is_wav else (),
        media=media,
    )
