"""A Llama with the names, weights and arithmetic of Hugging Face's `LlamaForCausalLM`.

Every part is a separate torch module, so that its time can be measured. Tensor parallelism splits the matrices between
devices (Megatron-LM, arXiv 1909.08053):

- The first matrices of attention and MLP are split by columns.
- The last matrices of attention and MLP are split by rows. The `TensorGroup` sums their partial results.
- The output head is split by columns.

`LAYERS` contains the classes of decoder layers. They differ in when the all-reduce after attention or MLP starts, and
in which later part of the model first uses its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from loadgen.servers.hardware import HardwareError, ModelShape

EPSILON = 1e-5
THETA = 10_000.0
"""Base of the rotary frequencies."""


class TensorGroup(Protocol):
    """Interface of a group of devices. Each layer of the model is split over these devices (tensor parallelism)."""

    @property
    def size(self) -> int:
        """Number of devices in the group."""

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        """Return `hidden` as the input of a linear layer whose weight matrix is split by columns over the devices.

        In the backward pass, the gradient of `hidden` is summed over all devices.
        """

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over all devices.

        `partial` is the output of a linear layer whose weight matrix is split by rows over the devices.
        """

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce in the background. Return a function that waits for the sum and returns it."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all devices, joined along the last dimension.

        `part` is this device's part. It is the output of a linear layer whose weight matrix is split by columns over
        the devices.
        """


class SingleProcess:
    """A group with a single device, without communication."""

    size = 1

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        """Return the input unchanged."""
        return hidden

    all_reduce = all_gather = copy_to_ranks

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the input unchanged."""
        return lambda: partial


