"""Runs on Ray whose actor, critic and reference share rows (``Mesh(fsdp=2, context=2)``), against one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from flowrl.run.training.job import Job
from tests.nightly import nightly
from tests.on_ray.parity.test_parity import numbers, relative
from tests.on_ray.process_leaks import leaves_nothing
from tests.support.jobs import job_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


def close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)


def assert_learns_as_one_process(training: Training, elsewhere: Job, folder: Path, resumes: bool = True) -> None:
    """The job of a training and the same one elsewhere have the same metrics and actor up to rounding; with `resumes`,
    a run that is resumed for its third step is the same to the bit."""
    local = replace(training, folder=str(folder / "local")).run()
    there = replace(training, job=elsewhere, folder=str(folder / "ray"))
    with leaves_nothing():
        remote = there.run()
        if resumes:
            parts = replace(there, folder=str(folder / "parts"), checkpoint_every=1)
            replace(parts, steps=2).run()
            resumed = replace(parts, resume=True).run()
    close(numbers(remote.metrics), numbers(local.metrics))
    one, two = (weights_of(folder / name / "actor") for name in ("local", "ray"))
    assert all(relative(one[name], two[name]) < 1e-5 for name in one)
    if resumes:
        assert numbers(resumed.metrics) == numbers(remote.metrics)
        three = weights_of(folder / "parts" / "actor")
        assert all(torch.equal(two[name], three[name]) for name in two)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Those of a model, or of an adapter."""
    [file] = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("algorithm", ["grpo", nightly("ppo")])
def test_processes_that_share_rows_learn_as_one_process(
    algorithm: str, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Three steps of two mini-batches: the same metrics and weights, and a resumed run is the same to the bit."""
    settings: Mapping[str, Any] = {"n": 3, "mini_batch": 6, "optimizer": AdamW(lr=1e-3, eps=1e-5)}
    job = job_of(algorithm, tiny, **settings).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    mesh = Mesh(fsdp=2, context=2)
    shared = {name: replace(one, mesh=mesh) for name, one in job.graph.bindings.items() if name != "rollout"}
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4)
    assert_learns_as_one_process(training, replace(job.edit(bind=shared), place=Colocate(2)), tmp_path)
