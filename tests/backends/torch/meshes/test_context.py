"""Processes that share rows (`score/context.py`): every engine on ``Mesh(fsdp, context)`` against one process.

The ranks of a mesh run once, through all of `context_cases`. Four ranks run nightly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.backends import Mesh
from tests.backends.torch.meshes.context_cases import ADAMW, CASES, MINIS, PPO, Ranks, make_inputs
from tests.backends.torch.meshes.processes import assert_as_one, run
from tests.backends.torch.train.test_fsdp import relative_error

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test of a mesh waits until its ranks end

OTHERS = ("bfloat16", "memory", "refused")
MESHES = [
    Mesh(fsdp=2, context=2),
    pytest.param(Mesh(fsdp=4, context=2), marks=pytest.mark.nightly),
    pytest.param(Mesh(fsdp=4, context=4), marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of inputs, and the results of one process."""
    folder = tmp_path_factory.mktemp("context")
    make_inputs(folder)
    return folder, {name: case(Ranks(folder)) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=MESHES, ids=lambda mesh: f"{mesh.fsdp}-{mesh.context}")
def found(request: pytest.FixtureRequest, alone: Any) -> tuple[dict[str, Any], Mesh, list[dict[str, Any]]]:
    """The results of one process, a mesh, and the results of its ranks."""
    folder, truth = alone
    return truth, request.param, run(folder, request.param, "context_cases")


@pytest.mark.parametrize("case", [name for name in CASES if name not in OTHERS])
def test_processes_that_share_rows_compute_what_one_does(found: Any, case: str) -> None:
    """Scores of dense models are equal to the bit, on every process in the order of the rows; gradients, weights after
    several mini-batches and metrics up to rounding."""
    truth, mesh, ranks = found
    assert_as_one(truth[case], mesh, [rank[case] for rank in ranks], 1e-6)
    for rank in (one[case] for one in ranks):
        if "own" in rank:
            rows, part = rank["own"]
            torch.testing.assert_close(part, truth[case]["own"][1][: len(rows)], atol=1e-6, rtol=1e-6)


def test_bfloat16_gradients_equal_those_of_one_process_up_to_rounding(found: Any) -> None:
    truth, _, ranks = found
    for rank in ranks:
        assert relative_error(rank["bfloat16"]["close"], truth["bfloat16"]["close"]) < 0.03


def test_rows_may_be_as_many_times_longer_at_the_same_peak(found: Any) -> None:
    """Counted are live bytes of a forward and backward pass, against ranks that share only weights. Columns of a row,
    such as ids and log-probs, are not cut; beside 64 hidden numbers a token they are some percent."""
    for rank in found[2]:
        for without, longer in rank["memory"]["peaks"].values():
            assert longer < 1.1 * without


def test_a_model_that_computes_something_else_in_parts_is_refused_on_all_ranks(found: Any) -> None:
    truth, _, ranks = found
    assert truth["refused"]["error"] == "no error"
    for rank in ranks:
        assert "its outputs for parts of rows differ by" in rank["refused"]["error"]
        assert rank["refused"]["error"].endswith("[mesh.no-context]")


def test_one_process_resumes_from_a_checkpoint_of_processes_that_share_rows(found: Any, alone: Any) -> None:
    (_, mesh, ranks), (folder, _) = found, alone
    there = Ranks(folder)
    engine, batch = there.trainer(optimizer=ADAMW, grad_clip=1.0), there.batch()
    engine.load_checkpoint(str(folder / f"checkpoint-{mesh.fsdp}-{mesh.context}"))
    engine.update(batch, there.minis(batch, PPO, *MINIS), PPO)
    assert relative_error(dict(engine.weights()), ranks[0]["training"]["close"]) < 1e-6
