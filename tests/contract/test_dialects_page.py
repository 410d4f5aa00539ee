"""The reference page of the dialects says what the dialects are."""

from __future__ import annotations

from pathlib import Path

from servers.kinds import KINDS
from tests.dialects import DIALECTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "dialects.md"


def test_the_page_lists_every_dialect_as_it_is() -> None:
    """Path, token ids and fixed length in the table are the dialect's own, and the bold endpoint is the native one."""
    yes = {True: "yes", False: "no"}
    rows = {
        f"| {server} | {f'**{endpoint}**' if KINDS[server].native == endpoint else endpoint} | `{dialect.path}` "
        f"| {yes[dialect.token_ids]} | {yes[dialect.fixed_output]} |"
        for (server, endpoint), dialect in DIALECTS.items()
    }
    written = {line for line in PAGE.read_text("utf-8").splitlines() if "| `/" in line}
    assert written == rows
