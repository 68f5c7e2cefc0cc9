"""The same job in one process and on Ray: the rest of what there is to say is in `on_ray`, by ``make test-ray``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ray

from flowrl import PromptData, Training
from flowrl.distributed.place import Colocate
from flowrl.sync.digest import weights_digest
from tests.jobs import job_of


def test_ray_has_the_bits_of_one_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """GRPO on one shared slot of a cluster that is started for the run."""
    from safetensors.torch import load_file

    job = job_of("grpo", tiny)
    local = Training(job, PromptData(prompts_file), steps=2, prompts=3, folder=str(tmp_path / "local")).run()
    place = Colocate(1)
    remote = Training(
        replace(job, place=place), PromptData(prompts_file), steps=2, prompts=3, folder=str(tmp_path / "ray")
    ).run()
    assert not ray.is_initialized()
    clock = ("timing", "throughput")
    for a, b in zip(local.metrics, remote.metrics, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(clock)} == {
            k: v for k, v in b.items() if not k.startswith(clock)
        }
    digests = {
        weights_digest(load_file(tmp_path / where / "actor" / "model.safetensors").items())
        for where in ("local", "ray")
    }
    assert len(digests) == 1
