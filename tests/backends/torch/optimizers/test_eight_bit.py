"""Tests of `eight_bit.py`: torchao's 8-bit AdamW, its states, and its checkpoints."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrl.backends import AdamW, TorchTrainer
from flowrl.backends.torch.optimizers.specs import Group
from flowrl.backends.torch.train.mesh import ProcessMesh
from tests.backends.torch.sizing.counting import RESPONSE, ROWS, Sum, batch, folder_of, size_of
from tests.backends.torch.train.trainers import CONTEXT, MiniBatch
from tests.support.errors import raises

ALONE = ProcessMesh(torch.device("cpu"))
SETTINGS = AdamW(lr=0.01, weight_decay=0.1, bits=8)


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao")


def test_without_torchao_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("package.not-installed", package="torchao", extra="torchao"):
        TorchTrainer(str(tmp_path), SETTINGS).build(CONTEXT)


def test_a_step_of_known_states_is_adamw_in_float64(torchao: None) -> None:
    """The first step has no rounded state, so it is AdamW's; a vector's states stay float32 in all steps."""
    draw = torch.Generator().manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(64, 128, generator=draw)), nn.Parameter(torch.randn(64, generator=draw))
    parameters = [matrix, vector]
    expected = [one.detach().double() for one in parameters]
    optimizer = SETTINGS.build([Group(parameters, [])], ALONE)
    averages = [torch.zeros_like(one) for one in expected], [torch.zeros_like(one) for one in expected]
    for step in range(1, 4):
        for i, one in enumerate(parameters):
            one.grad = torch.randn(one.shape, generator=draw)
            first, second = averages
            first[i] = 0.9 * first[i] + 0.1 * one.grad.double()
            second[i] = 0.999 * second[i] + 0.001 * one.grad.double() ** 2
            root = (second[i] / (1 - 0.999**step)).sqrt() + 1e-8
            expected[i] = expected[i] - 0.01 * (0.1 * expected[i] + first[i] / (1 - 0.9**step) / root)
        optimizer.step()
        if step == 1:
            torch.testing.assert_close(matrix.detach().double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(vector.detach().double(), expected[1], atol=1e-6, rtol=1e-6)
    assert size_of(optimizer.state[matrix]["exp_avg"]) == matrix.numel() + matrix.numel() // 256 * 4 + 256 * 4


def trained(folder: str, updates: int, **settings: Any) -> tuple[Any, list[float]]:
    """A trainer that makes some rows likelier, and their mean log-prob before each update."""
    engine = TorchTrainer(folder, device="cpu", grad_clip=None, **settings).build(CONTEXT)
    return engine, advance(engine, updates)


def advance(engine: Any, updates: int) -> list[float]:
    rows, found = batch(), []

    class Likelier(Sum):
        def __call__(self, output: Any, *args: Any) -> Any:
            found.append(float(output.detach().mean()))
            return -super().__call__(output, *args)

    for _ in range(updates):
        weights = torch.full((ROWS, RESPONSE), 1 / ROWS / RESPONSE)
        engine.update(rows, [MiniBatch(torch.arange(ROWS), weights, None)], Likelier())
    return found


def test_it_learns_as_adamw_does_and_resumes_to_the_bit(torchao: None, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", num_hidden_layers=1, intermediate_size=256)
    _, full = trained(folder, 8, optimizer=AdamW(lr=1e-3))
    engine, eight = trained(folder, 8, optimizer=AdamW(lr=1e-3, bits=8))
    assert full[0] == eight[0] and full[-1] > full[0] + 1
    assert eight[-1] - eight[0] == pytest.approx(full[-1] - full[0], rel=0.1)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    other = TorchTrainer(folder, AdamW(lr=1e-3, bits=8), device="cpu", grad_clip=None).build(CONTEXT)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    again = TorchTrainer(folder, AdamW(lr=1e-3, bits=8), device="cpu", grad_clip=None).build(CONTEXT)
    again.load_state_dict(copy.deepcopy(engine.state_dict()))
    for one in (engine, other, again):
        advance(one, 2)
    for one in (other, again):
        assert all(torch.equal(x, dict(one.weights())[name]) for name, x in engine.weights())
