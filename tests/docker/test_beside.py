"""What stands beside the servers, on a real engine: simulated ones, Prometheus, and runs over several containers."""

from __future__ import annotations

import json
import time
from urllib.parse import quote
from urllib.request import urlopen

from tests.docker.conftest import PORTS, PROJECT, Desk

UP = ("--profile", "sim", "up", "--detach", "--wait")
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")


def test_the_simulated_servers(desk: Desk) -> None:
    """All three are healthy and take a burst as user 10001; a second `up` leaves them as they are; `down` is quick."""
    desk.compose(*UP)
    before = desk.containers()
    assert set(before) == {f"sim-{server}" for server in PORTS}
    for server, port in PORTS.items():
        summary, _ = desk.burst(server, f"http://127.0.0.1:{port}", server)
        assert summary["server"]["simulated"]
    assert desk.compose("exec", "-T", "sim-tgi", "bash", "-c", "echo $UID").out.strip() == "10001"
    desk.compose(*UP)
    assert desk.containers() == before
    began_s = time.monotonic()
    desk.compose("--profile", "sim", "down")
    assert time.monotonic() - began_s < 60


def test_prometheus_reads_them_all(desk: Desk) -> None:
    """The real one takes the configuration and finds every server up that is up, with the figures of the dashboard."""
    port = 19090
    desk.env["PROMETHEUS_PORT"] = str(port)
    desk.compose("up", "--detach", "--wait", *(f"sim-{server}" for server in PORTS), "prometheus")
    desk.burst("vllm", f"http://127.0.0.1:{PORTS['vllm']}", "run")

    def ask(query: str) -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return {each["metric"]["instance"]: float(each["value"][1]) for each in found}

    wanted = {f"sim-{server}:8000" for server in PORTS}
    deadline_s = time.monotonic() + 60
    while not wanted <= {name for name, up in ask("up").items() if up} or not ask("vllm:generation_tokens_total"):
        assert time.monotonic() < deadline_s, ask("up")
        time.sleep(0.5)
    figures = (
        *("vllm:num_requests_running", "tgi_queue_size", "lightllm_batch_current_size"),
        *("sglang:num_running_reqs", "te_queue_size"),
    )
    assert [len(ask(figure)) for figure in figures] == [1, 1, 1, 1, 1]
    desk.compose("--profile", "sim", "--profile", "monitoring", "down")


def test_master_and_workers_in_containers(desk: Desk) -> None:
    """As in k8s/: without root, on read-only file systems, joined by a name; the run holds all that both sent."""
    desk.compose(*UP)
    run = ("docker", "run", f"--network={PROJECT}_bench", "--env=LOADGEN_TOKEN=0123456789abcdef0123456789abcdef")
    image, label = "llm-loadgen:0.1.0", f"--label={PROJECT}"
    try:
        for _ in range(2):
            worker = ("worker", "--master", "loadgen-master", "--stay", "--out", "/tmp/parts")
            desk.run(*run, "--detach", label, *HARDENED, image, *worker)
        load = ("--server=vllm", "--url=http://sim-vllm:8000", "--real", "--n=40", "--input-tokens=32")
        many = ("--distributed", "--expect-workers=2", "--workers=1", "--bind=0.0.0.0:5557", "--out=/tmp/run")
        master = ("--name=loadgen-master", "--network-alias=loadgen-master", label, *HARDENED, image, "burst")
        said = desk.run(*run, *master, *many, *load, "--output-tokens=8", "--json", code=(0, 5))
    finally:
        left = desk.run("docker", "ps", "--all", "--quiet", f"--filter=label={PROJECT}").out.split()
        desk.run("docker", "rm", "--force", *left)
    summary = json.loads(said.out)
    assert summary["requests"]["complete"] == 40
    assert len(summary["machines"]) == 2
    desk.compose("--profile", "sim", "down")
