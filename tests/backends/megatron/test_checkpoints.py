"""Checkpoints of a `MegatronTrainer`, written and read on meshes of up to four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.megatron.cases import KINDS
from tests.backends.megatron.checkpoint_cases import MESHES, results
from tests.backends.megatron.test_trainer import every_mesh
from tests.backends.torch.meshes.mesh_cases import make_inputs
from tests.backends.torch.meshes.processes import name_of, run

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]


@every_mesh
def test_what_a_mesh_has_written_is_read_on_every_other_to_the_bit(tmp_path: Path) -> None:
    """Weights, both moments of AdamW and the counters; all meshes make the same steps."""
    make_inputs(tmp_path, {"qwen3": KINDS["qwen3"]})
    wrote = {name_of(mesh): run(tmp_path, mesh, results.__module__, forked=True)[0] for mesh in MESHES}
    truth = wrote[name_of(MESHES[0])][name_of(MESHES[0])]
    for mesh in MESHES:
        assert wrote[name_of(mesh)][name_of(mesh)] == truth
        for rank in run(tmp_path, mesh, results.__module__, "reads", forked=True):
            assert rank == dict.fromkeys(map(name_of, MESHES), truth)
