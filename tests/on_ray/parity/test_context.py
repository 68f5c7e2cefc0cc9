"""Runs on Ray whose actor, critic and reference share rows (``Mesh(fsdp=2, context=2)``), against one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import PromptData, Training
from flowrl.backends import AdamW, Mesh, TorchRollout
from flowrl.distributed.place import Colocate
from tests.nightly import nightly
from tests.on_ray.parity.test_parity import numbers, relative, saved
from tests.on_ray.process_leaks import leaves_nothing
from tests.support.jobs import job_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


def close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", nightly("ppo")])
def test_processes_that_share_rows_learn_as_one_process(
    algorithm: str, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Three steps of two mini-batches: the same metrics and weights, and a resumed run is the same to the bit."""
    settings: Mapping[str, Any] = {"n": 3, "mini_batch": 6, "optimizer": AdamW(lr=1e-3, eps=1e-5)}
    job = job_of(algorithm, tiny, **settings).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    mesh = Mesh(fsdp=2, context=2)
    shared = {name: replace(one, mesh=mesh) for name, one in job.graph.bindings.items() if name != "rollout"}
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4, folder=str(tmp_path / "local"))
    local = training.run()
    there = replace(training, job=replace(job.edit(bind=shared), place=Colocate(2)), folder=str(tmp_path / "ray"))
    with leaves_nothing():
        remote = there.run()
        parts = replace(there, folder=str(tmp_path / "parts"), checkpoint_every=1)
        replace(parts, steps=2).run()
        resumed = replace(parts, resume=True).run()
    close(numbers(remote.metrics), numbers(local.metrics))
    assert numbers(resumed.metrics) == numbers(remote.metrics)
    one, two, three = (saved(tmp_path / name / "actor") for name in ("local", "ray", "parts"))
    assert all(relative(one[name], two[name]) < 1e-5 for name in one)
    assert all(torch.equal(two[name], three[name]) for name in two)
