"""Servers in containers, with a stand-in for the `docker` command that plays real outputs and failures."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.errors import LaunchError
from loadgen.servers.launch import LaunchSpec, compose, launched_server
from loadgen.servers.launch.process import free_port
from loadgen.servers.launch.spec import Host
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import ROOT, loadgen
from tests.support.simulated import running
from tests.support.stand_in_docker import CONTAINER, DIGEST, Docker, ps

GPU_A = Host("gpu-a", platform="A800", docker="gpu-a", gpus={"vllm": "3"}, env={"VLLM_TAG": "v0.32.0"})

FAILURES = tomllib.loads((ROOT / "tests/data/docker/failures.toml").read_text("utf-8"))["failure"]
OF_DOCKER = [each for each in FAILURES if each["step"] != "logs"]
OF_SERVERS = [each for each in FAILURES if each["step"] == "logs"]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """The stand-in, first on PATH; states and logs go to a folder of the test's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Docker(folder)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that answers where the container's would."""
    with running(SimulatedConfig(server="vllm", model="tiny")) as server:
        yield server.url


def on(host: Host, port: int | str) -> Host:
    """This host, with vLLM at another port than the usual one."""
    return replace(host, env={**host.env, "VLLM_PORT": str(port)})


def wanted(host: Host, **options: Any) -> LaunchSpec:
    return LaunchSpec("vllm", host, "tiny", "compose", {"poll_s": 0.01, **options})


def nowhere(host: Host = GPU_A) -> Host:
    return on(host, free_port())


def no_word(_: str) -> None:
    """Says nothing."""


def test_a_container_is_up_and_then_down(docker: Docker, url: str) -> None:
    """Compose gets file, project and profile; what is kept names image, digest and driver; the end removes it."""
    docker.answer({"words": ["ps"], "out": "", "times": 1}, ps("running", "starting") | {"times": 2})
    lines: list[str] = []
    with launched_server(wanted(on(GPU_A, url.rpartition(":")[2])), lines.append) as server:
        assert server.url == url
        facts = dict(server.facts)
    up, down = docker.call("up"), docker.call("down")
    file = str(ROOT / "docker-compose.yml")
    common = ["--context", "gpu-a", "compose", "--file", file, "--project-name", "loadgen-gpu-a", "--profile", "vllm"]
    assert up["arguments"] == [*common, "up", "--detach", "--no-deps", "vllm"]
    assert down["arguments"] == [*common, "down", "vllm"]  # with the network, once the project has no container left
    assert docker.calls[-1] == down
    assert up["environment"] == {
        "MODEL_NAME": "tiny",
        "BIND": "127.0.0.1",
        "VLLM_GPU": "3",
        "MODELS_VOLUME": "llm-models",
        "TENSOR_PARALLEL": "1",
        "VLLM_TAG": "v0.32.0",
    }
    assert (facts["image"], facts["image_digest"]) == ("vllm/vllm-openai:v0.32.0", DIGEST)
    assert (facts["driver_version"], facts["gpu"]) == ("550.163.01", "NVIDIA A800-SXM4-80GB")
    assert (facts["platform"], facts["engine_version"], facts["compose_version"]) == ("A800", "28.2.2", "2.39.1")
    assert facts["ready_s"] >= 0
    assert facts["limits"]["IpcMode"] == "host"
    assert "hf_never_kept" not in str(facts)
    assert "starting vllm on gpu-a" in lines[0]
    assert lines[-1] == "stopping vllm on gpu-a"  # which may take minutes


@pytest.mark.parametrize(
    ("engine", "flags", "environment"),
    [
        ("", [], {"DOCKER_HOST": "unix:///run/user/1000/docker.sock"}),
        ("gpu-a", ["--context", "gpu-a"], {}),
        ("ssh://bench@gpu-a", [], {"DOCKER_HOST": "ssh://bench@gpu-a"}),
    ],
)
def test_the_engine_is_the_hosts(
    docker: Docker, monkeypatch: pytest.MonkeyPatch, engine: str, flags: list[str], environment: dict[str, str]
) -> None:
    """A context by its name, ssh for the one call; only this machine's engine is the one the environment names."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    compose.down(wanted(replace(GPU_A, docker=engine)))
    (call,) = docker.calls
    assert call["arguments"][: len(flags) + 1] == [*flags, "compose"]
    assert {name: call["environment"].get(name) for name in environment} == environment
    assert ("DOCKER_HOST" in call["environment"]) == bool(environment)
    assert os.environ["DOCKER_HOST"] == "unix:///run/user/1000/docker.sock"


