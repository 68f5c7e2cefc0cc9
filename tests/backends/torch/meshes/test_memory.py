"""Settings that save memory, and optimizers, on one process and on meshes: `backends/torch/optimizers/streamed.py`,
`backends/torch/optimizers/muon.py` and `backends/torch/optimizers/specs.py`.

The ranks of a mesh run once, through all of `memory_cases`. Other axes than FSDP run nightly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import Mesh
from flowrl.backends.torch.optimizers import streamed
from tests.backends.torch.meshes.context_cases import ADAMW, Ranks, make_inputs
from tests.backends.torch.meshes.memory_cases import EIGHT_BIT, HAS_TORCHAO, SETTINGS, results, step, weights
from tests.backends.torch.meshes.processes import assert_as_one, name_of, run
from tests.backends.torch.train.test_fsdp import relative_error
from tests.nightly import nightly

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test of a mesh waits until its ranks end

MESHES = [
    Mesh(fsdp=2),
    nightly(Mesh(tensor=2)),
    nightly(Mesh(replicate=2)),
    nightly(Mesh(fsdp=2, tensor=2)),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of inputs, and the results of one process."""
    folder = tmp_path_factory.mktemp("memory")
    make_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "BUCKET_BYTES", 0)  # restored after `results`
        return folder, results(folder, Mesh(), 0, False)


@pytest.fixture(scope="module", params=MESHES, ids=name_of)
def found(request: pytest.FixtureRequest, alone: Any) -> tuple[dict[str, Any], Mesh, list[dict[str, Any]]]:
    """The results of one process, a mesh, and the results of its ranks."""
    folder, truth = alone
    return truth, request.param, run(folder, request.param, "memory_cases")


def test_settings_that_save_memory_change_no_bit(found: Any) -> None:
    truth, _, ranks = found
    for one in (truth, *ranks):
        assert one["exact"] == dict.fromkeys(SETTINGS, True)


def test_training_goes_on_to_the_bit_with_another_offload(found: Any) -> None:
    truth, _, ranks = found
    for one in (truth, *ranks):
        assert all(one["resumes"].values()), one["resumes"]


@pytest.mark.parametrize("case", ["muon", "experts"])
def test_muon_steps_whole_matrices_on_every_mesh(found: Any, case: str) -> None:
    """Up to the rounding of gradients, which its bfloat16 iterations enlarge to 1.3e-5 of the weights here."""
    truth, mesh, ranks = found
    assert_as_one(truth[case], mesh, [rank[case] for rank in ranks], 5e-5)
    assert all(one["muon"]["same"] for one in (truth, *ranks))


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_states_in_8_bits_shard_and_load_on_another_mesh(found: Any, alone: Any) -> None:
    """Blocks of numbers differ with shards, and so do the last bits of states."""
    (truth, _, ranks), (folder, _) = found, alone
    for one in (truth, *ranks):
        assert one["eight bit"]["same"]
    for rank in ranks:
        assert relative_error(rank["eight bit"]["close"], truth["eight bit"]["close"]) < 1e-3
    here = Ranks(folder)
    name = here.sizes if found[1] is None else name_of(found[1])
    for optimizer in (EIGHT_BIT, ADAMW):
        engine = here.trainer(optimizer=optimizer, grad_clip=1.0)
        engine.load_checkpoint(str(folder / f"eight-{name}"))
        assert relative_error(weights(engine), ranks[0]["eight bit"]["close"]) == 0
        step(here, engine)
