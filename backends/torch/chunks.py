"""What is taken of distributions over the vocabulary while they exist: of some tokens at a time.

Each function is given the head, the last states of some tokens, the tokens that were sampled and their temperatures,
and gives tensors ``[tokens ...]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from flowrl.core.protocols import OfDistribution

Entropy = Literal["none", "value", "gradient"]
Score = Callable[..., tuple[Tensor, ...]]


def scores(entropy: Entropy, of: OfDistribution | None) -> Score:
    """What gives the log-prob of each token, or what `of` gives in its place; and the entropy, if that is wanted."""
    return _SCORES[entropy] if of is None else partial(_score_distribution, of, entropy)


def _score(head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    return (_log_softmax(head, states, temperature).gather(1, targets[:, None]).squeeze(1),)


def _score_with_gradient(head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    log_p = _log_softmax(head, states, temperature)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def _score_with_value(head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    log_p = _log_softmax(head, states, temperature)
    seen = log_p.detach()
    return log_p.gather(1, targets[:, None]).squeeze(1), -(seen.exp() * seen).sum(1)


_SCORES: dict[Entropy, Score] = {
    "none": _score,
    "value": _score_with_value,
    "gradient": _score_with_gradient,
}


def _score_distribution(
    of: OfDistribution,
    entropy: Entropy,
    head: nn.Module,
    states: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, ...]:
    log_p = _log_softmax(head, states, temperature)
    loss = of.loss(log_p, **dict(zip(of.columns, columns, strict=True)))
    seen = log_p if entropy == "gradient" else log_p.detach()
    return loss, -(seen.exp() * seen).sum(1)


def score_top(
    k: int, head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` most likely tokens, their log-probs, and that of all others."""
    log_p = _log_softmax(head, states, temperature)
    top, ids = log_p.topk(k, dim=1)
    return ids, top, log_p.scatter_(1, ids, -torch.inf).logsumexp(1)


def score_norm(head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor]:
    """The squared norm of the gradient of a token's log-prob in the logits over the temperature."""
    p = _log_softmax(head, states, temperature).exp()
    return (p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0)).square().sum(1),)


def _log_softmax(head: nn.Module, states: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(head(states).float() / temperature[:, None].float(), dim=1)