def test_the_port_is_the_one_that_was_published(docker: Docker, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Not only the hosts file moves it: the shell may, and a `.env` that only Compose reads."""
    monkeypatch.setenv("VLLM_PORT", url.rpartition(":")[2])
    assert compose.up(wanted(GPU_A), no_word).url == url
    spec = wanted(replace(GPU_A, address="::1"))
    assert (
        compose.server_url({"Publishers": [{"PublishedPort": 0}, {"PublishedPort": 9001}]}, spec) == "http://[::1]:9001"
    )
    assert compose.server_url({"State": "exited"}, spec) == "http://[::1]:8001"


def test_a_server_that_ran_already_has_no_time_to_start(docker: Docker, url: str) -> None:
    """How long it took is known only where this `up` has made the container."""
    host = on(GPU_A, url.rpartition(":")[2])
    assert "ready_s" not in compose.up(wanted(host), no_word).facts
    docker.answer({"words": ["ps"], "out": "", "times": 1})
    assert compose.up(wanted(host), no_word).facts["ready_s"] >= 0
    docker.answer(ps("exited") | {"times": 1})  # the same container, started again
    assert compose.up(wanted(host), no_word).facts["ready_s"] >= 0


def test_a_start_that_is_given_up_says_that_it_stops(docker: Docker) -> None:
    """A server may need minutes for that."""
    docker.answer(ps("running", "starting"))
    lines: list[str] = []

    with pytest.raises(LaunchError):
        compose.up(wanted(nowhere(), timeout_s=0.05), lines.append)
    assert lines[-1] == "stopping vllm on gpu-a"


@pytest.mark.parametrize("failure", OF_DOCKER, ids=lambda each: each["what"])
def test_each_failure_of_docker_has_its_own_message(docker: Docker, failure: dict[str, str]) -> None:
    """What docker printed becomes what happened and what to do, with docker's own words below; nothing is left up."""
    words = {"compose version": ["version", "--short"], "version": ["version"], "up": ["up"]}[failure["step"]]
    docker.answer({"words": words, "err": failure["printed"], "code": 1})
    with pytest.raises(LaunchError) as caught:
        compose.up(wanted(nowhere()), no_word)
    assert failure["what"] in str(caught.value)
    assert failure["hint"] in caught.value.hint
    assert caught.value.log_tail
    assert ("down" in docker.calls[-1]["arguments"]) == (failure["step"] == "up")


@pytest.mark.parametrize("failure", OF_SERVERS, ids=lambda each: each["what"])
def test_a_container_that_ends_says_why(docker: Docker, failure: dict[str, str]) -> None:
    """Its log is read for a known reason and its end shown, the whole of it kept in a file, the container removed."""
    log = f"loading ...\n{failure['printed']}"
    docker.answer(ps("exited", code=1), {"words": ["logs"], "out": log})
    with pytest.raises(LaunchError) as caught:
        compose.up(wanted(nowhere()), no_word)
    assert failure["what"] in str(caught.value)
    assert failure["hint"] in caught.value.hint
    assert failure["printed"].strip() in caught.value.log_tail
    assert Path(caught.value.hint.rpartition(" ")[2]).read_text() == log
    docker.call("down")


def test_a_container_killed_for_memory_says_so(docker: Docker) -> None:
    """The engine knows that the kernel did it; the log does not."""
    docker.answer(ps("exited", code=137), {"words": ["inspect", "{{.State.OOMKilled}}"], "out": "true\n"})
    with pytest.raises(LaunchError, match="killed because the host ran out of memory"):
        compose.up(wanted(nowhere()), no_word)


def test_a_server_that_does_not_get_ready_is_given_up(docker: Docker) -> None:
    """After the time-out it is taken down, and the message has the end of its log and names --timeout."""
    docker.answer(ps("running", "starting"))
    with pytest.raises(LaunchError, match=r"did not get ready within 0\.05 s") as caught:
        compose.up(wanted(nowhere(), timeout_s=0.05), no_word)
    assert "--timeout" in caught.value.hint
    assert "Loading safetensors" in caught.value.log_tail
    docker.call("down")


def test_an_unhealthy_server_is_given_up(docker: Docker) -> None:
    """A health check that has failed for good ends the wait."""
    docker.answer(ps("running", "unhealthy"))
    with pytest.raises(LaunchError, match="health check fails"):
        compose.up(wanted(nowhere()), no_word)


def test_a_healthy_server_must_be_reachable_from_here(docker: Docker) -> None:
    """A port that is published where this machine cannot reach it is said as what it is."""
    with pytest.raises(LaunchError, match="healthy, but nothing answers at") as caught:
        compose.up(wanted(nowhere(), unreachable_s=0.0), no_word)
    assert "BIND" in caught.value.hint


def test_without_docker_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the way without it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="docker is not installed") as caught:
        compose.up(wanted(GPU_A), no_word)
    assert "--launch process" in caught.value.hint


