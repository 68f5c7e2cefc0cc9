"""How megatron-core names, fuses and cuts the weights of a Hugging Face causal LM: Llama, Qwen2 and Qwen3, dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn.functional import silu

from flowrl.backends.torch.train.boxes import Box, Cut
from flowrl.errors import BindError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

ROWS, COLUMNS, GATED = Cut(0), Cut(1), Cut(0, blocks=2)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Source(NamedTuple):
    """Rows of a tensor of a folder, and where they are in a weight of megatron-core."""

    name: str
    box: Box

    @staticmethod
    def of(name: str, here: int, there: int, rows: int, width: tuple[int, ...]) -> Source:
        """`rows` rows from `there` on, which are those from `here` on."""
        sides = tuple(slice(0, size) for size in width)
        return Source(name, Box((slice(there, there + rows), *sides), (slice(here, here + rows), *sides)))


class Weight(NamedTuple):
    """A weight of megatron-core, before it is cut.

    Args:
        cut: how the axis ``tensor`` cuts it; None if all of its processes have the same.
        sources: the rows of a folder's tensors that it consists of.
        summed: whether those processes use it for heads of their own, so that its gradients add up.
    """

    shape: tuple[int, ...]
    cut: Cut | None
    sources: list[Source]
    summed: bool = False


def weights(config: Any) -> Iterator[tuple[str, Weight]]:
    """The weights of all layers by their names in megatron-core's ``GPTModel``, with layers counted from the first of
    the model. Tied ones are the embedding's."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield EMBEDDING, _same("model.embed_tokens.weight", (vocabulary, hidden), ROWS)
    for number in range(config.num_hidden_layers):
        for name, weight in _layer(config, f"model.layers.{number}."):
            yield f"decoder.layers.{number}.{name}", weight
    yield "decoder.final_layernorm.weight", _same("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield OUTPUT, _same("lm_head.weight", (vocabulary, hidden), ROWS)


def _layer(config: Any, stored: str) -> Iterator[tuple[str, Weight]]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, head_size(config)
    heads = config.num_attention_heads * size
    yield "input_layernorm.weight", _same(f"{stored}input_layernorm.weight", (hidden,))
    yield "self_attention.linear_proj.weight", _same(f"{stored}self_attn.o_proj.weight", (hidden, heads), COLUMNS)
    yield "self_attention.linear_qkv.weight", _attention(config, f"{stored}self_attn.", "weight", (hidden,))
    if config.model_type == "qwen2":
        yield "self_attention.linear_qkv.bias", _attention(config, f"{stored}self_attn.", "bias", ())
    if config.model_type == "qwen3":
        for part in "qk":
            norm = _same(f"{stored}self_attn.{part}_norm.weight", (size,))
            yield f"self_attention.{part}_layernorm.weight", norm._replace(summed=True)
    yield "pre_mlp_layernorm.weight", _same(f"{stored}post_attention_layernorm.weight", (hidden,))
    gated = [
        Source.of(f"{stored}mlp.{part}_proj.weight", start, 0, inner, (hidden,))
        for part, start in (("gate", 0), ("up", inner))
    ]
    yield "mlp.linear_fc1.weight", Weight((2 * inner, hidden), GATED, gated)
    yield "mlp.linear_fc2.weight", _same(f"{stored}mlp.down_proj.weight", (hidden, inner), COLUMNS)


def _attention(config: Any, stored: str, kind: str, width: tuple[int, ...]) -> Weight:
    """Queries, keys and values: of each group of heads its queries, then its key and its value."""
    size, groups = head_size(config), config.num_key_value_heads
    queries = config.num_attention_heads // groups * size
    sources, start = [], 0
    for group in range(groups):
        for part, rows in (("q", queries), ("k", size), ("v", size)):
            sources.append(Source.of(f"{stored}{part}_proj.{kind}", start, group * rows, rows, width))
            start += rows
    return Weight((start, *width), ROWS, sources)


def _same(stored: str, shape: tuple[int, ...], cut: Cut | None = None) -> Weight:
    return Weight(shape, cut, [Source.of(stored, 0, 0, shape[0], shape[1:])])


def head_size(config: Any) -> int:
    """The width of an attention head."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def settings(config: Any) -> dict[str, Any]:
    """The arguments of megatron-core's ``TransformerConfig`` for the architecture."""
    return dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def refuse_other(config: Any, backend: str, folder: str) -> None:
    """Refuse a configuration of another architecture, or with a setting that changes it. Raises `BindError`."""
    wrong = {
        "model_type": config.model_type not in ARCHITECTURES,
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)) and config.model_type != "qwen2",
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "layer_types": {*(getattr(config, "layer_types", None) or ())} - {"full_attention"} != set(),
    }
    if name := next((name for name, bad in wrong.items() if bad), None):
        raise BindError(
            f"{backend} computes Llama, Qwen2 and Qwen3 without experts, windows or further biases, but the model in "
            f"{folder!r} has {name}={getattr(config, name)!r}. Use TorchTrainer.",
            code="megatron.no-architecture",
            path=folder,
            setting=name,
            found=getattr(config, name),
        )
