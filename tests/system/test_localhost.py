"""A server on `localhost`, in a network namespace with both address families."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from loadgen.analysis.run.runfile import read
from tests.support.namespaces import loadgen_inside, with_hosts

LOAD = ("--server", "openai", "--endpoint", "completions", "--lengths", "approximate", "--input-tokens", "4")
LOAD = (*LOAD, "--output-tokens", "max:2", "--metrics-every", "0", "--timeout", "20s")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("command", ["burst", "ui"])
def test_localhost_is_whichever_family_the_server_listens_on(command: str, host: str, tmp_path: Path) -> None:
    """`localhost` is ::1 and 127.0.0.1, and the server listens on one: bursts and interactive users find it."""
    words = ("--n", "5") if command == "burst" else ("--headless", "--users", "3", "--run-time", "2s")
    setup = with_hosts(tmp_path, "::1 localhost", "127.0.0.1 localhost")
    load = (*LOAD, "--no-report", "--out", "run", "--url", "http://localhost:PORT")
    code, out, err = loadgen_inside(tmp_path, setup, command, *load, *words, host=host)
    assert code in (0, 5), out + err  # 5: this machine was too busy
    run = read(tmp_path / "run")
    states = Counter(record.state for record in run.records)
    assert set(states) == {"complete"}
    assert states["complete"] >= 3
    assert run.header.server["addresses"] == [host]
