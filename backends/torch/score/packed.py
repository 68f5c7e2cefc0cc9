"""Rows one behind the other, without padding: a model runs over them as over one row, and attends within each.

Where rows end is said in the call of the model. Transformers hands that on to attention, also where a layer is computed
again in a backward pass. Not every architecture lets it through, or keeps tokens of two rows apart in all its layers;
`why_not_packed` tries that out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowrl.backends.torch.probes import LENGTH, Inputs, apart, known, probe_inputs
from flowrl.backends.torch.score.rows import Runs, TokenInputs, packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "flowrl_packed"
"""The name by which transformers knows `attend_apart`."""


class Window:
    """What a token attends to in a layer that does not look back all the way.

    Args:
        sees: of a row, a query and a key, by their indices: whether it attends to that.
        size: a row of as many tokens is attended to as a whole.
    """

    def __init__(self, sees: Callable[..., Tensor], size: int) -> None:
        self._sees, self._size = sees, size
        self._masks: dict[int, Tensor] = {}

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        """Of a row of so many tokens: bool ``[1 1 query key]``, or None where all that stands before is attended to."""
        if tokens <= self._size:
            return None
        if tokens not in self._masks:
            at = torch.arange(tokens, device=device)
            first = at.new_zeros(())
            self._masks[tokens] = self._sees(first, first, at[:, None], at[None])[None, None]
        return self._masks[tokens]


def _mask(attention_mask: Tensor | None = None, **asked: Any) -> Window | Tensor | None:
    """What fused attention is given, as transformers' masks have it; of one row without padding, how far it looks."""
    plain = asked.get("allow_is_causal_skip", False) and not asked.get("use_vmap", False)
    one = attention_mask is not None and len(attention_mask) == 1 and asked["q_length"] == asked["kv_length"]
    if not (plain and one and cast(Tensor, attention_mask).all()):
        mask: Tensor | None = AttentionMaskInterface()["sdpa"](attention_mask=attention_mask, **asked)
        return mask
    size = asked.get("local_size")
    return None if size is None else Window(asked["mask_function"], size)


def attend_apart(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    packed: Runs | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Fused attention within each row of `packed`; without it, that of transformers.

    Args:
        query, key, value: ``[row head token head_dim]``; of packed rows, one row.
    """
    fused = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if packed is None:
        if isinstance(attention_mask, Window):
            attention_mask = attention_mask.mask(query.shape[2], query.device)
        return cast(tuple[Tensor, None], fused(layer, query, key, value, attention_mask, **settings))
    if isinstance(attention_mask, Tensor):
        raise TypeError(f"{type(layer).__name__} makes a mask of its own")
    sizes, out = [rows * tokens for rows, tokens in packed], list[Tensor]()
    for (rows, tokens), *parts in zip(packed, *(x.split(sizes, 2) for x in (query, key, value)), strict=True):
        rectangles = (x[0].unflatten(1, (rows, tokens)).transpose(0, 1) for x in parts)
        mask = None if attention_mask is None else attention_mask.mask(tokens, query.device)
        out.append(fused(layer, *rectangles, mask, **settings)[0].flatten(0, 1))
    return torch.cat(out)[None], None


AttentionInterface.register(ATTENTION, attend_apart)
AttentionMaskInterface.register(ATTENTION, _mask)


def why_not_packed(probe: Inputs, model: PreTrainedModel, bound: float) -> str | None:
    """Let `model` attend within packed rows, where that gives it the numbers of each row; or why it does not.

    Args:
        probe: see `flowrl.backends.torch.probes.probe_inputs`.
        model: what is run, with the attention that was settled on.
        bound: see `flowrl.backends.torch.probes.tolerance`.

    Returns:
        None, and the model attends by `attend_apart` from now on; else it attends as before.
    """
    settled = model.config._attn_implementation
    if settled != "sdpa":
        return f"its attention is {settled!r}, and only fused attention (sdpa) is applied to each row by itself"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids"
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
    """What is wrong with the model's numbers for packed rows."""

    rows, columns = mask.nonzero(as_tuple=True)
    ids = probe["input_ids"]
    other = torch.cat([ids[:1].flip(1), ids[1:]])

    def found(ids: Tensor) -> Tensor:
        moved = packed(TokenInputs(ids, mask, probe["position_ids"], mask))
        return cast(Tensor, model(**known(model, moved.inputs), **moved.within)[0][0, columns + moved.shifts[rows]])

    try:
        together, changed = found(ids), found(other)
    except Exception as error:
        return f"over packed rows it raises {type(error).__name__}: {error}"
    if not (distance := apart(together, alone[rows, columns])) <= bound:
        return f"its outputs for packed rows are {distance:.2g} off those of each row (expected at most {bound:g})"
    if not (distance := apart(changed[rows > 0], together[rows > 0])) <= bound / 100:
        return f"in packed rows, tokens of one move the outputs of others by {distance:.2g}"
    return None
