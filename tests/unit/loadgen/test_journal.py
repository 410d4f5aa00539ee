"""Journals of commands with many runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.errors import OutputError
from loadgen.journal import JournalKind, open_journal

KIND = JournalKind("matrix", {})


def test_a_journal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link in a folder from another person cannot make `--resume` append to the file to which it leads."""
    (tmp_path / "folder").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("precious")
    (tmp_path / "folder" / KIND.file).symlink_to(outside)
    with pytest.raises(OutputError, match="cannot write"), open_journal(KIND, tmp_path / "folder", {}, resume=True):
        pass
    assert outside.read_text() == "precious"