@dataclass(slots=True)
class LayerCache:
    """KV cache of one layer, with space for further tokens."""

    keys: Tensor  # [sequences, heads, tokens, head dimension]
    values: Tensor
    used: int = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all keys and values in the cache."""
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys (arXiv 2104.09864)."""

    def forward(self, queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the angles of their positions."""

        def rotate(vectors: Tensor) -> Tensor:
            first, second = vectors.chunk(2, dim=-1)
            return vectors * cosines + torch.cat((-second, first), dim=-1) * sines

        return rotate(queries), rotate(keys)


class AttentionCore(nn.Module):
    """Softmax attention. It stores its scores in memory, or uses a flash kernel that stores no scores."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output for all queries. If a sequence has several queries, a causal mask is applied."""
        causal = queries.shape[2] > 1
        if self.flash:
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys = keys.repeat_interleave(groups, dim=1)
            values = values.repeat_interleave(groups, dim=1)
        scores = queries @ keys.transpose(2, 3) * queries.shape[3] ** -0.5
        if causal:
            new, known = scores.shape[2:]
            hidden = torch.ones(new, known, dtype=torch.bool, device=scores.device).triu(known - new + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return functional.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values


class Attention(nn.Module):
    """The attention block. On several devices, its result is a partial sum that an all-reduce completes."""

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
        """Return the result of the attention block for the normalised hidden state."""

        def split_heads(vectors: Tensor) -> Tensor:
            return vectors.unflatten(-1, (-1, self.dimension)).transpose(1, 2)

        queries = split_heads(self.q_proj(hidden))
        keys = split_heads(self.k_proj(hidden))
        values = split_heads(self.v_proj(hidden))
        queries, keys = self.rotary(queries, keys, *positions)
        if cache is not None:
            keys, values = cache.append(keys, values)
        return self.o_proj(self.core(queries, keys, values).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The MLP block with a gate (SwiGLU).

    On several devices, its result is a partial sum that an all-reduce completes.
    """

    def __init__(self, shape: ModelShape, group: TensorGroup) -> None:
        super().__init__()
        wide = shape.intermediate // group.size
        self.gate_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.up_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the result of the MLP block for the normalised hidden state."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """The standard decoder layer: an attention block and an MLP block, each of which waits for its all-reduce.

    `forward` takes the state that the previous layer returned, and returns the state for the next layer. In this class,
    the state is the hidden state. In a subclass, the state may also contain all-reduces in flight. After the last
    layer, `final_hidden` converts the state into the hidden state.
    """

    def __init__(self, shape: ModelShape, group: TensorGroup, flash: bool) -> None:
        super().__init__()
        self.group = group
        self.input_layernorm = nn.RMSNorm(shape.hidden, EPSILON)
        self.self_attn = Attention(shape, group, flash)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, EPSILON)
        self.mlp = Mlp(shape, group)

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        """Compute this layer: its attention and its MLP.

        `carried` is the output of the previous layer, and the result is passed to the next layer. In this class, both
        are the hidden state. In subclasses, they may contain more.
        """
        group = self.group
        normed = group.copy_to_ranks(self.input_layernorm(carried))
        carried = carried + group.all_reduce(self.self_attn(normed, positions, cache))
        normed = group.copy_to_ranks(self.post_attention_layernorm(carried))
        return carried + group.all_reduce(self.mlp(normed))

    @staticmethod
    def final_hidden(carried: Any) -> Tensor:
        """Return the hidden state after the last layer. `carried` is the state that the last layer returned.

        In this class, this state is the hidden state. In subclasses, it may also contain all-reduces in flight.
        """
        hidden: Tensor = carried
        return hidden


class ParallelLayer(DecoderLayer):
    """A decoder layer whose two blocks read the same hidden state and share one all-reduce (GPT-J, PaLM).

    Each block has a separate norm, so that the layer has the same weights as the standard layer.
    """

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        """Return the hidden state after this layer."""
        attention = self.self_attn(self.group.copy_to_ranks(self.input_layernorm(carried)), positions, cache)
        mlp = self.mlp(self.group.copy_to_ranks(self.post_attention_layernorm(carried)))
        return carried + self.group.all_reduce(attention + mlp)


class LadderLayer(DecoderLayer):
    """A decoder layer in which the all-reduce of a block runs during the next block (arXiv 2501.06589).

    A block therefore reads the hidden state without the result of the previous block:

        x[i] = x[i - 1] + all_reduce(h[i](x[i - 2])).

    Here `h[i]` is block `i`, and `x[i]` is the hidden state after this block. The state that layers pass on consists of
    the hidden state and two all-reduces in flight.
    """

    def forward(self, carried: Any, positions: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Any:
        """Return the hidden state and two functions, which wait for the last two all-reduces and return their results.

        The hidden state does not contain these two results yet. `carried` is the result of the previous layer. For the
        first layer, `carried` is the embedding.
        """
        hidden, *pending = carried if isinstance(carried, tuple) else (carried,)
        for norm, block in (
            (self.input_layernorm, lambda normed: self.self_attn(normed, positions, cache)),
            (self.post_attention_layernorm, self.mlp),
        ):
            if len(pending) == 2:
                hidden = hidden + pending.pop(0)()
            pending.append(self.group.start_all_reduce(block(self.group.copy_to_ranks(norm(hidden)))))
        return hidden, *pending

    @staticmethod
    def final_hidden(carried: Any) -> Tensor:
        """Return the hidden state after the last layer of the model. `carried` is what the last layer returned.

        `carried` contains a hidden state, followed by functions that wait for all-reduces in flight. The results of
        these all-reduces are added to the hidden state.
        """
        hidden, *pending = carried
        for wait in pending:
            hidden = hidden + wait()
        final: Tensor = hidden
        return final


class NoCommunicationLayer(DecoderLayer):
    """A decoder layer without all-reduces. Each device continues with its partial results.

    The output of such a model is wrong. Its speed shows the maximum gain from hiding communication.
    """

    def __init__(self, shape: ModelShape, group: TensorGroup, flash: bool) -> None:
        super().__init__(shape, group, flash)
        self.group = SingleProcess()


LAYERS: dict[str, type[DecoderLayer]] = {
    "standard": DecoderLayer,
    "parallel": ParallelLayer,
    "ladder": LadderLayer,
    "no-communication": NoCommunicationLayer,
}
"""Layer classes by the names of `loadgen.servers.hardware.inference.ARCHITECTURES`."""


class Decoder(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, shape: ModelShape, group: TensorGroup, architecture: str, flash: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LAYERS[architecture](shape, group, flash) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.final_hidden = LAYERS[architecture].final_hidden
        self.dimension = shape.head_dim

    def forward(self, tokens: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """Return the hidden states of the tokens. The tokens follow those in the caches."""
        start = caches[0].used if caches else 0
        carried = self.embed_tokens(tokens)
        positions = self._positions(start, tokens.shape[1], carried)
        for index, layer in enumerate(self.layers):
            carried = layer(carried, positions, caches[index] if caches else None)
        hidden: Tensor = self.norm(self.final_hidden(carried))
        return hidden

    def _positions(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles of `count` positions, beginning at `start`.

        They have the device and the number format of the tensor `like`.
        """
        indices = torch.arange(start, start + count, device=like.device, dtype=torch.float32)
        steps = torch.arange(0, self.dimension, 2, device=like.device, dtype=torch.float32) / self.dimension
        angles = torch.outer(indices, THETA**-steps).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Llama(nn.Module):
    """The complete language model, which maps token ids [sequences, tokens] to logits."""

    def __init__(self, shape: ModelShape, group: TensorGroup, architecture: str, flash: bool) -> None:
        super().__init__()
        self.shape = shape
        self.group = group
        self.model = Decoder(shape, group, architecture, flash)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary // group.size, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, caches: Sequence[LayerCache] | None = None, last: bool = False) -> Tensor:
        """Return the logits of every token in `tokens`. With `last`, return only the logits of the last token."""
        hidden = self.model(tokens, caches)
        logits: Tensor = self.lm_head(self.group.copy_to_ranks(hidden[:, -1:] if last else hidden))
        return self.group.all_gather(logits)

    def caches(self, sequences: int, room: int) -> list[LayerCache]:
        """Return one empty cache per layer, each with space for `room` tokens."""
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
    """Return a Llama model with random weights. `shape` contains the sizes of its layers.

    - `architecture`: The type of the decoder layers, a key of LAYERS.
    - `layers`: Number of layers. By default, `shape` states this number.
    - `group`: The devices that share the model. The result is the part of the model that belongs to this device. All
      devices must use the same torch seed, because the embedding and the norms are copied to every device.
    - `flash`: True for attention that does not store its scores.

    Raises HardwareError if the model is not a Llama, or if it cannot be divided among the devices.
    """
    group = group or SingleProcess()
    if architecture not in LAYERS:
        raise HardwareError(f"unknown architecture {architecture!r}: choose one of {', '.join(LAYERS)}")
    if not shape.plain:
        raise HardwareError(f"{shape.name} is not a Llama, it has other layers: choose a model such as llama-2-7b")
    if shape.mlp_matrices != 3:
        raise HardwareError(f"{shape.name} is not a Llama, its MLP has no gate: choose a model such as llama-2-7b")
    for name, count in (("heads", shape.heads), ("KV heads", shape.kv_heads), ("vocabulary", shape.vocabulary)):
        if count % group.size:
            raise HardwareError(
                f"{shape.name} has {count} {name}, which is not a multiple of {group.size}: choose another --tp"
            )
    if shape.tied and group.size > 1:
        raise HardwareError(f"{shape.name} shares one matrix for embedding and head: choose another model, or --tp 1")
    with torch.device("meta"):
        model = Llama(replace(shape, layers=layers or shape.layers), group, architecture, flash)
    model.to(dtype).to_empty(device=device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    if shape.tied:  # to_empty has separated the two
        model.lm_head.weight = model.model.embed_tokens.weight
    return model
