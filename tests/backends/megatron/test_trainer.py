"""`MegatronTrainer` on megatron-core against `TorchTrainer` in one process: `trainer.py`, `architecture.py`, `mesh.py`,
`stage.py`, `model.py`, `rows.py` and `engine.py` of `backends/megatron`.

It runs on CPUs, with replaced calls of ``torch.cuda``, in the processes of a mesh, once through all of `cases`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.backends import MegatronTrainer, Mesh, TorchTrainer
from flowrl.sync.digest import weights_digest
from tests.backends.megatron.cases import CASES, KINDS, QUICK, Ranks, results
from tests.backends.torch.meshes.mesh_cases import make_inputs
from tests.backends.torch.meshes.processes import assert_as_one, name_of, run
from tests.backends.torch.train.test_fsdp import relative_error
from tests.support.errors import raises
from tests.support.models import tiny_folder

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]  # the first test of a mesh waits until its ranks end

installed = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


def every_mesh(test: Any) -> Any:
    """A test that runs nightly, if megatron-core is installed."""
    return pytest.mark.nightly(installed(test))


MESHES = [
    Mesh(),
    Mesh(tensor=2),
    Mesh(pipeline=2),
    Mesh(replicate=2),
    Mesh(tensor=2, pipeline=2),
    Mesh(replicate=2, tensor=2),
    Mesh(replicate=2, pipeline=2),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of inputs, and the results of `TorchTrainer` in one process."""
    folder = tmp_path_factory.mktemp("megatron")
    make_inputs(folder, KINDS)
    return folder, {name: case(Ranks(folder)) for name, case in CASES.items()}


@installed
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    """Scores, gradients, weights after eight mini-batches, resumed ones and metrics, with layers split in two."""
    make_inputs(tmp_path, KINDS)
    ranks = run(tmp_path, Mesh(tensor=2), results.__module__, forked=True)
    for name in QUICK:
        assert_as_one(CASES[name](Ranks(tmp_path)), Mesh(tensor=2), [rank[name] for rank in ranks], 1e-6)


@pytest.fixture(scope="module", params=MESHES, ids=name_of)
def found(request: pytest.FixtureRequest, alone: Any) -> tuple[dict[str, Any], Mesh, list[dict[str, Any]]]:
    """The results of one process, a mesh, and the results of its ranks."""
    folder, truth = alone
    return truth, request.param, run(folder, request.param, results.__module__, "every", forked=True)


@every_mesh
@pytest.mark.parametrize("case", [name for name in CASES if name.split()[0] not in ("bfloat16", "sync", "refused")])
def test_megatron_computes_what_torch_does(found: Any, case: str) -> None:
    """Scores, gradients, weights after several mini-batches and metrics up to rounding, on every process."""
    truth, mesh, ranks = found
    assert_as_one(truth[case], mesh, [rank[case] for rank in ranks], 1e-6)


@every_mesh
@pytest.mark.parametrize("kind", KINDS)
def test_data_ranks_score_rows_of_their_own(found: Any, kind: str) -> None:
    truth, _, ranks = found
    for rank in ranks:
        rows, log_probs = rank[f"scores {kind}"]["own"]
        torch.testing.assert_close(log_probs, truth[f"scores {kind}"]["close"]["log_probs"][rows], atol=2e-6, rtol=0)


@every_mesh
def test_bfloat16_gradients_equal_those_of_autocast_up_to_rounding(found: Any) -> None:
    truth, _, ranks = found
    for rank in ranks:
        assert 1e-4 < relative_error(rank["bfloat16"]["close"], truth["bfloat16"]["close"]) < 0.03


@every_mesh
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("sync")])
def test_all_processes_sync_the_weights_that_they_save(found: Any, alone: Any, case: str) -> None:
    """The digest of the folder's weights before an update, and of the saved ones after it."""
    (truth, _, ranks), (folder, _) = found, alone
    for rank in ranks:
        assert rank[case]["digests"][0] == truth[case]["digests"][0]
        assert rank[case]["digests"][1] == ranks[0][case]["digests"][1] != truth[case]["digests"][0]
    saved = TorchTrainer(ranks[0][case]["folder"], device="cpu").build(Ranks(folder))
    assert weights_digest(saved.weights()) == ranks[0][case]["digests"][1]


@every_mesh
def test_rows_with_gaps_are_refused_on_all_processes(found: Any) -> None:
    truth, _, ranks = found
    for rank in ranks:
        assert rank["refused"]["error"].endswith("[megatron.gaps]")
        assert relative_error(rank["refused"]["close"], truth["refused"]["close"]) < 1e-6


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mesh": Mesh(fsdp=2)}, "mesh.fsdp"),
        ({"mesh": Mesh(fsdp=2, context=2)}, "mesh.fsdp"),
        ({"ranks": 2}, "ranks"),
        ({"offload": True}, "offload"),
        ({"attention": "eager"}, "attention"),
    ],
)
def test_settings_that_it_lacks_are_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with raises("megatron.unsupported", setting=name):
        MegatronTrainer("model", **settings)
    with raises("parameter.unknown"):
        MegatronTrainer("model", lora=None)  # type: ignore[call-arg]


def test_a_model_that_does_not_fit_is_refused_by_its_configuration_alone(tmp_path: Path) -> None:
    folders = {kind: tiny_folder(tmp_path, kind) for kind in ("llama", "gemma2")}
    with raises("megatron.no-architecture", setting="model_type", found="gemma2"):
        MegatronTrainer(folders["gemma2"]).refuse_missing()
    with raises("mesh.does-not-divide", size="num_hidden_layers", found=2, given=3):
        MegatronTrainer(folders["llama"], mesh=Mesh(pipeline=3)).refuse_missing()
    with raises("mesh.does-not-divide", size="num_key_value_heads", found=1, given=2):
        MegatronTrainer(folders["llama"], mesh=Mesh(tensor=2)).refuse_missing()
    for seed, (name, value) in enumerate({"mlp_bias": True, "attention_bias": True, "hidden_act": "gelu"}.items()):
        with raises("megatron.no-architecture", setting=name, found=value):
            MegatronTrainer(tiny_folder(tmp_path, seed=seed + 1, **{name: value})).refuse_missing()
    MegatronTrainer(folders["llama"], mesh=Mesh(replicate=3, pipeline=2)).refuse_missing()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_it_needs_a_gpu(tiny: str, tmp_path: Path) -> None:
    with raises("megatron.no-gpu"):
        MegatronTrainer(tiny).build(Ranks(tmp_path))
