"""A simulated server as a child process, without importing what it serves with (0.2 s), and where gevent may run."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loadgen.servers.lifeline import lifeline
from loadgen.servers.simulated import StartError
from loadgen.servers.simulated.config import SimulatedConfig

READY = "ready "  # first line of a child's standard output, followed by its URL
CHILD = (  # Ours come first, whatever the working directory holds. Its standard input begins with the config.
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    "from loadgen.servers.simulated.server import child; child()"
)

_START_LIMIT_S, _STOP_LIMIT_S = 30, 5


@contextlib.contextmanager
def spawn(config: SimulatedConfig) -> Iterator[str]:
    """As `spawn_process`; yields the URL alone."""
    with spawn_process(config) as (url, _):
        yield url


@contextlib.contextmanager
def spawn_process(config: SimulatedConfig) -> Iterator[tuple[str, int]]:
    """Start a simulated server in a separate process; yield its URL and its process id. The process is in a separate
    session, so Ctrl-C does not reach it. It ends when this process ends, also by SIGKILL (loadgen.servers.lifeline).
    Raises StartError when it does not start."""
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+b") as complaints,
        subprocess.Popen(  # noqa: S603 - our own interpreter and our own words
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=complaints, start_new_session=True
        ) as process,
        lifeline(process.stdin),
    ):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
                process.stdin.write(config.to_json())
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _START_LIMIT_S)
            line = process.stdout.readline().decode() if ready else ""
            if not line.startswith(READY):
                process.kill()
                process.wait()  # its last words are written by then
                complaints.seek(0)
                said = complaints.read()[-1000:].decode(errors="replace").strip()
                raise StartError(f"the simulated server did not start: {said or 'no answer'}")
            yield line.removeprefix(READY).strip(), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
