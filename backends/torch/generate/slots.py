"""KV of rows that come and go, written in place: for models of plain full attention.

Keys and values stand in buffers ``[layer slot kv_head width head_dim]``, each token at its own position from the left,
so that no row is padded for another, and none is copied when another ends. The rows are the first slots; where one
leaves, the last one takes its slot. Whether all this is right for a model is decided by `suits`, which tries it out.
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
from flowrl.backends.torch.probes import Inputs, apart, known

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUMBERS = itertools.count()
"""By which transformers tells the attention of one model from that of another, while they decode."""

SHARED = 16
"""Tokens; a beginning that rows have in common is computed once where it has as many."""

STEP = 64
"""Columns; a buffer is as wide as a multiple of them."""

HARMLESS = {"position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "is_causal"}
"""What layers hand to attention that it need not heed; of anything else we know too little to attend ourselves."""


class RetainedSlot(NamedTuple):
    """What was computed of a row: its tokens, and their keys and values ``[layer kv_head token head_dim]``."""

    ids: list[int]
    keys: Tensor
    values: Tensor


class _Layer(CacheLayerMixin):
    """What transformers takes for the cache of a layer."""

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
    """The memory of a decoder over a model that `suits`; see `flowrl.backends.torch.generate.decoder.Memory`.

    Args:
        model: a causal LM, in evaluation mode whenever this computes.
    """

    worth = 1 / 8

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = f"flowrl_slots_{next(NUMBERS)}"
        self._known = set(inspect.signature(model.forward).parameters)
        self._layers = len(DynamicCache(config=model.config).layers)
        self._cache = Cache(layers=[_Layer(self, i) for i in range(self._layers)])
        self.attended = False
        """Whether the model has used the attention of this."""
        self.computed = 0
        self.clear()

    @property
    def width(self) -> int:
        """Columns of the buffers."""
        return 0 if self._keys is None else self._keys.shape[3]

    def clear(self) -> None:
        """Forget all rows, and give their memory back."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._pass: Prefill | Extend | Decode | None = None
        self._contexts: list[list[int]] = []  # what each row joined with; nothing where it is sealed
        self._lengths = np.zeros(0, dtype=np.int64)  # tokens whose KV is there
        self._positions = torch.zeros(0, dtype=torch.int64, device=self._model.device)  # the same, on the device
        self._size = (0, 0)  # slots and columns that are wanted

    # What transformers calls in a forward pass

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a layer has computed; what it is to attend to."""
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
        """Attention, as transformers' `ALL_ATTENTION_FUNCTIONS` have it: queries ``[row head column head_dim]``."""
        unknown = [n for n, x in others.items() if x is not None and x is not False and n not in HARMLESS]
        if attention_mask is not None or unknown:
            raise TypeError(f"attention of {type(module).__name__} is not plain: it takes {unknown or 'a mask'}")
        assert self._pass is not None
        self.attended = True
        return self._pass.attend(query, key, value, scaling or query.shape[-1] ** -0.5), None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Within, the model attends by this; afterwards, also after an error, as it did before."""
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
            "attention_mask": torch.ones_like(ids),  # no model makes a mask of it for attention that it does not know
            "position_ids": positions,
            "past_key_values": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        output = self._model(**{name: value for name, value in inputs.items() if name in self._known})
        return cast(Tensor, output.logits[:, -1])

    # Rows

    def join(self, contexts: Sequence[Context]) -> Tensor:
        """Add rows behind those that are there; logits ``[row vocab]`` after their contexts.

        Equal contexts are computed once, and so are what was kept of a row, and beginnings that rows have in common
        with each other or with rows that are there.
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
        """Add a token to every row, int64 ``[row]``; logits ``[row vocab]`` after it."""
        low, top = int(self._lengths.min()), int(self._lengths.max()) + 1
        self._reserve(len(tokens), top)
        positions = self._positions
        logits = self._forward(Decode(positions, low, top), tokens[:, None], positions[:, None])
        self._lengths += 1
        self._positions = positions + 1
        return logits

    def leave(self, ended: Sequence[int]) -> list[int]:
        """Let rows go; the last ones take their slots. Which row each is that stays, in their new order."""
        rows, gone = len(self._contexts), set(ended)
        left = rows - len(gone)
        holes = [i for i in sorted(gone) if i < left]
        movers = [i for i in range(left, rows) if i not in gone]
        if movers:
            self._copy(holes, movers, int(self._lengths[movers].max()))
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self._contexts = [self._contexts[i] for i in order]
        self._set_lengths(self._lengths[order])
        return order

    def retain(self, row: int, ids: list[int]) -> RetainedSlot | None:
        """What was computed of a row whose tokens are `ids`, for when it comes again; None of one that was sealed."""
        if not self._contexts[row]:
            return None
        assert self._keys is not None and self._values is not None
        length = int(self._lengths[row])
        keys, values = (buffer[:, row, :, :length].clone() for buffer in (self._keys, self._values))
        return RetainedSlot(ids[:length], keys, values)

    def seal(self) -> None:
        """Rows that are there are of older weights now: none that joins begins as they do."""
        self._contexts = [[] for _ in self._contexts]

    def _recall(self, slot: int, context: Context, there: Sequence[tuple[list[int], int]]) -> int:
        """Fill a slot with what is known of a context, from its own row or from one that is there; how many tokens."""
        ids, kept = context.ids, cast("RetainedSlot | None", context.kept)
        if kept is not None and (length := min(common([ids, kept.ids]), len(ids) - 1)):
            if self._keys is None or self._values is None:
                self._keys, self._values = (self._buffer(x.shape[1], x.shape[3], x.dtype) for x in kept[1:])
            self._keys[:, slot, :, :length] = kept.keys[:, :, :length]
            self._values[:, slot, :, :length] = kept.values[:, :, :length]
            return length
        if there:
            place = bisect(there, ids, key=lambda row: row[0])  # beginnings in common are longest among neighbours
            near = there[max(place - 1, 0) : place + 1]
            length, source = max((min(common([ids, other]), len(ids) - 1), row) for other, row in near)
            if length >= SHARED:
                self._copy([slot], [source], length)
                return length
        return 0

    def _share(self, rows: Sequence[tuple[int, list[int]]], seen: list[int]) -> list[int]:
        """Compute what all rows of which nothing is known begin with, once; how much is known of each row then."""
        fresh = [k for k, n in enumerate(seen) if n == 0]
        if len(fresh) < 2:
            return seen
        contexts = [rows[k][1] for k in fresh]
        length = min(common(contexts), min(map(len, contexts)) - 1)
        if length < SHARED:
            return seen
        source = rows[fresh[0]][0]
        self._compute([(source, contexts[0][:length])], [0])
        self._copy([rows[k][0] for k in fresh[1:]], [source] * (len(fresh) - 1), length)
        return [n or length for n in seen]

    def _compute(self, rows: Sequence[tuple[int, list[int]]], seen: Sequence[int]) -> Tensor:
        """Logits after contexts ``(slot, ids)``; the KV of the first `seen` tokens is there, of all rows or of none."""
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
        """Have room for so many rows of so many tokens; what grows, grows by half at least, so that it seldom does."""
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
        """Zeros, since what nothing was written to is masked, and 0 times anything but a number is none."""
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
    """Whether `Slots` compute what a model computes without a cache.

    Its configuration must know of full attention only, and its layers hand nothing else to attention; and the logits
    must be those of a pass without a cache, for rows of unequal length that join, repeat others, end and come again.

    Args:
        model: a causal LM, in evaluation mode.
        probe: see `flowrl.backends.torch.probes.probe_inputs`; of two rows.
        bound: how far they may be apart; see `flowrl.backends.torch.probes.tolerance`.
    """
    config = model.config
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers) or config.get_text_config() is not config:
        return False
    slots = Slots(model)
    try:
        with slots.decoding():
            found, contexts = _tried(slots, *probe["input_ids"].tolist())
    except Exception:  # it differs in some other way, and needs a cache of its own kind
        return False
    truth = []
    for ids in contexts:
        inputs = {"input_ids": torch.tensor([ids], device=found.device), "use_cache": False}
        truth.append(model(**known(model, inputs)).logits[0, -1])
    return slots.attended and apart(found, torch.stack(truth)) <= bound


def _tried(slots: Slots, one: list[int], two: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Logits after contexts that have come about in all ways there are, and these contexts."""
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
    again, kept = [*rows[1], *one[:4]], slots.retain(1, rows[1])
    rows[:] = [rows[i] for i in slots.leave([0, 1])]
    join(Context(again, kept), Context(two))
    extend(1, 2, 3)
    slots.leave([1])
    rows.pop(1)
    extend(4, 5)
    return torch.cat(logits), contexts
