"""Tests of `streamed.py`: a step of some parameters at a time takes their states only, and so does a loaded state;
`test_memory.py` in ``tests/backends/torch/meshes`` has the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowrl.backends import AdamW, TorchTrainer
from flowrl.backends.torch.optimizers import streamed
from flowrl.backends.torch.optimizers.specs import Group
from flowrl.backends.torch.optimizers.streamed import Streamed
from flowrl.backends.torch.score.rows import Budget
from flowrl.backends.torch.train.learner import Learner
from flowrl.backends.torch.train.mesh import ProcessMesh
from tests.backends.torch.sizing.counting import Allocations

COUNT, SIZE = 8, 1 << 12


@pytest.mark.parametrize("parameters", [False, True], ids=["states", "parameters"])
def test_a_step_moves_a_bucket_at_a_time(parameters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight parameters in buckets of two, at most two are on the device with what belongs to them."""
    monkeypatch.setattr(streamed, "BUCKET_BYTES", 2 * 4 * SIZE)
    draw = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(SIZE, generator=draw)) for _ in range(COUNT)]
    theirs = [nn.Parameter(one.detach().clone()) for one in ours]
    optimizer, peer = (
        AdamW(lr=0.1).build([Group(each, [])], ProcessMesh(torch.device("cpu"))) for each in (ours, theirs)
    )
    steps = Streamed(optimizer, torch.device("cpu"), parameters)
    for _ in range(2):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn(SIZE, generator=draw)
        steps.step()
        peer.step()
    at_rest = [(state["exp_avg"], state["exp_avg_sq"]) for state in optimizer.state.values()]
    counter: Any = Allocations()
    counter.ignore(*ours, *(one.grad for one in ours), *(x for pair in at_rest for x in pair))
    with counter:
        steps.step()
    moved = 2 * 2 * 4 * SIZE  # of each parameter two: its states, or it and its gradient
    assert moved <= sum(counter.peak.values()) <= moved + 4 * 4 * SIZE  # and what a step of one makes
    peer.step()
    assert all(map(torch.equal, ours, theirs))
    if not parameters:
        places = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
        assert places == [first.data_ptr() for first, _ in at_rest]


def test_a_loaded_state_in_cpu_memory_never_moves_to_the_device() -> None:
    """Here the device is ``meta``, which would lose it."""
    here, there = (
        Learner(
            [("w", nn.Parameter(torch.ones(SIZE, device=device)))],
            TorchTrainer("model", AdamW(lr=0.1), offload=offload),
            "actor",
            ProcessMesh(torch.device(device)),
            Budget(1, packed=True),
        )
        for device, offload in (("cpu", False), ("meta", "optimizer"))
    )
    (parameter,) = here.optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(SIZE)
    here.optimizer.step()
    there.load_state_dict(here.state_dict())
    (loaded,), given = there.optimizer.state.values(), here.optimizer.state[parameter]
    assert all(torch.equal(value, given[key]) for key, value in loaded.items())
    assert loaded["exp_avg"].data_ptr() != given["exp_avg"].data_ptr()  # a copy
