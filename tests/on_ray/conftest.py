"""One Ray for all tests of this folder."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def free_cpus(count: int) -> Iterator[None]:
    """So many CPUs of the first node are free in the block."""
    taken = placement_group([{"CPU": CPUS - count}], strategy="STRICT_PACK")
    assert taken.wait(60)
    yield
    remove_placement_group(taken)


@pytest.fixture(scope="module")
def three_nodes(cluster: Cluster, warm_workers: dict[str, Any]) -> Iterator[None]:
    """Three nodes on this machine with one free CPU each, so that every slot is on a different node."""
    with free_cpus(1):
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=128 << 20, **warm_workers) for _ in range(2)]
        cluster.wait_for_nodes()
        yield
        for node in nodes:
            cluster.remove_node(node)


class SecondNode:
    """A second node on this machine, which stands for another machine.

    Args:
        cpus: its CPUs.
    """

    def __init__(self, cluster: Cluster, warm_workers: dict[str, Any], cpus: int) -> None:
        self._cluster, self._options = cluster, {"num_cpus": cpus, "object_store_memory": 128 << 20, **warm_workers}
        self._node: Any = None

    def join(self) -> None:
        """Start it."""
        self._node = self._cluster.add_node(**self._options)
        self._cluster.wait_for_nodes()

    def freeze(self) -> None:
        """Stop Ray on it, without closing a connection."""
        for process in (info.process for kind in self._node.all_processes.values() for info in kind):
            process.send_signal(signal.SIGSTOP)

    def lose(self) -> None:
        """End all its processes at once, as if the power failed."""
        self._node, node = None, self._node
        if node is not None:
            self._cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def second_node(cluster: Cluster, warm_workers: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[SecondNode]:
    """A second node; it and the first one have as many free CPUs as the parameter says."""
    with free_cpus(request.param):
        node = SecondNode(cluster, warm_workers, request.param)
        node.join()
        yield node
        node.lose()
