"""Scores of distributions over the vocabulary, which exist for a chunk of tokens at a time.

A `Score` gets the head, the chunk size, and of all tokens their last hidden states, the sampled tokens, their
temperatures and further columns; it returns tensors ``[tokens ...]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.backends.torch.score.tiles import Entropy, LMHead, score_tokens
from flowrl.protocols.protocols import OfDistribution

Score = Callable[..., tuple[Tensor, ...]]


def scores(entropy: Entropy, of: OfDistribution | None) -> Score:
    """The score of log-probs, or of `of` in their place, and of the entropy unless it is ``"none"``."""
    return partial(score_tokens, entropy) if of is None else in_chunks(partial(_score_distribution, of, entropy))


def in_chunks(score: Callable[..., tuple[Tensor, ...]]) -> Score:
    """A score of all tokens from one of a chunk; the backward pass recomputes the distributions of each chunk."""

    def scored(head: LMHead, chunk: int, *columns: Tensor) -> tuple[Tensor, ...]:
        pieces = zip(*(column.split(chunk) for column in columns), strict=True)
        if torch.is_grad_enabled():
            recomputed = partial(checkpoint, score, head, use_reentrant=False, preserve_rng_state=False)
            parts = [recomputed(*piece) for piece in pieces]
        else:
            parts = [score(head, *piece) for piece in pieces]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    return scored


def _score_distribution(
    of: OfDistribution,
    entropy: Entropy,
    head: LMHead,
    states: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, ...]:
    log_p = log_softmax(head, states, temperature)
    loss = of.loss(log_p, **dict(zip(of.columns, columns, strict=True)))
    seen = log_p if entropy == "gradient" else log_p.detach()
    return loss, -(seen.exp() * seen).sum(1)


def score_top(
    k: int, head: LMHead, states: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` most likely tokens, their log-probs, and the log-prob of all others together."""
    log_p = log_softmax(head, states, temperature)
    top, ids = log_p.topk(k, dim=1)
    return ids, top, log_p.scatter_(1, ids, -torch.inf).logsumexp(1)


def score_norm(head: LMHead, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor]:
    """The squared norm of the gradient of a token's log-prob in the logits over the temperature."""
    p = log_softmax(head, states, temperature).exp()
    return (p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0)).square().sum(1),)


def log_softmax(head: LMHead | nn.Module, states: Tensor, temperature: Tensor) -> Tensor:
    """Log-probs of all tokens of the vocabulary: float32 ``[tokens vocabulary]``."""
    return torch.log_softmax(head(states).float() / temperature[:, None].float(), dim=1)
