"""KV as transformers keeps it: for models whose cache is more than keys and values of all tokens.

Rows that join together form a cohort with a cache of its own, padded on the left, and go through the model together.
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
    """Rows that joined together: their cache, what of its columns is no padding (bool ``[row column]``), and the
    position of the next token (int64 ``[row 1]``)."""

    cache: DynamicCache
    attended: Tensor
    position: Tensor


class CacheBatches:
    """The memory of a decoder; see `flowrl.backends.torch.generate.decoder.Memory`.

    Args:
        model: a causal LM, in evaluation mode whenever this computes.
    """

    worth = 1.0  # few and large cohorts, since each takes a forward pass of its own

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known = set(inspect.signature(model.forward).parameters)
        self._cache = "cache_params" if "cache_params" in self._known else "past_key_values"
        self._cohorts: list[CacheBatch] = []
        self.computed = 0

    def decoding(self) -> AbstractContextManager[None]:
        """The model computes as it is."""
        return nullcontext()

    def clear(self) -> None:
        """Forget all rows."""
        self._cohorts = []

    def join(self, contexts: Sequence[Context]) -> Tensor:
        """Add rows behind those that are there; logits ``[row vocab]`` after their contexts."""
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
        self._cohorts.append(CacheBatch(cache, attended, attended.sum(1, keepdim=True)))
        return logits[chosen]

    def extend(self, tokens: Tensor) -> Tensor:
        """Add a token to every row, int64 ``[row]``; logits ``[row vocab]`` after it."""
        logits = []
        parts = tokens.split([len(cohort.attended) for cohort in self._cohorts])
        for cohort, part in zip(self._cohorts, parts, strict=True):
            cohort.attended = nn.functional.pad(cohort.attended, (0, 1), value=True)
            logits.append(self.step(part[:, None], cohort.attended, cohort.position, cohort.cache))
            cohort.position = cohort.position + 1
        return torch.cat(logits)

    def leave(self, ended: Sequence[int]) -> list[int]:
        """Let rows go. Which row each is that stays, in order."""
        gone, start, order = set(ended), 0, list[int]()
        for cohort in self._cohorts:
            rows = range(start, start + len(cohort.attended))
            on = [row for row in rows if row not in gone]
            if len(on) < len(rows):
                chosen = torch.tensor([row - start for row in on], dtype=torch.int64, device=cohort.attended.device)
                cohort.attended, cohort.position = cohort.attended[chosen], cohort.position[chosen]
                if on:
                    cohort.cache.reorder_cache(cast(LongTensor, chosen))
            start, order = rows.stop, order + on
        self._cohorts = [cohort for cohort in self._cohorts if len(cohort.attended)]
        return order

    def retain(self, row: int, ids: list[int]) -> None:
        """Nothing: a row cannot leave its cohort with its cache."""

    def seal(self) -> None:
        """Nothing need be done: rows share their cache with none that join later."""

    def new_cache(self) -> DynamicCache:
        """An empty one, as the model wants it."""
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
            del inputs["attention_mask"]  # a state-space model keeps no past that could be masked
        return cast(Tensor, self._model(**{n: x for n, x in inputs.items() if n in self._known}).logits[:, -1])
