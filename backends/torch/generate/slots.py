"""KV written in place: for models of plain full attention.

Keys and values are in buffers ``[layer slot kv_head width head_dim]``, each token at its own position from the left, so
no row is padded for another, and none is copied when another ends. Rows are the first slots; when one leaves, the last
one takes its slot. `suits` tests whether this is correct for a model.
"""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowrl.backends.torch.generate.decoder import Context, common, distinct
from flowrl.backends.torch.generate.passes import Decode, Extend, Prefill
from flowrl.backends.torch.probes import Inputs, known, relative_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUMBERS = itertools.count()
"""Numbers the attention functions of models in transformers while they decode."""

SHARED = 16
"""The fewest tokens of a common prefix that is computed once."""

STEP = 64
"""The width of a buffer is a multiple of as many columns."""

HARMLESS = {"position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "is_causal"}
"""Arguments that attention may ignore; with any others, the model is not suitable."""


class RetainedSlot(NamedTuple):
    """The KV of a row: its tokens, and their keys and values ``[layer kv_head token head_dim]``."""

    ids: list[int]
    keys: Tensor
    values: Tensor


class _Layer(CacheLayerMixin):
    """The cache of a layer, as transformers sees it."""

    is_sliding = False

    def __init__(self, slots: Slots, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._index = slots, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._slots.store(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._slots.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0

    def get_max_length(self) -> int:
        return self._slots.width


class Slots:
    """A `flowrl.backends.torch.generate.decoder.Memory` of a model that `suits`, in evaluation mode in all calls."""

    worth = 1 / 8

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = f"flowrl_slots_{next(NUMBERS)}"
        self._known = set(inspect.signature(model.forward).parameters)
        self._layers = len(DynamicCache(config=model.config).layers)
        self._cache = Cache(layers=[_Layer(self, i) for i in range(self._layers)])
        self.attended = False
        """Whether the model has called this attention."""
        self.computed = 0
        self.clear()

    @property
    def width(self) -> int:
        """Columns of the buffers."""
        return 0 if self._keys is None else self._keys.shape[3]

    def clear(self) -> None:
        """Drop all rows and release their memory."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._pass: Prefill | Extend | Decode | None = None
        self._contexts: list[list[int]] = []  # the context of each row; empty if it is sealed
        self._lengths = np.zeros(0, dtype=np.int64)  # tokens with KV
        self._positions = torch.zeros(0, dtype=torch.int64, device=self._model.device)  # the same, on the device
        self._size = (0, 0)  # needed slots and columns

    # Called by transformers in a forward pass

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a layer; returns those to attend to."""
        if self._keys is None:
            kind = keys.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self._keys, self._values = (
                self._buffer(x.shape[1], x.shape[3], autocast or x.dtype) for x in (keys, values)
            )
        assert self._pass is not None and self._values is not None
        return self._pass.store(self._keys[layer], keys), self._pass.store(self._values[layer], values)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention with the signature of transformers' `ALL_ATTENTION_FUNCTIONS`: queries ``[row head column
        head_dim]``."""
        unknown = [n for n, x in others.items() if x is not None and x is not False and n not in HARMLESS]
        if attention_mask is not None or unknown:
            raise TypeError(f"attention of {type(module).__name__} is not plain: it has {unknown or 'a mask'}")
        assert self._pass is not None
        self.attended = True
        return self._pass.attend(query, key, value, scaling or query.shape[-1] ** -0.5), None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Set the model's attention to this one in the block."""
        config = self._model.config
        before = config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[self._name] = self.attend
        config._attn_implementation = self._name
        try:
            yield
        finally:
            config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS[self._name]

    def _forward(self, kind: Prefill | Extend | Decode, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[row vocab]`` after the last column of tokens ``[row column]`` at these positions."""
        self._pass = kind
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),  # models make no mask of it for an unknown attention
            "position_ids": positions,
            "past_key_values": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        output = self._model(**{name: value for name, value in inputs.items() if name in self._known})
        return cast(Tensor, output.logits[:, -1])

    # Rows

    def join(self, contexts: Sequence[Context]) -> Tensor:
        """Append rows; logits ``[row vocab]`` after their contexts.

        Reuses retained KV and common prefixes with current rows; equal contexts and the common prefix of all new rows
        are computed once.
        """
        start = len(self._contexts)
        first, copies = distinct([context.ids for context in contexts])
        self._reserve(start + len(contexts), max(len(context.ids) for context in contexts))
        rows = [(start + i, contexts[i].ids) for i in first]
        there = sorted((ids, slot) for slot, ids in enumerate(self._contexts))
        seen = [self._recall(start + i, contexts[i], there) for i in first]
        seen = self._share(rows, seen)
        parts, order = list[Tensor](), list[int]()
        for known_part in (False, True):
            if chosen := [k for k, n in enumerate(seen) if (n > 0) is known_part]:
                parts.append(self._compute([rows[k] for k in chosen], [seen[k] for k in chosen]))
                order += chosen
        twins = [i for i in range(len(contexts)) if first[copies[i]] != i]
        if twins:
            self._copy([start + i for i in twins], [start + first[copies[i]] for i in twins], self._size[1])
        self._contexts += [context.ids for context in contexts]
        self._set_lengths(np.append(self._lengths, [len(context.ids) for context in contexts]))
        logits = torch.cat(parts)
        return logits if order == copies else logits[[order.index(k) for k in copies]]

    def extend(self, tokens: Tensor) -> Tensor:
        """Append a token to every row, int64 ``[row]``; logits ``[row vocab]`` after it."""
        low, top = int(self._lengths.min()), int(self._lengths.max()) + 1
        self._reserve(len(tokens), top)
        positions = self._positions
        logits = self._forward(Decode(positions, low, top), tokens[:, None], positions[:, None])
        self._lengths += 1
        self._positions = positions + 1
        return logits

    def leave(self, ended: Sequence[int]) -> list[int]:
        """Remove rows; the last ones take their slots. Returns the old numbers of the remaining rows in their new
        order."""
        rows, removed = len(self._contexts), set(ended)
        remaining = rows - len(removed)
        holes = [i for i in sorted(removed) if i < remaining]
        movers = [i for i in range(remaining, rows) if i not in removed]
        if movers:
            self._copy(holes, movers, int(self._lengths[movers].max()))
        order = list(range(remaining))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self._contexts = [self._contexts[i] for i in order]
        self._set_lengths(self._lengths[order])
        return order

    def retain(self, row: int, ids: list[int]) -> RetainedSlot | None:
        """The KV of a row with the tokens `ids`, for its next turn; None if it was sealed."""
        if not self._contexts[row]:
            return None
        assert self._keys is not None and self._values is not None
        length = int(self._lengths[row])
        keys, values = (buffer[:, row, :, :length].clone() for buffer in (self._keys, self._values))
        return RetainedSlot(ids[:length], keys, values)

    def seal(self) -> None:
        """Current rows have KV of older weights: later rows do not reuse it."""
        self._contexts = [[] for _ in self._contexts]

    def _recall(self, slot: int, context: Context, there: Sequence[tuple[list[int], int]]) -> int:
        """Fill a slot with cached KV of a context's prefix, retained or of a current row; returns its length."""
        ids, retained = context.ids, cast("RetainedSlot | None", context.retained)
        if retained is not None and (length := min(common([ids, retained.ids]), len(ids) - 1)):
            if self._keys is None or self._values is None:
                self._keys, self._values = (self._buffer(x.shape[1], x.shape[3], x.dtype) for x in retained[1:])
            self._keys[:, slot, :, :length] = retained.keys[:, :, :length]
            self._values[:, slot, :, :length] = retained.values[:, :, :length]
            return length
        if there:
            place = bisect(there, ids, key=lambda row: row[0])  # neighbors have the longest common prefixes
            near = there[max(place - 1, 0) : place + 1]
            length, source = max((min(common([ids, other]), len(ids) - 1), row) for other, row in near)
            if length >= SHARED:
                self._copy([slot], [source], length)
                return length
        return 0

    def _share(self, rows: Sequence[tuple[int, list[int]]], seen: list[int]) -> list[int]:
        """Compute the common prefix of all rows without cached KV once; returns the cached length of each row."""
        new = [k for k, n in enumerate(seen) if n == 0]
        if len(new) < 2:
            return seen
        contexts = [rows[k][1] for k in new]
        length = min(common(contexts), min(map(len, contexts)) - 1)
        if length < SHARED:
            return seen
        source = rows[new[0]][0]
        self._compute([(source, contexts[0][:length])], [0])
        self._copy([rows[k][0] for k in new[1:]], [source] * (len(new) - 1), length)
        return [n or length for n in seen]

    def _compute(self, rows: Sequence[tuple[int, list[int]]], seen: Sequence[int]) -> Tensor:
        """Logits after contexts ``(slot, ids)``; the first `seen` tokens have KV, in all rows or in none."""
        device = self._model.device
        slots = torch.tensor([slot for slot, _ in rows], device=device)
        length = torch.tensor([len(ids) for _, ids in rows])
        begun = torch.tensor(seen)
        self.computed += int((length - begun).sum())
        columns = int((length - begun).max())
        tokens = [ids[n:] + ids[-1:] * (columns - len(ids) + n) for (_, ids), n in zip(rows, seen, strict=True)]
        positions = torch.minimum(begun[:, None] + torch.arange(columns), length[:, None] - 1)
        ids, places = torch.tensor(tokens, device=device), positions.to(device)
        if not any(seen):
            last = None if int(length.min()) == columns else (length - 1).to(device)
            return self._forward(Prefill(slots, last), ids, places)
        top = int(length.max())
        mask = torch.arange(top, device=device) <= places[:, None, :, None]
        return self._forward(Extend(slots, places, top, mask), ids, places)

    # Buffers

    def _reserve(self, slots: int, columns: int) -> None:
        """Make room for this many rows and tokens per row; grows by at least a half, so that it happens rarely."""
        wide = -(-columns // STEP) * STEP
        if self._keys is None or self._values is None:
            self._size = (max(slots, self._size[0]), max(wide, self._size[1]))
            return
        have, width = self._size
        if slots <= have and columns <= width:
            return
        self._size = (
            have if slots <= have else max(slots, have + have // 2),
            width if columns <= width else max(wide, width + width // 2 // STEP * STEP),
        )
        grown = []
        for old in (self._keys, self._values):
            new = self._buffer(old.shape[2], old.shape[4], old.dtype)
            new[:, :have, :, :width] = old
            grown.append(new)
        self._keys, self._values = grown

    def _buffer(self, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros, since unwritten entries are masked, and 0 times NaN would be NaN."""
        slots, columns = self._size
        return torch.zeros(self._layers, slots, heads, columns, size, dtype=dtype, device=self._model.device)

    def _copy(self, slots: Sequence[int], sources: Sequence[int], length: int) -> None:
        """Copy the KV of the first `length` tokens from row to row."""
        assert self._keys is not None and self._values is not None
        to, of = (torch.tensor(x, device=self._keys.device) for x in (slots, sources))
        for buffer in (self._keys, self._values):
            buffer[:, to, :, :length] = buffer[:, of, :, :length]

    def _set_lengths(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._positions = torch.from_numpy(lengths.copy()).to(self._model.device)


def suits(model: PreTrainedModel, probe: Inputs, bound: float) -> bool:
    """Whether `Slots` compute the same as a model without a cache.

    Its configuration must have only full attention, its layers must pass no further arguments to attention, and the
    logits must equal those without a cache, for rows of unequal length that join, repeat others, end and continue.

    `probe` (`flowrl.backends.torch.probes.probe_inputs`) has two rows; `bound` is the largest relative error.
    """
    config = model.config
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers) or config.get_text_config() is not config:
        return False
    slots = Slots(model)
    try:
        with slots.decoding():
            found, contexts = _tried(slots, *probe["input_ids"].tolist())
    except Exception:  # the model needs another kind of cache
        return False
    truth = []
    for ids in contexts:
        inputs = {"input_ids": torch.tensor([ids], device=found.device), "use_cache": False}
        truth.append(model(**known(model, inputs)).logits[0, -1])
    return slots.attended and relative_error(found, torch.stack(truth)) <= bound


def _tried(slots: Slots, one: list[int], two: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Logits after contexts of all kinds (joined, extended, continued), and these contexts."""
    logits, contexts, rows = list[Tensor](), list[list[int]](), list[list[int]]()

    def join(*joining: Context) -> None:
        logits.append(slots.join(joining))
        contexts.extend(context.ids for context in joining)
        rows.extend(context.ids for context in joining)

    def extend(*tokens: int) -> None:
        logits.append(slots.extend(torch.tensor(tokens, device=logits[0].device)))
        rows[:] = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        contexts.extend(rows)

    join(Context(one[:5]), Context(two[:3]), Context(one[:5]))
    extend(7, 6, 5)
    continued, retained = [*rows[1], *one[:4]], slots.retain(1, rows[1])
    rows[:] = [rows[i] for i in slots.leave([0, 1])]
    join(Context(continued, retained), Context(two))
    extend(1, 2, 3)
    slots.leave([1])
    rows.pop(1)
    extend(4, 5)
    return torch.cat(logits), contexts
