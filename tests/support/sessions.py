"""Runs sessions against a plain OpenAI server, and groups the requests that the server received by session."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from loadgen.analysis.run import runfile
from tests.support.command import burst
from tests.support.plain_openai import PlainServer


def run_sessions(folder: Path, server: PlainServer, *options: str, url: str = "") -> list[tuple[int, dict[str, str]]]:
    """Run sessions against the server, and return the client's port and the headers of each request.

    `url` is the URL of a proxy in front of the server. By default, requests go to the server itself."""
    code, out, err = burst(
        folder, "--server", "openai", "--url", url or server.url, "--endpoint", "completions", "--metrics-every", "0",
        "--output-tokens", "2", "--no-ignore-eos", *options, command="run",
    )  # fmt: skip
    assert code in (0, 5), out + err
    heads = [(port, request.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:]) for port, request in server.requests]
    return [(port, dict(line.split(": ", 1) for line in lines)) for port, lines in heads]


def by_session(folder: Path, requests: list[tuple[int, dict[str, str]]]) -> dict[int, list[tuple[int, dict[str, str]]]]:
    """Group requests by the session of their Record. The request id in the headers names the Record."""
    loaded = runfile.read(folder / "run")
    assert {record.state for record in loaded.records} == {"complete"}
    sessions = {f"{loaded.header.client['request_ids']}-{record.id}": record.session for record in loaded.records}
    result = defaultdict(list)
    for port, headers in requests:
        result[sessions[headers["X-Request-Id"]]].append((port, headers))
    return result  # type: ignore[return-value]
