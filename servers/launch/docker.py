"""Calls of the `docker` command: on the engine of this machine, of a context, or of a host reached by ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from servers.errors import LaunchError
from servers.launch.base import Say
from servers.launch.diagnose import DOCKER, find, tail
from servers.launch.hosts import Host
from servers.launch.ready import SAY_EVERY_S

CALL_TIMEOUT_S = 60.0
"""For every call but those that may pull an image or stop a server."""


def docker(
    host: Host,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    say: Say | None = None,
) -> str:
    """Run `docker` against the host's engine; its standard output.

    `env` is for this call alone. `say` gets the last line that Docker has printed, every ten seconds. Raises
    LaunchError with a message of its own for each known failure.
    """
    program = shutil.which("docker")
    if program is None:
        raise LaunchError(
            "docker is not installed on this machine",
            "install Docker's command line with the Compose plugin, or start without Docker: --launch process",
        )
    context = ["--context", host.docker] if host.docker and not host.docker.startswith("ssh://") else []
    code, out, err = _run([program, *context, *arguments], _environment(host, env or {}), timeout_s, say)
    if code:
        raise failure(f"docker {' '.join(arguments)} on {host.name} ended with {code}", err or out)
    return out


def failure(what: str, text: str, *, log: str = "") -> LaunchError:
    """The error for what Docker has printed: a known one by its own name."""
    known = find(text, DOCKER)
    if known is None:
        return LaunchError(what, "Docker's own words are above", log_tail=tail(log or text))
    return LaunchError(*known, log_tail=tail(log or text, 6))


def _environment(host: Host, env: Mapping[str, str]) -> dict[str, str]:
    """This process's, except where the engine is: a host that names one must not be led elsewhere by DOCKER_HOST."""
    kept = dict(os.environ)
    if host.docker:
        kept.pop("DOCKER_HOST", None)
        kept.pop("DOCKER_CONTEXT", None)
    if host.docker.startswith("ssh://"):
        kept["DOCKER_HOST"] = host.docker
    return kept | dict(env)


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float, say: Say | None) -> tuple[int, str, str]:
    """Through files, so that a child which outlives the call (ssh's connection sharing) holds up no pipe."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        child = subprocess.Popen(  # noqa: S603 - docker, with arguments of ours
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        began_s = time.monotonic()
        try:
            while True:
                try:
                    child.wait(min(SAY_EVERY_S, timeout_s))
                    break
                except subprocess.TimeoutExpired:
                    passed_s = time.monotonic() - began_s
                    if passed_s > timeout_s:
                        raise LaunchError(
                            f"{' '.join(command[1:4])} ... did not end within {timeout_s:.0f} s",
                            "is the host reachable, and its Docker engine well?",
                            log_tail=tail(_text(err)),
                        ) from None
                    if say:
                        say(f"{passed_s:.0f} s: {tail(_text(err), 1).strip()}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        return child.returncode, _text(out), _text(err)


def _text(file: IO[bytes]) -> str:
    # Without moving the position in it, which the child shares and may be writing at.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
