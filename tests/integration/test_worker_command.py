"""`loadgen worker` without a master."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from loadgen.errors import EXIT_INTERRUPTED
from tests.support.command import Forked


def test_a_worker_waits_for_its_master_until_a_signal(tmp_path: Path) -> None:
    """The worker prints which master it waits for, and for how long. SIGTERM ends it."""
    pipe = subprocess.PIPE
    environment = os.environ | {"LOADGEN_TOKEN": "0123456789abcdef" * 2, "XDG_CACHE_HOME": str(tmp_path)}
    words = ["worker", "--master", "127.0.0.1:1"]
    with Forked(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting for the master at 127.0.0.1:1, for 300 s at most\n"
        process.terminate()
        process.communicate(timeout=100)
    assert process.returncode == EXIT_INTERRUPTED
