"""Files that a user names: regular files and pipes are read, anything else is refused, and everything has a limit."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen.workloads import input_files, lengths
from loadgen.workloads.input_files import InputFileError, LongLineError
from loadgen.workloads.spec_syntax import WorkloadError


@contextmanager
def pipe_with(content: bytes) -> Iterator[Path]:
    """The path of a pipe with this content, as a shell's `<(...)` gives it."""
    read_end, write_end = os.pipe()
    writer = threading.Thread(target=_write, args=(write_end, content))
    writer.start()
    try:
        yield Path(f"/dev/fd/{read_end}")
    finally:
        os.close(read_end)
        writer.join()


def _write(file: int, content: bytes) -> None:
    with open(file, "wb") as pipe:
        try:
            pipe.write(content)
            pipe.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)  # For what is left in the buffer


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/zero", "a device"), ("/dev/null", "a device"), ("/dev/random", "a device"), ("/", "a dir")],
)
def test_devices_and_directories_are_refused(path: str, kind: str) -> None:
    """The error says what the path is, and what is expected."""
    with pytest.raises(InputFileError, match=f"^it is {kind}.*; name a regular file or a pipe$"):
        input_files.open_input(Path(path))


def test_a_socket_is_refused(tmp_path: Path) -> None:
    """A socket in the file system cannot be opened, and the error says that it is one."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(InputFileError, match="it is a socket"):
            input_files.open_input(tmp_path / "s")


def test_a_pipe_is_read_once_and_kept() -> None:
    """Every read of a pipe gives the same bytes, although a pipe can be read only once. Its size is limited."""
    content = bytes(range(256)) * 1000
    with pipe_with(content) as path:
        assert [input_files.open_input(path).read() for _ in range(2)] == [content, content]
        with pytest.raises(InputFileError, match="more than 1,000 bytes"):
            input_files.read_input(path, 1000)
        with pytest.raises(InputFileError, match=r"it is a pipe; name a regular file$"):
            input_files.open_input(path, pipes=False)
        with input_files.input_path(path, 1 << 20) as copy:
            assert copy.read_bytes() == content
        assert not copy.exists()


def test_an_endless_pipe_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe with more data than its limit is an error that says what to do."""
    monkeypatch.setattr(input_files, "PIPE_BYTES", 1 << 17)
    with (
        pipe_with(b"128\n" * (1 << 16)) as path,
        pytest.raises(InputFileError, match="more than 131,072 bytes came through this pipe; write them to a file"),
    ):
        input_files.open_input(path)


def test_a_pipe_without_a_writer_is_mentioned_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening a pipe that no program writes to does not wait for ever: a note on stderr, then an error."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(input_files, "PIPE_NOTE_S", 0.01)
    monkeypatch.setattr(input_files, "PIPE_SILENCE_S", 0.02)
    with pytest.raises(InputFileError, match="no data came through this pipe"):
        input_files.open_input(tmp_path / "pipe")
    assert capsys.readouterr().err == f"loadgen: waiting for data from the pipe {tmp_path}/pipe\n"


def test_ctrl_c_ends_the_wait_for_a_pipe(tmp_path: Path) -> None:
    """The wait for a writer can be interrupted."""
    os.mkfifo(tmp_path / "pipe")
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        input_files.open_input(tmp_path / "pipe")


def test_a_named_pipe_is_read_when_its_writer_comes(tmp_path: Path) -> None:
    """A program may begin to write to a named pipe after loadgen has opened it."""
    os.mkfifo(tmp_path / "pipe")
    threading.Timer(0.1, (tmp_path / "pipe").write_bytes, (b"17\n",)).start()
    assert input_files.read_input(tmp_path / "pipe", 100) == b"17\n"


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A sparse file of a terabyte is refused after as many bytes as the limit allows."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputFileError, match="it has more than 1,000 bytes"):
        input_files.read_input(tmp_path / "large", 1000)
    with pytest.raises(WorkloadError, match="line 1 is longer than 4,194,304 characters"):
        next(lengths.Empirical(tmp_path / "large").tokens(0, "input"))
    with pytest.raises(WorkloadError, match="line 1 is longer than 4,194,304 characters"):
        next(lengths.Empirical(tmp_path / "large", "tokens").tokens(0, "input"))


def test_lines_have_a_limit() -> None:
    """A line of exactly the limit is read; a longer one is an error with its number."""
    assert [*input_files.limited_lines(io.StringIO("1234\n67\n"), 5)] == ["1234\n", "67\n"]
    with pytest.raises(LongLineError, match="line 2 is longer than 3 characters"):
        [*input_files.limited_lines(io.StringIO("12\n1234\n"), 3)]


def test_lengths_are_read_again_when_their_file_has_changed(tmp_path: Path) -> None:
    """Lengths stay in memory for later draws, but a file that was rewritten is read again."""
    file = tmp_path / "lengths"
    for number in (5, 7):
        file.write_text(f"{number}\n")
        os.utime(file, ns=(number, number))
        assert next(lengths.Empirical(file).tokens(0, "input")) == number
