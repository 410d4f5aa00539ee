"""What people get wrong is an exit code and a sentence; what they interrupt ends at once, whatever it is doing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.errors import EXIT_SERVER, EXIT_USAGE
from tests.support import raw_server
from tests.support.command import in_process

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


def test_several_urls_where_one_is_needed_are_a_mistake(tmp_path: Path) -> None:
    """The last URL does not win silently: the message names the commands that take several. A replica has one URL."""
    two = ("--url", "http://127.0.0.1:1", "--url=http://127.0.0.1:2")
    code, _, complaint = in_process(tmp_path, "ui", "--server", "tgi", *two)
    assert (code, "--url is given 2 times, but loadgen ui takes one server" in complaint) == (EXIT_USAGE, True)
    assert "loadgen burst, run and sweep" in complaint
    same = ("--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1")
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", *same)
    assert (code, "is given twice: name each replica once" in complaint) == (EXIT_USAGE, True), complaint
    code, _, complaint = in_process(tmp_path, "burst", "--server", "tgi", *same[:2], "--balance", "least-busy")
    assert (code, "repeat --url for each replica" in complaint) == (EXIT_USAGE, True), complaint


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
