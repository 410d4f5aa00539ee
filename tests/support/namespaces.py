"""Runs `loadgen` and a plain OpenAI server in new network and mount namespaces.

A test can thus limit local ports, remove routes or change /etc/hosts. The namespaces end with the command. Creating
them requires root, or a kernel that permits user namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.command import ROOT

BESIDE_A_SERVER = """
import subprocess, sys, time
from tests.support.plain_openai import plain_openai

def answer(talk):
    {answer}

with plain_openai(answer, host={host!r}) as server:
    command = [word.replace("PORT", str(server.port)) for word in sys.argv[1:]]
    code = subprocess.call([sys.executable, "-m", "loadgen", *command])
sys.exit(code)
"""


def loadgen_inside(
    folder: Path, setup: str, *words: str, answer: str = "talk.stream()", host: str = "127.0.0.1"
) -> tuple[int, str, str]:
    """Run `loadgen WORDS` and a plain server in new namespaces. Return exit code, stdout and stderr of loadgen.

    `setup` contains shell commands to run first. PORT in a word is replaced by the server's port. `answer` is Python
    code that answers a request. It can use the variables `talk` (see tests.support.plain_openai.Talk) and `server`.
    """
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    shell = f'set -e; ip link set lo up; {setup}; exec "$@"'
    code = BESIDE_A_SERVER.format(answer=answer, host=host)
    done = subprocess.run(
        ["unshare", *user, "--net", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def with_hosts(folder: Path, *lines: str) -> str:
    """Return a shell command for `loadgen_inside` that replaces /etc/hosts by a file with these lines."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{line}\n" for line in lines))
    return f"mount --bind {hosts} /etc/hosts"
