"""Tests of `checkpoint.py`, `saving.py` and `sharded.py` on real meshes of up to four processes: each writes, and each
reads what the others have written."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.protocols.mesh import Mesh
from flowrl.sync.digest import named_weights, weights_digest
from flowrl.sync.weight_selection import rounded
from tests import ROOT
from tests.backends.torch.meshes.checkpoint_cases import ENGINES, MESHES, PROCESSES, make_inputs
from tests.backends.torch.meshes.processes import name_of

pytestmark = [pytest.mark.nightly, pytest.mark.runs, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the processes have written."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_inputs(folder)
    logs, processes = [folder / f"log-{rank}.txt" for rank in range(PROCESSES)], []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.backends.torch.meshes.checkpoint_cases", str(rank), str(folder)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
    return folder


def results(folder: Path, case: str, mesh: Mesh) -> list[dict[str, Any]]:
    """Those of each process."""
    paths = [folder / f"{case}-{name_of(mesh)}-{rank}.pickle" for rank in range(mesh.ranks)]
    return [pickle.loads(path.read_bytes()) for path in paths]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_what_a_mesh_has_written_is_read_on_every_other_to_the_bit(found: Path, mesh: Mesh, name: str) -> None:
    """Weights, both moments of AdamW and the counters; all meshes have made the same steps."""
    truth = results(found, "writing", Mesh())[0][name]
    for wrote, read in zip(results(found, "writing", mesh), results(found, "reading", mesh), strict=True):
        assert wrote[name] == truth
        assert {name_of(other): read[f"{name} {name_of(other)}"] for other in MESHES} == dict.fromkeys(
            map(name_of, MESHES), truth
        )


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_a_mesh_saves_and_sends_what_one_process_does(found: Path, mesh: Mesh) -> None:
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(found / f"saved-{name_of(m)}") for m in (Mesh(), mesh)]
    one, other = (dict(named_weights(model)) for model in models)
    assert weights_digest(other.items()) == weights_digest(one.items())
    sent = weights_digest(rounded(one.items(), torch.bfloat16))
    assert {process["sent"] for process in results(found, "writing", mesh)} == {sent}
