"""The probe: after a sync, an engine and the trainer must score the same few tokens alike.

A digest proves that tensors arrived; what an engine made of them (fused, transposed, quantised, or silently dropped)
shows in its log-probs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.engines import Scorer
from flowrl.errors import SyncError

TOKENS = (17, 3, 29, 8, 22, 11, 30, 5, 26, 14, 2, 19, 31, 7, 24, 12)
"""Any ids would do; these are in every vocabulary. A log-prob is normalised over the whole vocabulary, so each of them
depends on every row of the output embedding, and on every layer."""


class Probe(NamedTuple):
    """`TOKENS` as one sequence, all but the first its response: what `Scorer.log_probs` reads."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


def probe() -> Probe:
    """The sequence: ``[1 len(TOKENS)]`` ids, its response one token shorter, at temperature 1."""
    ids = torch.tensor([TOKENS])
    return Probe(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(len(TOKENS))[None],
        response_mask=torch.ones(1, len(TOKENS) - 1, dtype=torch.bool),
        temperature=torch.ones(1),
    )


def refuse_other_weights(engine: str, log_probs: Sequence[float], source: Scorer, tolerance: float) -> float:
    """Hold an engine's log-probs of ``TOKENS[1:]`` against those of the trainer that it took its weights from.

    Args:
        engine: its name, for the error.
        log_probs: natural, at temperature 1, one for each of ``TOKENS[1:]``.
        source: the trainer.
        tolerance: nats, of the mean absolute difference.

    Returns:
        the mean absolute difference, in nats.

    Raises:
        SyncError: it is above `tolerance`, or not a number.
    """
    expected = source.log_probs(probe())[0].cpu()
    difference = (torch.tensor(log_probs) - expected).abs()
    mean = float(difference.mean())
    if not mean <= tolerance:  # NaN is refused too
        raise SyncError(
            f"after the sync {engine} and the trainer score the same {len(difference)} tokens differently, by "
            f"{mean:.3g} nats a token on the mean and {float(difference.max()):.3g} at most; expected at most "
            f"{tolerance:g} on the mean, so the engine does not compute with the weights that it was sent. Look for "
            f"quantisation, adapters or kernels that it applies on top; if its arithmetic is that coarse by intent, "
            f"set tolerance=... there."
        )
    return mean
