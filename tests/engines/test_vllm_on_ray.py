"""`VLLM` in a process of Ray's, where it takes turns with the actor, sleeps between, and is probed after each sync."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowrl import Colocate, PromptData, Training
from flowrl.backends import SGD, TorchTrainer
from flowrl.backends.torch_trainer import TorchTrainerEngine
from flowrl.backends.vllm import VLLM
from flowrl.errors import NodeError
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


class Crooked(TorchTrainer):
    """Where the file `mischief` is, it sends other weights than it scores by; their digest is in order."""

    mischief: str = ""

    def build(self, context: Any) -> TorchTrainerEngine:
        engine, mischief = super().build(context), Path(self.mischief)
        honest = engine.weights

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in honest():
                yield name, tensor * 1.5 if mischief.exists() and "layers.0.mlp" in name else tensor

        engine.weights = weights  # type: ignore[method-assign]
        return engine


def test_other_weights_than_the_trainer_scores_by_are_refused(tiny: str, tmp_path: Path) -> None:
    mischief = tmp_path / "mischief"
    job = job_of("grpo", tiny, digits, optimizer=SGD(lr=0.05)).edit(
        bind={
            "rollout": VLLM(tiny, dtype="float32", kv_cache_bytes=64 << 20),
            "actor": Crooked(tiny, SGD(lr=0.05), device="cpu", mischief=str(mischief)),
        }
    )
    with replace(job, place=Colocate(gpus=1)).open() as executor:
        executor.sync()
        mischief.touch()
        with pytest.raises(NodeError, match=r"on rollout rank 0: SyncError: .*score the same 15 tokens differently"):
            executor.sync()
