"""Tests of `muon.py`: its step against the formula in float64 and `torch.optim.Muon`, and a training that learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flowrl.backends import AdamW, Muon
from flowrl.backends.torch.optimizers.muon import orthogonalized
from flowrl.backends.torch.optimizers.specs import Group, is_matrix
from flowrl.backends.torch.train.mesh import ProcessMesh

ALONE = ProcessMesh(torch.device("cpu"))
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def group(*parameters: nn.Parameter) -> Group:
    return Group([*parameters], [one for one in parameters if is_matrix(one.shape)])


def iterated(x: Tensor) -> Tensor:
    """Five iterations of the polynomial on singular values, in float64 (Liu et al. 2025, equation 2)."""
    u, s, v = torch.linalg.svd(x.double() / x.double().norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_the_iteration_acts_on_singular_values(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(x)
    assert found.dtype == torch.bfloat16
    assert (found.double() - iterated(x)).norm() / iterated(x).norm() < 0.02  # bfloat16
    assert torch.linalg.svdvals(found.float()).min() > 0.5 and torch.linalg.svdvals(found.float()).max() < 1.3


def test_a_stack_of_experts_is_a_matrix_each() -> None:
    stack = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0))
    for one, alone in zip(orthogonalized(stack), stack, strict=True):
        torch.testing.assert_close(one, orthogonalized(alone))
    assert [is_matrix(shape) for shape in ((3, 8, 24), (8, 24), (8,), (1, 8), (8, 1, 4))] == [True, True] + [False] * 3


def gradients(parameter: Tensor) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(parameter.shape, generator=draw) for _ in range(3)]


def test_a_step_is_the_formula() -> None:
    """Equations 1 and 4 of Liu et al. 2025 in float64 by hand, with Nesterov's momentum as a mean."""
    weight = nn.Parameter(torch.randn(8, 24, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon(lr=LR, weight_decay=DECAY).build([group(weight)], ALONE)
    expected, mean = weight.detach().double(), torch.zeros(8, 24, dtype=torch.float64)
    for gradient in gradients(weight):
        weight.grad = gradient
        optimizer.step()
        mean = MOMENTUM * mean + (1 - MOMENTUM) * gradient.double()
        direction = iterated(MOMENTUM * mean + (1 - MOMENTUM) * gradient.double())
        expected = expected - LR * (0.2 * math.sqrt(24) * direction + DECAY * expected)
    moved = (expected - weight.detach().double()).norm() / (3 * LR * 0.2 * math.sqrt(24) * math.sqrt(8))
    assert moved < 0.02


def test_matrices_step_as_in_torch_and_the_rest_by_adamw() -> None:
    draw = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((16, 48), (32, 8), (16,))]
    theirs = [nn.Parameter(one.detach().clone()) for one in ours]
    optimizer = Muon(lr=LR, weight_decay=DECAY).build([group(*ours)], ALONE)
    peers = [
        torch.optim.Muon(theirs[:2], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[2:], lr=LR, weight_decay=DECAY),
    ]
    for step in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = gradients(one)[step]
        for each in (optimizer, *peers):
            each.step()
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one, other, atol=2e-3 * LR, rtol=1e-3)  # roundings in bfloat16
    assert torch.equal(ours[2], theirs[2])


def test_it_learns_as_adamw_does() -> None:
    """A network of two matrices fits another: at one rate, 100 steps of each leave less than 2 % of the loss."""

    def loss_of(spec: Muon | AdamW) -> tuple[float, float]:
        torch.manual_seed(0)
        inputs, teacher = torch.randn(256, 16), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        targets = teacher(inputs).detach()
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        optimizer = spec.build([group(*model.parameters())], ALONE)
        losses = []
        for _ in range(100):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0], losses[-1]

    for spec in (Muon(lr=0.01, weight_decay=0.0), AdamW(lr=0.01, weight_decay=0.0)):
        first, last = loss_of(spec)
        assert last < 0.02 * first
