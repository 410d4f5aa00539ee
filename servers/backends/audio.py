"""Request and response formats (dialects) of the endpoints `/v1/audio/transcriptions` and `/v1/audio/speech`.

**Transcriptions.** A request uploads a recording as `multipart/form-data` (RFC 7578) and asks for a streamed
transcript. The response has one of three forms:

    vLLM        data: {"object": "transcription.chunk", "choices": [{"delta": {"content": ...}}]}, as in chat streams
    OpenAI      data: {"type": "transcript.text.delta", "delta": ...}, and at the end {"type": "transcript.text.done",
                "text": ..., "usage": ...}
    others      {"text": ..., "usage": ...}, a single JSON object, if the server or the model cannot stream

A request does not state an output length, because the recording determines the length of the transcript.

**Speech.** The body of the response is the audio itself, without an end marker. The response is complete when its last
HTTP chunk has arrived, or as many bytes as its Content-Length states.

loadgen requests the format `wav`, because the header of a WAV file states the sample rate. A user may request another
format. Audio in the format `pcm` has no header, and is assumed to be 16-bit mono PCM at 24 kHz, as OpenAI documents.
The duration of audio in any other format is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.dialect import JSON_TYPE, Answer, Dialect, TokenCount, encode_body
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.lenient import end_marker
from loadgen.servers.backends.stream_events import decode_events, finalise, note_error
from loadgen.servers.backends.typed_events import GeneratedPiece, Totals, build_answer, finish_answer
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.workloads.recordings import AUDIO_TYPES, SyntheticRecording, wav_facts
from loadgen.workloads.request import Request, merged

TRANSCRIPTIONS_PATH, SPEECH_PATH = "/v1/audio/transcriptions", "/v1/audio/speech"
BOUNDARY = "loadgen-5d0f3c1a97e84b62"
"""Separator of the parts of an upload. It is the same in all requests, so that equal requests have equal bytes."""
TEST_RECORDING = SyntheticRecording(1, "test")
"""Recording of a test request."""
EVENT_TYPES = b'"transcript.text.'
FIRST_EVENTS = 4
"""Number of events that decide which form a stream has. An error may come first."""
DONE_TYPE = "transcript.text.done"
READABLE_FORMATS = ("json", "verbose_json")
"""Formats of transcripts that can be read. The others are plain text, in which an error looks like a transcript."""
PCM_BYTES_PER_S = 48_000
WAV_FORMAT, PCM_FORMAT = "wav", "pcm"
NO_AUDIO_LIMIT_BYTES = 1 << 16
"""Maximum size of a response that is examined for an error message."""
PLACEHOLDER_BYTES = 1 << 26
"""A WAV file that announces more bytes of audio than this has a placeholder in its header, because it was streamed."""


class TranscriptUsage(msgspec.Struct, gc=False):
    """The `usage` object of a transcript: counts of tokens, or the length of the recording in seconds."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    seconds: float | None = None


class TranscriptEvent(msgspec.Struct, gc=False):
    """An event of a streamed transcript in OpenAI's form, or a whole transcript in one JSON object.

    A whole transcript has a `text` and no `type`.
    """

    type: str | None = None
    delta: str | None = None
    text: str | None = None
    usage: TranscriptUsage | None = None
    duration: float | str | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(TranscriptEvent)
_NO_USAGE = TranscriptUsage()


def transcription_dialect(
    server: str,
    decode_chunks: Callable[[Sequence[bytes]], Answer],
    text_of_chunks: Callable[[Sequence[bytes]], str],
    extra_fields: Mapping[str, Any],
) -> Dialect:
    """Return the dialect of a server for transcriptions.

    `decode_chunks` and `text_of_chunks` decode streams in vLLM's form. `extra_fields` are added to every request.
    """

    def encode(request: Request, model: str) -> bytes:
        fields = {"model": model, "response_format": "json", "temperature": 0, "stream": True, **extra_fields}
        recording = request.recording or TEST_RECORDING
        return multipart(merged(fields, request.body), recording.name, recording.content())

    def decode(payloads: Sequence[bytes]) -> Answer:
        return decode_chunks(payloads) if _has_chunks(payloads) else decode_transcript(payloads)

    return Dialect(
        server,
        "transcriptions",
        TRANSCRIPTIONS_PATH,
        encode=encode,
        decode=decode,
        text=lambda payloads: text_of_chunks(payloads) if _has_chunks(payloads) else _text(payloads),
        count_by_running=None,
        may_be_whole=True,
        complete=note_recording,
        content_type=f"multipart/form-data; boundary={BOUNDARY}",
        accept=f"text/event-stream, {JSON_TYPE}",
        inputs="recording",
    )


