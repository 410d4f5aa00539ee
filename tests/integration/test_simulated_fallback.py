"""Commands without a server: when they use the built-in simulated one, and which of them refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from loadgen.servers.backends import BACKENDS
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, in_process, summary_of
from tests.support.simulated import running

SMALL = ("--n", "4", "--input-tokens", "16", "--output-tokens", "4", "--no-report")
HINT = "Use --url for a real server, or --simulated for the built-in one."


@pytest.fixture
def usual_port(unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port on which TGI is looked for. Nothing listens on it."""
    _look_on(unused_tcp_port, monkeypatch)
    return unused_tcp_port


def _look_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADGEN_TGI_URL", raising=False)
    monkeypatch.setitem(BACKENDS, "tgi", structs.replace(BACKENDS["tgi"], port=port))


def test_a_plain_command_says_that_it_simulates_and_what(usual_port: int, tmp_path: Path) -> None:
    """The first line says that there is no server, the second which hardware is modelled, at real speed. The report has
    the hardware in its title."""
    code, out, problems = in_process(tmp_path, "burst", "--server", "tgi", *SMALL, "--out", "run")
    assert code in {0, 5}, problems
    first, second, *rest = out.splitlines()
    assert first == (
        f"No TGI server found on 127.0.0.1:{usual_port}. Using the built-in simulated server; use --url for a real one."
    )
    assert second.startswith("SIMULATED tgi, a model of Llama-2-7B on 4 x H100 SXM: 4 requests, all at once")
    assert any(line.startswith("SIMULATED  tgi") and "on 4 x H100 SXM" in line for line in rest)
    server = summary_of(tmp_path)["server"]
    assert (server["simulated"], server["speed"], server["platform"]) == (True, 1.0, "4 x H100 SXM")


@pytest.mark.usefixtures("usual_port")
@pytest.mark.parametrize(
    ("words", "purpose"),
    [
        (("burst", "--server", "tgi", *SMALL, "--assert", "ttft.p99 < 5s"), "--assert"),
        (("run", "--server", "tgi", *SMALL, "--assert", "complete >= 99%", "--junit", "junit.xml"), "--assert"),
        (("sweep", "--server", "tgi", "--concurrency", "1,2", "--n", "4"), "sweep"),
        (("sweep", "--server", "tgi", "--objective", "ttft.p99 < 5s"), "sweep"),
    ],
)
def test_a_command_that_decides_does_not_fall_back(words: tuple[str, ...], purpose: str, tmp_path: Path) -> None:
    """Exit code 3 with the way out, and neither a run nor a JUnit file."""
    code, _, problems = in_process(tmp_path, *words)
    assert code == 3
    assert f"{purpose} does not judge the built-in simulated server" in problems
    assert HINT in problems
    assert not list(tmp_path.rglob("run.jsonl"))
    assert not list(tmp_path.rglob("junit.xml"))


@pytest.mark.usefixtures("usual_port")
def test_a_command_that_decides_uses_it_on_request(tmp_path: Path) -> None:
    """With --simulated the objective is judged. vLLM is simulated if no server is named."""
    code, out, problems = in_process(
        tmp_path, "burst", "--simulated", *SMALL, "--assert", "ttft.p99 < 5s", "--out", "run"
    )
    assert code in {0, 5, 6}, problems
    assert out.startswith("SIMULATED vllm, a model of")


@pytest.mark.usefixtures("usual_port")
def test_a_twin_of_the_fallback_is_not_fitted(tmp_path: Path) -> None:
    """Nobody has such a server. With --simulated, at the fit or at the run, it is."""
    burst = ("burst", "--server", "tgi", "--n", "24", "--output-tokens", "16", "--no-report", "--quiet")
    assert in_process(tmp_path, *burst, "--out", "fallback")[0] in {0, 5}
    code, _, problems = in_process(tmp_path, "twin", "fit", "fallback")
    assert (code, "because no TGI server was found" in problems) == (3, True)
    assert not (tmp_path / "twin.json").exists()
    assert in_process(tmp_path, "twin", "fit", "fallback", "--simulated")[0] == 0
    (tmp_path / "twin.json").unlink()
    assert in_process(tmp_path, *burst, "--simulated", "--out", "wanted")[0] in {0, 5}
    assert in_process(tmp_path, "twin", "fit", "wanted")[0] == 0


def test_a_server_on_the_usual_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line has its address and says that it was not chosen. With --simulated nothing is sent to it."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        _look_on(int(server.url.rpartition(":")[2]), monkeypatch)
        words = ("burst", "--server", "tgi", *SMALL)
        code, out, problems = in_process(tmp_path, *words, "--simulated", "--out", "run")
        assert code in {0, 5}, problems
        assert out.startswith("SIMULATED tgi, a model of")
        assert server.log == []
        code, out, problems = in_process(tmp_path, *words, "--out", "found")
        assert code in {0, 5}, problems
        assert f"at {server.url} (the usual port; use --url for another): 4 requests" in out.splitlines()[0]
        assert len(server.log) == 4
