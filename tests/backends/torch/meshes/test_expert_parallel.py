"""Meshes with the axis ``expert`` (`backends/torch/train/expert_parallel.py`) against one process.

The ranks of a mesh run once, through all of `expert_cases`. Four ranks run nightly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import Mesh, TorchScorer, TorchTrainer
from flowrl.sync.digest import weights_digest
from tests.backends.torch.meshes.context_cases import ADAMW, MINIS, PPO, Ranks, gradient
from tests.backends.torch.meshes.expert_cases import ARCHITECTURES, CASES, KINDS, make_inputs
from tests.backends.torch.meshes.mesh_cases import checkpoint
from tests.backends.torch.meshes.mesh_cases import make_inputs as make_models
from tests.backends.torch.meshes.processes import assert_as_one, name_of, run
from tests.backends.torch.meshes.shares import assert_shared
from tests.backends.torch.train.test_fsdp import relative_error
from tests.nightly import nightly
from tests.support.errors import raises

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test of a mesh waits until its ranks end

OTHERS = ("bfloat16", "sync")
MESHES = [
    Mesh(fsdp=2, expert=2),
    nightly(Mesh(fsdp=4, expert=2)),
    nightly(Mesh(fsdp=2, tensor=2, expert=2)),
    nightly(Mesh(fsdp=2, tensor=2, expert=4)),
    nightly(Mesh(replicate=2, fsdp=2, expert=2)),
    nightly(Mesh(fsdp=4, context=2, expert=2)),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of inputs, and the results of one process."""
    folder = tmp_path_factory.mktemp("experts")
    make_inputs(folder)
    return folder, {name: case(Ranks(folder)) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=MESHES, ids=name_of)
def found(request: pytest.FixtureRequest, alone: Any) -> tuple[dict[str, Any], Mesh, list[dict[str, Any]]]:
    """The results of one process, a mesh, and the results of its ranks."""
    folder, truth = alone
    return truth, request.param, run(folder, request.param, "expert_cases")


@pytest.mark.parametrize("case", [name for name in CASES if name not in OTHERS])
def test_a_mesh_computes_what_one_process_does(found: Any, case: str) -> None:
    """Scores, gradients, weights after eight mini-batches and metrics up to rounding, on every process."""
    truth, mesh, ranks = found
    assert_as_one(truth[case], mesh, [rank[case] for rank in ranks], 2e-6)


def test_experts_without_tokens_have_no_gradient(found: Any) -> None:
    """A process has only such experts if two of them share a layer; the others wait for it in each exchange."""
    _, _, ranks = found
    for rank in ranks:
        slopes = {name: x for name, x in rank["gradient unused"]["close"].items() if ".experts." in name}
        assert slopes and all(x[:2].any() and not x[2:].any() for x in slopes.values())


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


@pytest.mark.parametrize("case", ["sync", "adapter"])
def test_each_process_gathers_and_sends_its_share(found: Any, case: str) -> None:
    assert_shared([rank[case]["shares"] for rank in found[2]], together=12)  # matrices of a layer's experts


def test_one_process_resumes_from_a_checkpoint_of_a_mesh(found: Any, alone: Any) -> None:
    (_, mesh, ranks), (folder, _) = found, alone
    there = Ranks(folder)
    engine, batch = there.trainer("qwen2_moe", optimizer=ADAMW, grad_clip=1.0), there.batch("qwen2_moe")
    engine.load_checkpoint(f"{checkpoint(Ranks(folder, mesh))}-qwen2_moe")
    engine.update(batch, there.minis(batch, PPO, *MINIS), PPO)
    assert relative_error(dict(engine.weights()), ranks[0]["training qwen2_moe"]["close"]) < 2e-6


def test_passes_are_not_fused() -> None:
    reason = TorchTrainer("model", mesh=Mesh(fsdp=2, expert=2)).why_not_fusable
    assert reason is not None and "(expert)" in reason


@pytest.mark.parametrize("backend", [TorchTrainer, TorchScorer])
def test_experts_that_the_axis_does_not_divide_are_refused_by_the_configuration_alone(
    backend: Any, tmp_path: Path
) -> None:
    for kind, settings in KINDS.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind, **settings}))
        with raises("mesh.does-not-divide", size="num_experts", found=4, axis="expert", given=8):
            backend(str(tmp_path / kind), mesh=Mesh(fsdp=8, expert=8)).refuse_missing()
        backend(str(tmp_path / kind), mesh=Mesh(fsdp=8, expert=4)).refuse_missing()


@pytest.mark.nightly
def test_experts_of_every_architecture_are_cut(tmp_path: Path) -> None:
    """Gradients of one update on two ranks, against one process."""
    make_models(tmp_path, ARCHITECTURES)
    alone = {kind: gradient(Ranks(tmp_path), kind) for kind in ARCHITECTURES}
    found = run(tmp_path, Mesh(fsdp=2, expert=2), "expert_cases", "architectures")
    for here in (rank["architectures"] for rank in found):
        errors = {kind: relative_error(here[kind]["close"], alone[kind]["close"]) for kind in ARCHITECTURES}
        assert all(error < 2e-6 for error in errors.values()), errors
