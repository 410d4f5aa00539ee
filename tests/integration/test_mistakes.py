"""What people get wrong is an exit code and a sentence; what they interrupt ends at once, whatever it is doing."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.errors import EXIT_INTERRUPTED, EXIT_SERVER, EXIT_USAGE
from tests.support import raw_server
from tests.support.command import ROOT, Forked, in_process

TOKEN = {"LOADGEN_TOKEN": "0123456789abcdef" * 2}
URLS = {
    "http://h:99999": "is not a valid URL",
    "http://h:abc": "is not a valid URL",
    "http://[::1": "is not a valid URL",
    "http://..": "is not a valid URL",
    f"http://{'a' * 300}": "is not a valid URL",
    f"http://{'a.' * 200}x": "no valid host name",
    "http://": "no valid host name",
    "http://:80": "no valid host name",
    "http://a b": "must not contain spaces",
    "http://a\nb": "must not contain spaces",
    "http://h/ü": "in ASCII",
    "http://h?key=1": "a password or ?key",
    "ftp://h": "must start with http",
}


@pytest.mark.parametrize(("url", "said"), URLS.items(), ids=range(len(URLS)))
def test_a_url_that_cannot_be_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    """As an option and in the environment: 2, what is wrong with it, and nothing is asked."""
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", "--url", url)
    assert (code, said in complaint) == (EXIT_USAGE, True), complaint
    monkeypatch.setenv("LOADGEN_TGI_URL", url)
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi")
    assert (code, said in complaint, "LOADGEN_TGI_URL" in complaint) == (EXIT_USAGE, True, True), complaint


def test_a_url_given_twice_is_a_mistake(tmp_path: Path) -> None:
    """The last URL does not win silently: the message says how to measure several servers. A repetition is harmless."""
    two = ("--url", "http://127.0.0.1:1", "--url=http://127.0.0.1:2")
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", *two)
    assert (code, "--url is given 2 times, but a run measures one server" in complaint) == (EXIT_USAGE, True), complaint
    assert "loadgen compare" in complaint
    same = ("--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1")
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", *same)
    assert (code, "nothing listens at" in complaint) == (EXIT_SERVER, True), complaint


def test_a_host_name_of_other_letters_is_looked_up(tmp_path: Path) -> None:
    """By its name in ASCII."""
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", "--url", "http://bücher.invalid:80")
    assert (code, "xn--bcher-kva.invalid" in complaint) == (EXIT_SERVER, True), complaint


def unwritable(folder: Path) -> str:
    (folder / "file").write_text("")
    return str(folder / "file" / "run")


def taken(folder: Path) -> str:
    (folder / "run").mkdir()
    (folder / "run" / "mine").write_text("")
    return str(folder / "run")


FILES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "no PEM": ("--ca-file", lambda _: str(Path(__file__))),
    "a folder": ("--ca-file", str),
    "no file": ("--ca-file", lambda folder: str(folder / "none")),
    "no UTF-8": ("--out", lambda folder: f"{folder}/\udcff"),
    "unwritable": ("--out", unwritable),
    "taken": ("--out", taken),
}


@pytest.mark.parametrize(("option", "made"), FILES.values(), ids=FILES)
def test_a_file_that_will_not_do_is_a_mistake(tmp_path: Path, option: str, made: Callable[[Path], str]) -> None:
    """Before anything is sent."""
    words = ("burst", "--server", "tgi", "--n", "1", "--speed", "100", option, made(tmp_path))
    code, _, complaint = in_process(tmp_path, *words)
    assert (code, complaint.count("\n") >= 2) == (EXIT_USAGE, True), complaint


LONG_NAME = "a" * 300
PATHS = (
    *(("burst", "--workload", LONG_NAME), ("burst", "--tokenizer", LONG_NAME), ("report", LONG_NAME)),
    *(("compare", LONG_NAME, LONG_NAME), ("export", LONG_NAME, "--csv", "x"), ("twin", "fit", LONG_NAME)),
    *(("matrix", LONG_NAME), ("sweep", "--simulated", "--out", LONG_NAME, "--objective", "ttft.p99 < 1s")),
)


@pytest.mark.parametrize("words", PATHS, ids=lambda words: " ".join(words[:2])[:12])
def test_a_name_that_is_too_long_is_a_mistake(tmp_path: Path, words: tuple[str, ...]) -> None:
    """No file can have such a name, so that even a look for the file fails."""
    code, _, complaint = in_process(tmp_path, *words)
    assert (code, "File name too long" in complaint) == (EXIT_USAGE, True), complaint
    assert "Check the path" in complaint


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.EROFS])
def test_a_path_that_may_not_be_used_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The same for a folder that may not be read, wherever the error occurs."""

    def refuse(_path: Path) -> bool:
        raise OSError(number, os.strerror(number), "locked/chats.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        code, _, complaint = in_process(tmp_path, "burst", "--workload", "locked/chats.jsonl")
    assert code == EXIT_USAGE
    assert f"cannot use locked/chats.jsonl: {os.strerror(number)}" in complaint


def test_a_key_in_a_wrong_option_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that quotes a wrong value does not quote the API key."""
    monkeypatch.setenv("LOADGEN_API_KEY", "sk-3Zr8hdP1qYw0Lm")
    code, _, complaint = in_process(tmp_path, "burst", "--timeout", "sk-3Zr8hdP1qYw0Lm")
    assert (code, "***" in complaint, "sk-3Zr8" in complaint) == (EXIT_USAGE, True, False), complaint


@pytest.mark.parametrize("body", [b"[" * 300_000, b'{"a":' * 100_000, b"\xff", b"1" * 10_000], ids=range(4))
def test_answers_that_no_server_gives_are_another_server(tmp_path: Path, body: bytes) -> None:
    """From every route that is asked: 3."""
    with raw_server.serving(lambda _path: raw_server.page(body)) as odd:
        code, _, complaint = in_process(tmp_path, "burst", "--server", "vllm", "--url", odd.url)
        assert (code, "not as vLLM" in complaint) == (EXIT_SERVER, True), complaint


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
