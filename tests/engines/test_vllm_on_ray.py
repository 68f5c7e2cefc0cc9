"""`VLLM` in a process of Ray's, where it takes turns with the actor and sleeps between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import Colocate, PromptData, Training
from flowrl.backends import SGD
from flowrl.backends.vllm import VLLM
from tests.jobs import job_of
from tests.rewards import digits

pytestmark = [pytest.mark.engines("vllm", "ray"), pytest.mark.timeout(480)]


def test_it_trains_as_in_one_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    rollout = VLLM(tiny, dtype="float32", kv_cache_bytes=64 << 20)
    job = job_of("grpo", tiny, digits, optimizer=SGD(lr=0.05)).edit(bind={"rollout": rollout})
    runs = {
        name: Training(
            replace(job, place=place),
            PromptData(prompts_file),
            steps=3,
            prompts=4,
            folder=str(tmp_path / name),
            save_model=False,
        ).run()
        for name, place in {"ray": Colocate(gpus=1), "here": None}.items()
    }
    for on_ray, here in zip(runs["ray"].metrics, runs["here"].metrics, strict=True):
        assert on_ray["sync/version"] == here["sync/version"]
        assert on_ray["sync/bytes"] == here["sync/bytes"] > 0
        assert on_ray["reward/mean"] == pytest.approx(here["reward/mean"])
        assert on_ray["actor/grad_norm"] == pytest.approx(here["actor/grad_norm"], rel=1e-3)
