"""The simulated servers answer the recorded requests as the real servers did: status, headers and shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from servers import marks
from servers.simulated.config import SimulatedConfig
from tests.contract.recorded import TRANSCRIPTS
from tests.contract.recorded_requests import TGI, Recorded, exchange, recording, shape_of
from tests.simulated import running

CONFIG = SimulatedConfig(server="tgi", model="tiny", max_model_len=2048, ttft_s=0.002, itl_s=0.0001, speed=10)
"""As the recorded router was started."""


@pytest.fixture(scope="module")
def idle_tgi() -> Iterator[str]:
    """The URL of a simulated TGI."""
    with running(CONFIG) as server:
        yield server.url


@pytest.fixture(scope="module")
def busy_tgi() -> Iterator[str]:
    """The URL of a simulated TGI whose only place is taken."""
    with running(replace(CONFIG, max_concurrent_requests=1, itl_s=6000)) as server, taking_its_place(server.url):
        yield server.url


@pytest.fixture
def fresh_tgi() -> Iterator[str]:
    """The URL of a simulated TGI that had no request before."""
    with running(CONFIG) as server:
        yield server.url


@contextmanager
def taking_its_place(url: str) -> Iterator[None]:
    """One stream that goes on."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 100}}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=30) as stream:
        pieces = stream.iter_raw()  # kept: a forgotten iterator closes the connection
        next(pieces)
        yield


def test_every_recording_of_tgi_has_its_request() -> None:
    """A recording that no request is made for would prove nothing."""
    files = {f"tgi-3.3.7/{path.name}" for path in (TRANSCRIPTS / "tgi-3.3.7").glob("*.txt")}
    assert files == {request.file for request in TGI}
    assert len(TGI) == len(files) == 72


@pytest.mark.parametrize("request_", TGI, ids=lambda request: request.file.removesuffix(".txt"))
def test_the_simulated_tgi_answers_as_the_recorded_one(request: pytest.FixtureRequest, request_: Recorded) -> None:
    """Status line, headers in their order, and the shape of the body, with every word of a refusal."""
    ours = shape_of(exchange(request.getfixturevalue(f"{request_.server}_tgi"), request_), request_)
    theirs = shape_of(recording(request_), request_)
    assert ours.status == theirs.status
    assert ours.headers == theirs.headers
    if request_.path == "/metrics":
        assert metric_types(ours.body) <= metric_types(theirs.body)
    else:
        assert json.dumps(ours.body) == json.dumps(theirs.body)


def metric_types(page: str) -> set[str]:
    """Names and types of a page of metrics, without the mark of the simulated servers."""
    return {line for line in page.splitlines() if line.startswith("# TYPE") and marks.FIELD not in line}
