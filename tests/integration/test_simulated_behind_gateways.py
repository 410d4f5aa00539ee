"""A simulated server is never taken for a real one, whatever a gateway hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.discovery import probe
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, summary_of
from tests.support.dialects import STREAMING_BACKENDS
from tests.support.simulated import running
from tests.support.strict_gateway import Gateway, running_gateway

FAST: dict[str, Any] = {"model": "m", "ttft_s": 0.01, "itl_s": 0.001, "speed": 2.5}
LOAD = ("--n", "4", "--input-tokens", "8", "--output-tokens", "4", "--lengths", "approximate")
MARK = "SIMULATED at 2.5 times speed"


def measured(folder: Path, url: str, *more: str) -> tuple[dict[str, Any], str]:
    """The summary and the printed text of a burst."""
    code, out, err = burst(folder, "--server", "openai", "--url", url, *LOAD, *more, report=True)
    assert code in (0, 5), out + err
    return summary_of(folder), out


def test_the_probe_sees_a_simulated_server_through_v1_alone(tmp_path: Path) -> None:
    """The card of the model has the mark, so that a gateway that publishes only /v1 and drops headers hides nothing."""
    for name in STREAMING_BACKENDS:
        with (
            running(SimulatedConfig(server=name, **FAST)) as server,
            running_gateway(Gateway(backend=server.url)) as way,
        ):
            facts = probe(way.url)
            assert (facts.simulated, facts.speed) == (True, 2.5), name
            assert "GET /simulated/status" in way.asked


def test_a_limited_rate_of_pages_hides_nothing() -> None:
    """The probe's later questions are answered with 429; what was answered before is enough."""
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        running_gateway(Gateway(backend=server.url, pages=3)) as way,
    ):
        facts = probe(way.url, "openai")
    assert (facts.simulated, facts.speed) == (True, 2.5)


@pytest.mark.parametrize("name", STREAMING_BACKENDS)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_load_itself_finds_a_simulated_server_behind_an_alias(name: str, endpoint: str, tmp_path: Path) -> None:
    """The gateway lists a model of its own and drops headers, so the probe sees nothing. Ids and fingerprints of the
    responses have the mark, and every title, table and page has it then."""
    behind = {"alias": "small", "model": "m"}
    with (
        running(SimulatedConfig(server=name, **FAST)) as server,
        running_gateway(Gateway(backend=server.url, **behind)) as way,
    ):
        assert not probe(way.url).simulated
        summary, out = measured(tmp_path, way.url, "--endpoint", endpoint)
    assert (summary["server"]["simulated"], summary["server"]["speed"]) == (True, 2.5)
    assert f"{MARK}  Latency of complete requests" in out
    assert MARK in (tmp_path / "run" / "report.html").read_text("utf-8")
    run = runfile.read(tmp_path / "run")
    assert any(sample.values.get("simulated") for sample in run.telemetry if sample.source == "client")


def test_the_native_stream_of_tgi_has_the_mark(tmp_path: Path) -> None:
    """Its events have no id; the first one has a field of its own."""
    with (
        running(SimulatedConfig(server="tgi", **FAST)) as server,
        running_gateway(Gateway(backend=server.url, native=True)) as way,
    ):
        code, out, err = burst(tmp_path, "--server", "tgi", "--url", way.url, *LOAD)
    assert code in (0, 5), out + err
    run = runfile.read(tmp_path / "run")
    assert any(sample.values.get("simulated_speed") == 2.5 for sample in run.telemetry if sample.source == "client")


def test_a_real_server_is_not_called_simulated(tmp_path: Path) -> None:
    """A gateway that puts its own ids in place of the marked ones stands for a real server here."""
    behind = {"alias": "simulated-x5-model", "model": "m", "hides_ids": True}
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        running_gateway(Gateway(backend=server.url, **behind)) as way,
    ):
        summary, out = measured(tmp_path, way.url)
    assert summary["server"]["simulated"] is False
    assert "SIMULATED" not in out


def test_a_count_of_prompts_can_tell(tmp_path: Path) -> None:
    """A gateway that counts prompts by running them passes an id on, and the run knows before it starts."""
    behind = {"alias": "small", "model": "m"}
    load = ("--n", "2", "--input-tokens", "8", "--output-tokens", "4", "--lengths", "server", "--no-report")
    with (
        running(SimulatedConfig(server="vllm", **FAST)) as server,
        running_gateway(Gateway(backend=server.url, **behind)) as way,
    ):
        code, out, err = burst(tmp_path, "--server", "openai", "--url", way.url, *load)
    assert code in (0, 5), out + err
    assert "SIMULATED openai at 2.5 times speed: its prompt counts show that it is simulated" in out
    header = json.loads((tmp_path / "run" / "run.jsonl").read_text("utf-8").splitlines()[0])
    assert (header["server"]["simulated"], header["server"]["speed"]) == (True, 2.5)
