"""A function runs in a forked process."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import pytest

from loadgen.analysis.child_process import ChildProcess, _send_result


def fail() -> NoReturn:
    raise MemoryError


def test_the_result_comes_from_another_process() -> None:
    """The function runs in a child process, and its result arrives in this process."""
    with ChildProcess(os.getpid) as child:
        assert child.result() not in (None, os.getpid())


def test_a_failed_child_has_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    """A function that raises an exception has no result, and prints nothing to standard output."""
    with ChildProcess(fail) as child:
        assert child.result() is None
    assert capfd.readouterr().out == ""


@pytest.mark.timeout(30)
def test_an_error_in_the_block_ends_the_child() -> None:
    """After an exception in the block, the child process is killed, and it leaves no zombie."""
    child = ChildProcess(signal.pause)
    with pytest.raises(KeyboardInterrupt), child:
        raise KeyboardInterrupt
    with pytest.raises(ChildProcessError):
        os.waitpid(child._child, 0)


@pytest.mark.timeout(30)
def test_the_child_ends_if_nobody_reads_its_result() -> None:
    """After the death of the parent process, the write of the child process fails. It does not wait for a reader."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            _send_result(lambda: bytes(1 << 20), receiving, sending)
        finally:
            os._exit(3)
    os.close(receiving)
    os.close(sending)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
