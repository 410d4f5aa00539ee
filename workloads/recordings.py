"""Recordings of speech that loadgen uploads to a transcription endpoint: synthetic recordings, and files of the user.

A synthetic recording is a WAV file: PCM, 16 bits, mono, 16 kHz, the rate that speech models use. The recording consists
of vowels, hisses and pauses in random order. They have the rhythm of speech but form no words, so the server
transcribes nonsense or nothing. All recordings differ, so the server finds none of them in its cache.
"""

from __future__ import annotations

import errno
import math
import struct
from array import array
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from loadgen.workloads import lengths
from loadgen.workloads.input_files import InputFileError, read_input
from loadgen.workloads.lengths import Fixed, LengthDistribution, Uniform
from loadgen.workloads.spec_syntax import WorkloadError

SAMPLES_PER_S = 16_000
SAMPLE_BYTES = 2
SECONDS_DEFAULT, SECONDS_LIMIT = 10, 3_600
"""Default and maximum length of a synthetic recording in seconds."""
FILE_LIMIT_BYTES = 1 << 27
"""Maximum size of a file. Most servers accept at most 25 MB."""
CACHED_FILES = 64
"""Maximum number of files whose content stays in memory."""
AUDIO_TYPES = {
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp3": "audio/mpeg",
    ".mp4": "audio/mp4",
    ".m4a": "audio/mp4",
    ".mpeg": "audio/mpeg",
    ".mpga": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".webm": "audio/webm",
}
"""Media types by the suffix of a file's name. OpenAI and vLLM accept these formats."""
SOUNDS = 24
"""Number of different vowels, of different hisses and of different pauses."""
PAUSE_SHARE, HISS_SHARE = 0.3, 0.35
"""Share of pauses among all sounds, and share of hisses among the other sounds."""
PITCHES_HZ = (90, 240)
HARMONICS = 24
FULL_SCALE = 12_000
"""Largest amplitude of a sample. The maximum of 16 bits is 32,767."""
WAV_HEAD_LIMIT_BYTES = 1 << 16
"""Number of bytes at the beginning of a WAV file that are searched for its audio data."""


class WavFacts(NamedTuple):
    """The facts in the header of a WAV file."""

    bytes_per_s: int
    data_start: int
    """Offset of the first sample in the file."""
    data_bytes: int
    """Number of bytes of audio that the header announces. A server that streams writes a placeholder."""


class SyntheticRecording(msgspec.Struct, frozen=True):
    """A synthetic recording of at most SECONDS_LIMIT seconds. Equal seeds give equal recordings."""

    seconds: int
    seed: str

    @property
    def name(self) -> str:
        """The name of the file that is uploaded."""
        return "audio.wav"

    @property
    def duration_us(self) -> int:
        """The length of the recording in microseconds."""
        return min(self.seconds, SECONDS_LIMIT) * 1_000_000

    def content(self) -> bytes:
        """Return the recording as a WAV file."""
        draw = Random(self.seed).random  # noqa: S311 - sounds, not secrets
        vowels, hisses, pauses = _sounds()
        samples_bytes = min(self.seconds, SECONDS_LIMIT) * SAMPLES_PER_S * SAMPLE_BYTES
        parts: list[bytes] = []
        size = 0
        while size < samples_bytes:
            kind = vowels
            if draw() < PAUSE_SHARE:
                kind = pauses
            elif draw() < HISS_SHARE:
                kind = hisses
            sound = kind[int(draw() * SOUNDS)]
            parts.append(sound)
            size += len(sound)
        return wav_header(samples_bytes, SAMPLES_PER_S) + b"".join(parts)[:samples_bytes]


class RecordedFile(msgspec.Struct, frozen=True):
    """A recording in a file of the user. The content of the file is uploaded unchanged."""

    path: Path
    duration_us: int = 0
    """The length of the recording in microseconds. 0: unknown, because only WAV and FLAC files state it."""

    @property
    def name(self) -> str:
        """The name of the file that is uploaded."""
        return self.path.name

    def content(self) -> bytes:
        """Return the content of the file. Raises OSError if the file cannot be read."""
        return _read_file(self.path)


Recording = SyntheticRecording | RecordedFile


def parse_seconds_of_audio(text: str) -> LengthDistribution:
    """Parse the length of recordings in seconds: a number, or a distribution such as `uniform:5..30`.

    Raises WorkloadError if the text is invalid, or if a recording would be longer than SECONDS_LIMIT."""
    result = lengths.parse(text)
    longest = 0
    if isinstance(result, Uniform):
        longest = result.high
    elif isinstance(result, Fixed):
        longest = result.length
    if longest > SECONDS_LIMIT:
        raise WorkloadError(f"{longest:,} s is too long", f"write at most {SECONDS_LIMIT:,} seconds")
    return result


