"""SECURITY.md's table of ports: each row is checked here, and each check has its row."""

from __future__ import annotations

import json
import re
import select
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import psutil
import pytest

from loadgen.analysis.report.page import page_server
from loadgen.analysis.run import runfile
from loadgen.cli.run import run_load
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, in_process, start, wait_for
from tests.support.echo import echoing
from tests.support.simulated import running
from tests.support.ui import Ui, page

GOOD = {"user_count": 1, "spawn_rate": 1}
FILES = {"workload": "jsonl:{}", "input_tokens": "empirical:{}", "output_tokens": "max:empirical:{}"}
OPTIONS = (
    "tokenizer",
    "ca_file",
    "proxy",
    "cert",
    "extra_body",
    "header",
    "api_key_env",
    "url",
    "dcgm_url",
    "insecure",
    "out",
    "label",
)
BAD = (
    {"user_count": "x"},
    {"user_count": -1},
    {"user_count": 1_000_001},
    {"user_count": 999_999_999},
    {"spawn_rate": "nan"},
    {"spawn_rate": 0},
    {"run_time": "soon"},
    {"input_tokens": "0"},
)


def swarm(ui: Ui, **form: Any) -> dict[str, Any]:
    with urlopen(f"{ui.url}/swarm", data=urlencode(GOOD | form).encode(), timeout=20) as answer:
        said: dict[str, Any] = json.load(answer)
        return said


def the_page_by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the form may not is refused, and does not stick: the run that follows is the one of the command line."""
    monkeypatch.setenv("LOADGEN_API_KEY", "a key of the tests")
    (named, other) = (folder / "named.csv"), (folder / "other.csv")
    for file in (named, other):
        file.write_text("16\n16\n")
    config = SimulatedConfig(server="vllm", api_key="a key of the tests", **FAST)
    start = ("--output-tokens", "4", "--input-tokens", f"empirical:{named}")
    with running(config) as server, echoing() as evil, page(folder, "--url", server.url, *start) as ui:
        for header in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            with pytest.raises(HTTPError, match="403"):
                urlopen(Request(f"{ui.url}/loadgen/live", headers=header), timeout=20)
        for path in ("/", "/stats/requests", "/loadgen/live", "/loadgen/live.js"):
            with urlopen(f"{ui.url}{path}", timeout=20) as answer:
                assert answer.headers["X-Frame-Options"] == "DENY"
                assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        for name in OPTIONS:
            assert "Only the command line of loadgen ui can set" in swarm(ui, **{name: str(other)})["message"]
        for name, words in FILES.items():
            for path in (other, "/etc/passwd", "/nowhere"):
                message = swarm(ui, **{name: words.format(path)})["message"]
                assert message.startswith("Only the command line of loadgen ui can name files")
        assert "Restart loadgen ui" in swarm(ui, host=evil.url, output_tokens="5")["message"]
        assert not any(swarm(ui, **({"seed": "7", "output_tokens": "9"} | form))["success"] for form in BAD)
        assert ui.live()["run"] is None
        assert swarm(ui, host=server.url, input_tokens=f"empirical:{named}")["success"]
        wait_for(lambda: (ui.live()["run"] or {"tokens": 0})["tokens"] > 0, ui.process)
        assert not swarm(ui, host=evil.url)["success"]
        assert (ui.live()["server"]["url"], evil.heard) == (server.url, 0)
    plan = runfile.read(folder / "run").header.plan
    assert (plan["seed"], plan["output_tokens"], plan["tokenizer"], plan["url"]) == (0, 4, None, server.url)
    assert plan["label"] == "ui"


def the_report(_folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound to loopback; tests/integration/test_report_serve.py asks it for other things."""
    with page_server(b"") as server:
        assert server.server_address[0] == "127.0.0.1"


def the_simulated_server(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback by default; tokens only with the key; nothing but its own pages, whatever is asked."""
    with running(SimulatedConfig(server="vllm", api_key="sesame", **FAST)) as server:
        assert server.url.startswith("http://127.0.0.1:")
        body = b'{"model":"m","prompt":"a"}'
        for key in ("", "Bearer sesam", "Bearer sesame2"):
            asked = Request(f"{server.url}/v1/completions", body, {"Authorization": key})
            with pytest.raises(HTTPError, match="401"):
                urlopen(asked, timeout=20)
        for path in ("/../../etc/passwd", "//etc/passwd", f"/{folder}", "/%2e%2e/%2e%2e/etc/passwd"):
            with pytest.raises(HTTPError, match=r"40[14]"):
                urlopen(server.url + path, timeout=20)


def the_master(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback by default, and elsewhere only with a token; tests/system/test_distributed.py knocks."""
    monkeypatch.delenv("LOADGEN_TOKEN", raising=False)
    assert run_load.__kwdefaults__["bind"] == "127.0.0.1:5557"
    asked = ("burst", "--server", "tgi", "--n", "2", "--distributed", "--expect-workers", "1", "--bind", "0.0.0.0:0")
    code, _, err = in_process(folder, *asked)
    assert (code, "without a token the master listens only on this machine" in err) == (2, True)


def listening(process: subprocess.Popen[str]) -> list[Any]:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return [each for one in family for each in one.net_connections() if each.status == psutil.CONN_LISTEN]


def a_worker(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has connected to its master, which does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        process = start(folder, "--master", f"127.0.0.1:{master.getsockname()[1]}", command="worker")
        try:
            wait_for(lambda: bool(select.select([master], [], [], 0)[0]), process)
            master.close()
            assert not listening(process)
        finally:
            process.terminate()
            process.communicate(timeout=30)


def our_metrics(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run goes on."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.05)) as server:
        process = start(folder, "--server", "vllm", "--url", server.url, "--n", "4", "--output-tokens", "60", "--quiet")
        wait_for((folder / "run/run.jsonl").exists, process)
        assert not listening(process)
        process.communicate(timeout=60)


def compose(_folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Every port, and Grafana's doors."""
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    ports = re.findall(r"^ +ports: (.*)$", text, re.M)
    assert len(ports) > 5
    assert all(each.startswith('["${BIND:-127.0.0.1}:') and "," not in each for each in ports)
    assert "GF_AUTH_DISABLE_LOGIN_FORM" in text


CHECKS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "`loadgen ui`, page and its figures": the_page_by_hand,
    "`loadgen report --serve`": the_report,
    "`loadgen mock-server` and the built-in simulated server": the_simulated_server,
    "master of `--distributed`": the_master,
    "`loadgen worker`": a_worker,
    "metrics of `loadgen`": our_metrics,
    "`docker-compose.yml`: servers, DCGM exporter, Prometheus, Grafana": compose,
}


def test_every_port_of_the_table_is_checked() -> None:
    """And nothing is checked that the table does not say."""
    table = (ROOT / "SECURITY.md").read_text("utf-8").partition("| port |")[2]
    assert re.findall(r"^\| ([^|-][^|]*?) \|", table, re.M) == list(CHECKS)


@pytest.mark.parametrize("port", CHECKS)
def test_a_port_does_what_the_table_says(port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may speak to it, what they may do, and what they may not."""
    CHECKS[port](tmp_path, monkeypatch)
