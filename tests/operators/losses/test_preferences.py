"""NLL and DPO as their papers write them, row by row, in float64; gradients are autograd's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import DPO, NLL
from flowrl.operators.losses.objective import Aggregation, TokenObjective, token_weights
from flowrl.operators.updates.mini_batches import record
from tests.operators.advantages.ragged import masks, numbers
from tests.support.errors import raises
from tests.support.jobs import column
from tests.support.rows.loss_rows import aggregate, every_aggregation

GROUPS = st.lists(st.sampled_from([2, 2, 3, 4]), min_size=1, max_size=4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, list[int], list[float]]:
    """Groups of rows in a random order, each row with tokens anywhere or nowhere, and a score."""
    sizes = draw(GROUPS)
    group = draw(st.permutations([number for number, size in enumerate(sizes) for _ in range(size)]))
    width = draw(st.integers(1, 6))
    row = st.lists(st.booleans(), min_size=width, max_size=width)
    mask = torch.tensor(draw(st.lists(row, min_size=len(group), max_size=len(group))))
    scores = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(group), max_size=len(group)))
    return mask, list(group), scores


def objective_of(
    loss: DPO | NLL, new: Tensor, mask: Tensor, aggregation: Aggregation, norm: float | None, **columns: object
) -> tuple[float, Tensor, Metrics]:
    """The objective of `loss`, its gradient on the mask, and what was reported."""
    output, metrics = new.clone().requires_grad_(), Metrics()
    batch = record({"response_mask": mask, **columns})
    weights = token_weights(mask, aggregation, norm)
    found = TokenObjective(loss, aggregation, norm)(output, torch.zeros_like(new), batch, weights, metrics)
    found.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert not output.grad[~mask].any()
    return found.item(), output.grad[mask].double(), metrics


@every_aggregation
@given(masks(), st.integers(0, 99))
def test_nll_is_minus_the_log_likelihood(aggregation: Aggregation, norm: float | None, mask: Tensor, seed: int) -> None:
    new = numbers(mask, seed, off=0.0)
    found, gradient, _ = objective_of(NLL(), new, mask, aggregation, norm)
    by_row = [[-x for x in new[row][mask[row]].double().tolist()] for row in range(len(mask))]
    assert found == pytest.approx(aggregate(by_row, aggregation, norm), rel=1e-5, abs=1e-6)
    assert gradient.tolist() == pytest.approx((-token_weights(mask, aggregation, norm)[mask].double()).tolist())


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def dpo(
    new: Tensor, ref: Tensor, mask: Tensor, group: list[int], scores: list[float], beta: float, eps: float
) -> tuple[list[Tensor], int, int]:
    """Equation 7, pair by pair, of the rows' tokens on the mask: the loss of each row, pairs, and those in order."""
    moved = [(new[row][mask[row]] - ref[row][mask[row]]).sum() for row in range(len(mask))]
    by_row, count, right = [torch.zeros((), dtype=torch.float64)] * len(mask), 0, 0
    for number in set(group):
        rows = [row for row, other in enumerate(group) if other == number]
        chosen = next(row for row in rows if scores[row] == max(scores[other] for other in rows))
        rejected = next(row for row in rows if scores[row] == min(scores[other] for other in rows))
        if scores[chosen] == scores[rejected]:
            continue
        margin = beta * moved[chosen] - beta * moved[rejected]
        loss = -(1 - eps) * torch.log(torch.sigmoid(margin)) - eps * torch.log(torch.sigmoid(-margin))
        count, right = count + 1, right + int(margin.item() > 0)
        for row in rows:
            by_row[row] = loss
    return by_row, count, right


@given(pairs(), st.integers(0, 99), st.sampled_from([0.05, 0.5, 2.0]), st.sampled_from([0.0, 0.1, 0.3]))
def test_dpo_matches_equation_7(
    drawn: tuple[Tensor, list[int], list[float]], seed: int, beta: float, smoothing: float
) -> None:
    mask, group, scores = drawn
    new, ref = numbers(mask, seed, off=0.0), numbers(mask, seed + 1000, off=0.0)
    scores = [score if tokens.any() else 0.0 for score, tokens in zip(scores, mask, strict=True)]
    token_scores = torch.zeros(mask.shape)
    for row, tokens in enumerate(mask):  # on the first token on the mask
        token_scores[row, int(tokens.int().argmax())] = scores[row]
    uid = column([f"g{number}" for number in group])
    found, gradient, metrics = objective_of(
        DPO(beta, smoothing), new, mask, "seq-mean-token-mean", None,
        ref_log_prob=ref, token_level_scores=token_scores, uid=uid,
    )  # fmt: skip
    exact = new.double().requires_grad_()
    by_row, count, right = dpo(exact, ref.double(), mask, group, scores, beta, smoothing)
    live = [loss for loss, tokens in zip(by_row, mask, strict=True) if tokens.any()]
    expected = torch.stack([torch.zeros((), dtype=torch.float64), *live]).sum() / max(1, len(live))
    assert found == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    theirs = torch.zeros_like(exact)
    if expected.requires_grad:
        [theirs] = torch.autograd.grad(expected, exact)
    assert torch.allclose(gradient, theirs[mask], rtol=1e-4, atol=1e-6)
    accuracy = metrics["actor/dpo_accuracy"]
    assert (accuracy.weight, accuracy.value) == (count, right)


def test_the_dpo_gradient_matches_the_paper() -> None:
    """Of section 4: ``-beta sigmoid(r_l - r_w) (grad log pi(y_w) - grad log pi(y_l))``, of one pair of a token each."""
    mask, beta = torch.ones(2, 1, dtype=torch.bool), 0.3
    new, ref = torch.tensor([[-1.0], [-0.5]]), torch.tensor([[-1.5], [-2.0]])
    scores, uid = torch.tensor([[1.0], [0.0]]), column(["a", "a"])
    _, gradient, _ = objective_of(
        DPO(beta), new, mask, "seq-mean-token-mean", None, ref_log_prob=ref, token_level_scores=scores, uid=uid
    )
    slope = beta * sigmoid(beta * 1.5 - beta * 0.5)
    assert gradient.tolist() == pytest.approx([-slope, slope])


def test_a_group_of_one_row_is_refused() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    with raises("rows.small-group", uid="a", expected=2, found=1):
        objective_of(
            DPO(), torch.zeros(1, 1), mask, "token-mean", None,
            ref_log_prob=torch.zeros(1, 1), token_level_scores=torch.zeros(1, 1), uid=column(["a"]),
        )  # fmt: skip
