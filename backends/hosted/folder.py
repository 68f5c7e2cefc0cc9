"""`FolderWeights`: the source of a frozen engine's only sync, at its start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.backends.torch.load import load_causal_lm
from flowrl.records import FROZEN, Sequences
from flowrl.sync.digest import named_weights


class FolderWeights:
    """The weights of a folder as transformers reads them, in float32 on the CPU; to an engine, a trainer at the
    version `FROZEN`.

    So a frozen engine is checked against transformers as every sync against the trainer.
    """

    version: ClassVar[int] = FROZEN

    def __init__(self, folder: str) -> None:
        self._model = load_causal_lm(folder, attention="eager").eval()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, under their Hugging Face names, sorted, tied ones once."""
        return named_weights(self._model)

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """Log-probs of the response tokens at temperature 1: float32 ``[batch response]``."""
        width = batch.response_mask.shape[1]
        logits: Tensor = self._model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
        ).logits[:, -width - 1 : -1]
        return logits.log_softmax(-1).gather(-1, batch.input_ids[:, -width:, None]).squeeze(-1)
