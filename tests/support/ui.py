"""Runs `loadgen ui` in a separate process, because gevent must not be imported into the test process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.command import ROOT


@dataclass(frozen=True)
class Ui:
    """A running `loadgen ui`, with the URL of its web page."""

    url: str
    process: subprocess.Popen[str]

    def live(self) -> dict[str, Any]:
        """Return the JSON of `/loadgen/live`, from which loadgen's part of the page is drawn."""
        with urlopen(f"{self.url}/loadgen/live", timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}


@contextlib.contextmanager
def page(folder: Path, *arguments: str) -> Iterator[Ui]:
    """Run `loadgen ui --out FOLDER/run ARGUMENTS`, and yield it when it answers. End it with SIGINT.

    Raises AssertionError if the command prints a traceback.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", "ui", "--port", str(port), "--out", str(folder / "run"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=environment(folder),
    )
    ui = Ui(f"http://127.0.0.1:{port}", process)
    try:
        _answers(ui)
        yield ui
    finally:
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert "Traceback" not in out, out


def headless(folder: Path, *arguments: str, command: str = "ui") -> tuple[int, str, str]:
    """Run `loadgen COMMAND --headless --out FOLDER/run ARGUMENTS` until it ends.

    Return the exit code, stdout and stderr. Raises AssertionError if the command prints a traceback.
    """
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", command, "--headless", "--out", str(folder / "run"), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        cwd=folder,
        env=environment(folder),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def behind_tls(url: str, context: ssl.SSLContext) -> Iterator[str]:
    """Run a TLS proxy in front of the HTTP server at `url`, and yield the proxy's https URL."""
    host, port = url.removeprefix("http://").split(":")
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    open_sockets: list[socket.socket] = []

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            inner = context.wrap_socket(client, server_side=True)
            outer = socket.create_connection((host, int(port)))
            open_sockets.extend((inner, outer))
            threading.Thread(target=_copy, args=(outer, inner), daemon=True).start()
            _copy(inner, outer)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                open_sockets.append(client)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for each in (listening, *open_sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _answers(ui: Ui) -> None:
    deadline = time.monotonic() + 40
    while True:
        try:
            ui.live()
        except (URLError, ConnectionError):
            assert ui.process.poll() is None, ui.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return
