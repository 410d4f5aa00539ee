"""Starts real gateways in front of a server: nginx, haproxy, Envoy, sglang-router and LiteLLM."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.servers.launch.process import end_process, free_port
from tests.real.conftest import ENGINE, tail

HOST = "127.0.0.1"
READY_S = 120
"""LiteLLM takes about 20 s on two idle cores."""
MASTER_KEY = "sk-example"
NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen {host}:{port};
        location / {{ proxy_pass http://{backend}; {options} }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    {options}
    timeout connect 5s
    timeout client 50s
    timeout server 50s
frontend front
    bind {host}:{port}
    default_backend server
backend server
    server server {backend}
"""
ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: {host}, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: "/"}}, route: {{cluster: server}}}}]}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: server
    connect_timeout: 5s
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {backend_host}, port_value: {backend_port}}}}}}}
"""
LITELLM = """
model_list:
- model_name: {model}
  litellm_params: {{model: "openai/{model}", api_base: "http://{backend}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
"""


@contextlib.contextmanager
def nginx(folder: Path, backend_url: str, options: str = "") -> Iterator[str]:
    """Run nginx in front of a server, and yield its URL. `options` are further directives of the location."""
    config, url = _configured(folder, "nginx.conf", NGINX, backend_url, options)
    with _running([_program("nginx"), "-p", str(config.parent), "-c", str(config)], url, config.parent):
        yield url


@contextlib.contextmanager
def haproxy(folder: Path, backend_url: str, options: str = "") -> Iterator[str]:
    """Run haproxy in front of a server, and yield its URL. `options` are further lines of its defaults."""
    config, url = _configured(folder, "haproxy.cfg", HAPROXY, backend_url, options)
    with _running([_program("haproxy"), "-db", "-f", str(config)], url, config.parent):
        yield url


@contextlib.contextmanager
def envoy(folder: Path, backend_url: str) -> Iterator[str]:
    """Run Envoy in front of a server, and yield its URL."""
    config, url = _configured(folder, "envoy.yaml", ENVOY, backend_url)
    program = str(ENGINE / "envoy" / "bin" / "envoy")
    with _running([program, "-c", str(config), "--concurrency", "1"], url, config.parent):
        yield url


@contextlib.contextmanager
def sglang_router(folder: Path, backend_url: str) -> Iterator[str]:
    """Run sglang-router in front of a server, and yield its URL."""
    port, metrics_port = free_port(), free_port()
    program = [str(ENGINE / "sglang-router" / "bin" / "python"), "-m", "sglang_router.launch_router"]
    options = [
        "--host",
        HOST,
        "--port",
        str(port),
        "--worker-urls",
        backend_url,
        "--prometheus-port",
        str(metrics_port),
    ]
    url = f"http://{HOST}:{port}"
    folder = folder / f"sglang-router-{port}"
    folder.mkdir()
    with _running([*program, *options], url, folder):
        yield url


@contextlib.contextmanager
def litellm(folder: Path, backend_url: str, model: str) -> Iterator[str]:
    """Run LiteLLM's proxy in front of a server with this model, and yield its URL. It requires the key MASTER_KEY."""
    template = LITELLM.replace("{model}", model).replace("{key}", MASTER_KEY)
    config, url = _configured(folder, "litellm.yaml", template, backend_url)
    program = str(ENGINE / "litellm" / "bin" / "litellm")
    environment = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    options = ["--host", HOST, "--port", str(urlsplit(url).port), "--telemetry", "False"]
    with _running([program, "--config", str(config), *options], url, config.parent, environment):
        yield url


def _configured(folder: Path, name: str, template: str, backend_url: str, options: str = "") -> tuple[Path, str]:
    """Write the configuration of a gateway to a new folder. Return its path and the URL of the gateway."""
    port = free_port()
    folder = folder / f"{name}-{port}"
    folder.mkdir()
    backend = urlsplit(backend_url)
    config = folder / name
    config.write_text(
        template.format(
            folder=folder,
            host=HOST,
            port=port,
            backend=backend.netloc,
            backend_host=backend.hostname,
            backend_port=backend.port,
            options=options,
        )
    )
    return config, f"http://{HOST}:{port}"


@contextlib.contextmanager
def _running(
    command: Sequence[str], url: str, folder: Path, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """Run a gateway until the `with` block ends. It is ready when it answers a request."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(url):
            assert process.poll() is None, f"{command[0]} has ended:\n{tail(log)}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer:\n{tail(log)}"
            time.sleep(0.1)
        yield
    finally:
        end_process(process.pid)
        process.wait()


def _answers(url: str) -> bool:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {MASTER_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except (OSError, urllib.error.HTTPError):
        return False


def _program(name: str) -> str:
    program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, f"{name} is missing: apt-get install {name}"
    return program
