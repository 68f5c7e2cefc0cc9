"""Checkpoints that `test_checkpoints.py` writes with a `MegatronTrainer` on a mesh, and reads on others; the main
program of a rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from flowrl.backends import MegatronTrainer, Mesh
from flowrl.sync.digest import weights_digest
from tests.backends.megatron import on_cpu
from tests.backends.megatron.cases import Ranks
from tests.backends.torch.meshes.checkpoint_cases import step
from tests.backends.torch.meshes.processes import main, name_of

MESHES = (Mesh(), Mesh(tensor=2), Mesh(pipeline=2), Mesh(replicate=2, pipeline=2), Mesh(tensor=2, pipeline=2))


def continued(engine: Any) -> tuple[str, str, int]:
    """The weights, those after two further steps, which moments and counters change too, and the version."""
    before = weights_digest(engine.weights())
    step(engine)
    return before, weights_digest(engine.weights()), engine.version


def results(folder: Path, mesh: Mesh, rank: int, reads: bool) -> dict[str, Any]:
    """What comes after a checkpoint that this mesh writes; or after each that any has written."""
    ranks = Ranks(folder, mesh, rank, backend=MegatronTrainer)
    engine = ranks.trainer("qwen3", grad_clip=None)
    if not reads:
        step(engine)
        engine.save_checkpoint(str(folder / name_of(mesh)))
        return {name_of(mesh): continued(engine)}
    found = {}
    for other in MESHES:
        with torch.no_grad():
            for parameter in engine.learner._parameters:
                parameter.zero_()
        engine.load_checkpoint(str(folder / name_of(other)))
        found[name_of(other)] = continued(engine)
    return found


if __name__ == "__main__":
    on_cpu.install()
    importlib.import_module("flowrl.backends.megatron.model")  # before ranks are forked
    main(results)
