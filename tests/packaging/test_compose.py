"""docker-compose.yml, judged without a container engine: by the schema, and by what the schema lets through."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen.servers.backends import BACKENDS

BURST = 1000
INSIDE = {"vllm": "8000", "tgi": "80", "lightllm": "8000", "sglang": "8000", "tei": "80"}
LIMITS = {
    "vllm": "--max-num-seqs",
    "tgi": "--max-concurrent-requests",
    "lightllm": "--running_max_req_size",
    "sglang": "--max-running-requests",
    "tei": "--max-concurrent-requests",
}
PROFILES = {
    **{server: [server] for server in INSIDE},
    **{f"sim-{server}": ["sim"] for server in INSIDE},
    **{name: ["monitoring"] for name in ("dcgm-exporter", "prometheus", "grafana")},
}
PROBE_FIELDS = {"test", "interval", "timeout", "retries", "start_period", "start_interval"}
DURATION = re.compile(r"\d+(ms|s|m|h)")
PORT = re.compile(r"\$\{BIND:-127\.0\.0\.1\}:\$\{\w+_PORT:-(\d+)\}:(\d+)")


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    """The file as it is written."""
    return (root / "docker-compose.yml").read_text("utf-8")


@pytest.fixture(scope="module")
def compose(text: str) -> dict[str, Any]:
    """The file as Compose reads it, before variables are filled in."""
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


@pytest.fixture(params=INSIDE)
def server(request: pytest.FixtureRequest) -> str:
    """Each of the three servers in turn."""
    return str(request.param)


@pytest.fixture(params=PROFILES)
def service(request: pytest.FixtureRequest, compose: dict[str, Any]) -> dict[str, Any]:
    """What the file says about each service in turn."""
    described: dict[str, Any] = compose["services"][request.param]
    return described


@pytest.fixture
def backend(compose: dict[str, Any], server: str) -> dict[str, Any]:
    """What the file says about this real server."""
    described: dict[str, Any] = compose["services"][server]
    return described


@pytest.fixture
def simulated(compose: dict[str, Any], server: str) -> dict[str, Any]:
    """What the file says about this simulated server."""
    described: dict[str, Any] = compose["services"][f"sim-{server}"]
    return described


def test_it_follows_the_compose_specification(root: Path) -> None:
    """No key is misspelt or misplaced."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(check, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_service_starts_only_when_its_profile_is_named(compose: dict[str, Any]) -> None:
    """A bare `docker compose up` starts nothing, and nothing restarts behind a run's back."""
    assert {name: each["profiles"] for name, each in compose["services"].items()} == PROFILES
    assert {each["restart"] for each in compose["services"].values()} == {"no"}


def test_no_variable_must_be_set(text: str) -> None:
    """Compose fills in the whole file whatever the profile, so one that must be set would stop all the others."""
    assert not re.findall(r"\$\{\w+(?::?\?[^}]*)?\}", text)


def test_every_variable_is_explained(root: Path, text: str) -> None:
    """The guide has a row for each variable of the file, with the default that it has there."""
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*?) \|", (root / "docs/guides/servers.md").read_text("utf-8"), re.M)
    said = {
        name: default
        for names, defaults in rows
        for name, default in zip(
            re.findall(r"`(\w+)`", names), defaults.split(", ") * (1 if ", " in defaults else 9), strict=False
        )
    }
    assert said == dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))


def test_images_are_pinned(service: dict[str, Any]) -> None:
    """Each image has a version, which an environment variable can replace, digest included; none floats."""
    assert re.search(r":(\$\{[A-Z]+_TAG:-(?:cuda-|v)?\d+\.\d+\.\d+[\w.-]*\}|\d+\.\d+\.\d+)$", service["image"])


def test_real_servers_are_on_the_ports_that_the_command_line_looks_at(backend: dict[str, Any], server: str) -> None:
    """Loopback unless asked otherwise, and to the port that the server listens on and its health check asks."""
    (port,) = backend["ports"]
    assert port == f"${{BIND:-127.0.0.1}}:${{{server.upper()}_PORT:-{BACKENDS[server].port}}}:{INSIDE[server]}"
    assert f"127.0.0.1{'/' if server in ('vllm', 'tei') else ':'}{INSIDE[server]}" in " ".join(
        backend["healthcheck"]["test"]
    )
    listens = [word for word in backend["command"] if word.startswith(("--port=", "--host="))]
    assert listens == ([] if server in ("tgi", "tei") else ["--host=0.0.0.0", f"--port={INSIDE[server]}"])


