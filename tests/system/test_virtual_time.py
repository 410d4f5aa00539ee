"""Virtual time compared with simulated servers that answer in real time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.discrete_event import FOREVER_NS, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Scheduler
from loadgen.servers.simulated.scheduler_presets import find_engine
from tests.support.simulated import running


@pytest.mark.alone
@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm", "sglang"])
def test_virtual_time_agrees_with_the_server_that_answers(server: str) -> None:
    """The same requests at the instants at which the simulated server's log has them: both take as long, but
    for the way to the server, on which one may miss a step."""
    config = SimulatedConfig(server=server, clock="batching", gpu="A800", model_shape="llama-2-7b", speed=2)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "vllm": ("/v1/completions", {"max_tokens": 40, "ignore_eos": True}),
        "tgi": ("/generate", {"inputs": "word " * 199, "parameters": {"max_new_tokens": 40}}),
        "sglang": ("/v1/completions", {"max_tokens": 40, "ignore_eos": True}),
        "lightllm": ("/generate", {"inputs": "word " * 199, "parameters": {"max_new_tokens": 40, "ignore_eos": True}}),
    }
    took_s, virtual_s = _both_s(config, *asked[server])
    assert virtual_s == pytest.approx(took_s, rel=0.15)


def _both_s(config: SimulatedConfig, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """How long 16 requests took over HTTP, and in virtual time, in seconds of the engine's clock."""
    with (
        running(config) as http,
        ThreadPoolExecutor(16) as pool,
        httpx.Client(base_url=http.url, timeout=60) as client,
    ):
        bodies = [body | ({"prompt": [5 + place] * 200} if path == "/v1/completions" else {}) for place in range(16)]
        answers = list(pool.map(lambda body: client.post(path, json=body), bodies))
    assert {answer.status_code for answer in answers} == {200}
    lines = sorted(http.log, key=lambda line: line.received_ns)
    begun_ns, speed = lines[0].received_ns, config.speed
    took_s = speed * (max(line.due_ns[-1] for line in lines) - begun_ns) / 1e9
    engine = find_engine(config.server)
    deployment = engine.deployment("A800", "llama-2-7b")
    kv_tokens = engine.kv_tokens(deployment)
    served = VirtualEngine(Scheduler(engine.policy_for(kv_tokens), kv_tokens), engine.step_time(deployment))
    for line in lines:
        served.submit(Job(line.prompt_tokens, 40, round(speed * (line.received_ns - begun_ns))))
    while served.busy:
        served.run(FOREVER_NS)
    return took_s, served.now_ns / 1e9
