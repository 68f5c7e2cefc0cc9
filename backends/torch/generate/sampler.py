"""Samples tokens from logits with given uniform numbers, so that a row's samples depend on no other row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.protocols.protocols import Sampling

BLOCK = 256
"""Columns per block of the search."""


def next_token(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample one token per row, by inverting the cumulative distribution at `uniforms`.

    Logits are divided by the temperature, then those of at least `min_p` times the largest probability are kept, of
    these the `top_k` largest (of equals the lowest ids), then the smallest set of the most likely whose probability
    reaches `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751), then renormalized; the token is sampled
    from this distribution, and its log-prob is under it. At temperature 0 it is the most likely token, regardless of
    min-p, top-k and top-p, with its log-prob at temperature 1. The penalties of `sampling` are not applied; see
    `penalized`.

    Args:
        logits: ``[rows vocab]`` of any float dtype; computed in float32.
        uniforms: float64 ``[rows]`` in [0, 1).

    Returns:
        tokens (int64 ``[rows]``) and log-probs (float32 ``[rows]``), NaN where a logit of the row is NaN or +inf.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        pick = logits.argmax(-1, keepdim=True)
        return pick.squeeze(1), logits.log_softmax(-1).gather(1, pick).squeeze(1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        within = logits >= logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.where(within | logits.isnan(), -torch.inf)
    order = None
    if sampling.top_k > 0 or sampling.top_p < 1:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k > 0:
        logits = logits[:, : sampling.top_k]
    if sampling.top_p < 1:
        reached = logits.softmax(-1).double().cumsum(-1) >= sampling.top_p
        logits[:, 1:].masked_fill_(reached[:, :-1], -torch.inf)
    probabilities = logits.softmax(-1)  # one NaN or +inf makes the whole row NaN
    pick = _invert(probabilities, uniforms[:, None])
    tokens = pick if order is None else order.gather(1, pick)
    return tokens.squeeze(1), probabilities.gather(1, pick).log_().squeeze(1)


def penalized(logits: Tensor, sampling: Sampling, prompt: Tensor, response: Tensor) -> Tensor:
    """Logits after the penalties of `sampling`, before its temperature: float32 ``[rows vocab]``.

    First the repetition penalty: positive logits of tokens in the prompt or the response are divided by it, negative
    ones multiplied (Keskar et al. 2019, arXiv:1909.05858, section 4.1). Then the others, which count the response
    alone: ``logit - frequency_penalty * count - presence_penalty * (count > 0)``, as OpenAI and vLLM define them.

    Args:
        logits: ``[rows vocab]`` of any float dtype.
        prompt: bool ``[rows vocab]``, the tokens in the prompt.
        response: int64 ``[rows vocab]``, how often each token is in the response so far.
    """
    logits, there = logits.float(), response > 0
    factor = sampling.repetition_penalty
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(prompt | there, repeated, logits)
    return logits - sampling.frequency_penalty * response - sampling.presence_penalty * there


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first column at which a row's cumulative weight exceeds the share `uniforms` ``[rows 1]`` of its total."""
    columns = weights.shape[1]
    if columns <= 8 * BLOCK:
        return _search(weights, uniforms)[0]
    full = columns - columns % BLOCK
    sums = [weights[:, :full].unflatten(1, (-1, BLOCK)).sum(-1), weights[:, full:].sum(-1, keepdim=True)]
    block, share, cumulative = _search(torch.cat(sums, 1), uniforms)
    upper = cumulative.gather(1, block)
    lower = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    place = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp(max=columns - 1)).masked_fill_(place >= columns, 0)
    within = ((share - lower) / (upper - lower)).clamp_(0, 1 - 2**-53)
    return (block * BLOCK + _search(inside, within)[0]).clamp_(max=columns - 1)


def _search(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns as in `_invert`, the target shares, and the cumulative weights in float64."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    share = uniforms * cumulative[:, -1:]
    # The first entry above the share: not one of weight 0, nor, as a uniform is below 1, one past the end.
    pick = torch.searchsorted(cumulative, share, right=True).clamp_(max=weights.shape[1] - 1)
    return pick, share, cumulative
