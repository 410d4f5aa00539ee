"""Transcriptions and speech: what is asked, and what a response says. `test_wire_faults.py` has the broken ones, and
`recorded.py` the streams."""

from __future__ import annotations

from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.backends.audio import BOUNDARY, decode_speech, multipart, note_speech, split_speech
from loadgen.workloads.recordings import RecordedFile, SyntheticRecording, wav_header
from loadgen.workloads.request import Request
from tests.support.answers import recorded
from tests.support.dialects import AUDIO

TRANSCRIPTIONS = [key for key in AUDIO if key[1] == "transcriptions"]
RECORDING = SyntheticRecording(2, "a")
SAMPLES = bytes(range(1, 241)) * 20
HEADER = wav_header(len(SAMPLES), 24_000)


def form(body: bytes, content_type: str) -> dict[str, tuple[bytes, str | None, str]]:
    """The parts of an upload as Python's parser of MIME messages reads them: content, file name and type."""
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    return {
        str(part.get_param("name", header="content-disposition")): (
            part.get_payload(decode=True),
            part.get_filename(),
            part.get_content_type(),
        )
        for part in message.iter_parts()
    }


@pytest.mark.parametrize("key", TRANSCRIPTIONS, ids="-".join)
def test_a_recording_is_uploaded_as_a_form(key: tuple[str, str]) -> None:
    """An independent parser finds the fields and the file. Only vLLM is asked for its token counts."""
    dialect = AUDIO[key]
    request = Request(1, "", 0, 0, recording=RECORDING, body={"language": "en", "temperature": None})
    body = dialect.encode(request, "m")
    parts = form(body, dialect.content_type)
    assert parts.pop("file") == (RECORDING.content(), "audio.wav", "audio/wav")
    fields = {name: content.decode() for name, (content, _, _) in parts.items()}
    usage = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    common = {"model": "m", "response_format": "json", "stream": "true", "language": "en"}
    assert fields == common | (usage if key[0] == "vllm" else {})
    assert dialect.media_headers["Content-Type"] == f"multipart/form-data; boundary={BOUNDARY}"
    assert body == dialect.encode(request, "m")


def test_fields_and_names_of_any_form_are_sent(tmp_path: Path) -> None:
    """A list is one part per item, and no name breaks out of its header."""
    file = tmp_path / 'a "b".flac'
    file.write_bytes(b"fLaC")
    body = multipart({"x[]": ["a", "b"], "y": {"z": 1}, 'q"\r\n': 2}, file.name, RecordedFile(file).content())
    assert body.count(b'name="x[]"') == 2
    assert b'name="y"\r\n\r\n{"z":1}\r\n' in body
    assert b'name="q%22%0D%0A"\r\n\r\n2\r\n' in body
    assert b'filename="a %22b%22.flac"\r\nContent-Type: audio/flac\r\n\r\nfLaC\r\n' in body


def test_a_file_with_the_separator_in_it_is_not_sent() -> None:
    """The server would see two parts."""
    with pytest.raises(ValueError, match="separates the parts of an upload"):
        multipart({}, "a.wav", b"a" + BOUNDARY.encode())


def test_speech_is_asked_for_as_wav() -> None:
    """vLLM-Omni streams only on request. OpenAI requires a voice."""
    request = Request(1, "To be", 0, 0, body={"voice": "echo"})
    assert AUDIO["openai", "speech"].encode(request, "m") == (
        b'{"model":"m","input":"To be","response_format":"wav","voice":"echo"}'
    )
    assert AUDIO["vllm", "speech"].encode(Request(1, "To be", 0, 0), "m") == (
        b'{"model":"m","input":"To be","response_format":"wav","stream":true}'
    )
    assert AUDIO["openai", "speech"].media_headers == {"Accept": "audio/*, */*"}


@pytest.mark.parametrize(
    ("header", "asked", "counts"),
    [
        (HEADER, {}, {"audio_bytes": 4800, "audio_us": 100_000}),
        (wav_header(0, 48_000), {}, {"audio_bytes": 4800, "audio_us": 50_000}),
        (b"", {"response_format": "pcm"}, {"audio_bytes": 4800, "audio_us": 100_000}),
        (b"", {"response_format": "mp3"}, {"audio_bytes": 4800}),
    ],
)
def test_speech_has_bytes_and_mostly_a_length(header: bytes, asked: dict[str, Any], counts: dict[str, int]) -> None:
    """The header states the rate; raw samples have the rate that OpenAI documents; other formats have no known length.

    The first sample is an event of its own, whose arrival is the time to first audio."""
    payloads = split_speech(header + SAMPLES, True)
    assert b"".join(payloads) == header + SAMPLES
    answer = decode_speech(payloads)
    note_speech(answer, Request(1, "a", 0, 0, body=asked))
    assert (answer.counts, answer.events, answer.end_event, answer.error_kind) == (counts, {"first_audio_ns": 1}, 3, "")
    assert payloads[0] == header
    assert split_speech(header + SAMPLES, False) == payloads[:3]


@pytest.mark.parametrize("first", [b"{", b"<", b"d", b"e"])
def test_samples_that_begin_like_a_text_are_audio(first: bytes) -> None:
    """Raw samples may have any value."""
    assert decode_speech(split_speech(first + SAMPLES, True)).error_kind == ""


def test_the_record_has_the_length_of_its_recording() -> None:
    """It wins over the rounded seconds of the server, which count where the length is unknown."""
    raw = b'{"text":"a","usage":{"type":"duration","seconds":3}}'
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
    record, _ = recorded(("openai", "transcriptions"), raw=raw, asked=0)
    assert (record.state, record.marks) == ("complete", {"audio_us": 3_000_000})
    dialect = AUDIO["openai", "transcriptions"]
    answer = dialect.decode([raw.partition(b"\r\n\r\n")[2]])
    dialect.complete(answer, Request(1, "", 0, 0, recording=RECORDING))
    assert answer.counts == {"audio_us": 2_000_000}


def test_the_first_audio_is_the_first_sample() -> None:
    """Not the head of the response and not the header of the file, which may come long before."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2c\r\n" + wav_header(1 << 31, 24_000) + b"\r\n"
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(SAMPLES), SAMPLES) for _ in range(2))
    record, _ = recorded(("vllm", "speech"), raw=head + pieces + b"0\r\n\r\n", asked=0, reads=(len(head), len(SAMPLES)))
    assert record.state == "complete"
    assert (record.first_byte_ns, record.marks["first_audio_ns"], record.end_ns) == (1000, 2000, 3000)
    assert (record.marks["audio_bytes"], record.marks["audio_us"]) == (9600, 200_000)
