"""LightLLM 0.0.1's own HTTP front end, scheduler and detokenizer, with random tokens where the GPU model would be.

    .engine/lightllm/bin/python tests/real/engine/lightllm_front.py --model_dir .engine/model --port P --nccl_port Q ...

Takes LightLLM's own options. Replaced are the model's client (lightllm/server/router/model_infer/model_rpc.py), and,
by empty modules, torch and what only models need. A step takes STEP_S, so its timing is ours: good for the wire
format, batching, queueing and errors, not for speed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

STEP_S = 0.005
EMPTY_MODULES = (
    "torch",
    "torch.distributed",
    "lightllm.common.mem_manager",
    "lightllm.models.llava.model",
    "lightllm.models.qwen_vl.model",
    "lightllm.server.visualserver.manager",
)


class RandomModel:
    """What the router calls a model client. Keeps each request's tokens, as the real one keeps its KV cache.

    Every answer maps a request id to (status, KV length, output length, new tokens, finish status, nothing).
    """

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.requests: dict[int, dict[str, Any]] = {}
        self.batches: dict[str, list[int]] = {}

    async def init_model(self, options: dict[str, Any]) -> None:
        from lightllm.server.router.dynamic_prompt.shared_arr import SharedInt

        config = json.loads((Path(options["weight_dir"]) / "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]
        self.eos_ids: list[int] = options["eos_id"]
        self.tokens_max: int = options["max_total_token_num"]
        # The scheduler reads from shared memory how many tokens still fit into the cache.
        self.tokens_free = SharedInt(f"{options['nccl_port']}_mem_manger_can_use_token_num")
        self.tell_tokens_free()

    def tell_tokens_free(self) -> None:
        self.tokens_free.set_value(self.tokens_max - sum(request["kv"] for request in self.requests.values()))

    async def init_batch(self, batch_id: str, requests: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
        for request in requests:
            self.requests.setdefault(request["request_id"], {**request, "kv": 0, "output": 0})
        self.batches[batch_id] = [request["request_id"] for request in requests]
        return {identity: self.answer(identity, []) for identity in self.batches[batch_id]}

    async def prefill_batch(self, batch_id: str) -> dict[int, tuple[Any, ...]]:
        return await self.step(batch_id)

    async def decode_batch(self, batch_id: str) -> dict[int, tuple[Any, ...]]:
        return await self.step(batch_id)

    async def step(self, batch_id: str) -> dict[int, tuple[Any, ...]]:
        await asyncio.sleep(STEP_S)
        answers = {identity: self.one_token(identity) for identity in self.batches[batch_id]}
        self.tell_tokens_free()
        return answers

    def one_token(self, identity: int) -> tuple[Any, ...]:
        request = self.requests[identity]
        request["kv"] = len(request["input_id"]) + request["output"]
        request["output"] += 1
        token = self.random.randrange(self.vocabulary)
        return self.answer(identity, [(token, {"id": token, "logprob": -1.5})])

    def answer(self, identity: int, tokens: list[tuple[int, dict[str, Any]]]) -> tuple[Any, ...]:
        from lightllm.server.io_struct import FinishStatus, ReqRunStatus

        request, finish = self.requests[identity], FinishStatus.NO_FINISH
        sampling = request["sampling_param"]
        if request["output"] >= sampling["max_new_tokens"]:
            finish = FinishStatus.FINISHED_LENGTH
        elif not sampling["ignore_eos"] and any(token in self.eos_ids for token, _ in tokens):
            finish = FinishStatus.FINISHED_STOP
        return ReqRunStatus.RUNNING, request["kv"], request["output"], tokens, finish.value, None

    async def filter_batch(self, batch_id: str, kept: list[int], finished: list[int]) -> None:
        self.discard_before(finished)
        self.batches[batch_id] = kept

    async def merge_batch(self, batch_id: str, other_id: str) -> None:
        self.batches[batch_id] += self.batches.pop(other_id)

    async def remove_batch(self, batch_id: str) -> None:
        self.discard_before(self.batches.pop(batch_id))

    def discard_before(self, identities: list[int]) -> None:
        for identity in identities:
            del self.requests[identity]
        self.tell_tokens_free()

    async def pause_reqs(self, batch_id: str, paused: list[tuple[int, Any]]) -> None:
        for identity, _ in paused:
            self.requests[identity]["kv"] = 0
            self.batches[batch_id].remove(identity)
        self.tell_tokens_free()


async def start_model_process(port: int, world_size: int) -> RandomModel:
    return RandomModel()


def main() -> None:
    import transformers  # noqa: F401 - before the empty torch below, which it would take for the real one

    for name in EMPTY_MODULES:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    sys.modules["lightllm.server.router.model_infer.model_rpc"] = MagicMock(start_model_process=start_model_process)
    from lightllm.server import api_server

    api_server.main()


if __name__ == "__main__":
    main()
