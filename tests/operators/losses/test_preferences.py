"""NLL, DPO, IPO, SimPO, ORPO and KTO as their papers write them, row by row, in float64; gradients are autograd's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.core.operators.loss import Loss
from flowrl.data.metrics import Metrics
from flowrl.operators import DPO, IPO, KTO, NLL, ORPO, SimPO
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
    loss: Loss, new: Tensor, mask: Tensor, aggregation: Aggregation, norm: float | None, **columns: object
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


Row = tuple[Tensor, Tensor]
"""The log-probs of the policy and of the reference at the tokens of a row, float64."""


def ipo(chosen: Row, rejected: Row, tau: float, per_token: bool) -> Tensor:
    """Equation 17, with h of equation 9; TRL divides each log-ratio by the length of its row."""
    ratios = [(new - ref).sum() / (len(new) if per_token else 1) for new, ref in (chosen, rejected)]
    return (ratios[0] - ratios[1] - 1 / (2 * tau)) ** 2


def simpo(chosen: Row, rejected: Row, beta: float, gamma: float) -> Tensor:
    """Equation 6."""
    (w, _), (l, _) = chosen, rejected  # noqa: E741
    return -torch.log(torch.sigmoid(beta / len(w) * w.sum() - beta / len(l) * l.sum() - gamma))


def orpo(chosen: Row, rejected: Row, coef: float) -> Tensor:
    """Equations 6 and 7, with the odds of equation 4, of the probability of equation 3."""
    p_w, p_l = (new.mean().exp() for new, _ in (chosen, rejected))
    odds_ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
    return -torch.log(p_w) + coef * -torch.log(torch.sigmoid(torch.log(odds_ratio)))


def of_pairs(tokens: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of the policy and of the reference, mask and scores of pairs of rows with these lengths; the second
    row of every pair is the chosen one."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(tokens)) < torch.tensor(tokens)[:, None]
    new, ref = (torch.where(mask, -0.05 - torch.rand(mask.shape, generator=generator), 0.0) for _ in range(2))
    scores = torch.zeros(mask.shape)
    scores[1::2, 0] = 1.0
    return new, ref, mask, scores


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (IPO(), lambda w, l: ipo(w, l, 0.1, False)),  # noqa: E741
        (IPO(0.7, per_token=True), lambda w, l: ipo(w, l, 0.7, True)),  # noqa: E741
        (SimPO(), lambda w, l: simpo(w, l, 2.0, 1.0)),  # noqa: E741
        (SimPO(0.5, 0.0), lambda w, l: simpo(w, l, 0.5, 0.0)),  # noqa: E741
        (ORPO(), lambda w, l: orpo(w, l, 0.1)),  # noqa: E741
        (ORPO(1.5), lambda w, l: orpo(w, l, 1.5)),  # noqa: E741
    ],
    ids=lambda value: repr(value) if isinstance(value, Loss) else "formula",
)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_losses_of_pairs_match_their_equations(
    loss: Loss, formula: Callable[[Row, Row], Tensor], lengths: list[int], seed: int
) -> None:
    new, ref, mask, scores = of_pairs([n for length in lengths for n in (length, 1 + length % 5)], seed)
    uid = column([f"p{row // 2}" for row in range(len(mask))])
    found, gradient, metrics = objective_of(
        loss, new, mask, "seq-mean-token-mean", None,
        ref_log_prob=ref, token_level_scores=scores, uid=uid, response_mask=mask,
    )  # fmt: skip
    exact = new.double().requires_grad_()
    rows = [(exact[row][mask[row]], ref[row][mask[row]].double()) for row in range(len(mask))]
    expected = torch.stack([formula(rows[i + 1], rows[i]) for i in range(0, len(rows), 2)]).mean()
    [slope] = torch.autograd.grad(expected, exact)
    assert found == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient, slope[mask], rtol=2e-4, atol=1e-5)
    name = type(loss).__name__.lower()
    assert metrics[f"actor/{name}_accuracy"].weight == len(lengths)


@pytest.mark.parametrize("loss", [IPO(), SimPO(), ORPO()], ids=repr)
def test_a_group_of_equal_scores_has_no_pair(loss: Loss) -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    found, gradient, _ = objective_of(
        loss, torch.tensor([[-1.0], [-0.5]]), mask, "seq-mean-token-mean", None,
        ref_log_prob=torch.zeros(2, 1), token_level_scores=torch.zeros(2, 1), uid=column(["a", "a"]),
    )  # fmt: skip
    assert found == 0.0 and not gradient.any()


def test_certain_tokens_have_finite_odds() -> None:
    """A log-prob of 0, or one far below, where a naive ``log(1 - exp(x))`` or its gradient is not finite."""
    mask = torch.ones(4, 1, dtype=torch.bool)
    scores, uid = torch.tensor([[1.0], [0.0]] * 2), column(["a", "a", "b", "b"])
    found, gradient, _ = objective_of(
        ORPO(), torch.tensor([[0.0], [-200.0], [-200.0], [0.0]]), mask, "seq-mean-token-mean", None,
        token_level_scores=scores, uid=uid,
    )  # fmt: skip
    assert math.isfinite(found) and gradient.isfinite().all()


@given(masks(), st.integers(0, 99), st.sampled_from([0.1, 1.0]), st.sampled_from([0.0, 0.7]))
def test_kto_matches_equation_8(mask: Tensor, seed: int, beta: float, baseline: float) -> None:
    """``E[lambda_y - v(x, y)]`` with the value of equation 8, label by label; the baseline has no gradient."""
    new, ref = numbers(mask, seed, off=0.0), numbers(mask, seed + 1000, off=0.0)
    labels = [row % 3 != 1 for row in range(len(mask))]
    scores = torch.where(mask.cumsum(1).eq(1) & mask, torch.tensor(labels)[:, None].float(), 0.0)
    found, gradient, metrics = objective_of(
        KTO(beta, desirable=1.3, undesirable=0.6), new, mask, "seq-mean-token-mean", None,
        ref_log_prob=ref, token_level_scores=scores, kl_baseline=torch.full((len(mask),), baseline),
    )  # fmt: skip
    exact = new.double().requires_grad_()
    losses = []
    for row, good in enumerate(labels):
        if mask[row].any():
            r = (exact[row] - ref[row].double())[mask[row]].sum()
            value = 1.3 * torch.sigmoid(beta * (r - baseline)) if good else 0.6 * torch.sigmoid(beta * (baseline - r))
            losses.append((1.3 if good else 0.6) - value)
    if losses:
        expected = torch.stack(losses).mean()
        [slope] = torch.autograd.grad(expected, exact)
        assert found == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient, slope[mask], rtol=1e-4, atol=1e-6)
    desirable = sum(good and bool(mask[row].any()) for row, good in enumerate(labels))
    assert (metrics["actor/kto_desirable"].weight if "actor/kto_desirable" in metrics else 0) == desirable


def test_kto_reports_nothing_of_a_label_that_no_row_has() -> None:
    """A mean over no rows is NaN, of which an alarm would warn."""
    scores = torch.tensor([[1.0], [1.0]])
    mask, zero = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1)
    *_, metrics = objective_of(
        KTO(0.1), zero, mask, "seq-mean-token-mean", None,
        ref_log_prob=zero - 1.0, token_level_scores=scores, kl_baseline=torch.zeros(2),
    )  # fmt: skip
    assert metrics.compute()["actor/kto_desirable"] == pytest.approx(0.1)
    assert "actor/kto_undesirable" not in metrics
