"""The same job in one process and on Ray; other tests are in `on_ray`, see ``make test-ray``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file

from flowrl import PromptData, Training
from flowrl.distributed.place import Colocate
from flowrl.sync.digest import weights_digest
from tests.support.jobs import job_of


@pytest.fixture(autouse=True)
def shut_ray_down() -> Iterator[None]:
    yield
    ray.shutdown()


def test_two_jobs_on_ray_are_bit_equal_to_one_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """GRPO on one shared slot, on a cluster that the first job starts and the second reuses."""
    job = job_of("grpo", tiny)
    runs, addresses = [], []
    for where, place in (("local", None), ("first", Colocate(1)), ("second", Colocate(1))):
        placed, folder = replace(job, place=place), tmp_path / where
        runs.append(Training(placed, PromptData(prompts_file), steps=2, prompts=3, folder=str(folder)).run())
        if place is not None:
            addresses.append(ray.get_runtime_context().gcs_address)
    assert addresses[0] == addresses[1]
    clock = ("time", "timing", "throughput", "total/seconds")
    numbers = [[{k: v for k, v in step.items() if not k.startswith(clock)} for step in run.metrics] for run in runs]
    assert numbers[0] == numbers[1] == numbers[2]
    digests = {
        weights_digest(load_file(tmp_path / where / "actor" / "model.safetensors").items())
        for where in ("local", "first", "second")
    }
    assert len(digests) == 1