def recorded_file(path: Path) -> RecordedFile:
    """Return the recording in a file. Its length is read from the header of a WAV or FLAC file.

    Raises WorkloadError for a file that cannot be read or has no suffix of an audio file."""
    if path.suffix.lower() not in AUDIO_TYPES:
        raise WorkloadError(
            f"{path} does not have the suffix of an audio file", f"the suffixes are {', '.join(AUDIO_TYPES)}"
        )
    try:
        size = path.stat().st_size
        begin = _beginning(path)
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror}") from None
    if not size or size > FILE_LIMIT_BYTES:
        raise WorkloadError(
            f"{path} has {size:,} bytes", f"name audio files of at most {FILE_LIMIT_BYTES >> 20} MiB that are not empty"
        )
    facts = wav_facts(begin)
    if facts is None:
        return RecordedFile(path, _flac_duration_us(begin))
    return RecordedFile(path, min(facts.data_bytes, size - facts.data_start) * 1_000_000 // facts.bytes_per_s)


def _flac_duration_us(begin: bytes) -> int:
    """Return the length of a FLAC file in microseconds, or 0 if it is unknown.

    The first block of the file contains the sample rate (20 bits) and the number of samples (36 bits), as RFC 9639
    defines in section 8.2."""
    if len(begin) < 26 or begin[:4] != b"fLaC" or begin[4] & 0x7F:
        return 0
    numbers = int.from_bytes(begin[18:26])
    samples_per_s = numbers >> 44
    return (numbers & ((1 << 36) - 1)) * 1_000_000 // samples_per_s if samples_per_s else 0


def wav_header(data_bytes: int, samples_per_s: int) -> bytes:
    """Return the header of a WAV file with 16-bit mono PCM (RIFF, Multimedia Programming Interface 1.0)."""
    format_chunk = struct.pack(
        "<IHHIIHH",
        16,  # size of the rest of this chunk
        1,  # PCM
        1,  # channel
        samples_per_s,
        samples_per_s * SAMPLE_BYTES,
        SAMPLE_BYTES,
        8 * SAMPLE_BYTES,
    )
    size = struct.pack("<I", 36 + data_bytes)
    return b"RIFF" + size + b"WAVEfmt " + format_chunk + b"data" + struct.pack("<I", data_bytes)


def wav_facts(begin: bytes) -> WavFacts | None:
    """Return the facts in the header of a WAV file, or None if `begin` is not the beginning of a WAV file.

    `begin` must contain the whole header, up to the first sample."""
    if begin[:4] != b"RIFF" or begin[8:12] != b"WAVE":
        return None
    bytes_per_s = 0
    position = 12
    while position + 8 <= min(len(begin), WAV_HEAD_LIMIT_BYTES):
        name, size = struct.unpack_from("<4sI", begin, position)
        position += 8
        if name == b"data":
            return WavFacts(bytes_per_s, position, size) if bytes_per_s else None
        if name == b"fmt " and position + 12 <= len(begin):
            (bytes_per_s,) = struct.unpack_from("<I", begin, position + 8)
        position += size + size % 2
    return None


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        raise InputFileError(errno.EINVAL, "it is not a regular file")
    with path.open("rb") as file:
        return file.read(WAV_HEAD_LIMIT_BYTES)


@lru_cache(CACHED_FILES)
def _read_file(path: Path) -> bytes:
    return read_input(path, FILE_LIMIT_BYTES, pipes=False)


@lru_cache(1)
def _sounds() -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return the vowels, the hisses and the pauses of synthetic recordings, as PCM samples.

    Every call returns the same sounds.
    """
    random = Random("sounds")  # noqa: S311 - sounds, not secrets
    vowels = [_vowel(random) for _ in range(SOUNDS)]
    hisses = [_hiss(random) for _ in range(SOUNDS)]
    pauses = [bytes(SAMPLE_BYTES * round(SAMPLES_PER_S * random.uniform(0.03, 0.3))) for _ in range(SOUNDS)]
    return vowels, hisses, pauses


def _vowel(random: Random) -> bytes:
    """Return the samples of a sound like a vowel: harmonics of a pitch, louder near two random formants.

    Only one period is computed. The sound repeats the period, first louder and then softer."""
    period = round(SAMPLES_PER_S / random.uniform(*PITCHES_HZ))
    pitch_hz = SAMPLES_PER_S / period
    formants_hz = random.uniform(300, 900), random.uniform(900, 2500)
    loudness = [
        sum(math.exp(-(((number * pitch_hz - formant) / 250) ** 2)) for formant in formants_hz) + 0.02
        for number in range(1, HARMONICS + 1)
    ]
    wave = [
        sum(level * math.sin(math.tau * number * index / period) for number, level in enumerate(loudness, 1))
        for index in range(period)
    ]
    peak = max(map(abs, wave))
    periods = round(random.uniform(0.08, 0.25) * pitch_hz)
    samples = array("h")
    for index in range(periods):
        volume = FULL_SCALE * math.sin(math.pi * (index + 1) / (periods + 1)) / peak
        samples.extend([round(value * volume) for value in wave])
    return samples.tobytes()


def _hiss(random: Random) -> bytes:
    """Return the samples of a sound like a consonant: soft noise of 40 to 120 ms."""
    count = round(SAMPLES_PER_S * random.uniform(0.04, 0.12))
    amplitude = FULL_SCALE // 8
    return array("h", [round(amplitude * (2 * random.random() - 1)) for _ in range(count)]).tobytes()
