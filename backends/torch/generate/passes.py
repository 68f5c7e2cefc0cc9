"""The three kinds of forward pass with KV written in place: what each writes, and attends to.

Buffers are ``[slot kv_head width head_dim]``. Queries, keys and values of a layer are ``[row head column head_dim]``;
attention returns ``[row column head head_dim]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Prefill:
    """A pass over full contexts ``[row column]``, padded on the right, with causal attention.

    Args:
        slots: int64 ``[row]``, or a slice.
        last: int64 ``[row]``, the column of the last token of each row; None if it is the last column in all.
    """

    slots: Tensor | slice
    last: Tensor | None

    def store(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[self.slots, :, : new.shape[2]] = new.to(buffer.dtype)
        return new

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        grouped = query.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
        out = out.transpose(1, 2)
        if self.last is not None:
            # Padding repeats the last token, and its output in the last column is set to that of the last token. So it
            # equals the last token in every layer, and the last column has the logits of every row.
            out = out.contiguous()
            out[:, -1] = out[torch.arange(len(out), device=out.device), self.last]
        return out


@dataclass(frozen=True)
class Extend:
    """A pass over further tokens ``[row column]`` of rows with a past; padding repeats the last one, at its position.

    Args:
        slots: int64 ``[row]``.
        positions: int64 ``[row column]``.
        top: used columns of the buffers.
        mask: bool ``[row 1 column top]``, the attended columns.
    """

    slots: Tensor
    positions: Tensor
    top: int
    mask: Tensor

    def store(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[self.slots[:, None], :, self.positions] = new.transpose(1, 2).to(buffer.dtype)
        return buffer[self.slots, :, : self.top]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        grouped = query.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(query, keys, values, self.mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)


class Decode:
    """A pass over one further token of every row; rows are the first slots.

    Args:
        positions: int64 ``[row]``.
        low, top: the lowest position, and the used columns of the buffers: one more than the highest.
    """

    def __init__(self, positions: Tensor, low: int, top: int) -> None:
        self._positions, self._rows, self._top = positions, len(positions), top
        self._equal = low + 1 == top
        self._places: Tensor | None = None  # indices of the new entries in a buffer as ``[place head_dim]``
        self._mask: Tensor | None = None  # added to scores
        self._masks: Tensor | None = None  # the same per query head, for all layers
        if not self._equal:
            beyond = torch.arange(top, device=positions.device) > positions[:, None, None, None]
            self._mask = torch.where(beyond, -torch.inf, 0.0)

    def store(self, buffer: Tensor, new: Tensor) -> Tensor:
        if self._equal:
            buffer[: self._rows, :, self._top - 1] = new[:, :, 0]
        else:
            if self._places is None:
                _, heads, width, _ = buffer.shape
                lines = torch.arange(self._rows * heads, device=buffer.device).view(-1, heads)
                self._places = (lines * width + self._positions[:, None]).flatten()
            buffer.view(-1, buffer.shape[3]).index_copy_(0, self._places, new.flatten(0, 2).to(buffer.dtype))
        return buffer[: self._rows, :, : self._top]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Heads that share keys are the queries of one attention over them, without copies of keys and values.

        In float32 two batched products are faster than torch's fused attention for so few queries; in other dtypes
        fused attention sums in float32.
        """
        rows, heads, _, size = query.shape
        kv = keys.shape[1]
        query = query.reshape(rows, kv, heads // kv, size)
        if keys.dtype != torch.float32:
            mask = None if self._mask is None else self._mask.to(keys.dtype)
            out = scaled_dot_product_attention(query, keys, values, mask, scale=scale)
        else:
            query, keys, values = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
            if self._mask is None:
                scores = torch.bmm(query * scale, keys.transpose(1, 2))
            else:
                if self._masks is None:
                    self._masks = self._mask.expand(-1, kv, heads // kv, -1).flatten(0, 1)
                scores = torch.baddbmm(self._masks, query, keys.transpose(1, 2), alpha=scale)
            out = torch.bmm(scores.softmax(-1), values)
        return out.view(rows, 1, heads, -1)
