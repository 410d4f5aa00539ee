"""Recordings: the sound and length of synthetic ones, and the lengths that the headers of files state."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import pytest

from loadgen.workloads import workload
from loadgen.workloads.audio_files import Recordings
from loadgen.workloads.lengths import Fixed, Uniform
from loadgen.workloads.recordings import (
    RecordedFile,
    SyntheticRecording,
    parse_seconds_of_audio,
    recorded_file,
    wav_facts,
    wav_header,
)
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.workload import Prompts, WorkloadSpec

FLAC = b"fLaC\x80\x00\x00\x22" + bytes(10) + ((16_000 << 44) | (15 << 36) | 40_000).to_bytes(8) + bytes(16)
"""The beginning of a FLAC file: 16 kHz, 40,000 samples."""


def test_a_synthetic_recording_is_a_wav_file_of_its_length() -> None:
    """As Python's own reader sees it. Equal seeds give equal bytes, others give others."""
    content = SyntheticRecording(3, "0/1").content()
    with wave.open(io.BytesIO(content)) as file:
        facts = (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes())
        samples = memoryview(file.readframes(48_000)).cast("h")
    assert facts == (16_000, 1, 2, 48_000)
    assert 3_000 < max(samples) <= 12_000  # neither silent nor clipped
    assert SyntheticRecording(3, "0/1").content() == content
    assert SyntheticRecording(3, "0/2").content() != content


def test_the_header_of_a_wav_file_is_read() -> None:
    """Other chunks may stand before the samples. What is no WAV file, or ends too early, has no facts."""
    header = wav_header(480, 24_000)
    assert wav_facts(header) == (48_000, 44, 480)
    listed = header[:36] + b"LIST\x03\x00\x00\x00abc\x00" + header[36:]
    assert wav_facts(listed) == (48_000, 56, 480)
    for broken in (b"", b"RIFF", header[:20], header[:36], header.replace(b"fmt ", b"abc "), b"ID3" + header):
        assert wav_facts(broken) is None


@pytest.mark.parametrize(
    ("name", "content", "duration_us"),
    [
        ("a.wav", SyntheticRecording(2, "a").content(), 2_000_000),
        ("cut.WAV", SyntheticRecording(2, "a").content()[: 44 + 32_000], 1_000_000),
        ("a.flac", FLAC, 2_500_000),
        ("a.flac", b"fLaC" + bytes(30), 0),
        ("a.flac", b"fLaC", 0),
        ("a.mp3", b"ID3" + bytes(30), 0),
    ],
)
def test_the_length_of_a_file_is_that_of_its_header(
    name: str, content: bytes, duration_us: int, tmp_path: Path
) -> None:
    """Where the header announces more samples than the file has, the samples count."""
    file = tmp_path / name
    file.write_bytes(content)
    recording = recorded_file(file)
    assert (recording.duration_us, recording.name, recording.content()) == (duration_us, name, content)


def test_a_folder_is_sent_in_the_order_of_its_names(tmp_path: Path) -> None:
    """Files of other types are left out, and a file may be named alone."""
    for name in ("b.wav", "a.wav", "notes.txt"):
        (tmp_path / name).write_bytes(SyntheticRecording(1, name).content())
    source = workload.parse(f"audio:{tmp_path}")
    assert isinstance(source, Recordings)
    assert [recording.name for recording in source.samples()] == ["a.wav", "b.wav"]
    assert str(workload.parse(str(tmp_path / "a.wav"))) == f"audio:{tmp_path / 'a.wav'}"
    spec = WorkloadSpec(source, Fixed(10), Fixed(1), 0, 3, repeat_file=True, recordings=True)
    requests = [*Prompts(spec, lambda *_: "", len).requests()]
    assert [request.recording and request.recording.name for request in requests] == ["a.wav", "b.wav", "a.wav"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"a", "does not have the suffix of an audio file"),
        ("a.wav", b"", "has 0 bytes"),
        ("missing.wav", None, "cannot read .*: No such file or directory"),
        ("", None, "the folder .* has no audio file"),
    ],
)
def test_a_wrong_file_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    """Before anything is sent."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=message):
        [*Recordings(tmp_path / name).samples()]


def test_requests_have_recordings_of_the_requested_lengths() -> None:
    """Warm-up requests too. They have no text and no tokens, and every recording differs."""
    spec = WorkloadSpec(workload.parse("synthetic"), Uniform(2, 4), Fixed(1), 7, 5, warmup=2, recordings=True)
    prompts = Prompts(spec, lambda *_: "", len)
    requests = [*prompts.requests(), *prompts.warmup()]
    recordings = [request.recording for request in requests if request.recording is not None]
    assert len(recordings) == 7
    assert all(isinstance(each, SyntheticRecording) and 2 <= each.seconds <= 4 for each in recordings)
    assert len({each.content() for each in recordings}) == 7
    assert {(request.prompt, request.input_tokens) for request in requests} == {("", 0)}


def test_lengths_have_a_maximum() -> None:
    """An hour is more than any server takes."""
    assert str(parse_seconds_of_audio("uniform:5..30")) == "uniform:5..30"
    for text in ("3601", "uniform:5..4000", "ten"):
        with pytest.raises(WorkloadError):
            parse_seconds_of_audio(text)
    assert RecordedFile(Path("a.mp3")).duration_us == 0
