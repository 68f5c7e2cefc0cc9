"""What is taken of distributions over the vocabulary while they exist: of some tokens at a time.

A `Score` is given the head, how many tokens there may be at a time, and of all tokens their last states, the tokens
that were sampled, their temperatures, and what else it reads; it gives tensors ``[tokens ...]``.
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
    """What gives the log-prob of each token, or what `of` gives in its place; and the entropy, if that is wanted."""
    return partial(score_tokens, entropy) if of is None else in_chunks(partial(_score_distribution, of, entropy))


def in_chunks(score: Callable[..., tuple[Tensor, ...]]) -> Score:
    """What gives of all tokens what `score` gives of a few, whose distributions exist one after another: none is kept
    for the backward pass, which computes them again."""

    def scored(head: LMHead, chunk: int, *columns: Tensor) -> tuple[Tensor, ...]:
        pieces = zip(*(column.split(chunk) for column in columns), strict=True)
        if torch.is_grad_enabled():
            again = partial(checkpoint, score, head, use_reentrant=False, preserve_rng_state=False)
            parts = [again(*piece) for piece in pieces]
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
    """The `k` most likely tokens, their log-probs, and that of all others."""
    log_p = log_softmax(head, states, temperature)
    top, ids = log_p.topk(k, dim=1)
    return ids, top, log_p.scatter_(1, ids, -torch.inf).logsumexp(1)


def score_norm(head: LMHead, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor]:
    """The squared norm of the gradient of a token's log-prob in the logits over the temperature."""
    p = log_softmax(head, states, temperature).exp()
    return (p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0)).square().sum(1),)


def log_softmax(head: LMHead | nn.Module, states: Tensor, temperature: Tensor) -> Tensor:
    """Log-probs of the whole vocabulary: float32 ``[tokens vocabulary]``."""
    return torch.log_softmax(head(states).float() / temperature[:, None].float(), dim=1)
