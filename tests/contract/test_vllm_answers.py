"""The simulated vLLM answers 117 requests as the real one did, or its page says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import running
from tests.support.vllm_answers import ask, requests

REQUESTS = requests()
PAGE = Path(__file__).parents[2] / "docs/simulated.md"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A simulated vLLM, started as the recorded one was."""
    config = SimulatedConfig(server="vllm", model="tiny", max_model_len=2048, ttft_s=0.002, itl_s=0.0005, speed=10)
    with running(config) as server, httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def test_there_are_117() -> None:
    """As many different requests as the list promises."""
    assert len({request["name"] for request in REQUESTS}) == len(REQUESTS) == 117


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["name"] for request in REQUESTS])
def test_it_answers_as_the_real_one(client: httpx.Client, request_: dict[str, Any]) -> None:
    """Status, keys and their order, words of the protocol, counts, order of events, and refusals to the letter."""
    ours, theirs = json.dumps(ask(client, request_)), json.dumps(request_["said"])
    assert (ours != theirs) == ("differs" in request_), f"\n{ours}\n{theirs}"


def test_every_difference_is_on_the_page() -> None:
    """With its reason, and the page lists no other."""
    _, _, section = PAGE.read_text("utf-8").partition("## Where it differs from the real vLLM\n")
    listed = [line.removeprefix("- ") for line in section.partition("\n## ")[0].splitlines() if line.startswith("- ")]
    assert sorted(listed) == sorted({request["differs"] for request in REQUESTS if "differs" in request})
