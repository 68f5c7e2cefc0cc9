"""Every algorithm of the shelf on Ray, on meshes of two processes with a mixture of experts, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import Training
from flowrl.backends import Mesh, TorchRewardTrainer, TorchRollout, TorchScorer
from flowrl.distributed.place import Colocate
from tests.backends.torch.meshes.mesh_cases import KINDS, SIZES, write_model
from tests.backends.torch.meshes.processes import name_of
from tests.look.recorded import ALGORITHMS, data_of, graph_of
from tests.on_ray.parity.test_context import close
from tests.on_ray.parity.test_parity import numbers, relative, saved
from tests.on_ray.process_leaks import leaves_nothing
from tests.support.jobs import bind_tiny

pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("cluster"),
]


def without_ties(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """The first step's margins against an equal reference are 0, so rounding decides which answer of a pair wins."""
    first, *later = metrics
    return [{name: value for name, value in first.items() if not name.endswith("_accuracy")}, *later]


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(fsdp=2, context=2), Mesh(fsdp=2, expert=2)], ids=name_of)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_on_a_mesh_as_in_one_process(algorithm: str, mesh: Mesh, tmp_path: Path) -> None:
    """Two steps: the same metrics and weights, receipts of syncs included."""
    model = str(tmp_path / "mixtral")
    write_model(Path(model), "mixtral", SIZES | KINDS["mixtral"])
    separate: dict[str, Any] = {
        "rollout": TorchRollout(model, device="cpu"),
        "teacher": TorchScorer(model, device="cpu"),
        "reward_model": TorchRewardTrainer(model, device="cpu"),
    }
    job = bind_tiny(graph_of(algorithm), model, **separate)
    cut = {name: replace(one, mesh=mesh) for name, one in job.graph.bindings.items() if name != "rollout"}
    training = Training(job, data_of(algorithm, tmp_path), steps=2, prompts=4, folder=str(tmp_path / "local"))
    local = training.run()
    there = replace(training, job=replace(job.edit(bind=cut), place=Colocate(2)), folder=str(tmp_path / "ray"))
    with leaves_nothing():
        remote = there.run()
    close(*(without_ties(numbers(run.metrics)) for run in (remote, local)))
    trained = "reward_model" if algorithm == "reward_model" else "actor"
    one, two = (saved(tmp_path / name / trained) for name in ("local", "ray"))
    assert all(relative(one[name], two[name]) < 1e-5 for name in one)
