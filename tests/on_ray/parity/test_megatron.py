"""Runs on Ray whose actor is a `MegatronTrainer`, against a `TorchTrainer` in one process, and until it learns."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from tests.backends.megatron.on_cpu import MegatronOnCPU
from tests.on_ray.parity.test_context import assert_learns_as_one_process
from tests.support.jobs import job_of
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


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(replicate=2)], ids=["pipeline", "replicate"])
def test_megatron_learns_as_torch_in_one_process(mesh: Mesh, prompts_file: str, tmp_path: Path) -> None:
    """Three steps of two mini-batches with tied weights: the same metrics and weights, receipts of syncs included."""
    # Without biases of keys: the softmax cancels most of their gradient, and AdamW scales the rounding of the rest.
    model = tiny_folder(tmp_path, "llama", num_key_value_heads=2, tie_word_embeddings=True)
    job = job_of("grpo", model, n=3, mini_batch=6, optimizer=AdamW(lr=1e-3, eps=1e-5))
    job = job.edit(bind={"rollout": TorchRollout(model, device="cpu")})
    actor = MegatronOnCPU(model, AdamW(lr=1e-3, eps=1e-5), device="cpu", mesh=mesh)
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4)
    split = job.edit(bind={"actor": actor, "ref": replace(job.graph.bindings["ref"], mesh=Mesh(fsdp=2))})  # type: ignore[type-var]
    assert_learns_as_one_process(training, replace(split, place=Colocate(2)), tmp_path, resumes=False)


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
