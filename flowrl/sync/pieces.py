"""The weights of a Hugging Face model in pieces that are converted to the format of its folder one by one.

Transformers stores some weights in another form than it computes with: the experts of a layer are one tensor in memory
and a tensor each in a folder. A piece is one weight that is at most renamed, or the weights of a layer that are
converted. So a sync needs memory for the experts of one layer, not for those of all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r".*?\.\d+\.")


class Piece(NamedTuple):
    """Some weights of a model.

    Args:
        names: in its state dict.
        stored: what a folder has for them, sorted by name, on the meta device.
        converted: whether they are not only renamed.
    """

    names: tuple[str, ...]
    stored: dict[str, Tensor]
    converted: bool

    def convert(self, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a folder from those of the model, sorted by name: the same ones if they are only renamed."""
        if self.converted:
            return iter(_stored(model, {name: weights[name] for name in self.names}).items())
        return zip(self.stored, (weights[name] for name in self.names), strict=True)


def in_pieces(model: PreTrainedModel, state: Mapping[str, Tensor]) -> list[Piece]:
    """The weights of a model by their names in its state dict, in pieces in the order of their stored names."""
    blank = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    renamed = {id(tensor): name for name, tensor in _stored(model, blank).items()}
    layers: dict[str, list[str]] = defaultdict(list)
    pieces = []
    for name, tensor in blank.items():
        if id(tensor) in renamed:
            pieces.append(Piece((name,), {renamed[id(tensor)]: tensor}, False))
        else:
            layer = _LAYER.match(name)
            layers[layer[0] if layer else ""].append(name)
    for names in layers.values():
        pieces.append(Piece((*names,), _stored(model, {name: blank[name] for name in names}), True))
    ordered: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: next(iter(piece.stored))):
        if ordered and next(iter(piece.stored)) < next(reversed(ordered[-1].stored)):  # their names interleave
            last = ordered.pop()
            piece = Piece(last.names + piece.names, dict(sorted({**last.stored, **piece.stored}.items())), True)
        ordered.append(piece)
    return ordered


def _stored(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # here, since it takes seconds to import

    return dict(sorted(revert_weight_conversion(model, dict(weights)).items()))
