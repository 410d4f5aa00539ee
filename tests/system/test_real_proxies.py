"""Runs behind nginx and haproxy: requests that a proxy rejects, and servers of which a proxy publishes a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.busy_proxies import haproxy_queued, nginx_limited, nginx_publishing
from tests.support.command import FAST, accounted, burst, summary_of
from tests.support.simulated import running
from tests.support.stub_server import VLLM, Answer, answering

CHAT = "POST /v1/chat/completions"
LOAD = ("--n", "4", "--input-tokens", "8", "--output-tokens", "4", "--lengths", "approximate")


@pytest.mark.parametrize(("status", "said"), [(None, "HTTP 503"), (429, "HTTP 429")], ids=["default", "429"])
def test_what_nginx_limits_is_rejected(status: int | None, said: str, tmp_path: Path) -> None:
    """Four of twelve pass its rate limit. The server knows nothing of the others, and a warning says who may have
    rejected them."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server, nginx_limited(tmp_path, server.url, status) as url:
        where = ("--server", "vllm", "--url", url, "--n", "12", "--input-tokens", "16", "--output-tokens", "4")
        code, out, err = burst(tmp_path, *where)
    assert code == 1, err
    assert accounted(tmp_path, 12) == {"complete": 4, "rejected": 8}
    text = " ".join(out.split())
    assert f"8 rejected ({said})" in text
    assert "The server counted 0 rejections, the client 8: a proxy in front of vLLM rejected the other requests" in text


def test_what_haproxy_does_not_queue_is_rejected(tmp_path: Path) -> None:
    """Four of twelve are sent on at once; the others wait in its queue for longer than it allows."""
    slow = SimulatedConfig(server="vllm", ttft_s=2.0, itl_s=0.01)
    with running(slow) as server, haproxy_queued(tmp_path, server.url) as url:
        where = ("--server", "vllm", "--url", url, "--n", "12", "--input-tokens", "16", "--output-tokens", "4")
        code, out, err = burst(tmp_path, *where, "--metrics-every", "0")
    assert code == 1, err
    assert accounted(tmp_path, 12) == {"complete": 4, "rejected": 8}
    assert "8 rejected (HTTP 503)" in " ".join(out.split())


def test_vllm_behind_a_gateway_that_publishes_two_routes(tmp_path: Path) -> None:
    """Only chat and the models are published: a missing version is said once, and the run is measured."""

    def chat(body: dict[str, Any]) -> Any:
        usage = {"prompt_tokens": 8, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            return {"choices": [{}], "usage": usage}
        tokens = [{"choices": [{"delta": {"content": "a "}}]} for _ in range(body["max_tokens"])]
        last = [{"choices": [{"delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        return 200, b"".join(
            b"data: %b\n\n" % json.dumps(event).encode() for event in tokens + last
        ) + b"data: [DONE]\n\n"

    published: dict[str, Answer] = {"GET /v1/models": VLLM["GET /v1/models"], CHAT: chat}
    with answering(published) as stub, nginx_publishing(tmp_path, stub.url, "/v1/") as url:
        code, out, err = burst(tmp_path, "--url", url, "--n", "4", "--input-tokens", "8", "--output-tokens", "3")
    assert code in (0, 5), out + err
    assert accounted(tmp_path, 4) == {"complete": 4}
    assert out.count("its version is unknown") == 1
    assert "4 prompts of about 8 tokens (estimated)" in out


def test_nginx_that_publishes_only_v1_hides_nothing(tmp_path: Path) -> None:
    """A gateway that nobody here wrote: the mark is in the first line, the table and the page, with the speed."""
    with (
        running(SimulatedConfig(server="vllm", model="m", speed=2.5, **FAST)) as server,
        nginx_publishing(tmp_path, server.url, "/v1/") as url,
    ):
        code, out, err = burst(tmp_path, "--server", "vllm", "--url", url, *LOAD, report=True)
    assert code in (0, 5), out + err
    assert out.splitlines()[0].startswith("SIMULATED vllm at 2.5 times speed")
    assert summary_of(tmp_path)["server"]["simulated"] is True
    assert "SIMULATED at 2.5 times speed" in (tmp_path / "run" / "report.html").read_text("utf-8")
