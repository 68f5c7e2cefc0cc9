"""The probe: after a sync, the engine and the trainer must give the same few tokens the same log-probs.

A digest proves that tensors arrived. What an engine made of them (fused, transposed, quantised or silently dropped)
shows in its log-probs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.protocols import Scorer
from flowrl.errors import SyncError

TOKENS = (17, 3, 29, 8, 22, 11, 30, 5, 26, 14, 2, 19, 31, 7, 24, 12)
"""Any ids would do; these are in every vocabulary. A log-prob is normalised over the whole vocabulary, so each one
depends on every row of the output embedding and on every layer."""


class Probe(NamedTuple):
    """`TOKENS` as one sequence, as `Scorer.log_probs` reads it: all but the first are its response."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


def probe() -> Probe:
    """The probe: ids ``[1 len(TOKENS)]``, a response that is one token shorter, temperature 1."""
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
        engine: the engine's, after a sync.
        trainer: those of the trainer whose weights it took over.
    """

    engine: tuple[float, ...]
    trainer: tuple[float, ...]


def refuse_other_weights(engine: str, log_probs: Sequence[float], source: Scorer, tolerance: float) -> Scores:
    """Compare an engine's log-probs of ``TOKENS[1:]`` with those of the trainer whose weights it took over.

    Args:
        engine: the engine's name, for the error.
        log_probs: natural, at temperature 1, one for each of ``TOKENS[1:]``.
        source: the trainer.
        tolerance: the largest mean absolute difference that is accepted, in nats.

    Returns:
        the scores of both, for `refuse_old_weights`.

    Raises:
        SyncError: the mean absolute difference is above `tolerance`, or not a number.
    """
    expected = source.log_probs(probe())[0].cpu()
    scores = Scores(tuple(log_probs), tuple(expected.tolist()))
    difference = (torch.tensor(log_probs) - expected).abs()
    mean = float(difference.mean())
    if not mean <= tolerance:  # NaN is refused too
        raise SyncError(
            f"after the sync {engine} and the trainer score the same {len(difference)} tokens differently, by "
            f"{mean:.3g} nats a token on average and {float(difference.max()):.3g} at most; expected at most "
            f"{tolerance:g} on average, so the engine does not compute with the weights that it was sent. Look for "
            f"quantisation, adapters or kernels that it applies on top; if its arithmetic is meant to be that coarse, "
            f"set tolerance=... there."
        )
    return scores


def refuse_old_weights(engine: str, scores: Scores, before: Scores | None, resolution: float) -> Scores:
    """Refuse an engine whose scores are the same as before, bit by bit, although the trainer's have changed.

    An update may be smaller than the tolerance of `refuse_other_weights`, and smaller than what weights in bfloat16
    can show. The trainer's change is counted from when the engine's scores last changed, so small updates add up: an
    engine that takes over none of them is found after some syncs.

    Args:
        engine: the engine's name, for the error.
        scores: after this sync.
        before: what this returned after the last sync; None at first.
        resolution: in nats; a larger mean absolute change of the trainer's scores must change some of the engine's.

    Returns:
        what to compare the next scores with.

    Raises:
        SyncError: the trainer's scores have moved by more than `resolution` since the engine's last changed.
    """
    if before is None or scores.engine != before.engine:
        return scores
    moved = float((torch.tensor(scores.trainer) - torch.tensor(before.trainer)).abs().mean())
    if moved > resolution:
        raise SyncError(
            f"after the sync {engine} scores {len(scores.engine)} tokens exactly as it did before, bit by bit, and the "
            f"trainer has moved by {moved:.3g} nats a token on average since the scores of {engine} last changed; "
            f"expected them to change with more than {resolution:g}, so it keeps old weights. Look for what it caches "
            f"or freezes, or merges when it starts; the next engine.sync(trainer) starts it anew."
        )
    return before
