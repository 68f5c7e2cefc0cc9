"""Meshes with the axes ``tensor`` and ``replicate`` (`backends/torch/train/tensor_parallel.py`,
`backends/torch/train/mesh.py`) against one process.

The ranks of a mesh run once, through all of `mesh_cases`. Four ranks run nightly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import Mesh, TorchTrainer
from flowrl.sync.digest import weights_digest
from tests.backends.torch.meshes.context_cases import ADAMW, MINIS, PPO, Ranks, gradient
from tests.backends.torch.meshes.mesh_cases import ARCHITECTURES, CASES, NOT_SPLIT, checkpoint, make_inputs
from tests.backends.torch.meshes.processes import assert_as_one, name_of, run
from tests.backends.torch.meshes.shares import assert_shared
from tests.backends.torch.train.test_fsdp import relative_error
from tests.nightly import nightly

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test of a mesh waits until its ranks end

OTHERS = ("bfloat16", "dense", "sync")
MESHES = [
    Mesh(tensor=2),
    nightly(Mesh(replicate=2)),
    nightly(Mesh(fsdp=2, tensor=2)),
    nightly(Mesh(replicate=2, fsdp=2)),
    nightly(Mesh(replicate=2, tensor=2)),
    nightly(Mesh(fsdp=2, tensor=2, context=2)),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of inputs, and the results of one process."""
    folder = tmp_path_factory.mktemp("mesh")
    make_inputs(folder)
    return folder, {name: case(Ranks(folder)) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=MESHES, ids=name_of)
def found(request: pytest.FixtureRequest, alone: Any) -> tuple[dict[str, Any], Mesh, list[dict[str, Any]]]:
    """The results of one process, a mesh, and the results of its ranks."""
    folder, truth = alone
    return truth, request.param, run(folder, request.param, "mesh_cases")


@pytest.mark.parametrize("case", [name for name in CASES if name not in OTHERS])
def test_a_mesh_computes_what_one_process_does(found: Any, case: str) -> None:
    """Scores, gradients, weights after several mini-batches and metrics up to rounding, on every process."""
    truth, mesh, ranks = found
    assert_as_one(truth[case], mesh, [rank[case] for rank in ranks], 1e-6)


def test_bfloat16_gradients_equal_those_of_one_process_up_to_rounding(found: Any) -> None:
    truth, _, ranks = found
    for rank in ranks:
        assert relative_error(rank["bfloat16"]["close"], truth["bfloat16"]["close"]) < 0.03


def test_all_processes_sync_the_weights_that_they_save(found: Any, alone: Any) -> None:
    """The digest of the folder's weights before an update, and of the saved ones after it."""
    (truth, _, ranks), (folder, _) = found, alone
    for rank in ranks:
        assert rank["sync"]["digests"][0] == truth["sync"]["digests"][0]
        assert rank["sync"]["digests"][1] == ranks[0]["sync"]["digests"][1] != truth["sync"]["digests"][0]
    saved = TorchTrainer(ranks[0]["sync"]["folder"], device="cpu").build(Ranks(folder))
    assert weights_digest(saved.weights()) == ranks[0]["sync"]["digests"][1]


@pytest.mark.parametrize("case", ["sync", "dense", "adapter"])
def test_each_process_gathers_and_sends_its_share(found: Any, case: str) -> None:
    assert_shared([rank[case]["shares"] for rank in found[2]], 12 if case == "sync" else 1)  # a layer's experts


def test_one_process_resumes_from_a_checkpoint_of_a_mesh(found: Any, alone: Any) -> None:
    (_, mesh, ranks), (folder, _) = found, alone
    there = Ranks(folder)
    engine, batch = there.trainer("qwen3", optimizer=ADAMW, grad_clip=1.0), there.batch("qwen3")
    engine.load_checkpoint(checkpoint(Ranks(folder, mesh)))
    engine.update(batch, there.minis(batch, PPO, *MINIS), PPO)
    assert relative_error(dict(engine.weights()), ranks[0]["training"]["close"]) < 1e-6


@pytest.mark.nightly
def test_every_architecture_with_a_plan_is_split(tmp_path: Path) -> None:
    """Gradients of one update on two ranks that split layers, against one process."""
    make_inputs(tmp_path, {**ARCHITECTURES, **NOT_SPLIT})
    alone = {kind: gradient(Ranks(tmp_path), kind) for kind in ARCHITECTURES}
    found = run(tmp_path, Mesh(tensor=2), "mesh_cases", "architectures")
    for here in (rank["architectures"] for rank in found):
        errors = {kind: relative_error(here[kind]["close"], alone[kind]["close"]) for kind in ARCHITECTURES}
        assert all(error < 2e-6 for error in errors.values()), errors
        assert all(here[kind].endswith("[mesh.no-plan]") for kind in NOT_SPLIT)
