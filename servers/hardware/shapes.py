"""Dimensions of parts that only some models have: experts, latent attention, sliding windows and linear attention.

The columns of mixtures.csv hold these dimensions. A user's TOML file may have the same columns in its table [models].
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = (
    "experts",
    "experts_per_token",
    "expert_intermediate",
    "shared_intermediate",
    "dense_layers",
    "q_rank",
    "kv_rank",
    "rope_dim",
    "value_dim",
    "window",
    "window_layers",
    "linear_layers",
    "linear_key_heads",
    "linear_value_heads",
    "linear_head_dim",
    "gated",
)
"""Columns of mixtures.csv between the name of the model and the source. An empty cell means 0."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer. A router chooses a few of them for each token; every token uses the shared expert."""

    count: int
    per_token: int
    intermediate: int  # Inner size of one expert
    shared_intermediate: int = 0  # Inner size of the shared experts together; 0 if there are none
    dense_layers: int = 0  # First layers, which have a dense MLP instead of experts

    def layer_parameters(self, hidden: int) -> int:
        """Return the number of parameters of the experts and the router of one layer."""
        return hidden * (3 * (self.count * self.intermediate + self.shared_intermediate) + self.count)

    def active_parameters(self, hidden: int) -> int:
        """Return the number of parameters that one token uses in the experts and the router of one layer.

        `hidden` is the hidden size of the model.
        """
        return hidden * (3 * (self.per_token * self.intermediate + self.shared_intermediate) + self.count)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA, arXiv 2405.04434): all heads share one compressed vector per token.

    The KV cache stores `kv_rank + rope_dim` values per token and layer.
    """

    q_rank: int  # Size of the compressed query; 0 if queries are not compressed
    kv_rank: int
    rope_dim: int  # Values per head of a query or key that carry the position
    value_dim: int  # Values per head of the attention result

    @property
    def cached_values(self) -> int:
        """Number of values that the KV cache stores per token and layer."""
        return self.kv_rank + self.rope_dim

    def layer_parameters(self, hidden: int, heads: int, head_dim: int) -> int:
        """Return the number of attention parameters per layer.

        `hidden` is the width of the model. `heads` and `head_dim` are the number of heads and their dimension.
        """
        query_size = heads * (head_dim + self.rope_dim)
        query = self.q_rank * (hidden + query_size) if self.q_rank else hidden * query_size
        key_value = hidden * self.cached_values + self.kv_rank * heads * (head_dim + self.value_dim)
        return query + key_value + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention (Gated DeltaNet, arXiv 2412.06464). It has a state of constant size instead of a KV cache."""

    layers: int  # Number of layers with linear attention; the other layers have attention over all tokens
    key_heads: int
    value_heads: int
    head_dim: int

    @property
    def input_size(self) -> int:
        """Number of columns of all input matrices of one layer together.

        The input matrices compute queries, keys, values, an output gate, and two rates per value head.
        """
        return 2 * (self.key_heads + self.value_heads) * self.head_dim + 2 * self.value_heads

    @property
    def state_values(self) -> int:
        """Number of values in the state of one sequence and layer."""
        return self.value_heads * self.head_dim * self.head_dim

    def layer_parameters(self, hidden: int) -> int:
        """Return the number of parameters in the input and output matrices of one layer."""
        return hidden * (self.input_size + self.value_heads * self.head_dim)
