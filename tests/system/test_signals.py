"""Signals to new interpreters: a command ends at once at any instant, and leaves no child process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadgen.errors import EXIT_INTERRUPTED
from tests.support.command import ROOT, Forked

TOKEN = {"LOADGEN_TOKEN": "0123456789abcdef" * 2}


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)} | TOKEN
    pipe = subprocess.PIPE
    return Forked(words, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
@pytest.mark.parametrize("way", [[sys.executable, "-m", "loadgen"], [str(Path(sys.executable).with_name("loadgen"))]])
def test_a_signal_ends_the_command_at_any_instant(tmp_path: Path, way: list[str], number: signal.Signals) -> None:
    """Also amid its imports: no traceback of ours. Before our first line Python ends as by the signal, or in its own
    words."""
    draw = random.Random(f"{number.name} {len(way)}")
    words = [*way, "burst", "--server", "tgi", "--n", "50", "--output-tokens", "2000", "--no-report"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    for after_s in (draw.uniform(0, upto_s) for upto_s in (0.1, 0.3, 1, 1, 1, 2)):
        with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=-3, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(after_s)
            process.send_signal(number)
            _, complaint = process.communicate(timeout=100)
        by_python = process.returncode != EXIT_INTERRUPTED and str(ROOT / "loadgen") not in complaint
        assert by_python or "Traceback" not in complaint, (after_s, complaint)
        assert process.returncode in {EXIT_INTERRUPTED, -number} or by_python, (after_s, process.returncode, complaint)


def children(of: int) -> list[int]:
    return [*map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split())]


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_worker_that_waits_says_so_and_leaves_no_child(tmp_path: Path, by: signal.Signals) -> None:
    """Without a master it says for how long it waits; ended, it takes its Locust process with it."""
    with started(tmp_path, "worker", "--master", "127.0.0.1:1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting for the master at 127.0.0.1:1, for 300 s at most\n"
        (child,) = children(process.pid)
        while b"locust_process" not in Path(f"/proc/{child}/cmdline").read_bytes():
            time.sleep(0.01)
        process.send_signal(by)
        process.communicate(timeout=100)
    until_s = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(("ignored", "stays"), [("", False), ("trap '' HUP; ", True)])
def test_a_worker_ends_with_who_started_it(tmp_path: Path, ignored: str, stays: bool) -> None:
    """Nobody would end it otherwise; one that was detached, as nohup does, was meant to stay."""
    script = f'{ignored}"$0" -m loadgen worker --master 127.0.0.1:1 & echo $!; wait'
    env = os.environ | {"PYTHONPATH": str(ROOT)} | TOKEN
    command = ["sh", "-c", script, sys.executable]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline().startswith("waiting for the master")
        parent.kill()
        until_s = time.monotonic() + (3 if stays else 60)
        while Path(f"/proc/{worker}").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert Path(f"/proc/{worker}").exists() == stays
        if stays:
            os.kill(worker, signal.SIGTERM)
