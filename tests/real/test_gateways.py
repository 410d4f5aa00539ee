"""Real gateways in front of the simulated vLLM: which hold tokens back, which name themselves, and what helps."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.real import gateways
from tests.real.conftest import BURST_TIMEOUT_S, ROOT
from tests.support.simulated import running

REQUESTS, TOKENS = 12, 32
LARGE_BUFFERS = "proxy_buffers 8 64k; proxy_buffer_size 64k; proxy_busy_buffers_size 64k;"
MODEL = "unknown"
"""The only model that sglang-router knows if it cannot ask its server for the name."""


@dataclass(frozen=True)
class Case:
    """A gateway, and what a report must say about it."""

    run: Callable[[Path, str], AbstractContextManager[str]]
    """Starts the gateway from (folder, URL of the server), and yields its URL."""
    holds_back: bool
    named: str
    """Beginning of the name in the record. Empty: the gateway does not name itself."""
    remedy: str = ""
    """The remedy in the warning, which must come first."""


@contextlib.contextmanager
def two_nginx(folder: Path, url: str, options: str) -> Iterator[str]:
    """Run nginx in front of nginx, as an ingress in front of a gateway. `options` configure the outer one."""
    with gateways.nginx(folder, url) as inner, gateways.nginx(folder, inner, options) as outer:
        yield outer


CASES = {
    "nginx": Case(gateways.nginx, holds_back=False, named="nginx/"),
    "two nginx": Case(
        lambda folder, url: two_nginx(folder, url, LARGE_BUFFERS),
        holds_back=True,
        named="nginx/",
        remedy="`proxy_buffering off` in nginx",
    ),
    "two nginx, remedied": Case(
        lambda folder, url: two_nginx(folder, url, "proxy_buffering off;"), holds_back=False, named="nginx/"
    ),
    "haproxy": Case(gateways.haproxy, holds_back=True, named="", remedy="`option http-no-delay` in haproxy"),
    "haproxy, remedied": Case(
        lambda folder, url: gateways.haproxy(folder, url, "option http-no-delay"), holds_back=False, named=""
    ),
    "Envoy": Case(gateways.envoy, holds_back=False, named="Envoy"),
    "sglang-router": Case(gateways.sglang_router, holds_back=False, named=""),
    "LiteLLM": Case(lambda folder, url: gateways.litellm(folder, url, MODEL), holds_back=False, named="LiteLLM"),
}


def measured(url: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run a small load through a gateway. Return the summary and the printed report in one line."""
    command = [
        sys.executable,
        "-m",
        "loadgen",
        "run",
        "--url",
        url,
        "--model",
        MODEL,
        "--no-report",
        "--out",
        str(folder),
    ]
    load = ["--concurrency", "1", "--n", str(REQUESTS), "--input-tokens", "64", "--output-tokens", str(TOKENS)]
    done = subprocess.run(
        [*command, *load],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BURST_TIMEOUT_S,
        check=False,
        env=os.environ | {"LOADGEN_API_KEY": gateways.MASTER_KEY},
    )
    assert done.returncode in (0, 5), done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["requests"]["complete"] == REQUESTS
    return summary, " ".join(done.stdout.split())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gateways_are_told_apart(case: Case, tmp_path: Path) -> None:
    """A gateway that holds tokens back gives a warning with its remedy. Any other gateway gives no warning."""
    config = SimulatedConfig(server="vllm", model=MODEL, ttft_s=0.1, itl_s=0.01)
    with running(config) as server, case.run(tmp_path, server.url) as url:
        summary, report = measured(url, tmp_path / "run")
    held = summary.get("held_back")
    is_common = held is not None and held["responses"] >= 0.5 * held["examined"]
    assert is_common == case.holds_back
    assert ("A proxy or the server buffers the stream" in report) == case.holds_back
    if case.holds_back:
        assert f"Remedies: {case.remedy}" in report or f", {case.remedy}, or a --url" in report
    names = summary["network"]["gateways"]
    assert [name for name in names if case.named and name.startswith(case.named)] == names
    assert bool(names) == bool(case.named)
    assert summary["tokens"]["counted_by"] == {"server": REQUESTS}
