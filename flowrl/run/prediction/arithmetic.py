"""`Shape`: the floating-point operations and bytes of a model, from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HALF = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Shape:
    """Counts of a decoder.

    Args:
        layers, hidden, vocabulary: of the configuration.
        heads: the width of all query heads, or of all values, in numbers a token.
        cache: numbers a token that a layer keeps in the KV cache.
        attention: weights of a layer's attention.
        dense, sparse: weights of an MLP, and of an expert.
        experts, chosen, shared: experts of a sparse layer, those that a token chooses, and those that all go through.
        dense_layers: layers without experts.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    cache: int
    attention: int
    dense: int
    sparse: int = 0
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    dense_layers: int = 0
    tied: bool = False

    @property
    def weights(self) -> int:
        """All weights but norms and biases."""
        outside = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return outside + self._layers(self.experts)

    @property
    def active(self) -> int:
        """The weights that multiply a token: of the experts those chosen, and no embedding."""
        return self.vocabulary * self.hidden + self._layers(self.chosen)

    def read(self, tokens: float) -> float:
        """The weights that a batch of this many tokens reads: experts that no token chose are not (each token chooses
        at random)."""
        idle = (1.0 - self.chosen / self.experts) ** tokens if self.experts else 0.0
        return self.vocabulary * self.hidden + self._layers(self.experts * (1.0 - idle))

    def _layers(self, experts: float) -> int:
        sparse = self.sparse_layers
        of_experts = self.sparse * (experts + self.shared) + self.hidden * self.experts
        return round(self.layers * self.attention + (self.layers - sparse) * self.dense + sparse * of_experts)

    def attention_flops(self, context: float) -> float:
        """Forward operations of a token that attends to `context` ones, beside those of weights: 2 each for scores and
        values."""
        return 4.0 * self.layers * self.heads * context

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache a token, in bfloat16."""
        return HALF * self.layers * self.cache

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def traffic_bytes(self) -> int:
        """Bytes a token that a forward pass writes and reads outside of matrix products.

        In a layer, the 34 bytes a hidden unit of Korthikanti et al. 2022 (arXiv:2205.05198, equation 1, without
        scores), each written and read. Of these, 19 are of an MLP. In their place, each expert that a token goes
        through has its input and its output, and of its width two products and their activation, in bfloat16.
        """
        width = self.sparse // (3 * self.hidden)
        experts = (self.chosen + self.shared) * 2 * HALF * (2 * self.hidden + 3 * width)
        return 2 * self.hidden * (34 * self.layers - 19 * self.sparse_layers) + self.sparse_layers * experts


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a ``config.json`` with the names of Llama, Qwen and DeepSeek.

    Raises:
        KeyError: the configuration does not name a count, or has layers other than attention.
    """
    if odd := set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        raise KeyError(odd.pop())
    if odd := {name for name in config if name.startswith(("mamba", "ssm", "linear_"))}:
        raise KeyError(odd.pop())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("n_shared_experts") or 0
    if "kv_lora_rank" in config:
        attended, cache, attention = _latent(config)
    else:
        size = config.get("head_dim") or hidden // heads
        key_values = 2 * (config.get("num_key_value_heads") or heads) * size
        attended, cache, attention = heads * size, key_values, hidden * (2 * heads * size + key_values)
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        vocabulary=config["vocab_size"],
        heads=attended,
        cache=cache,
        attention=attention,
        dense=3 * hidden * config["intermediate_size"],
        sparse=3 * hidden * width if experts else 0,
        experts=experts,
        chosen=config.get("num_experts_per_tok") or 0,
        shared=shared,
        dense_layers=config.get("first_k_dense_replace") or 0,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _latent(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The same of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = heads * (plain + rotary)
    rank = config.get("q_lora_rank")
    query = hidden * queries if rank is None else rank * (hidden + queries)
    keys = hidden * (latent + rotary) + latent * heads * (plain + value)
    return heads * (plain + rotary + value) // 2, latent + rotary, query + keys + heads * value * hidden
