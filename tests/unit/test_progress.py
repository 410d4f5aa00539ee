"""What is shown while a run is on."""

import re
from io import StringIO

import pytest

from loadgen.engine.health import Counts
from loadgen.progress import Display


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


COUNTS = Counts(due=9, sent=8, streaming=3, complete=4, truncated=1, failed=2, dropped=1, tokens=77)


def test_without_a_terminal_lines_are_plain() -> None:
    """One line with every count, and no control characters."""
    stream = StringIO()
    with Display(10, stream) as display:
        display.show("ended", COUNTS)
    line = stream.getvalue()
    assert "ended: 8/10 sent, 3 streaming, 4 complete, 1 truncated, 2 failed, 1 dropped" in line
    assert line.isprintable() or line.count("\n") == 1


def test_a_terminal_gets_one_live_line() -> None:
    """The line is redrawn in place and gone at the end."""
    stream = Terminal()
    with Display(None, stream) as display:
        display.show("running", COUNTS)
        display.show("running", COUNTS)
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue())
    assert "running: 8 sent, 3 streaming" in plain
    assert plain != stream.getvalue()


@pytest.mark.parametrize("stream", [StringIO(), Terminal()])
def test_quiet_shows_nothing(stream: StringIO) -> None:
    """Whatever the stream is."""
    with Display(10, stream, quiet=True) as display:
        display.show("ended", COUNTS)
    assert stream.getvalue() == ""