def test_simulated_servers_are_on_the_same_ports(simulated: dict[str, Any], server: str) -> None:
    """They stand in for the real ones, and their command names the server, the address and the port asked."""
    (port,) = simulated["ports"]
    assert port == f"${{BIND:-127.0.0.1}}:${{{server.upper()}_PORT:-{BACKENDS[server].port}}}:8000"
    assert simulated["command"][:4] == ["mock-server", f"--server={server}", "--host=0.0.0.0", "--port=8000"]
    assert "/dev/tcp/127.0.0.1/8000" in " ".join(simulated["healthcheck"]["test"])


def test_ports_are_well_formed_and_unique(compose: dict[str, Any]) -> None:
    """Within what may run together no two services want one port; the schema lets any text pass for a port."""
    said = {name: [PORT.fullmatch(port) for port in each["ports"]] for name, each in compose["services"].items()}
    assert all(all(ports) for ports in said.values())
    for left_out in ("sim-", ""):
        taken = [match[1] for name, ports in said.items() for match in ports if match and not _is(left_out, name)]
        assert len(set(taken)) == len(taken)


def _is(left_out: str, name: str) -> bool:
    """Whether a service is of the sort left out: simulated ones, or else the real servers they stand for."""
    return name.startswith("sim-") if left_out else name in INSIDE


def test_limits_admit_the_burst(backend: dict[str, Any], simulated: dict[str, Any], server: str) -> None:
    """1000 requests at once are neither turned away nor short of sockets."""
    (limit,) = (word for word in backend["command"] if word.startswith(LIMITS[server] + "="))
    assert int(limit.partition("=")[2]) >= BURST
    assert all(each["ulimits"]["nofile"]["soft"] > BURST for each in (backend, simulated))
    allowed = [int(word.partition("=")[2]) for word in simulated["command"] if word.startswith("--max-concurrent")]
    assert all(each >= BURST for each in allowed)
    assert bool(allowed) == (server not in ("vllm", "sglang"))  # these two have no limit


def test_each_real_server_works_on_a_host_with_one_gpu(compose: dict[str, Any]) -> None:
    """One named device each, GPU 0 unless a variable names another one; only the exporter sees all."""
    devices = {
        name: each["deploy"]["resources"]["reservations"]["devices"]
        for name, each in compose["services"].items()
        if "deploy" in each
    }
    assert set(devices) == {*INSIDE, "dcgm-exporter"}
    assert all(len(each) == 1 and "gpu" in each[0]["capabilities"] for each in devices.values())
    assert "device_ids" not in devices["dcgm-exporter"][0]
    for server in INSIDE:
        assert "count" not in devices[server][0]
        assert devices[server][0]["device_ids"] == [f"${{{server.upper()}_GPU:-0}}"]


def test_health_checks_are_spelt_out(compose: dict[str, Any]) -> None:
    """Every field is given, because the defaults would call a server dead while it loads its weights."""
    probes = {name: each.get("healthcheck") for name, each in compose["services"].items()}
    assert [name for name, probe in probes.items() if not probe] == ["dcgm-exporter"]  # its image has no shell
    for probe in filter(None, probes.values()):
        assert set(probe) == PROBE_FIELDS
        assert all(
            DURATION.fullmatch(probe[field]) for field in ("interval", "timeout", "start_period", "start_interval")
        )


def test_health_checks_leave_the_cores_alone(compose: dict[str, Any]) -> None:
    """They run beside what is measured: once a minute, and in a program that starts in a millisecond or two."""
    for probe in (each["healthcheck"] for each in compose["services"].values() if "healthcheck" in each):
        assert probe["interval"] == "1m"
        assert probe["test"][1] in ("bash", "curl", "wget")
        # SGLang's /health generates a token, so its check uses another page.
        assert any(page in " ".join(probe["test"]) for page in ("/health", "/-/ready", "/model_info"))


def test_servers_stop_when_they_are_told_to(backend: dict[str, Any], simulated: dict[str, Any]) -> None:
    """As process 1 a program that handles no SIGTERM ignores it, until the grace period of two minutes is over."""
    assert backend["init"] is simulated["init"] is True


def test_one_service_builds_the_image_of_the_simulated_servers(compose: dict[str, Any]) -> None:
    """Compose labels each build with its service: of three builds of one tag, each `up` would make new containers."""
    simulated = {name: each for name, each in compose["services"].items() if name.startswith("sim-")}
    assert {name: each["pull_policy"] for name, each in simulated.items() if "build" in each} == {"sim-vllm": "build"}
    assert {each["pull_policy"] for name, each in simulated.items() if "build" not in each} == {"never"}
    assert len({each["image"] for each in simulated.values()}) == 1


def test_shared_memory_is_large_enough(backend: dict[str, Any], server: str) -> None:
    """The 64 MB that containers get by default do not carry tensors between processes. TEI has one process."""
    assert server == "tei" or backend.get("ipc") == "host" or backend["shm_size"] in {"2gb", "16gb"}


