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
from tests.backends.torch.meshes.mesh_cases import name_of

pytestmark = [pytest.mark.nightly, pytest.mark.runs, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and the results of each process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_inputs(folder)
    logs, processes = [folder / f"log-{rank}.txt" for rank in range(PROCESSES)], []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.backends.torch.meshes.checkpoint_cases", str(rank), str(folder)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
    return folder, [pickle.loads((folder / f"found-{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_what_a_mesh_has_written_is_read_on_every_other_to_the_bit(found: Any, mesh: Mesh, name: str) -> None:
    """Weights, both moments of AdamW and the counters; all meshes have made the same steps."""
    _, processes = found
    truth = processes[0][f"writing {name_of(Mesh())}"][name]
    for process in processes[: mesh.ranks]:
        assert process[f"writing {name_of(mesh)}"][name] == truth
        assert {process[f"reading {name_of(mesh)}"][f"{name} {name_of(other)}"] for other in MESHES} == {truth}


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_a_mesh_saves_and_sends_what_one_process_does(found: Any, mesh: Mesh) -> None:
    folder, processes = found
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder / f"saved-{name_of(m)}") for m in (Mesh(), mesh)]
    one, other = (dict(named_weights(model)) for model in models)
    assert weights_digest(other.items()) == weights_digest(one.items())
    sent = weights_digest(rounded(one.items(), torch.bfloat16))
    assert {process[f"writing {name_of(mesh)}"]["sent"] for process in processes[: mesh.ranks]} == {sent}
