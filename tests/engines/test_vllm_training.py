"""The demo's run with rollouts from vLLM: one edit of the job, and the model learns to think as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.backends.vllm import VLLM
from flowrl.demo.model import build
from flowrl.demo.run import graphs, training
from flowrl.demo.task import write_dataset

pytestmark = pytest.mark.engines("vllm")
STEPS = 14


def test_the_demo_learns_to_think_from_rollouts_by_vllm(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", seed=0)[0].parent
    model = build(tmp_path / "model", seed=0)
    by_torch = training(graphs()[0], model, data, tmp_path / "run", STEPS, seed=0)
    rollout = VLLM(str(model), dtype="float32", kv_cache_bytes=128 << 20)
    run = replace(by_torch, job=by_torch.job.edit(bind={"rollout": rollout}), validation=(), save_model=False).run()
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    lengths = [metrics["response_length/mean"] for metrics in run.metrics]
    assert max(rewards[:2]) < 0.4
    assert min(rewards[-3:]) > 0.8
    assert lengths[-1] > 1.5 * lengths[0]  # it thinks before it answers
    assert [metrics["sync/version"] for metrics in run.metrics] == [*range(1, STEPS + 1)]
    assert all(metrics["sync/bytes"] > 0 for metrics in run.metrics)
