"""Runs on Ray whose actor and reference split layers (``Mesh(tensor=2)``), against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from tests.nightly import nightly
from tests.on_ray.parity.test_context import assert_learns_as_one_process
from tests.support.jobs import job_of
from tests.support.models import tiny_folder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize(("algorithm", "resumes"), [("grpo", False), nightly("grpo", True), nightly("ppo", True)])
def test_processes_that_split_layers_learn_as_one_process(
    algorithm: str, resumes: bool, prompts_file: str, tmp_path: Path
) -> None:
    """Three steps of two mini-batches: the same metrics and weights, receipts of syncs included; a resumed run is the
    same to the bit."""
    model = tiny_folder(tmp_path, "llama", num_key_value_heads=2)
    job = job_of(algorithm, model, n=3, mini_batch=6, optimizer=AdamW(lr=1e-3, eps=1e-5))
    job = job.edit(bind={"rollout": TorchRollout(model, device="cpu")})
    split = {name: replace(one, mesh=Mesh(tensor=2)) for name, one in job.graph.bindings.items() if name != "rollout"}
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4)
    assert_learns_as_one_process(training, replace(job.edit(bind=split), place=Colocate(2)), tmp_path, resumes)
