"""`Weights`: the parameters of a model, counted from its configuration."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from flowrl.backends.torch.load import loading, quiet, skeleton
from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.sizing.experts import cut_experts
from flowrl.backends.torch.sizing.trace import MicroBatch, Peaks, Run, gathered_narrow, trace
from flowrl.backends.torch.train.expert_parallel import layers_of_experts
from flowrl.protocols.mesh import Mesh
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

ONE = Mesh()
"""One process."""

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
        expert: the processes that have the experts of a layer together, of which this is the first; `tensor` then does
            not split these.
        layers: the first ones, which a stage of a pipeline has; None is all.
    """

    folder: str
    lora: LoRA | None = None
    with_head: bool = True
    attention: Any = None
    tensor: int = 1
    expert: int = 1
    layers: int | None = None

    def skeleton(self) -> PreTrainedModel:
        """The model without storage."""
        with loading(self.folder), quiet():
            lm = skeleton(self.folder, self.attention, **self._share())
        if self.lora is not None:
            Adapter(lm, self.lora, self.folder)
        if self.expert > 1:
            cut_experts(lm, self.expert, self.tensor)
        return lm

    def _share(self) -> dict[str, Any]:
        """The entries of ``config.json`` that `tensor` divides, divided, and those of `layers`."""
        if self.tensor == 1 and self.layers is None:
            return {}
        with open(os.path.join(self.folder, "config.json"), encoding="utf-8") as file:
            found = json.load(file)
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        if self.layers is not None and found.get("layer_types"):
            layers["layer_types"] = found["layer_types"][: self.layers]
        if self.tensor == 1:
            return layers
        split = [name for name in _SPLIT if isinstance(found.get(name), int)]
        if self.expert > 1:
            split.remove("moe_intermediate_size" if "moe_intermediate_size" in split else "intermediate_size")
        sizes = {name: -(-found[name] // self.tensor) for name in split}
        size = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        return {**sizes, **layers, "head_dim": size, "pad_token_id": None}


class Weight(NamedTuple):
    """A parameter: its shape, whether it is trained, and the group that is gathered with it: a block by its number,
    ``"embedding"``, ``"head"``, or ``"rest"``; and whether it is of experts that the axis ``expert`` cuts."""

    shape: tuple[int, ...]
    trained: bool
    group: int | str
    expert: bool = False

    def numbers(self, mesh: Mesh = ONE) -> int:
        """Its numbers, or those of the first process of `mesh`, which shares its rows (FSDP2: Zhao et al. 2023)."""
        first, rest = (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)
        return -(-first // (mesh.expert_shards if self.expert else mesh.fsdp)) * rest


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
        block: the numbers of the largest block, and of its trained weights, without experts that an axis cuts; and
            those of these, which are gathered by themselves.
    """

    each: tuple[Weight, ...]
    narrow: bool
    sent: tuple[Sent, ...]
    vocabulary: int
    hidden: int
    block: tuple[int, int, int, int]

    def bytes(self, mesh: Mesh = ONE, trained: bool = False) -> int:
        """Float32 bytes on the first process of `mesh`, of all or of the `trained` ones."""
        return FLOAT * sum(one.numbers(mesh) for one in self.each if one.trained or not trained)

    def of(self, group: int | str, trained: bool = False) -> int:
        """The numbers of a group."""
        return sum(one.numbers() for one in self.each if one.group == group and (one.trained or not trained))

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
    cut = {id(p) for layer in layers_of_experts(lm) for p in layer.parameters()} if model.expert > 1 else set()
    named = dict(module.named_parameters()).values()
    each = [Weight(tuple(p.shape), p.requires_grad, group.get(id(p), "rest"), id(p) in cut) for p in named]
    size, width = embedding.weight.shape
    if not model.with_head:
        each += [Weight((1, width), True, "rest"), Weight((1,), True, "rest")]
    sent = _sent(lm, model.lora is not None) if model.with_head else ()
    return Weights(tuple(each), all(map(gathered_narrow, blocks)), sent, size, width, _largest(each))


def _largest(each: Iterable[Weight]) -> tuple[int, int, int, int]:
    """See `Weights.block`."""
    found: dict[int, list[int]] = {}
    for one in each:
        if isinstance(one.group, int):
            sizes, numbers = found.setdefault(one.group, [0, 0, 0, 0]), one.numbers()
            sizes[2 * one.expert] += numbers
            sizes[2 * one.expert + 1] += numbers * one.trained
    whole, trained, experts, trained_experts = max(found.values(), key=lambda one: one[0] + one[2], default=[0] * 4)
    return whole, trained, experts, trained_experts


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