def test_a_model_folder_becomes_the_volume(docker: Docker, url: str) -> None:
    """The folder of the hosts file is shown by the volume; one that exists and shows it is used as it is."""
    host = replace(on(GPU_A, url.rpartition(":")[2]), model_dir="/srv/models")
    docker.answer({"words": ["volume", "ls"], "out": "\n"}, {"words": ["volume", "create"], "out": "llm-models\n"})
    compose.up(wanted(host), no_word)
    made = docker.call("volume", "create")["arguments"]
    assert made[-5:] == ["create", "--opt=type=none", "--opt=o=bind", "--opt=device=/srv/models", "llm-models"]
    there = {"words": ["volume", "ls"], "out": "llm-models\n"}
    docker.answer(there, {"words": ["volume", "inspect"], "out": '[{"Options": {"device": "/srv/models"}}]'})
    compose.up(wanted(host), no_word)
    docker.call("volume", "create")
    docker.answer(there, {"words": ["volume", "inspect"], "out": '[{"Options": null}]'})
    with pytest.raises(LaunchError, match="is bound to no folder, not /srv/models"):
        compose.up(wanted(host), no_word)


def test_ports_are_bound_where_the_host_is_reached(docker: Docker) -> None:
    """The address of the hosts file, a name resolved; nothing else of the machine listens."""
    compose.down(wanted(replace(GPU_A, address="10.0.0.5")))
    compose.down(wanted(replace(GPU_A, address="::1")))
    compose.down(wanted(replace(GPU_A, address="localhost")))
    binds = [call["environment"]["BIND"] for call in docker.calls]
    assert binds[:2] == ["10.0.0.5", "[::1]"]
    assert binds[2] in ("127.0.0.1", "[::1]")
    with pytest.raises(LaunchError, match="no such host"):
        compose.down(wanted(replace(GPU_A, address="no.such.host.invalid")))