def speech_dialect(server: str, extra_fields: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a server for speech. `extra_fields` are added to every request."""

    def encode(request: Request, model: str) -> bytes:
        fields = {"model": model, "input": request.prompt, "response_format": WAV_FORMAT, **extra_fields}
        return encode_body(fields, request)

    return Dialect(
        server,
        "speech",
        SPEECH_PATH,
        encode=encode,
        decode=decode_speech,
        text=lambda _: "",
        count_by_running=None,
        split=split_speech,
        complete=note_speech,
        accept="audio/*, */*",
        streams=False,
    )


def multipart(fields: Mapping[str, Any], name: str, content: bytes) -> bytes:
    """Return a `multipart/form-data` body with `fields` and a file.

    `name` and `content` are the name and the content of the file. A field that is a list becomes one part per item, and
    a field that is an object becomes JSON. Raises ValueError if the file contains the boundary between parts.
    """
    if BOUNDARY.encode() in content:
        raise ValueError(f"the file {name} contains {BOUNDARY}, which separates the parts of an upload")
    parts: list[bytes] = []
    for field, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            text = item if isinstance(item, str) else msgspec.json.encode(item).decode()
            parts.append(_part(f'name="{_quoted(field)}"', "", text.encode()))
    media_type = AUDIO_TYPES.get(f".{name.rpartition('.')[2].lower()}", "application/octet-stream")
    parts.append(_part(f'name="file"; filename="{_quoted(name)}"', f"Content-Type: {media_type}\r\n", content))
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY.encode()


def _part(disposition: str, headers: str, content: bytes) -> bytes:
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n{headers}\r\n"
    return head.encode() + content + b"\r\n"


def _quoted(name: str) -> str:
    """Escape the name of a field or a file, as the HTML standard requires for uploads."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


# Transcripts.


def _has_chunks(payloads: Sequence[bytes]) -> bool:
    """Return True if the first events have the form of vLLM's chunks."""
    first = payloads[:FIRST_EVENTS]
    return any(b'"choices"' in payload for payload in first) and not any(EVENT_TYPES in payload for payload in first)


def decode_transcript(payloads: Sequence[bytes]) -> Answer:
    """Decode a transcript in OpenAI's form: a stream of events, or one JSON object."""
    events, broken = decode_events(payloads, _EVENTS)
    pieces = [GeneratedPiece(event.delta) if event.delta is not None else None for event in events]
    done = [
        index
        for index, event in enumerate(events)
        if event.type == "transcript.text.done" or _is_whole(event, payloads)
    ]
    if len(payloads) == 1 and payloads[0].lstrip()[:1] == b"{" and not (done or broken or _is_event(events[0])):
        broken = one_line(f"the response has no `text`: {payloads[0][:100]!r}")
    usage = (events[done[0]].usage if done else None) or _NO_USAGE
    totals = Totals(usage.input_tokens, usage.output_tokens)
    answer = build_answer(payloads, pieces, totals)
    answer.end_event = done[0] if done else end_marker(payloads)
    finish_answer(answer, pieces, totals, broken)
    if done:
        answer.counts |= _reported_duration(events[done[0]])
    return answer


def _is_whole(event: TranscriptEvent, payloads: Sequence[bytes]) -> bool:
    """Return True if an event is a whole transcript: it has a text, and it is the only payload of its response."""
    return len(payloads) == 1 and event.text is not None and not event.error


def _is_event(event: TranscriptEvent) -> bool:
    """Return True if a JSON object is an error or an event of a streamed transcript, but not a whole transcript."""
    return event.type is not None or event.delta is not None or bool(event.error)


def _reported_duration(event: TranscriptEvent) -> dict[str, int]:
    """Return the length of the recording, as the server reports it, as a dict with the entry `audio_us` in
    microseconds.

    The server may have rounded the length up to whole seconds. The dict is empty if the server reports no valid length.
    """
    reported = event.duration if event.usage is None or event.usage.seconds is None else event.usage.seconds
    try:
        seconds = float(reported or 0)
    except ValueError:
        seconds = 0.0
    return {"audio_us": round(seconds * 1e6)} if 0 < seconds < 1e6 else {}


def _text(payloads: Sequence[bytes]) -> str:
    events, _ = decode_events(payloads, _EVENTS)
    return next((event.text for event in events if event.text is not None), "")


def note_recording(answer: Answer, request: Request) -> None:
    """Store the length of the request's recording, which is more exact than the length that the server reports."""
    if request.recording is not None and request.recording.duration_us:
        answer.counts["audio_us"] = request.recording.duration_us


# Speech.


def split_speech(body: bytes, complete: bool) -> Sequence[bytes]:
    """Split an audio body into three payloads: its header, the first byte of audio, and the remaining bytes.

    The first byte is a separate payload, so that its arrival can be recorded as the time of the first audio.

    If the body is complete, a fourth, empty payload stands for the end of the response. An empty body has no payloads.
    """
    if not body:
        return []
    facts = wav_facts(body)
    start = facts.data_start if facts else 0
    payloads = [body[:start], body[start : start + 1], body[start + 1 :]]
    return [*payloads, b""] if complete else payloads


def decode_speech(payloads: Sequence[bytes]) -> Answer:
    """Decode the payloads that `split_speech` returns."""
    answer = Answer([0] * len(payloads))
    if not payloads:
        return finalise(answer, 0, "")
    body = b"".join(payloads)
    facts = wav_facts(body)
    size = len(body) - (facts.data_start if facts else 0)
    answer.counts["audio_bytes"] = size
    if problem := _not_audio(body, answer):
        answer.counts.clear()
        return finalise(answer, 0, problem)
    if size:
        answer.events["first_audio_ns"] = 1
    if facts:
        answer.counts["audio_us"] = size * 1_000_000 // facts.bytes_per_s
    ended = len(payloads) > 3
    if ended and not size:
        return finalise(answer, 0, "the response contains no audio")
    if ended and facts and size < facts.data_bytes <= PLACEHOLDER_BYTES:
        return finalise(answer, 0, f"the WAV header announces {facts.data_bytes:,} bytes of audio, and {size:,} came")
    answer.end_event = 3 if ended else None
    return finalise(answer, 0, "")


def _not_audio(body: bytes, answer: Answer) -> str:
    """Return a description of a body that is not audio, or "" if it is audio. Store the server's error in `answer`."""
    if len(body) > NO_AUDIO_LIMIT_BYTES or body[:1] not in (b"{", b"<", b"d", b"e"):
        return ""
    if body.startswith((b"data:", b"event:")):
        return "the response is a stream of events instead of audio: leave stream_format out"
    if body[:1] == b"<":
        return one_line(f"the response is a page instead of audio: {body[:100]!r}") if b"html" in body.lower() else ""
    try:
        msgspec.json.decode(body, type=dict[str, Any])
    except DECODE_ERRORS:
        return ""
    note_error(answer, body)
    return one_line(f"the response is JSON instead of audio: {body[:100]!r}")


def note_speech(answer: Answer, request: Request) -> None:
    """Store the duration of the audio in `answer` if the request asked for the format `pcm`.

    Audio in this format has no header, so the response does not state its format or its duration. The duration is
    computed from the number of bytes.
    """
    if request.body.get("response_format") == PCM_FORMAT and "audio_bytes" in answer.counts:
        answer.counts.setdefault("audio_us", answer.counts["audio_bytes"] * 1_000_000 // PCM_BYTES_PER_S)
