"""Transcriptions and speech, end to end against the simulated vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.workloads.recordings import SyntheticRecording, wav_facts
from tests.support.command import FAST, accounted, burst, in_process, summary_of
from tests.support.simulated import running

VLLM = SimulatedConfig(server="vllm", **FAST)
TRANSCRIBE = ["--endpoint", "transcriptions", "--audio-seconds", "4"]


@pytest.mark.parametrize(("server", "openai_form"), [("vllm", False), ("openai", False), ("openai", True)])
def test_a_burst_of_recordings(server: str, openai_form: bool, tmp_path: Path) -> None:
    """Audio per second and the real-time factor follow from the length of the recordings; TTFT from the first word."""
    with running(replace(VLLM, openai_transcripts=openai_form)) as simulated:
        more = ["--n", "12", "--warmup", "2", "--assert", "rtf.p50 > 0", "--goodput", "rtf <= 1000"]
        code, out, err = burst(tmp_path, "--server", server, "--url", simulated.url, *TRANSCRIBE, *more, report=True)
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert (found["requests"]["complete"], found["requests"]["warmup"]) == (12, 2)
    rates, latency = found["throughput"], found["latency"]
    assert rates["audio_seconds_per_s"] == pytest.approx(4 * rates["requests_per_s"], rel=1e-6)
    assert rates["audio_bytes_per_s"] is None
    assert (latency["rtf"]["n"], latency["ttft_s"]["n"], latency["first_audio_s"]["n"]) == (12, 12, 0)
    assert 0 < latency["ttft_s"]["p50"] / 4 < latency["rtf"]["p50"]
    assert found["tokens"]["output_asked"] == 0
    assert (found["tokens"]["output_reported"] == 12 * 12) == (server == "vllm" or openai_form)
    assert found["goodput"]["good"] == 12
    assert (found["run"]["audio_seconds"], found["run"]["input_tokens"]) == ("4", 0)
    assert "12 requests of 4 seconds of audio each" in out
    assert "12 recordings of 4 s" in out
    assert not any(problem in out + err for problem in ("not as requested", "the client 0", "0 tokens,"))
    assert (tmp_path / "run" / "report.html").exists()


def test_the_times_are_those_of_the_server(tmp_path: Path) -> None:
    """TTFT and the time to first audio agree with the server's own log of what it sent."""
    for endpoint, metric in (("transcriptions", "ttft_s"), ("speech", "first_audio_s")):
        folder = tmp_path / endpoint
        folder.mkdir()
        with running(replace(VLLM, ttft_s=0.2, log=folder / "log.jsonl")) as simulated:
            common = ["--server", "vllm", "--url", simulated.url, "--endpoint", endpoint, "--n", "8"]
            code, _, err = burst(folder, *common, "--concurrency", "2", command="run")
        assert code in (0, 5), err
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        sent_s = sorted((line["sent_ns"][0] - line["received_ns"]) / 1e9 for line in lines if "sent_ns" in line)
        measured = summary_of(folder)["latency"][metric]
        # The upload takes a moment, which the server's log does not contain.
        assert sent_s[0] <= measured["min"]
        assert measured["p50"] == pytest.approx(sent_s[4], abs=0.05)


def test_files_of_the_user_are_uploaded(tmp_path: Path) -> None:
    """Each has its own length. Where one is unknown, the report says so and shows no rate of audio."""
    audio = tmp_path / "calls"
    audio.mkdir()
    for seconds in (1, 3):
        (audio / f"{seconds}.wav").write_bytes(SyntheticRecording(seconds, "a").content())
    with running(VLLM) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--workload", f"audio:{audio}", "--concurrency", "1"]
        code, out, err = burst(tmp_path, *common, command="run", report=True)
        (tmp_path / "more").mkdir()
        (audio / "2.mp3").write_bytes(b"ID3" + bytes(32_000))
        second, more_out, more_err = burst(tmp_path / "more", *common, command="run", report=True)
    assert (code in (0, 5), second in (0, 5)) == (True, True), err + more_err
    records = runfile.read(tmp_path / "run").records
    assert sorted(record.marks["audio_us"] for record in records) == [1_000_000, 3_000_000]
    assert "2 requests from audio calls" in out
    found = summary_of(tmp_path / "more")
    assert (found["latency"]["rtf"]["n"], found["throughput"]["audio_seconds_per_s"]) == (2, None)
    assert "The duration of 1 of 3 recordings is unknown" in " ".join(more_out.split())


