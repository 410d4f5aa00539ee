"""What is shown while a run is on."""

import re
import sys
from io import StringIO

import pytest

from loadgen.cli.output import Output, shown_progress
from loadgen.engine.health import Counts


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


COUNTS = Counts(due=9, sent=8, streaming=3, complete=4, truncated=1, failed=2, dropped=1, tokens=77)


def test_without_a_terminal_lines_are_plain() -> None:
    """One line with every count, and no control characters."""
    stream = StringIO()
    with shown_progress(10, stream) as show:
        show("ended", COUNTS)
    line = stream.getvalue()
    assert "ended: 8/10 sent, 3 streaming, 4 complete, 1 truncated, 2 failed, 1 dropped" in line
    assert line.isprintable() or line.count("\n") == 1


def test_a_terminal_gets_one_live_line() -> None:
    """The line is redrawn in place and gone at the end."""
    stream = Terminal()
    with shown_progress(None, stream) as show:
        show("running", COUNTS)
        show("running", COUNTS)
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue())
    assert "running: 8 sent, 3 streaming" in plain
    assert plain != stream.getvalue()


@pytest.mark.parametrize("kind", [StringIO, Terminal])
@pytest.mark.parametrize(("quiet", "plain"), [(True, True), (False, False)])
def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, kind: type[StringIO], quiet: bool, plain: bool) -> None:
    """With --quiet whatever the stream is; a matrix shows nothing where that is no terminal."""
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with Output(as_json=False, quiet=quiet).progress(10, plain=plain) as show:
        show("ended", COUNTS)
    assert (stream.getvalue() == "") == (quiet or not stream.isatty())
