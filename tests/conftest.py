"""What every test starts from: no settings of the person who runs it, and properties without a stopwatch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.checked_patches import CheckedMonkeyPatch

settings.register_profile("loadgen", deadline=None)
settings.load_profile("loadgen")
gc.disable()  # collecting the tests makes no garbage, and looking for it takes a tenth of the CPU time


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage need look at it again, 0.2 s each."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)  # tests leave little garbage in cycles, and looking for it takes a tenth of their CPU time


def pytest_unconfigure() -> None:
    """Libraries complain of what is left when the interpreter ends."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    """Start commands, simulated servers and measurements as forks of a small process (tests/support/fork_server.py)."""
    from loadgen import api
    from loadgen.servers.simulated import process
    from tests.support.command import SERVER, ForkedRun, ForkedServer, replace_popen

    before = process.subprocess, api.subprocess
    replace_popen(process, ForkedServer)
    replace_popen(api, ForkedRun)
    SERVER.usable = True
    yield
    SERVER.close()
    process.subprocess, api.subprocess = before


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """pytest's fixture, but a function can only be replaced by one that takes the same arguments."""
    patch = CheckedMonkeyPatch()
    yield patch
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs learn about servers is kept in a folder of the tests, not in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    """A server's URL or a proxy set for daily work must not change what a test talks to, nor a terminal without a
    cursor or another test's secret what is shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.servers.auth._known", set())
        for name in list(os.environ):
            if name.startswith("LOADGEN_") or name.lower() in {"http_proxy", "https_proxy", "all_proxy", "term"}:
                patch.delenv(name)
        yield