def test_a_model_is_spread_over_the_gpus_of_the_host(docker: Docker, tmp_path: Path) -> None:
    """As many as asked, the first of those named, which is one unless more are asked for."""
    four = replace(GPU_A, gpus={"vllm": "4,5,6,7"})
    for host, options in ((four, {"tensor_parallel": 2}), (four, {}), (replace(GPU_A, gpus={}), {})):
        compose.down(wanted(host, **options))
    told = [(call["environment"].get("VLLM_GPU"), call["environment"]["TENSOR_PARALLEL"]) for call in docker.calls]
    assert told == [("4,5", "2"), ("4", "1"), (None, "1")]


def reserved(*gpus: str) -> dict[str, Any]:
    """The rule for a Compose file that reserves these GPUs for vLLM."""
    devices = [{"driver": "nvidia", "device_ids": [*gpus], "capabilities": ["gpu"]}]
    service = {"deploy": {"resources": {"reservations": {"devices": devices}}}}
    return {"words": ["config"], "out": json.dumps({"services": {"vllm": service}})}


def runs(service: str, *gpus: str, project: str = "loadgen") -> list[dict[str, Any]]:
    """The rules for a running container of a Compose project that uses these GPUs."""
    labels = {"com.docker.compose.project": project, "com.docker.compose.service": service}
    container = {"Config": {"Labels": labels}, "HostConfig": {"DeviceRequests": [{"DeviceIDs": [*gpus]}]}}
    listed = {"words": ["container", "ls"], "out": "a1b2\n"}
    return [listed, {"words": ["inspect", "a1b2"], "out": json.dumps([container])}]


@pytest.mark.parametrize(
    ("own", "container"),
    [
        (["0"], runs("tgi", "0")),
        (["0,1"], runs("tgi", "1")),
        (["GPU-aa", "GPU-bb"], runs("lightllm", "GPU-bb", project="loadgen-gpu-a")),
    ],
)
def test_two_servers_do_not_share_a_gpu(docker: Docker, own: list[str], container: list[dict[str, Any]]) -> None:
    """The second server is refused before it is started, and the first one is not touched."""
    docker.answer({"words": ["ps"], "out": ""}, reserved(*own), *container)
    with pytest.raises(LaunchError, match=r"vllm on gpu-a needs GPU .*, which (tgi|lightllm) already uses") as caught:
        compose.up(wanted(GPU_A), no_word)
    assert "loadgen servers down --server" in caught.value.hint
    assert "VLLM_GPU=1" in caught.value.hint
    assert not [call for call in docker.calls if {"up", "down", "stop"} & set(call["arguments"])]


@pytest.mark.parametrize(
    ("own", "container"),
    [
        (["0"], runs("tgi", "1")),
        (["0"], runs("vllm", "0", project="loadgen-gpu-a")),  # the same server, which Compose recreates
        (["0"], runs("sim-tgi")),
        (["0"], runs("dcgm-exporter", "0")),
        (["0"], runs("tgi", "0", project="of-somebody-else")),
        ([], runs("tgi", "0")),
    ],
)
def test_a_free_gpu_is_used(docker: Docker, own: list[str], container: list[dict[str, Any]], url: str) -> None:
    """Other GPUs, simulated servers, monitoring and other projects do not keep a server from starting."""
    docker.answer({"words": ["ps"], "out": "", "times": 1}, reserved(*own), *container)
    assert compose.up(wanted(on(GPU_A, url.rpartition(":")[2])), no_word).url == url


def test_options_that_nobody_knows_are_mistakes(docker: Docker) -> None:
    """They would be passed over; nothing is started. More for docker-compose.yml goes under `env`."""
    with pytest.raises(LaunchError, match="--launch compose has no option temperature") as caught:
        compose.up(wanted(GPU_A, temperature=1), no_word)
    assert "tensor_parallel" in caught.value.hint
    assert docker.calls == []
    compose.down(wanted(GPU_A, env={"VLLM_TAG": "v0.33.0"}))
    assert docker.calls[0]["environment"]["VLLM_TAG"] == "v0.33.0"


