"""Runs proxies with common restrictions: nginx with a rate limit, nginx with one public path, haproxy with a queue."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.tls import HOST
from tests.support.tls_servers import running_proxy

NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    limit_req_zone $server_port zone=all:1m rate=1r/m;
    server {{
        listen {host}:{port};
        location / {{ proxy_pass http://{backend}; proxy_buffering off; }}
        location /v1/completions {{
            limit_req zone=all burst=3 nodelay; {status}
            proxy_pass http://{backend}; proxy_buffering off;
        }}
    }}
}}
"""
NGINX_PUBLISHING = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen {host}:{port};
        location {prefix} {{
            proxy_pass http://{backend}; proxy_buffering off; proxy_http_version 1.1;
            proxy_hide_header X-Simulated-Speed;
        }}
    }}
}}
"""
NGINX_HASHING = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    map $http_x_session_id $key {{ default $http_x_session_id; "" $request_id; }}
    upstream replicas {{ hash $key consistent; {servers} }}
    server {{
        listen {host}:{port};
        location / {{ proxy_pass http://replicas; proxy_buffering off; proxy_http_version 1.1; }}
    }}
}}
"""
NGINX_IN_TURN = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream replicas {{ {servers} }}
    upstream metrics {{ {servers} }}
    server {{
        listen {host}:{port};
        location = /metrics {{ proxy_pass http://metrics; }}
        location / {{
            proxy_pass http://replicas; proxy_buffering off; proxy_http_version 1.1;
            add_header X-Served-By $upstream_addr always;
        }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 50s
    timeout server 50s
    timeout queue 100ms
frontend all
    bind fd@{descriptor}
    default_backend simulated
backend simulated
    server simulated {backend} maxconn 4
"""


@contextlib.contextmanager
def nginx_limited(folder: Path, backend_url: str, status: int | None) -> Iterator[str]:
    """Run nginx with a rate limit in front of a server, and yield the URL of nginx.

    nginx forwards four requests to /v1/completions, and rejects further ones for a minute. `status` is the HTTP status
    of rejected requests (None: nginx's default, 503).
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        configured = "" if status is None else f"limit_req_status {status};"
        facts = {"folder": folder, "host": HOST, "port": port, "backend": urlsplit(backend_url).netloc}
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(**facts, status=configured))
        environment = os.environ | {"NGINX": f"{listening.fileno()};"}
        with running_proxy(["nginx", "-p", str(folder), "-c", str(config)], listening, environment):
            yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def nginx_hashing(folder: Path, *backend_urls: str) -> Iterator[str]:
    """Run nginx in front of several servers, and yield the URL of nginx.

    nginx chooses the server by the header X-Session-ID. Requests without this header are spread at random.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        servers = " ".join(f"server {urlsplit(url).netloc};" for url in backend_urls)
        config = folder / "nginx.conf"
        config.write_text(NGINX_HASHING.format(folder=folder, host=HOST, port=port, servers=servers))
        environment = os.environ | {"NGINX": f"{listening.fileno()};"}
        with running_proxy(["nginx", "-p", str(folder), "-c", str(config)], listening, environment):
            yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def nginx_in_turn(folder: Path, *backend_urls: str) -> Iterator[str]:
    """Run nginx in front of several servers, and yield the URL of nginx.

    Requests go to the servers in turn, and so do the readings of /metrics. X-Served-By names the server.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        servers = " ".join(f"server {urlsplit(url).netloc};" for url in backend_urls)
        config = folder / "nginx.conf"
        config.write_text(NGINX_IN_TURN.format(folder=folder, host=HOST, port=port, servers=servers))
        environment = os.environ | {"NGINX": f"{listening.fileno()};"}
        with running_proxy(["nginx", "-p", str(folder), "-c", str(config)], listening, environment):
            yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def nginx_publishing(folder: Path, backend_url: str, prefix: str) -> Iterator[str]:
    """Run nginx in front of a server, and yield the URL of nginx.

    nginx forwards only paths that begin with `prefix`. It removes the response header X-Simulated-Speed.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port = listening.getsockname()[1]
        facts = {
            "folder": folder,
            "host": HOST,
            "port": port,
            "backend": urlsplit(backend_url).netloc,
            "prefix": prefix,
        }
        config = folder / "nginx.conf"
        config.write_text(NGINX_PUBLISHING.format(**facts))
        environment = os.environ | {"NGINX": f"{listening.fileno()};"}
        with running_proxy(["nginx", "-p", str(folder), "-c", str(config)], listening, environment):
            yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def haproxy_queued(folder: Path, backend_url: str) -> Iterator[str]:
    """Run haproxy in front of a server, and yield the URL of haproxy.

    haproxy forwards four requests at a time, and rejects requests that have waited for 100 ms.
    """
    with socket.create_server((HOST, 0), backlog=512) as listening:
        config = folder / "haproxy.cfg"
        config.write_text(HAPROXY.format(descriptor=listening.fileno(), backend=urlsplit(backend_url).netloc))
        with running_proxy(["haproxy", "-db", "-f", str(config)], listening, {**os.environ}):
            yield f"http://{HOST}:{listening.getsockname()[1]}"
