"""The Llama itself: names, weights and arithmetic as in Hugging Face's `LlamaForCausalLM`, every part a module.

Under tensor parallelism the first matrices of attention and MLP are split by columns, the last by rows, and their
partial results are added up by the `TensorGroup` (Megatron-LM, arXiv 1909.08053); so is the output head, by columns. A
decoder layer says when: `LAYERS` has one class for each way in which all-reduces meet the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from loadgen.servers.hardware import HardwareError, ModelShape

EPSILON, THETA = 1e-5, 10_000.0


class TensorGroup(Protocol):
    """The devices that share each layer."""

    @property
    def size(self) -> int: ...

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        """The same, before matrices that are split by columns; its gradient is the sum over all."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all, after matrices that are split by rows."""

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Likewise, but it goes on meanwhile: call what this gives for the sum."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All parts side by side, after a matrix that is split by columns."""


class SingleProcess:
    """A group of one."""

    size = 1

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        return hidden

    all_reduce = all_gather = copy_to_ranks

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        return lambda: partial


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer, with room for what is still to come."""

    keys: Tensor  # Sequences, heads, tokens, dimension
    values: Tensor
    used: int = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All that there are, with these behind them."""
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end], self.values[:, :, self.used : end] = keys, values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864) of queries and keys."""

    def forward(self, queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        def turned(each: Tensor) -> Tensor:
            one, other = each.chunk(2, dim=-1)
            return each * cosines + torch.cat((-other, one), dim=-1) * sines

        return turned(queries), turned(keys)


class AttentionCore(nn.Module):
    """Softmax of queries times keys, times values: with the scores in memory, or by a kernel that keeps none."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        causal = queries.shape[2] > 1
        if self.flash:
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scores = queries @ keys.transpose(2, 3) * queries.shape[3] ** -0.5
        if causal:
            new, known = scores.shape[2:]
            hidden = torch.ones(new, known, dtype=torch.bool, device=scores.device).triu(known - new + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return functional.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values


class Attention(nn.Module):
    """One block; what it gives is this device's part of the sum."""

    def __init__(self, shape: ModelShape, group: TensorGroup, flash: bool) -> None:
        super().__init__()
        self.dimension = shape.head_dim
        heads, kv_heads = shape.heads // group.size, shape.kv_heads // group.size
        self.q_proj = nn.Linear(shape.hidden, heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_heads * shape.head_dim, bias=False)
        self.rotary = Rotary()
        self.core = AttentionCore(flash)
        self.o_proj = nn.Linear(heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        def heads(each: Tensor) -> Tensor:
            return each.unflatten(-1, (-1, self.dimension)).transpose(1, 2)

        queries, keys, values = heads(self.q_proj(hidden)), heads(self.k_proj(hidden)), heads(self.v_proj(hidden))
        queries, keys = self.rotary(queries, keys, *positions)
        if cache is not None:
            keys, values = cache.append(keys, values)
        return self.o_proj(self.core(queries, keys, values).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The other block, with a gate (SwiGLU); its part of the sum."""

    def __init__(self, shape: ModelShape, group: TensorGroup) -> None:
        super().__init__()
        wide = shape.intermediate // group.size
        self.gate_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.up_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """Standard: each block waits for its all-reduce. What one layer hands to the next, `ended` turns into the hidden
    state at the end; here it is that state."""

    def __init__(self, shape: ModelShape, group: TensorGroup, flash: bool) -> None:
        super().__init__()
        self.group = group
        self.input_layernorm = nn.RMSNorm(shape.hidden, EPSILON)
        self.self_attn = Attention(shape, group, flash)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, EPSILON)
        self.mlp = Mlp(shape, group)

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        group = self.group
        normed = group.copy_to_ranks(self.input_layernorm(carried))
        carried = carried + group.all_reduce(self.self_attn(normed, positions, cache))
        normed = group.copy_to_ranks(self.post_attention_layernorm(carried))
        return carried + group.all_reduce(self.mlp(normed))

    @staticmethod
    def final_hidden(carried: Any) -> Tensor:
        hidden: Tensor = carried
        return hidden


class ParallelLayer(DecoderLayer):
    """Both blocks read the same and share an all-reduce (GPT-J, PaLM). Each keeps its norm: weights are those of the
    standard layer."""

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        one = self.self_attn(self.group.copy_to_ranks(self.input_layernorm(carried)), positions, cache)
        other = self.mlp(self.group.copy_to_ranks(self.post_attention_layernorm(carried)))
        return carried + self.group.all_reduce(one + other)


class LadderLayer(DecoderLayer):
    """Each block reads the hidden state without the block before it, whose all-reduce goes on meanwhile:
    x_i = x_(i-1) + all-reduce(h_i(x_(i-2))), arXiv 2501.06589. Carries the hidden state and the two all-reduces."""

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        hidden, *underway = carried if isinstance(carried, tuple) else (carried,)
        for norm, block in (
            (self.input_layernorm, lambda normed: self.self_attn(normed, positions, cache)),
            (self.post_attention_layernorm, self.mlp),
        ):
            if len(underway) == 2:
                hidden = hidden + underway.pop(0)()
            underway.append(self.group.start_all_reduce(block(self.group.copy_to_ranks(norm(hidden)))))
        return hidden, *underway

    @staticmethod
    def final_hidden(carried: Any) -> Tensor:
        hidden, *underway = carried
        for arrived in underway:
            hidden = hidden + arrived()
        ended: Tensor = hidden
        return ended


class NoCommunicationLayer(DecoderLayer):
    """Without communication, so that each device goes on with its own part: no model, but the most there is to gain."""

    def __init__(self, shape: ModelShape, group: TensorGroup, flash: bool) -> None:
        super().__init__(shape, group, flash)
        self.group = SingleProcess()


LAYERS: dict[str, type[DecoderLayer]] = {
    "standard": DecoderLayer,
    "parallel": ParallelLayer,
    "ladder": LadderLayer,
    "no-communication": NoCommunicationLayer,
}
"""How all-reduces meet the blocks, by the names of `loadgen.servers.hardware.inference.ARCHITECTURES`."""


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: ModelShape, group: TensorGroup, architecture: str, flash: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LAYERS[architecture](shape, group, flash) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.final_hidden, self.dimension = LAYERS[architecture].final_hidden, shape.head_dim

    def forward(self, tokens: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        start = caches[0].used if caches else 0
        carried = self.embed_tokens(tokens)
        positions = self._positions(start, tokens.shape[1], carried)
        for index, layer in enumerate(self.layers):
            carried = layer(carried, positions, caches[index] if caches else None)
        hidden: Tensor = self.norm(self.final_hidden(carried))
        return hidden

    def _positions(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(start, start + count, device=like.device, dtype=torch.float32)
        steps = torch.arange(0, self.dimension, 2, device=like.device, dtype=torch.float32) / self.dimension
        angles = torch.outer(places, THETA**-steps).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Llama(nn.Module):
    """Tokens, [sequences, tokens], to logits."""

    def __init__(self, shape: ModelShape, group: TensorGroup, architecture: str, flash: bool) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        self.model = Decoder(shape, group, architecture, flash)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary // group.size, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, caches: Sequence[LayerCache] | None = None, last: bool = False) -> Tensor:
        """Of every token, or of the `last` alone."""
        hidden = self.model(tokens, caches)
        logits: Tensor = self.lm_head(self.group.copy_to_ranks(hidden[:, -1:] if last else hidden))
        return self.group.all_gather(logits)

    def caches(self, sequences: int, room: int) -> list[LayerCache]:
        """An empty cache for each layer, for so many tokens."""
        weight = self.lm_head.weight
        heads = self.shape.kv_heads // self.group.size
        size = (sequences, heads, room, self.shape.head_dim)
        empty = [torch.zeros(size, dtype=weight.dtype, device=weight.device) for _ in range(2 * self.shape.layers)]
        return [LayerCache(*pair) for pair in zip(empty[::2], empty[1::2], strict=True)]


def build_model(
    shape: ModelShape,
    *,
    architecture: str = "standard",
    layers: int | None = None,
    group: TensorGroup | None = None,
    flash: bool = False,
    device: str = "cpu",
    dtype: Any = torch.float32,
) -> Llama:
    """The model with random weights, or this device's part of it; of fewer `layers` where told. Raises HardwareError.
    Seed torch alike on every device of a group: embedding and norms are whole on each."""
    group = group or SingleProcess()
    if architecture not in LAYERS:
        raise HardwareError(f"unknown architecture {architecture!r}: choose one of {', '.join(LAYERS)}")
    if shape.mlp_matrices != 3:
        raise HardwareError(f"{shape.name} is no Llama, its MLP has no gate: choose a model like llama-2-7b")
    for name, count in (("heads", shape.heads), ("KV heads", shape.kv_heads), ("vocabulary", shape.vocabulary)):
        if count % group.size:
            raise HardwareError(f"{shape.name} has {count} {name}, no multiple of {group.size}: choose another --tp")
    if shape.tied and group.size > 1:
        raise HardwareError(f"{shape.name} has one matrix for embedding and head: choose another model, or --tp 1")
    with torch.device("meta"):
        model = Llama(replace(shape, layers=layers or shape.layers), group, architecture, flash)
    model.to(dtype).to_empty(device=device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    if shape.tied:  # two empty matrices where there is to be one
        model.lm_head.weight = model.model.embed_tokens.weight
    return model
