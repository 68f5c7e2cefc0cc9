"""Random rows for losses, and reference losses in loops over Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import KLLoss, PPOClip, ValueClip
from flowrl.operators.losses.objective import Aggregation, TokenObjective

NAN = float("nan")
AGGREGATIONS: list[tuple[Aggregation, float | None]] = [
    ("token-mean", None),
    ("token-sum", None),
    ("seq-mean-token-sum", None),
    ("seq-mean-token-mean", None),
    ("seq-mean-token-sum-norm", 11.0),
]
every_aggregation = pytest.mark.parametrize(("aggregation", "norm"), AGGREGATIONS)


class PolicyBatch(NamedTuple):
    """The columns that a trainer passes to a policy loss; `output` and `entropy` come from the model."""

    old_log_probs: Tensor
    advantages: Tensor
    ref_log_prob: Tensor | None
    response_mask: Tensor


class ValueBatch(NamedTuple):
    values: Tensor
    returns: Tensor
    response_mask: Tensor


class Rows(NamedTuple):
    """The model's output and entropy, and the batch."""

    output: Tensor
    entropy: Tensor
    batch: Any

    def take(self, index: Tensor) -> Rows:
        batch = type(self.batch)(*(None if x is None else x[index] for x in self.batch))
        return Rows(self.output[index], self.entropy[index], batch)


def make(kind: type, mask: Tensor, seed: int, off: float = NAN) -> Rows:
    """Seeded numbers under the mask, spread so that every branch of the losses runs; `off` elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float, shift: float = 0.0) -> Tensor:
        return (scale * torch.randn(mask.shape, generator=generator) + shift).masked_fill(~mask, off)

    if kind is PPOClip:
        new = draw(0.4, -2)
        batch: Any = PolicyBatch(new + draw(0.6), draw(1.0), new + draw(0.7), mask)
        return Rows(new, draw(0.2, 1), batch)
    return Rows(draw(0.5), draw(1), ValueBatch(draw(0.5), draw(1), mask))


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(st.booleans(), min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def aggregate(rows: Sequence[Sequence[float]], aggregation: str, norm: float | None) -> float:
    """The definition of the aggregation, in float64; `rows` has the losses of the tokens under the mask."""
    live = [row for row in rows if row]
    if not live:
        return 0.0
    tokens = [x for row in live for x in row]
    if aggregation == "token-mean":
        return sum(tokens) / len(tokens)
    if aggregation == "token-sum":
        return sum(tokens)
    reduce: Callable[[Sequence[float]], float] = {
        "seq-mean-token-sum": lambda row: sum(row),
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / (norm or NAN),
    }[aggregation]
    return sum(reduce(row) for row in live) / len(live)


def on_mask(x: Tensor, mask: Tensor) -> list[list[float]]:
    return [x[i][mask[i]].double().tolist() for i in range(len(mask))]


def by_rows(function: Callable[..., float], *columns: list[list[float]]) -> list[list[float]]:
    return [[function(*token) for token in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


def policy_by_loops(objective: TokenObjective, rows: Rows, output: Tensor | None = None) -> float:
    loss = objective.loss
    assert isinstance(loss, PPOClip)
    high = loss.clip_low if loss.clip_high is None else loss.clip_high

    def surrogate(new: float, old: float, advantage: float) -> float:
        ratio = math.exp(new - old)
        gain = min(ratio * advantage, min(max(ratio, 1 - loss.clip_low), 1 + high) * advantage)
        if loss.dual_clip is not None and advantage < 0:
            gain = max(gain, loss.dual_clip * advantage)
        return -gain

    batch, mask = rows.batch, rows.batch.response_mask
    new = on_mask(rows.output if output is None else output, mask)
    per_token = by_rows(surrogate, new, on_mask(batch.old_log_probs, mask), on_mask(batch.advantages, mask))
    total = aggregate(per_token, objective.aggregation, objective.norm)
    total -= objective.entropy * aggregate(on_mask(rows.entropy, mask), objective.aggregation, objective.norm)
    if objective.kl is not None:
        assert objective.kl.estimator == "k3"
        k3 = by_rows(lambda n, r: math.exp(r - n) - (r - n) - 1, new, on_mask(batch.ref_log_prob, mask))
        if objective.kl.ratio:
            k3 = by_rows(lambda n, old, kl: math.exp(n - old) * kl, new, on_mask(batch.old_log_probs, mask), k3)
        total += objective.kl.coef * aggregate(k3, objective.aggregation, objective.norm)
    return total


def value_by_loops(objective: TokenObjective, rows: Rows, output: Tensor | None = None) -> float:
    clip = getattr(objective.loss, "clip", None)

    def error(new: float, old: float, target: float) -> float:
        plain = (new - target) ** 2
        if clip is None:
            return plain / 2
        return max(plain, (min(max(new, old - clip), old + clip) - target) ** 2) / 2

    batch, mask = rows.batch, rows.batch.response_mask
    new = on_mask(rows.output if output is None else output, mask)
    per_token = by_rows(error, new, on_mask(batch.values, mask), on_mask(batch.returns, mask))
    return aggregate(per_token, objective.aggregation, objective.norm)


def by_loops(objective: TokenObjective, rows: Rows, output: Tensor | None = None) -> float:
    if isinstance(objective.loss, PPOClip):
        return policy_by_loops(objective, rows, output)
    return value_by_loops(objective, rows, output)


def run(objective: TokenObjective, rows: Rows, weights: Tensor) -> tuple[float, Tensor, Metrics]:
    """The objective, its gradient on the model's output, and metrics."""
    output, metrics = rows.output.clone().requires_grad_(), Metrics()
    value = objective(output, rows.entropy, rows.batch, weights, metrics)
    value.backward()
    assert value.dtype == torch.float32 and value.shape == () and output.grad is not None
    return value.item(), output.grad, metrics


def objectives(aggregation: Aggregation, norm: float | None) -> list[TokenObjective]:
    return [
        TokenObjective(PPOClip(0.2), aggregation, norm),
        TokenObjective(PPOClip(0.2, 0.28, 1.5), aggregation, norm, KLLoss("k3", 0.1), 0.05),
        TokenObjective(PPOClip(0.2), aggregation, norm, KLLoss("k3", 0.1, ratio=True)),
        TokenObjective(ValueClip(0.2), aggregation, norm),
        TokenObjective(ValueClip(None), aggregation, norm),
    ]
