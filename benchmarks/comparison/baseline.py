"""The baseline of the comparison: a C client that connects, sends requests and reads, but decodes nothing.

The kernel timestamps the data that it reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import run
from benchmarks.comparison.model import NAME

VERSION = "2"
"""Version of the C source. Raise it with every change, so that the client is compiled again."""
SOURCE = Path(__file__).parents[1] / "baseline.c"


def _install(folder: Path) -> None:
    """Compile the client. Raises FileNotFoundError if there is no C compiler."""
    run("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(folder / "baseline"), str(SOURCE))


def _command(folder: Path, load: Load) -> list[str]:
    file = load.scratch / "request.http"
    file.write_bytes(_request(load))
    address = urlsplit(load.url)
    return [str(folder / "baseline"), str(address.hostname), str(address.port), str(load.n), str(file)]


def _request(load: Load) -> bytes:
    """Return the bytes of the HTTP request (head and body) that every connection sends."""
    prompt = [1 + index % 2000 + 20_000 for index in range(load.input_tokens)]
    asked = {"model": NAME, "prompt": prompt, "max_tokens": load.output_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(load.url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def _reported(scratch: Path) -> Reported:
    return Reported(**json.loads((scratch / "output.txt").read_text("utf-8")))


CLIENT = Client(name="C baseline", version=VERSION, install=_install, command=_command, reported=_reported)
