"""Packed rows: a model runs over concatenated rows without padding as over one row, and attends within each.

The lengths of rows are an argument of the model, which transformers passes to attention, also when a layer is
recomputed in a backward pass. Not every architecture passes it, or separates the tokens of two rows in all its layers;
`why_not_packed` tests that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowrl.backends.torch.probes import LENGTH, Inputs, known, probe_inputs, relative_error
from flowrl.backends.torch.score.context import Layer, Ulysses
from flowrl.backends.torch.score.rows import Runs, TokenInputs, packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "flowrl_packed"
"""The name of `attend_packed` in transformers."""


class Window:
    """The attention of a layer with a limited window.

    Args:
        sees: whether a query attends to a key, by the indices of batch, head, query and key.
        size: rows of at most as many tokens are attended to fully.
    """

    def __init__(self, sees: Callable[..., Tensor], size: int) -> None:
        self._sees, self._size = sees, size
        self._masks: dict[int, Tensor] = {}

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        """The mask of a row of this many tokens: bool ``[1 1 query key]``, or None if it is causal."""
        if tokens <= self._size:
            return None
        if tokens not in self._masks:
            at = torch.arange(tokens, device=device)
            first = at.new_zeros(())
            self._masks[tokens] = self._sees(first, first, at[:, None], at[None])[None, None]
        return self._masks[tokens]


def _mask(attention_mask: Tensor | None = None, **settings: Any) -> Window | Tensor | None:
    """The mask of fused attention as transformers makes it; for one row without padding, its window."""
    plain = settings.get("allow_is_causal_skip", False) and not settings.get("use_vmap", False)
    one = attention_mask is not None and len(attention_mask) == 1 and settings["q_length"] == settings["kv_length"]
    if not (plain and one and cast(Tensor, attention_mask).all()):
        mask: Tensor | None = AttentionMaskInterface()["sdpa"](attention_mask=attention_mask, **settings)
        return mask
    size = settings.get("local_size")
    return None if size is None else Window(settings["mask_function"], size)


def attend_packed(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    packed: Runs | None = None,
    context: Ulysses | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Fused attention within each row of `packed`; without it, that of transformers. Queries, keys and values are
    ``[row head token head_dim]``; packed rows are one row. With `context`, tokens are those of this process."""
    fused: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if packed is None:
        if isinstance(attention_mask, Window):
            attention_mask = attention_mask.mask(query.shape[2], query.device)
        return cast(tuple[Tensor, None], fused(layer, query, key, value, attention_mask, **settings))
    if isinstance(attention_mask, Tensor):
        raise TypeError(f"{type(layer).__name__} makes its own mask")
    part: nn.Module | Layer = layer
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
        part = Layer(query.shape[1] // key.shape[1], getattr(layer, "is_causal", True))
    sizes, out = [rows * tokens for rows, tokens in packed], list[Tensor]()
    for (rows, tokens), *parts in zip(packed, *(x.split(sizes, 2) for x in (query, key, value)), strict=True):
        rectangles = (x[0].unflatten(1, (rows, tokens)).transpose(0, 1) for x in parts)
        mask = None if attention_mask is None else attention_mask.mask(tokens, query.device)
        out.append(fused(part, *rectangles, mask, **settings)[0].flatten(0, 1))
    attended = torch.cat(out)[None]
    return attended if context is None else context.to_tokens(attended), None


AttentionInterface.register(ATTENTION, attend_packed)
AttentionMaskInterface.register(ATTENTION, _mask)


def why_not_packed(probe: Inputs, model: PreTrainedModel, bound: float) -> str | None:
    """Make `model` attend within packed rows if that gives the same numbers as each row alone; else return why it does
    not, and leave its attention unchanged."""
    settled = model.config._attn_implementation
    if settled != "sdpa":
        return f"its attention is {settled!r}, and only fused attention (sdpa) is applied to each row by itself"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it has no parameter position_ids"
    probe = probe_inputs(model, probe["input_ids"].device, rows=3)
    lengths = torch.tensor([LENGTH - 3, LENGTH, LENGTH - 5], device=probe["input_ids"].device)
    mask = probe["position_ids"] < lengths[:, None]
    alone = model(**known(model, probe | {"attention_mask": mask.long()}))[0]
    model.set_attn_implementation(ATTENTION)
    why = _fault(probe, model, mask, alone, bound)
    if why is not None:
        model.set_attn_implementation(settled)
    return why


def _fault(probe: Inputs, model: PreTrainedModel, mask: Tensor, alone: Tensor, bound: float) -> str | None:
    """What is wrong with the model's outputs for packed rows."""

    rows, columns = mask.nonzero(as_tuple=True)
    ids = probe["input_ids"]
    other = torch.cat([ids[:1].flip(1), ids[1:]])

    def found(ids: Tensor) -> Tensor:
        moved = packed(TokenInputs(ids, mask, probe["position_ids"], mask))
        return cast(Tensor, model(**known(model, moved.inputs), **moved.within)[0][0, moved.find(rows, columns)[1]])

    try:
        together, changed = found(ids), found(other)
    except Exception as error:
        return f"over packed rows it raises {type(error).__name__}: {error}"
    if not (distance := relative_error(together, alone[rows, columns])) <= bound:
        return f"its outputs for packed rows differ by {distance:.2g} from each row's (expected at most {bound:g})"
    if not (distance := relative_error(changed[rows > 0], together[rows > 0])) <= bound / 100:
        return f"in packed rows, the tokens of one row change the outputs of others by {distance:.2g}"
    return None
