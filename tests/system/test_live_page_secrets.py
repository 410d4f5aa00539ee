"""The live page of `loadgen ui` on a server that echoes every secret."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.support.echo import ANSWERS, SECRET, echoing, leaks
from tests.support.ui import page


def test_the_live_page_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our part of it, nor Locust's own tables, logs and CSV files."""
    monkeypatch.setenv("LOADGEN_API_KEY", SECRET)
    with echoing() as echo, page(tmp_path, "--server", "vllm", "--url", echo.url, "--output-tokens", "1") as ui:
        with urlopen(
            f"{ui.url}/swarm", data=urlencode({"user_count": 2, "spawn_rate": 2}).encode(), timeout=20
        ) as said:
            assert json.load(said)["success"]
        while len(echo.generated) <= len(ANSWERS) or len(ui.live()["run"]["failures"]) < 4:
            time.sleep(0.05)
        told = [json.dumps(ui.live(), ensure_ascii=False)]
        for route in (
            "",
            "stats/requests",
            "stats/failures/csv",
            "exceptions",
            "logs",
            "stats/report",
            "loadgen/report",
        ):
            with urlopen(f"{ui.url}/{route}", timeout=60) as said:
                told.append(said.read().decode())
    assert "***" in told[0]
    assert not leaks(tmp_path, *told)