@pytest.mark.parametrize(("server", "streamed"), [("vllm", True), ("openai", False)])
def test_a_burst_of_speech(server: str, streamed: bool, tmp_path: Path) -> None:
    """Bytes and seconds of audio per second, and the time to first audio, before the end only where it is streamed."""
    with running(replace(VLLM, itl_s=0.01)) as simulated:
        common = ["--server", server, "--url", simulated.url, "--endpoint", "speech", "--n", "6"]
        code, out, err = burst(tmp_path, *common, "--input-tokens", "20", report=True)
    assert code in (0, 5), err
    found: dict[str, Any] = summary_of(tmp_path)
    assert found["requests"]["complete"] == 6
    rates, latency = found["throughput"], found["latency"]
    assert rates["audio_bytes_per_s"] == pytest.approx(48_000 * rates["audio_seconds_per_s"], rel=1e-6)
    assert (latency["first_audio_s"]["n"], latency["ttft_s"]["n"], latency["rtf"]["n"]) == (6, 0, 6)
    assert (latency["first_audio_s"]["max"] < latency["e2e_s"]["min"] / 2) == streamed
    assert found["tokens"]["prompt_asked"] == found["tokens"]["output_asked"] == 0
    assert "First audio" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(title in page for title in ("Time to first audio", "Real-time factor", "Audio (RTFx)"))
    assert not any(word in out for word in ("Output throughput", "TTFT", "TPOT", "Input throughput"))


