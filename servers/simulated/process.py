"""Runs a simulated server in a child process.

The parent process does not import the HTTP server, because the import takes 0.2 s.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import tempfile
from collections.abc import Iterator

from loadgen.servers.lifeline import lifeline
from loadgen.servers.own_process import own_process
from loadgen.servers.simulated import StartError
from loadgen.servers.simulated.config import SimulatedConfig

READY = "ready "
"""Prefix of the first line that a child writes to standard output. The prefix is followed by the server's URL."""

_START_LIMIT_S = 30
_STOP_LIMIT_S = 5
_MAX_ERROR_BYTES = 1000


@contextlib.contextmanager
def spawn(config: SimulatedConfig) -> Iterator[str]:
    """Start a simulated server in a child process, and yield its URL. See `spawn_process`."""
    with spawn_process(config) as (url, _):
        yield url


@contextlib.contextmanager
def spawn_process(config: SimulatedConfig) -> Iterator[tuple[str, int]]:
    """Start a simulated server in a child process, and yield its URL and its process id.

    The server is stopped at the end of the context, or when this process is killed (loadgen.servers.lifeline). Ctrl-C
    does not reach the server, because the server runs in a separate session. Raises StartError if the server does not
    start.
    """
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+b") as errors,
        subprocess.Popen(  # noqa: S603 - our own interpreter and our own words
            own_process("loadgen.servers.simulated"),
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            start_new_session=True,
        ) as process,
        lifeline(process.stdin),
    ):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the child has ended already; its error output says why
                process.stdin.write(config.to_json())
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _START_LIMIT_S)
            line = process.stdout.readline().decode() if ready else ""
            if not line.startswith(READY):
                process.kill()
                process.wait()  # its error output is complete afterwards
                errors.seek(0)
                message = errors.read()[-_MAX_ERROR_BYTES:].decode(errors="replace").strip()
                raise StartError(f"the simulated server did not start: {message or 'no output'}")
            yield line.removeprefix(READY).strip(), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
