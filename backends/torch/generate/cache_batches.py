"""KV in caches of transformers: for models whose cache is more than keys and values of all tokens.

Rows that join together form a batch with its own cache, padded on the left, and run through the model together.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import LongTensor, Tensor, nn

from flowrl.backends.torch.generate.decoder import Context, distinct
from flowrl.data.text.tokenizer import positions

if TYPE_CHECKING:  # they take seconds to import
    from transformers import DynamicCache, PreTrainedModel


@dataclass
class CacheBatch:
    """Rows that joined together: their cache, its attended columns (bool ``[row column]``), and the position of the
    next token (int64 ``[row 1]``)."""

    cache: DynamicCache
    attended: Tensor
    position: Tensor


class CacheBatches:
    """A `flowrl.backends.torch.generate.decoder.Memory`; the model must be in evaluation mode during all calls."""

    worth = 1.0  # few and large batches, since each needs its own forward pass

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known = set(inspect.signature(model.forward).parameters)
        self._cache = "cache_params" if "cache_params" in self._known else "past_key_values"
        self._batches: list[CacheBatch] = []
        self.computed = 0

    def decoding(self) -> AbstractContextManager[None]:
        """No change to the model."""
        return nullcontext()

    def clear(self) -> None:
        """Drop all rows."""
        self._batches = []

    def join(self, contexts: Sequence[Context]) -> Tensor:
        """Append rows; logits ``[row vocab]`` after their contexts."""
        device = self._model.device
        first, copies = distinct([context.ids for context in contexts])
        rows = [contexts[i].ids for i in first]
        self.computed += sum(map(len, rows))
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        attended = (
            torch.arange(width - 1, -1, -1, device=device) < torch.tensor(list(map(len, rows)), device=device)[:, None]
        )
        cache = self.new_cache()
        logits = self.step(ids, attended, positions(attended), cache)
        chosen = torch.tensor(copies, device=device)
        cache.reorder_cache(cast(LongTensor, chosen))
        attended = attended[chosen]
        self._batches.append(CacheBatch(cache, attended, attended.sum(1, keepdim=True)))
        return logits[chosen]

    def extend(self, tokens: Tensor) -> Tensor:
        """Append a token to every row, int64 ``[row]``; logits ``[row vocab]`` after it."""
        logits = []
        parts = tokens.split([len(batch.attended) for batch in self._batches])
        for batch, part in zip(self._batches, parts, strict=True):
            batch.attended = nn.functional.pad(batch.attended, (0, 1), value=True)
            logits.append(self.step(part[:, None], batch.attended, batch.position, batch.cache))
            batch.position = batch.position + 1
        return torch.cat(logits)

    def leave(self, ended: Sequence[int]) -> list[int]:
        """Remove rows; returns the old numbers of the remaining ones, in order."""
        removed, start, order = set(ended), 0, list[int]()
        for batch in self._batches:
            rows = range(start, start + len(batch.attended))
            remaining = [row for row in rows if row not in removed]
            if len(remaining) < len(rows):
                numbers = [row - start for row in remaining]
                chosen = torch.tensor(numbers, dtype=torch.int64, device=batch.attended.device)
                batch.attended, batch.position = batch.attended[chosen], batch.position[chosen]
                if remaining:
                    batch.cache.reorder_cache(cast(LongTensor, chosen))
            start, order = rows.stop, order + remaining
        self._batches = [batch for batch in self._batches if len(batch.attended)]
        return order

    def retain(self, row: int, ids: list[int]) -> None:
        """Nothing: a row cannot leave its batch with its cache."""

    def seal(self) -> None:
        """Nothing: rows share their cache with none that join later."""

    def new_cache(self) -> DynamicCache:
        """An empty cache for the model."""
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def step(self, ids: Tensor, attention: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the token after the last column: ``[rows vocab]``."""
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": position,
            self._cache: cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if self._cache == "cache_params" and ids.shape[1] < attention.shape[1]:
            del inputs["attention_mask"]  # a state-space model has no past to mask
        return cast(Tensor, self._model(**{n: x for n, x in inputs.items() if n in self._known}).logits[:, -1])
