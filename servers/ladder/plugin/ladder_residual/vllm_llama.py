"""vLLM's own Llama, its blocks one step ahead of their all-reduces (Ladder Residual, arXiv 2501.06589).

Weights, their names and all kernels are vLLM's. Block i reads the hidden state without the result of block i - 1, whose
all-reduce runs meanwhile. It is the one of torch.distributed: NCCL has a stream of its own, gloo a thread.
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
    """Holds two blocks that leave their partial results as they are."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.self_attn.o_proj.reduce_results = self.mlp.down_proj.reduce_results = False


@ignore_torch_compile  # Compiled pieces end at attention: an all-reduce would be under way where a CUDA graph ends
class LadderLlamaModel(LlamaModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=LadderLlamaLayer)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002  # of pipelines
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        underway: deque[Callable[[], Tensor]] = deque()
        for layer in self.layers:
            for norm, block in (
                (layer.input_layernorm, lambda normed, layer=layer: layer.self_attn(positions, normed)),
                (layer.post_attention_layernorm, layer.mlp),
            ):
                if len(underway) == 2:
                    normed, hidden = norm(underway.popleft()(), hidden)
                else:  # the first two blocks read the embedding
                    normed = norm(hidden)
                underway.append(started(block(normed)))
        normed, _ = self.norm(underway.pop()(), hidden + underway.pop()())
        return normed


class LadderLlamaForCausalLM(LlamaForCausalLM):
    supports_pp = supports_eagle3 = False  # Both take the hidden state between layers, where all-reduces are under way

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **_: Any) -> LadderLlamaModel:
        return LadderLlamaModel(vllm_config=vllm_config, prefix=prefix)


def started(partial: Tensor) -> Callable[[], Tensor]:
    """The all-reduce of `partial`, in place, under way; call it for the sum."""
    group = get_tp_group()
    if group.world_size == 1:
        return lambda: partial
    work = distributed.all_reduce(partial, group=group.device_group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return partial

    return arrived
