"""One Ray for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from flowrl.backends import TorchTrainer
from flowrl.distributed.cluster.host_server import node_options, start_fork_server

CPUS = 12


@pytest.fixture(scope="session")
def warm_workers() -> Iterator[dict[str, Any]]:
    """The parameters of a Ray node whose workers are forks of a process that has imported the modules of hosts."""
    server = start_fork_server({"actor": TorchTrainer("any")})
    assert server is not None
    yield node_options(server)
    server.close()


@pytest.fixture(scope="session", autouse=True)
def cluster(warm_workers: dict[str, Any]) -> Iterator[Cluster]:
    """One Ray for the session, with more logical CPUs than there are.

    In a separate folder (with a short path), because Ray registers the cluster in the common one, and any Ray that is
    started later would join it; and on a machine where Ray never ran, there is no common folder.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": CPUS, "include_dashboard": False, "object_store_memory": 256 << 20}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            cluster = Cluster(initialize_head=True, head_node_args=head | warm_workers)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def three_nodes(cluster: Cluster, warm_workers: dict[str, Any]) -> Iterator[None]:
    """Three nodes on this machine with one free CPU each, so that every slot is on a different node."""
    taken = placement_group([{"CPU": CPUS - 1}], strategy="STRICT_PACK")
    assert taken.wait(60)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=128 << 20, **warm_workers) for _ in range(2)]
    cluster.wait_for_nodes()
    yield
    for node in nodes:
        cluster.remove_node(node)
    remove_placement_group(taken)


class TwoNodes:
    def __init__(self, cluster, warm):
        self.cluster, self.warm = cluster, warm
        self.add()

    def add(self):
        self.node = self.cluster.add_node(num_cpus=2, object_store_memory=128 << 20, **self.warm)
        self.cluster.wait_for_nodes()

    def kill(self):
        self.cluster.remove_node(self.node, allow_graceful=False)


@pytest.fixture(scope="module")
def two_nodes(cluster: Cluster, warm_workers: dict[str, Any]):
    taken = placement_group([{"CPU": CPUS - 2}], strategy="STRICT_PACK")
    assert taken.wait(60)
    two = TwoNodes(cluster, warm_workers)
    yield two
    if two.node in cluster.worker_nodes:
        cluster.remove_node(two.node)
    remove_placement_group(taken)
