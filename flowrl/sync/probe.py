"""The probe: after a sync, an engine and the trainer must score the same few tokens alike.

A digest proves that tensors arrived; what an engine made of them (fused, transposed, quantised, or silently dropped)
shows in its log-probs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.protocols import Scorer
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


class Scores(NamedTuple):
    """Log-probs of ``TOKENS[1:]``, natural, at temperature 1.

    Args:
        engine: by an engine, after a sync.
        trainer: by the trainer whose weights it took over.
    """

    engine: tuple[float, ...]
    trainer: tuple[float, ...]


def refuse_other_weights(engine: str, log_probs: Sequence[float], source: Scorer, tolerance: float) -> Scores:
    """Hold an engine's log-probs of ``TOKENS[1:]`` against those of the trainer that it took its weights from.

    Args:
        engine: its name, for the error.
        log_probs: natural, at temperature 1, one for each of ``TOKENS[1:]``.
        source: the trainer.
        tolerance: nats, of the mean absolute difference.

    Returns:
        the scores of both, for `refuse_old_weights`.

    Raises:
        SyncError: it is above `tolerance`, or not a number.
    """
    expected = source.log_probs(probe())[0].cpu()
    scores = Scores(tuple(log_probs), tuple(expected.tolist()))
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
    return scores


def refuse_old_weights(engine: str, scores: Scores, before: Scores | None, resolution: float) -> Scores:
    """Refuse an engine that answers as before, bit by bit, although the trainer does not.

    An update may be smaller than the tolerance of `refuse_other_weights`, and smaller than what weights in bfloat16
    can show. What the trainer has moved is counted from where the engine last moved, so that small updates add up:
    an engine that takes over none of them is found after some syncs.

    Args:
        engine: its name, for the error.
        scores: after this sync.
        before: what this returned after the last one; None at first.
        resolution: nats; a larger mean absolute change of the trainer's shows in some of the engine's.

    Returns:
        what to hold the next scores against.

    Raises:
        SyncError: the trainer's have moved by more than `resolution` since the engine's last did.
    """
    if before is None or scores.engine != before.engine:
        return scores
    moved = float((torch.tensor(scores.trainer) - torch.tensor(before.trainer)).abs().mean())
    if moved > resolution:
        raise SyncError(
            f"after the sync {engine} scores {len(scores.engine)} tokens exactly as it did before, bit by bit, and the "
            f"trainer has moved by {moved:.3g} nats a token on the mean since the scores of {engine} last changed; "
            f"expected them to change with more than {resolution:g}, so it keeps old weights. Look for what it caches "
            f"or freezes, or merges when it starts; the next engine.sync(trainer) starts it anew."
        )
    return before