@pytest.mark.parametrize(("name", "seconds"), [("pcm", 1), ("wav", 1)])
def test_formats_of_speech(name: str, seconds: int, tmp_path: Path) -> None:
    """Raw samples have no header, and count as 24 kHz."""
    with running(VLLM) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--endpoint", "speech", "--n", "2", "--quiet"]
        code, _, err = burst(tmp_path, *common, "--extra-body", json.dumps({"response_format": name}))
    assert code in (0, 5), err
    for record in runfile.read(tmp_path / "run").records:
        assert record.marks["audio_us"] == record.marks["audio_bytes"] * 1_000_000 // 48_000 > seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "transcriptions", "--input-tokens", "64"], "takes recordings, which have no tokens"),
        (["--endpoint", "transcriptions", "--output-tokens", "64"], "the input decides the length of the transcript"),
        (["--endpoint", "transcriptions", "--workload", "shared-prefix:groups=2,tokens=8"], "takes recordings"),
        (["--endpoint", "transcriptions", "--workload", "multi-turn:turns=2"], "takes recordings"),
        (["--endpoint", "transcriptions", "--batch-size", "2"], "has only one recording"),
        (["--endpoint", "transcriptions", "--image", "8x8"], "only chat messages can hold images"),
        (["--endpoint", "transcriptions", "--lengths", "approximate"], "counts no tokens"),
        (
            ["--endpoint", "transcriptions", "--extra-body", '{"response_format": "srt"}'],
            "is plain text, like an error of the server",
        ),
        (["--endpoint", "speech", "--output-tokens", "64"], "the input decides the length of the speech"),
        (["--endpoint", "speech", "--audio-seconds", "5"], "takes texts, not recordings"),
        (["--endpoint", "speech", "--workload", "multi-turn:turns=2"], "cannot be used for sessions"),
        (["--endpoint", "speech", "--extra-body", '{"stream_format": "sse"}'], "no audio but events"),
        (["--endpoint", "chat", "--audio-seconds", "5"], "takes texts, not recordings"),
        (["--endpoint", "chat", "--workload", "audio:calls.wav"], "takes texts, not recordings"),
        (["--endpoint", "transcriptions", "--audio-seconds", "4000"], "write at most 3,600 seconds"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    """With exit code 2 and advice, before anything is sent."""
    (tmp_path / "calls.wav").write_bytes(SyntheticRecording(1, "a").content())
    code, _, err = burst(
        tmp_path, "--simulated", "--n", "2", *arguments, command="run" if "multi" in str(arguments) else "burst"
    )
    assert (code, message in " ".join(err.split())) == (2, True), err


def test_uploads_have_no_bodies_of_json(tmp_path: Path) -> None:
    """Whole requests are JSON. Speech can be requested with them."""
    file = tmp_path / "log.jsonl"
    file.write_text('{"body": {"input": "To be or not"}, "url": "/v1/audio/speech"}\n' * 2)
    with running(VLLM) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--workload", f"requests:{file}", "--quiet"]
        code, _, err = burst(tmp_path, *common)
        assert code in (0, 5), err
        assert summary_of(tmp_path)["latency"]["rtf"]["n"] == 2
        file.write_text('{"body": {}, "url": "/v1/audio/speech"}\n{"body": {}, "url": "/v1/audio/transcriptions"}\n')
        (tmp_path / "again").mkdir()
        code, _, err = burst(tmp_path / "again", *common)
    assert (code, "are uploads, whose bodies are not JSON" in err) == (2, True), err


BROKEN = [(endpoint, fault) for endpoint in ("transcriptions", "speech") for fault in ("500", "cut", "error", "reset")]


@pytest.mark.parametrize(
    ("endpoint", "fault"), [*BROKEN, ("transcriptions", "malformed"), ("speech", "content-length")]
)
def test_a_broken_response_is_not_complete(endpoint: str, fault: str, tmp_path: Path) -> None:
    """Whatever goes wrong on the wire."""
    with running(VLLM) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--endpoint", endpoint, "--n", "2"]
        code, _, _ = burst(tmp_path, *common, "--header", f"X-Simulated-Fault: {fault}", "--timeout", "5s", "--quiet")
    assert code == 1
    assert "complete" not in accounted(tmp_path, 2)


def test_runs_are_compared_and_exported(tmp_path: Path) -> None:
    """The figures of audio are compared, and each request has them in the export."""
    with running(VLLM) as simulated:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            burst(tmp_path / name, "--server", "vllm", "--url", simulated.url, *TRANSCRIBE, "--n", "5")
    _, out, err = in_process(tmp_path, "compare", "a/run", "b/run")
    assert "rtf.p50" in out + err
    assert "audio_seconds_per_s" in out + err
    code, _, err = in_process(tmp_path, "export", "a/run", "--csv", "out")
    assert code == 0, err
    assert "rtf" in (tmp_path / "out" / "requests.csv").read_text().partition("\n")[0]


def test_the_simulated_server_transcribes_and_speaks() -> None:
    """A transcript in one piece, and files with a header and a length."""
    with running(replace(VLLM, ttft_s=0)) as server, httpx.Client(base_url=server.url) as client:
        files = {"file": ("a.wav", SyntheticRecording(3, "a").content(), "audio/wav")}
        whole = client.post("/v1/audio/transcriptions", files=files, data={"model": VLLM.model}).json()
        assert whole["usage"] == {"type": "duration", "seconds": 3}
        verbose = {"response_format": "verbose_json"}
        assert client.post("/v1/audio/transcriptions", files=files, data=verbose).json()["duration"] == 3.0
        spoken = client.post("/v1/audio/speech", json={"input": "To be or not to be"})
        facts = wav_facts(spoken.content)
        assert facts is not None
        assert spoken.headers["content-type"] == "audio/wav"
        assert len(spoken.content) == facts.data_start + facts.data_bytes
        assert client.post("/v1/audio/speech", json={"input": " "}).status_code == 400
        assert client.post("/v1/audio/speech", json={"input": "a", "response_format": "mp3"}).status_code == 400
