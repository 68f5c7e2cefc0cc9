"""vLLM on the weights of a `MegatronTrainer`: the modules of `backends/megatron` and `backends/vllm`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import Colocate
from flowrl.backends import SGD, Mesh
from flowrl.backends.vllm.engine import VLLM
from tests.backends.megatron.on_cpu import MegatronOnCPU
from tests.engines.test_engines_on_ray import DEADLINE, assert_greedy_responses, cluster, folder, job_with
from tests.on_ray.process_leaks import leaves_nothing

__all__ = ["cluster", "folder"]

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("cluster")]


@pytest.mark.engines("vllm", "ray")
@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_vllm_samples_from_the_weights_of_two_stages(folder: str, tmp_path: Path) -> None:
    """The digest of its weights is that of the folder that the trainer saves."""
    job = job_with(folder, VLLM(folder, dtype="float32", kv_cache_bytes=64 << 20), Colocate(gpus=2, deadline=DEADLINE))
    actor = MegatronOnCPU(folder, SGD(lr=0.5), device="cpu", mesh=Mesh(pipeline=2))
    reference = replace(job.graph.bindings["ref"], mesh=Mesh(fsdp=2))  # type: ignore[type-var]
    with leaves_nothing(), job.edit(bind={"actor": actor, "ref": reference}).open() as executor:
        assert_greedy_responses(executor, folder, tmp_path / "actor", ranks=1)
