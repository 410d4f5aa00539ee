"""A server that is gone for a part of a run, behind a real proxy: the outage is in every figure that it concerns."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.runfile import read
from tests.support.command import ROOT, start, summary_of

HOST = "127.0.0.1"
NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    log_format status "$request_method $status"; access_log {folder}/access.log status;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen {host}:{port}; location / {{ proxy_pass http://unix:{folder}/backend; proxy_buffering off; }} }}
}}
"""
BACKEND = """
import uvicorn
from tests.support.tls_servers import Completions
uvicorn.run(Completions(0.05, 0.005), uds={path!r})
"""


class Backend:
    """uvicorn on a socket in the file system, to be killed and started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        self._path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", BACKEND.format(path=str(self._path))],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while True:
            assert self._process.poll() is None
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self._path))
                return
            time.sleep(0.02)

    def kill(self) -> None:
        """End the server at once, and whatever it was answering."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    """A server with nginx before it, at the URL in the file `url`."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "nginx is missing: `make test-system` installs it"
    server = Backend(tmp_path / "backend")
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        (tmp_path / "nginx.conf").write_text(NGINX.format(folder=tmp_path, host=HOST, port=port))
        (tmp_path / "url").write_text(f"http://{HOST}:{port}")
        proxy = subprocess.Popen(
            [program, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")],
            pass_fds=[listening.fileno()],
            env=os.environ | {"NGINX": f"{listening.fileno()};"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield server
        finally:
            proxy.terminate()
            proxy.wait()
            server.kill()


def answered(folder: Path) -> Counter[str]:
    """How many requests nginx has answered, by method and status."""
    file = folder / "access.log"
    return Counter(file.read_text().splitlines() if file.exists() else ())


@pytest.mark.parametrize(
    "load", [("closed:4", "--n", "160"), ("poisson:40", "--duration", "5s")], ids=["closed loop", "Poisson"]
)
def test_an_outage_is_in_goodput_and_throughput(load: tuple[str, ...], backend: Backend, tmp_path: Path) -> None:
    """Fast errors of the proxy look like a run that ends. Every request of the outage counts as a miss all the same."""
    url = (tmp_path / "url").read_text()
    where = ("--url", url, "--endpoint", "completions", "--lengths", "approximate", "--metrics-every", "0")
    size = ("--input-tokens", "8", "--output-tokens", "8")
    process = start(tmp_path, *where, *size, "--arrivals", *load, "--goodput", "ttft < 100s", command="run")
    until(lambda: answered(tmp_path)["POST 200"] > 40, process)
    backend.kill()
    until(lambda: answered(tmp_path)["POST 502"] > 10, process)
    backend.start()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    summary: dict[str, Any] = summary_of(tmp_path)
    requests, goodput = summary["requests"], summary["goodput"]
    lost = requests["failed"] + requests["truncated"]
    assert lost >= 11
    assert goodput["requests"] - goodput["good"] == lost
    window, throughput = summary["window"], summary["throughput"]
    assert window["chosen"] == "whole" or not load[0].startswith("closed")
    assert not window.get("outside", {}).get("incomplete")
    records = [each for each in read(tmp_path / "run").records if each.sent_ns is not None]
    span_s = window["to_s"] - window["from_s"]
    if window["chosen"] == "whole":
        span_s = (max(each.end_ns or 0 for each in records) - min(each.sent_ns or 0 for each in records)) / 1e9
        assert throughput["completed"] == requests["complete"]
    assert throughput["requests_per_s"] == pytest.approx(throughput["completed"] / span_s, rel=1e-6)


def until(condition: Any, process: subprocess.Popen[str]) -> None:
    """Wait until something has happened during the run."""
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
