"""docker-compose.yml, judged without a container engine: by the schema, and by what the schema lets through."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BURST = 1000
PORTS = {"vllm": "8001:8000", "tgi": "8002:80", "lightllm": "8003:8000"}
LIMITS = {"vllm": "--max-num-seqs", "tgi": "--max-concurrent-requests", "lightllm": "--running_max_req_size"}
PROBE_FIELDS = {"test", "interval", "timeout", "retries", "start_period", "start_interval"}
DURATION = re.compile(r"\d+(ms|s|m|h)")


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    """The file as Compose reads it, before variables are filled in."""
    parsed: dict[str, Any] = yaml.safe_load((root / "docker-compose.yml").read_text("utf-8"))
    return parsed


@pytest.fixture(params=PORTS)
def server(request: pytest.FixtureRequest) -> str:
    """Each of the three servers in turn."""
    return str(request.param)


@pytest.fixture
def service(compose: dict[str, Any], server: str) -> dict[str, Any]:
    """What the file says about this server."""
    described: dict[str, Any] = compose["services"][server]
    return described


def test_it_follows_the_compose_specification(root: Path) -> None:
    """No key is misspelt or misplaced."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(check, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_server_starts_only_when_named(service: dict[str, Any], server: str) -> None:
    """A profile per server: a bare `docker compose up` starts nothing, and nothing restarts behind a run's back."""
    assert service["profiles"] == [server]
    assert service["restart"] == "no"


def test_images_are_pinned_by_a_variable(service: dict[str, Any], server: str) -> None:
    """Each image has a version that an environment variable can replace, digest included; none floats."""
    image = service["image"]
    assert re.search(rf":\$\{{{server.upper()}_TAG:-v?\d+\.\d+\.\d+\}}$", image)


def test_ports_are_where_the_command_line_looks(service: dict[str, Any], server: str) -> None:
    """Loopback unless asked otherwise, on the port that `--server` tries, and to the port the server listens on."""
    assert service["ports"] == ["${BIND:-127.0.0.1}:" + PORTS[server]]
    inside = PORTS[server].partition(":")[2]
    assert f"http://127.0.0.1:{inside}/health" in " ".join(service["healthcheck"]["test"])


def test_limits_admit_the_burst(service: dict[str, Any], server: str) -> None:
    """1000 requests at once are neither turned away nor short of sockets."""
    (limit,) = (word for word in service["command"] if word.startswith(LIMITS[server] + "="))
    assert int(limit.partition("=")[2]) >= BURST
    assert service["ulimits"]["nofile"]["soft"] > BURST


def test_each_server_has_a_gpu_of_its_own(compose: dict[str, Any]) -> None:
    """One named device each, so that two profiles never share a card by accident."""
    devices = [each["deploy"]["resources"]["reservations"]["devices"] for each in compose["services"].values()]
    assert all(len(each) == 1 and each[0]["capabilities"] == ["gpu"] and "count" not in each[0] for each in devices)
    named = [each[0]["device_ids"][0] for each in devices]
    assert len(set(named)) == len(named) == len(PORTS)


def test_health_checks_are_spelt_out(service: dict[str, Any]) -> None:
    """Every field is given, because the defaults would call a server dead while it loads its weights."""
    probe = service["healthcheck"]
    assert set(probe) == PROBE_FIELDS
    assert all(DURATION.fullmatch(probe[field]) for field in ("interval", "timeout", "start_period", "start_interval"))


def test_shared_memory_is_large_enough(service: dict[str, Any]) -> None:
    """The 64 MB that containers get by default do not carry tensors between processes."""
    assert service.get("ipc") == "host" or service["shm_size"] in {"2gb", "16gb"}


def test_volumes_are_declared_and_nothing_is_bound(compose: dict[str, Any], service: dict[str, Any]) -> None:
    """Named volumes only: the file works on another machine's engine, where no folder of this one exists."""
    assert all(each["type"] == "volume" and each["source"] in compose["volumes"] for each in service["volumes"])


def test_prefix_caches_are_off(compose: dict[str, Any]) -> None:
    """A burst measures the work it names, not what an earlier one left in a cache."""
    services = compose["services"]
    assert "--no-enable-prefix-caching" in services["vllm"]["command"]
    assert services["tgi"]["environment"]["PREFIX_CACHING"] == "0"
    assert "--disable_dynamic_prompt_cache" in services["lightllm"]["command"]


def test_commands_fit_their_images(compose: dict[str, Any]) -> None:
    """vLLM's image serves by itself, LightLLM's has no entry point, TGI counts GPUs wrongly unless told."""
    commands = {name: each["command"] for name, each in compose["services"].items()}
    assert commands["vllm"][0].startswith("--")
    assert commands["lightllm"][:3] == ["python", "-m", "lightllm.server.api_server"]
    assert "--num-shard=1" in commands["tgi"]


def test_no_secret_is_written_down(root: Path) -> None:
    """Tokens come from the caller's environment, never from the file."""
    assert not re.search(
        r"hf_[A-Za-z0-9]{8}|(?i:token|key|password)\w*[=:] *[\"']?\w{16}",
        (root / "docker-compose.yml").read_text("utf-8"),
    )
