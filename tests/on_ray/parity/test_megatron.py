"""A run on Ray whose actor is a `MegatronTrainer` of two stages."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from tests.backends.megatron.on_cpu import MegatronOnCPU
from tests.support.models import tiny_folder
from tests.test_learning import job as learning_job
from tests.test_learning import rewards, write_task

pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]


def test_grpo_with_megatron_raises_the_reward(tmp_path: Path) -> None:
    """Thirty steps of the task of `tests/test_learning.py`, in two stages."""
    model = tiny_folder(tmp_path)
    actor = MegatronOnCPU(model, AdamW(lr=3e-3), device="cpu", mesh=Mesh(pipeline=2))
    job = learning_job("grpo", model)
    reference = replace(job.graph.bindings["ref"], mesh=Mesh(fsdp=2))  # type: ignore[type-var]
    job = job.edit(bind={"actor": actor, "ref": reference, "rollout": TorchRollout(model, device="cpu")})
    task = PromptData(write_task(tmp_path / "prompts.jsonl"))
    staged = replace(job, place=Colocate(2))
    run = Training(staged, task, steps=30, prompts=8, seed=0, folder=str(tmp_path / "run"), save_model=False).run()
    first, last = rewards(run)
    assert first < 0.45
    assert last > 0.85