def test_what_is_used_is_declared_and_nothing_is_bound(compose: dict[str, Any], service: dict[str, Any]) -> None:
    """Named volumes and inline configs only: the file works on another machine's engine, where no folder of this is."""
    assert all(each["type"] == "volume" and each["source"] in compose["volumes"] for each in service.get("volumes", []))
    assert all(each["source"] in compose["configs"] for each in service.get("configs", []))
    assert set(service["networks"]) == set(compose["networks"])
    assert all(set(each) == {"content"} for each in compose["configs"].values())
    assert "env_file" not in service
    assert "secrets" not in service
    assert not (service.get("read_only") and service.get("configs"))  # Compose copies them in, and would fail


def test_prefix_caches_are_off(compose: dict[str, Any]) -> None:
    """A burst measures the work it names, not what an earlier one left in a cache."""
    services = compose["services"]
    assert "--no-enable-prefix-caching" in services["vllm"]["command"]
    assert services["tgi"]["environment"]["PREFIX_CACHING"] == "0"
    assert "--disable_dynamic_prompt_cache" in services["lightllm"]["command"]
    assert "--disable-radix-cache" in services["sglang"]["command"]


def test_commands_fit_their_images(compose: dict[str, Any]) -> None:
    """vLLM's image is `vllm serve MODEL`, LightLLM's has no entry point, TGI counts GPUs wrongly unless told."""
    commands = {name: each["command"] for name, each in compose["services"].items() if name in INSIDE}
    assert commands["vllm"][0] == "/models/${MODEL_NAME:-llama-2-7b}"
    assert all(word.startswith("--") for word in commands["vllm"][1:])
    assert commands["lightllm"][:3] == ["python", "-m", "lightllm.server.api_server"]
    assert "--num-shard=${TENSOR_PARALLEL:-1}" in commands["tgi"]


def test_what_needs_no_rights_has_none(compose: dict[str, Any]) -> None:
    """Simulated servers cannot write or gain rights; of the rest only the exporter has a capability added."""
    services = compose["services"]
    for server in INSIDE:
        simulated = services[f"sim-{server}"]
        assert simulated["read_only"]
        assert simulated["tmpfs"] == ["/tmp"]
    for name in (*(f"sim-{server}" for server in INSIDE), "prometheus", "grafana"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
    assert {name: each["cap_add"] for name, each in services.items() if "cap_add" in each} == {
        "dcgm-exporter": ["SYS_ADMIN"]
    }
    assert not any(each.get("privileged") for each in services.values())


def test_prometheus_asks_every_service_that_says_something(compose: dict[str, Any]) -> None:
    """One job per server, real and simulated, at the port inside; LightLLM's has the fallback that it needs."""
    said = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    jobs = {each["job_name"]: each for each in said["scrape_configs"]}
    assert set(jobs) == {*INSIDE, "dcgm"}
    assert jobs["lightllm"]["fallback_scrape_protocol"] == "PrometheusText0.0.4"
    targets = {name: job["static_configs"][0]["targets"] for name, job in jobs.items()}
    assert targets.pop("dcgm") == ["dcgm-exporter:9400"]
    assert targets == {server: [f"{server}:{port}", f"sim-{server}:8000"] for server, port in INSIDE.items()}


def test_configs_parse_and_reach_where_they_are_read(compose: dict[str, Any]) -> None:
    """Grafana finds its data source and a folder of dashboards; every `$` that is not a variable of ours is doubled."""
    source = yaml.safe_load(compose["configs"]["grafana-source"]["content"])["datasources"][0]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    folder = yaml.safe_load(compose["configs"]["grafana-dashboards"]["content"])["providers"][0]["options"]["path"]
    targets = {each["source"]: each["target"] for each in compose["services"]["grafana"]["configs"]}
    assert targets["grafana-loadgen"] == f"{folder}/loadgen.json"
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == targets["grafana-loadgen"]
    assert list(_single_dollars(compose)) == []


def _single_dollars(compose: dict[str, Any]) -> Iterator[str]:
    for name, config in compose["configs"].items():
        if re.search(r"(?<!\$)\$(?!\$)", config["content"].replace("$$", "")):
            yield name


def test_grafana_has_no_password_to_know(compose: dict[str, Any]) -> None:
    """Its default password is public: so nobody may log in, and whoever reaches the port may only look."""
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_no_secret_is_written_down(text: str) -> None:
    """Tokens come from the caller's environment, never from the file."""
    assert not re.search(r"hf_[A-Za-z0-9]{8}|(?i:token|key|password)\w*[=:] *[\"']?\w{16}", text)
