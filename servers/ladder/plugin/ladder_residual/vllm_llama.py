"""vLLM's Llama with Ladder Residual (arXiv 2501.06589): all-reduces run while the next block computes.

Weights, their names and all kernels are those of vLLM. Block i reads the hidden state without the result of block i -
1, because the all-reduce of that result is still running. The all-reduce comes from torch.distributed and runs in a
separate CUDA stream (NCCL) or in a thread (gloo).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed
from vllm.compilation.decorators import ignore_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class LadderLlamaLayer(LlamaDecoderLayer):
    """A Llama layer whose attention and MLP return partial sums, without an all-reduce."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.self_attn.o_proj.reduce_results = False
        self.mlp.down_proj.reduce_results = False


@ignore_torch_compile  # Compiled pieces end at attention, so a CUDA graph would end during an all-reduce
class LadderLlamaModel(LlamaModel):
    """A Llama model that keeps up to two all-reduces in flight."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=LadderLlamaLayer)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002 - for pipeline parallelism
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        pending: deque[Callable[[], Tensor]] = deque()
        for layer in self.layers:
            for norm, block in (
                (layer.input_layernorm, lambda normed, layer=layer: layer.self_attn(positions, normed)),
                (layer.post_attention_layernorm, layer.mlp),
            ):
                if len(pending) == 2:
                    normed, hidden = norm(pending.popleft()(), hidden)
                else:  # the first two blocks read the embedding
                    normed = norm(hidden)
                pending.append(start_all_reduce(block(normed)))
        normed, _ = self.norm(pending.pop()(), hidden + pending.pop()())
        return normed


class LadderLlamaForCausalLM(LlamaForCausalLM):
    """The model that vLLM loads for the architecture `LadderLlamaForCausalLM`."""

    # Both features take the hidden state between layers, where all-reduces are in flight.
    supports_pp = False
    supports_eagle3 = False

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **_: Any) -> LadderLlamaModel:
        return LadderLlamaModel(vllm_config=vllm_config, prefix=prefix)


def start_all_reduce(partial: Tensor) -> Callable[[], Tensor]:
    """Start an in-place all-reduce of `partial`, and return a function that waits for the sum and returns it."""
    group = get_tp_group()
    if group.world_size == 1:
        return lambda: partial
    work = distributed.all_reduce(partial, group=group.device_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return partial

    return wait
