"""Tests whether the simulated server is fast enough: many streams in one burst, read by a minimal client.

    python benchmarks/simulated.py                       # 1000 streams of 200 tokens, 20 ms apart: 50,000 events/s
    python benchmarks/simulated.py --n 100 --tokens 100

The server runs in a separate process. It measures how late it sent its tokens, relative to their due times. The client
only reads bytes and decodes nothing, so that it does not slow down the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

BODIES = {
    "vllm": ("/v1/completions", {"prompt": [5] * 512, "stream": True, "max_tokens": 0, "ignore_eos": True}),
    "tgi": ("/generate_stream", {"inputs": "word " * 300, "parameters": {"max_new_tokens": 0, "details": True}}),
    "lightllm": ("/generate_stream", {"inputs": [5] * 512, "parameters": {"max_new_tokens": 0, "ignore_eos": True}}),
}
END = b"0\r\n\r\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Send one burst and print the server's lateness."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="tgi", choices=tuple(BODIES))
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ttft-ms", type=float, default=500)
    parser.add_argument("--itl-ms", type=float, default=20)
    options = parser.parse_args(arguments)
    config = SimulatedConfig(
        server=options.server,
        ttft_s=options.ttft_ms / 1e3,
        itl_s=options.itl_ms / 1e3,
        max_concurrent_requests=options.n,
    )
    with spawn(config) as url:
        wall_s = burst(url, options.n, request(options.server, options.tokens))
        status = status_of(url)
        cpu_s = server_cpu_s()
    late = ", ".join(f"{name} {late_ns / 1e6:.3f}" for name, late_ns in status["late_ns"].items())
    print(f"{options.n} streams x {options.tokens} tokens in {wall_s:.2f} s, server CPU {cpu_s:.2f} s since its start")
    print(f"{status['events']} sends, late by {late} ms; falling behind: {status['falling_behind']}")


def request(server: str, tokens: int) -> bytes:
    """Return the bytes of one HTTP request, head and body."""
    path, template = BODIES[server]
    body = json.dumps(template)
    name = "max_tokens" if server == "vllm" else "max_new_tokens"
    body = body.replace(f'"{name}": 0', f'"{name}": {tokens}')
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


def burst(url: str, n: int, data: bytes) -> float:
    """Send `n` copies of a request at once, and read all responses. Return the duration in seconds."""
    address = urlsplit(url)
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection((address.hostname, address.port)) for _ in range(n)]
    for connection in connections:
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    start_s = time.perf_counter()
    for connection in connections:
        connection.sendall(data)
    left = n
    while left:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            got = connection.recv(1 << 16)
            if not got or got.endswith(END):
                selector.unregister(connection)
                connection.close()
                left -= 1
    return time.perf_counter() - start_s


def status_of(url: str) -> dict[str, Any]:
    """Return the server's status, with its number of events and their lateness."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/simulated/status")
    status: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return status


def server_cpu_s() -> float:
    """Return the CPU time of the server in seconds. The server is the only child of this process."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            user, system = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
            return (int(user) + int(system)) / 100
    return float("nan")


if __name__ == "__main__":
    main()
