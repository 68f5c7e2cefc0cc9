"""vLLM on two nodes of this computer, which stand for machines: each engine is on one, and both get a sync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from flowrl.backends.vllm.engine import VLLM
from flowrl.distributed.place import Colocate
from tests.engines.test_engines_on_ray import DEADLINE, all_processes, assert_greedy_responses, job_with
from tests.on_ray.process_leaks import leaves_nothing
from tests.support.models import tiny_folder

pytestmark = [pytest.mark.timeout(900), pytest.mark.engines("vllm", "ray"), pytest.mark.nightly]


@pytest.fixture
def two_machines() -> Iterator[None]:
    """A Ray with two nodes of two CPUs each."""
    node = {"num_cpus": 2, "object_store_memory": 256 << 20}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.usefixtures("two_machines")
def test_engines_on_two_machines_get_the_weights_of_ranks_on_both(tmp_path: Path) -> None:
    """Four ranks of the actor, two engines of two workers each: greedy responses are of the actor's weights."""
    folder = tiny_folder(tmp_path, "qwen2")
    rollout = VLLM(folder, tensor_parallel=2, ranks=2, dtype="float32", kv_cache_bytes=64 << 20)
    job = replace(job_with(folder, rollout, ranks=4), place=Colocate(4, per_machine=2, deadline=DEADLINE))
    with leaves_nothing() as processes, job.open() as executor:
        processes += all_processes(executor)
        nodes = {plan.name: location.node for plan, location in executor.runner.hosts.locations.items()}
        assert nodes["rollout[0]"] == nodes["actor[0]"] == nodes["actor[1]"]
        assert nodes["rollout[1]"] == nodes["actor[2]"] == nodes["actor[3]"] != nodes["rollout[0]"]
        assert_greedy_responses(executor, folder, tmp_path / "actor", ranks=2)
        processes += all_processes(executor)