def test_old_and_new_lists_of_containers_are_read(docker: Docker) -> None:
    """Compose before 2.21 prints one JSON array, later versions a line per container, and nothing without any."""
    row = ps("running", "healthy")["out"]
    for printed, ids in ((f"[{row.strip()}]\n", [CONTAINER]), (row, [CONTAINER]), ("\n", []), ("[]\n", [])):
        docker.answer({"words": ["ps"], "out": printed})
        assert list(filter(None, [compose.status(wanted(GPU_A)).get("ID")])) == ids


def servers(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`loadgen servers ...` as a person would run it."""
    return loadgen(folder, "servers", *arguments, timeout_s=60)


def test_the_commands_speak_of_a_host_in_the_hosts_file(docker: Docker, url: str, tmp_path: Path) -> None:
    """Up says what is ready and that its limits fit, status and logs read the container, down removes it."""
    port = url.rpartition(":")[2]
    (tmp_path / "hosts.toml").write_text(
        f'[gpu-a]\nplatform = "A800"\ndocker = "gpu-a"\nenv = {{VLLM_PORT = "{port}"}}\n'
    )
    up = servers("up", "--server", "vllm", "--host", "gpu-a", "--model", "tiny", folder=tmp_path)
    assert up.returncode == 0, up.stderr
    assert f"at {url}: tiny" in up.stdout
    assert f"next: loadgen burst --server vllm --url {url}" in up.stdout
    status = servers("status", "--server", "vllm", "--host", "gpu-a", folder=tmp_path)
    assert (status.returncode, "running (healthy) on gpu-a" in status.stdout) == (0, True)
    assert "Loading safetensors" in servers("logs", "--server", "vllm", "--host", "gpu-a", folder=tmp_path).stdout
    again = servers("up", "--server", "vllm", "--host", "gpu-a", "--model", "tiny", folder=tmp_path)
    assert f"vllm 0.32.0 was already running at {url}" in again.stdout
    assert "vllm on gpu-a: down" in servers("down", "--server", "vllm", "--host", "gpu-a", folder=tmp_path).stdout
    docker.call("down")


def test_a_server_that_is_down_has_no_log(docker: Docker, tmp_path: Path) -> None:
    """Exit code 3, and where the log of a start that failed is kept."""
    docker.answer({"words": ["ps"], "out": ""})
    for more in ([], ["--launch", "process"]):
        done = servers("logs", "--server", "vllm", *more, folder=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        assert "vllm is down on local, so it has no log" in done.stderr
        assert "local-vllm.log" in done.stderr


def test_a_burst_past_the_servers_limits_is_said_at_once(docker: Docker, url: str, tmp_path: Path) -> None:
    """The server is up, and exit code 2 with the limit named says that the burst would not fit."""
    (tmp_path / "hosts.toml").write_text(f'[local]\nenv = {{VLLM_PORT = "{url.rpartition(":")[2]}"}}\n')
    up = servers("up", "--server", "vllm", "--model", "tiny", "--input-tokens", "4000", folder=tmp_path)
    assert up.returncode == 2
    assert "max_model_len of 4096" in up.stderr
    assert [call for call in docker.calls if "down" in call["arguments"]] == []


def test_a_failure_shows_the_log_before_the_message(docker: Docker, tmp_path: Path) -> None:
    """Exit code 3; the log's end comes first, so that what happened and what to do stand at the prompt."""
    (tmp_path / "hosts.toml").write_text(f'[local]\nenv = {{VLLM_PORT = "{free_port()}"}}\n')
    log = "ValueError: No available memory for the cache blocks.\n"
    docker.answer(ps("exited", code=1), {"words": ["logs"], "out": log})
    up = servers("up", "--server", "vllm", folder=tmp_path)
    assert up.returncode == 3
    before, _, after = up.stderr.partition("loadgen: vllm on local: the GPU does not have enough free memory")
    assert f"  | {log.strip()}" in before
    assert "choose a smaller model" in after
