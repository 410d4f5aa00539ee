"""What every test starts from: no settings of the person who runs it, and properties without a stopwatch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("loadgen", deadline=None)
settings.load_profile("loadgen")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's URL or a proxy set for daily work must not change what a test talks to, nor another test's secret what
    is shown."""
    monkeypatch.setattr("servers.access._known", set())
    for name in list(os.environ):
        if name.startswith("LOADGEN_") or name.lower() in {"http_proxy", "https_proxy", "all_proxy"}:
            monkeypatch.delenv(name)
