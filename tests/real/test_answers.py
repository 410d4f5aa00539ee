"""What the list of 117 requests says of the real vLLM is still so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.real.conftest import Engine
from tests.support.vllm_answers import ask, requests

REQUESTS = requests()


@pytest.fixture(scope="module")
def client(vllm: Engine) -> Iterator[httpx.Client]:
    """The real one."""
    with httpx.Client(base_url=vllm.url, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["name"] for request in REQUESTS])
def test_the_real_one_answers_as_recorded(client: httpx.Client, request_: dict[str, Any]) -> None:
    """Statuses, shapes and refusals; tests/contract compares the simulated one with the same."""
    assert json.dumps(ask(client, request_)) == json.dumps(request_["said"])
