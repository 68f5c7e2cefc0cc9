"""`Weights`: the parameters of a model, counted from its configuration."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from flowrl.backends.torch.load import loading, quiet, skeleton
from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.sizing.trace import MicroBatch, Peaks, Run, gathered_narrow, trace
from flowrl.sync.buckets import in_buckets
from flowrl.sync.pieces import in_pieces
from flowrl.sync.weight_selection import rounds

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_SPLIT = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)

FLOAT = 4
"""Bytes of a float32."""

WIDTHS = {"float32": FLOAT, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


class Model(NamedTuple):
    """A model by its folder, of which only ``config.json`` is read.

    Args:
        lora: the adapter that is trained.
        with_head: False is only the body, with a scalar head.
        attention: as in `flowrl.backends.torch.train.learner.TrainedSpec`.
        tensor: the processes that split each layer, of which this is the first: it has its share of heads, widths and
            vocabulary (Shoeybi et al. 2019, arXiv:1909.08053).
    """

    folder: str
    lora: LoRA | None = None
    with_head: bool = True
    attention: Any = None
    tensor: int = 1

    def skeleton(self) -> PreTrainedModel:
        """The model without storage."""
        with loading(self.folder), quiet():
            lm = skeleton(self.folder, self.attention, **self._share())
        if self.lora is not None:
            Adapter(lm, self.lora, self.folder)
        return lm

    def _share(self) -> dict[str, Any]:
        """The entries of ``config.json`` that `tensor` divides, divided."""
        if self.tensor == 1:
            return {}
        with open(os.path.join(self.folder, "config.json"), encoding="utf-8") as file:
            found = json.load(file)
        sizes = {name: -(-found[name] // self.tensor) for name in _SPLIT if isinstance(found.get(name), int)}
        size = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        return {**sizes, "head_dim": size, "pad_token_id": None}


class Weight(NamedTuple):
    """A parameter: its shape, whether it is trained, and the group that is gathered with it: a block by its number,
    ``"embedding"``, ``"head"``, or ``"rest"``."""

    shape: tuple[int, ...]
    trained: bool
    group: int | str

    def numbers(self, ranks: int = 1) -> int:
        """Its numbers, or those of the first of `ranks` that share its rows (FSDP2: Zhao et al. 2023)."""
        first, rest = (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)
        return -(-first // ranks) * rest


class Sent(NamedTuple):
    """Weights that a sync converts together; see `flowrl.sync.pieces.Piece`.

    Args:
        shapes: of the weights, as the model has them.
        stored: of the tensors that are sent.
        rounds: whether they are sent in the engine's dtype, if that is not float32.
        converted: whether they are not only renamed.
    """

    shapes: tuple[tuple[int, ...], ...]
    stored: tuple[tuple[int, ...], ...]
    rounds: bool = False
    converted: bool = False

    def width(self, dtype: str) -> int:
        """Bytes of a number that is sent to an engine in `dtype`."""
        return WIDTHS[dtype] if self.rounds else FLOAT


class Weights(NamedTuple):
    """The parameters of a model, tied ones once.

    Args:
        narrow: whether blocks are gathered in bfloat16, if the model computes in it.
        sent: what a sync sends, in order.
        vocabulary, hidden: of its head.
    """

    each: tuple[Weight, ...]
    narrow: bool
    sent: tuple[Sent, ...]
    vocabulary: int
    hidden: int

    def bytes(self, ranks: int = 1, trained: bool = False) -> int:
        """Float32 bytes on the first of `ranks`, of all or of the `trained` ones."""
        return FLOAT * sum(one.numbers(ranks) for one in self.each if one.trained or not trained)

    def of(self, group: int | str, trained: bool = False) -> int:
        """The numbers of a group."""
        return sum(one.numbers() for one in self.each if one.group == group and (one.trained or not trained))

    @property
    def block(self) -> tuple[int, int]:
        """The numbers of the largest block, and of its trained weights."""
        blocks = {one.group for one in self.each if isinstance(one.group, int)}
        return max(((self.of(block), self.of(block, trained=True)) for block in blocks), default=(0, 0))

    @property
    def blocks(self) -> int:
        """The numbers of all blocks."""
        return sum(one.numbers() for one in self.each if isinstance(one.group, int))

    @property
    def head_trained(self) -> bool:
        """Whether the head, or the embedding that is it, is trained."""
        return any(one.trained and one.shape == (self.vocabulary, self.hidden) for one in self.each)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return not any(one.group == "head" for one in self.each)


@functools.cache
def weights_of(model: Model) -> Weights:
    """The weights of a model.

    Raises:
        BindError: `config.json` does not load as a causal LM, or the adapter does not fit it.
    """
    lm = model.skeleton()
    module: nn.Module = lm if model.with_head else lm.base_model
    blocks = blocks_of(lm)
    group: dict[int, int | str] = {id(p): i for i, block in enumerate(blocks) for p in block.parameters()}
    embedding: Any = lm.get_input_embeddings()
    head: Any = lm.get_output_embeddings() if model.with_head else None
    if head is None or head.weight is not embedding.weight:
        for name, layer in (("embedding", embedding), ("head", head)):
            group |= {id(p): name for p in ([] if layer is None else layer.parameters())}
    named = dict(module.named_parameters())
    each = [Weight(tuple(p.shape), p.requires_grad, group.get(id(p), "rest")) for p in named.values()]
    size, width = embedding.weight.shape
    if not model.with_head:
        each += [Weight((1, width), True, "rest"), Weight((1,), True, "rest")]
    sent = _sent(lm, model.lora is not None) if model.with_head else ()
    return Weights(tuple(each), all(map(gathered_narrow, blocks)), sent, size, width)


def _sent(lm: PreTrainedModel, adapted: bool) -> tuple[Sent, ...]:
    """What a sync sends of a model; adapted layers are merged in float32 before they are rounded."""
    state, found = untied(lm), []
    for piece in in_pieces(lm, state):
        shapes, stored = (
            [tuple(x.shape) for x in xs] for xs in ([state[name] for name in piece.names], piece.stored.values())
        )
        rounded = not adapted and all(rounds(name, like, torch.bfloat16) for name, like in piece.stored.items())
        found.append(Sent((*shapes,), (*stored,), rounded, piece.converted))
    return tuple(found)


@functools.cache
def peaks_of(model: Model, batch: MicroBatch, run: Run) -> Peaks:
    """The activations of a model; see `trace`."""
    return trace(model.skeleton(), batch, run)


def bucket_bytes(sent: Sequence[Sent], limit: int, ranks: int, dtype: str = "float32", split: bool = False) -> int:
    """The most bytes while sharded weights for an engine in `dtype` are gathered in buckets; see
    `flowrl.backends.torch.train.shards.gathered_weights`.

    They are a bucket, the shards that it is gathered from, and these rounded, while the one before is still read. Those
    that are converted stay until the largest is copied. A weight that is `split` over the axis ``tensor`` is copied
    from its parts.
    """
    most = 0
    for converted, run in groupby(sent, lambda one: one.converted):
        for together in ([one] for one in run) if converted else [list(run)]:
            shaped = [(one, _Shaped(shape, one.width(dtype))) for one in together for shape in one.shapes]
            before = 0
            for bucket in in_buckets([(str(one.width(dtype) < FLOAT), x) for one, x in shaped], limit):  # type: ignore[misc]
                each = [(x.of(ranks), narrows == "True") for narrows, x in bucket]  # type: ignore[attr-defined]
                own, rounded = sum(size for size, _ in each), sum(size for size, narrows in each if narrows)
                copied = max(own, split * ranks * max(size for size, _ in each))
                most = max(most, before + own * ranks + rounded + copied)
                before = before * converted + own * ranks
            most = max(most, converted * (before + max(x.nbytes for _, x in shaped)))
    return most


class _Shaped(NamedTuple):
    """A tensor of which only the size counts."""

    shape: tuple[int, ...]
    width: int

    @property
    def nbytes(self) -> int:
        return self.width * math.prod(self.shape)

    def of(self, ranks: int) -> int:
        """The bytes of the first of `ranks` that share its rows."""
        return self.width * Weight(self.shape, False, 0).numbers(ranks)
