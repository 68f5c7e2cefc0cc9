"""Tests of starting and joining Ray clusters, in separate processes, and of jobs refused before a model loads.

They cover `flowrl/distributed/cluster/cluster.py`, `flowrl/distributed/cluster/host_server.py`,
`flowrl/distributed/cluster/local_cluster.py` and `flowrl/distributed/cluster/slots.py`.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.cluster.slots import Slots
from flowrl.distributed.place import Colocate, Split
from flowrl.graphs import grpo
from flowrl.run.placement.place import Place
from flowrl.run.training.job import Job
from tests.on_ray.process_leaks import family
from tests.on_ray.toys import Blind, Both, Counting, Desk, toy_job
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.rewards import digits

pytestmark = pytest.mark.ray

JOB = """
    from pathlib import Path
    from flowrl.distributed.place import Colocate
    from flowrl.graphs import grpo
    from tests.support.jobs import prompt_batch, proto
    from tests.on_ray.toys import Desk, ToyRollout, toy_job
    from tests.support.rewards import digits
    import ray

    def step(desk, folder, **place):
        run(toy_job(grpo(digits, n=2, max_new_tokens=4), Path(desk), folder, place=Colocate(1, **place)))

    def run(job):
        with job.open() as executor:
            executor.sync()
            result = executor.step(proto(prompt_batch([[11, 12], [13]])), 0)
            print("trained", result.metrics["actor/trained"].compute())
            return executor.runner.hosts.processes
"""


def script(code: str, *arguments: str, **environment: str) -> str:
    """Run a script in a separate process; returns its stdout and stderr."""
    source = textwrap.dedent(JOB) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def listening(root: int) -> set[str]:
    """The addresses at which a process and its descendants listen, in the kernel's notation."""
    sockets = set()
    for process in family(root):
        with suppress(FileNotFoundError, ProcessLookupError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    listens = "0A"
    return {line[1].partition(":")[0] for line in lines if line[3] == listens and line[9] in sockets}


REUSED = """
    import os, sys
    from flowrl.distributed.cluster.cluster import connected
    from tests.on_ray.cluster.test_cluster import listening
    from flowrl.distributed.cluster import local_cluster
    address = lambda: ray.get_runtime_context().gcs_address
    variable = ray.remote(lambda: os.environ.get("PLANTED"))
    with connected(Colocate(1)):
        print("CPUs", ray.cluster_resources()["CPU"] >= 1)
        ray.get(ray.remote(lambda: "a process of Ray's").remote())
        print("at", *sorted(listening(os.getpid())))
    first = address()
    step(sys.argv[1], sys.argv[2])
    print("reused", address() == first)
    with connected(Colocate(1)), connected(Colocate(1)):
        print("nested", address() == first)
    cpus = int(ray.cluster_resources()["CPU"])
    with connected(Colocate(cpus + 1)):
        print("larger", address() != first, ray.cluster_resources()["CPU"] == cpus + 1)
    second = address()
    with connected(Colocate(1)):
        print("reused", address() == second)
    os.environ["PLANTED"] = "seen"
    step(sys.argv[1], sys.argv[2])
    print("environment", address() != second, ray.get(variable.remote()))
    third = address()
    local_cluster._cluster.hosts.server.close()
    with connected(Colocate(1)):
        print("after a death", address() != third, ray.get(variable.remote()))
    ray.shutdown()
    with connected(Colocate(1)):
        print("after a shutdown", ray.get(variable.remote()))
"""
"""Several jobs in one process, with events between them that need a new cluster."""


@pytest.mark.timeout(600)
def test_the_cluster_of_a_process_is_reused_until_it_is_shut_down(tiny: str, tmp_path: Path) -> None:
    """It starts without output, listens only on the loopback, ignores RAY_ADDRESS, and serves later jobs.

    A job gets a new cluster if this one has too few CPUs, was shut down, or has a dead process, or if the environment,
    which workers inherit, has changed.
    """
    printed = script(
        REUSED,
        str(tmp_path / "desk"),
        tiny,
        RAY_ADDRESS=unused_address(),
    )
    lines = [line for line in printed.splitlines() if "Loading weights" not in line]
    loopback = "0100007F"
    assert lines == [
        "CPUs True",
        f"at 0000000000000000FFFF0000{loopback} {loopback}",
        "trained 4.0",
        "reused True",
        "nested True",
        "larger True True",
        "reused True",
        "trained 4.0",
        "environment True seen",
        "after a death True seen",
        "after a shutdown seen",
    ]


@pytest.fixture
def token() -> dict[str, str]:
    """The environment variables with the token of a cluster, which this test creates."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def head(token: dict[str, str]) -> Iterator[str]:
    """The address of a cluster of another process; it has GPUs as far as Ray knows."""
    source = """if True:
        import ray, sys
        quiet = {"include_dashboard": False, "log_to_driver": False}
        ray.init("local", num_cpus=3, num_gpus=3, object_store_memory=100 << 20, **quiet)
        print("at", ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", source], env=os.environ | token, text=True, **pipes) as process:
        assert process.stdout is not None
        yield next(line.split()[1] for line in process.stdout if line.startswith("at "))
        process.communicate()


def joining(address: str, token: dict[str, str]) -> str:
    """The output of a process that joins the cluster at `address` with `token`."""
    return script(
        """
        import sys
        from flowrl.distributed.cluster.cluster import connected
        from flowrl.errors import BindError
        try:
            with connected(Colocate(1, address=sys.argv[1])):
                print("connected")
        except BindError as error:
            print(error)
        """,
        address,
        **token,
    )


@pytest.mark.timeout(900)
def test_a_job_on_a_joined_cluster_runs_or_is_refused_and_the_cluster_survives(
    head: str, token: dict[str, str], tiny: str, tmp_path: Path
) -> None:
    """A job is refused if the cluster is too small, the address is another one, or the token is wrong. A connection
    that the program has is used and left open.

    An engine with several slots sees the GPUs of all of them, an engine with one slot sees one GPU.
    """
    printed = script(
        """
        import sys
        from flowrl.distributed.cluster.cluster import connected
        from flowrl.errors import BindError
        desk, folder, address = sys.argv[1:]
        wide = ToyRollout(desk=desk, folder=folder, slots_per_rank=2)
        job = toy_job(grpo(digits, n=2, max_new_tokens=4), Path(desk), folder, place=Colocate(3, address=address))
        plans = run(job.edit(bind={"rollout": wide}))
        assert not ray.is_initialized()
        sees = {event["role"]: event["gpus"] for event in Desk(desk).events() if event["what"] == "build"}
        for plan in plans:
            print("slots", *plan.slots, "see", sees[plan.roles[0]])
        try:
            with toy_job(grpo(digits, n=2), Path(desk), folder, place=Colocate(7, address=address)).open():
                print("opened")
        except BindError as error:
            print(error)
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        with connected(Colocate(3)):
            print("at", ray.get_runtime_context().gcs_address)
        assert ray.is_initialized()
        try:
            step(desk, folder, address="127.0.0.1:1")
        except BindError as error:
            print(error)
        """,
        str(tmp_path / "desk"),
        tiny,
        head,
        **token,
    )
    assert printed.count("trained 4.0") == 1
    assert f"at {head}\n" in printed and "opened" not in printed
    assert "Colocate needs 7 slot(s), but the Ray cluster has only 3 GPU(s)" in printed
    seen = [line.split()[1:] for line in printed.splitlines() if line.startswith("slots ")]
    assert sorted(len(words) for words in seen) == [3, 3, 4]
    gpu = {slots[0]: gpus for *slots, _, gpus in seen if len(slots) == 1}
    [[slots, gpus]] = [[slots, gpus.split(",")] for *slots, _, gpus in seen if len(slots) == 2]
    for slot, number in zip(slots, gpus, strict=True):
        assert gpu.setdefault(slot, number) == number
    assert len(gpu) == len(set(gpu.values())), "each slot has a GPU of its own"
    refused = joining(head, token | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    assert f"The Ray cluster at '{head}' rejected this process's token" in refused
    assert "RAY_AUTH_TOKEN" in refused and "[cluster.authentication]" in refused
    assert "Colocate has address='127.0.0.1:1', but this process is connected to the Ray cluster at" in printed


@pytest.fixture
def disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process is not connected to a cluster, as it is after other tests."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


def unused_address() -> str:
    """An address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.usefixtures("disconnected")
@pytest.mark.parametrize("silent", [False, True])
def test_an_address_that_does_not_respond_is_refused(silent: bool, tiny: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}" if silent else unused_address()
        job = Job(job_of("grpo", tiny).graph, Colocate(1, address=address))
        started = time.monotonic()
        with raises("cluster.address", address=address), job.open():
            raise AssertionError("opened")
        assert time.monotonic() - started < 100  # Ray would wait for minutes


@pytest.mark.parametrize("address", ["nowhere", "host:port", "ray://host:1"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with raises("cluster.address", address=address), connected(Colocate(1, address=address)):
        raise AssertionError("connected")


@pytest.mark.usefixtures("disconnected")
def test_a_failed_start_of_ray_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because of much.")

    monkeypatch.setattr(ray, "init", refuse)
    reason = "Exception: The current node timed out during startup"
    with raises("cluster.start-failed", reason=reason), connected(Colocate(1)):
        raise AssertionError("connected")


@pytest.mark.usefixtures("disconnected")
def test_another_service_at_the_address_is_refused() -> None:
    """A server that responds, but does not use Ray's protocol."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        place = Colocate(1, address=f"127.0.0.1:{port}")
        try:
            reason = "another service responds there"
            with raises("cluster.address", reason=reason), connected(place):
                raise AssertionError("connected")
        finally:
            server.terminate()


@pytest.mark.parametrize(
    ("ranks", "place", "code"),
    [
        ({"actor": 3}, Colocate(2), "place.too-few-slots"),
        ({"rollout": 2}, Split(3, 1), "place.too-few-slots"),
        ({"actor": 2}, None, "job.no-place"),
    ],
)
def test_ranks_without_slots_are_refused_before_an_engine_is_built(
    ranks: dict[str, int], place: Place | None, code: str, tiny: str, tmp_path: Path
) -> None:
    job = toy_job(grpo(digits), tmp_path / "desk", tiny, ranks, place)
    [(role, count)] = ranks.items()
    with raises(code, role=role, ranks=count), job.open():
        raise AssertionError("opened")
    assert not Desk(str(tmp_path / "desk")).events()


def test_nodes_that_no_process_can_run_are_refused(tiny: str, tmp_path: Path) -> None:
    """Roles of different processes; groups without a port for them; and state that each rank would have."""
    graph = grpo(digits, n=2)
    separate = toy_job(graph.edit(replace={"ref_log_prob": Both()}), tmp_path, tiny, place=Colocate(1))
    with raises("place.separate-roles", node="both"), separate.open():
        raise AssertionError("opened")
    blind = toy_job(graph.edit(replace={"ref_log_prob": Blind()}), tmp_path, tiny, {"ref": 2}, Colocate(2))
    with raises("place.ranks", node="blind", role="ref", ranks=2), blind.open():
        raise AssertionError("opened")
    counting = toy_job(graph.edit(replace={"ref_log_prob": Counting()}), tmp_path, tiny, {"ref": 2}, Colocate(2))
    with raises("place.ranks", node="counting", role="ref", ranks=2), counting.open():
        raise AssertionError("opened")


def test_each_slot_needs_a_cpu_in_addition_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0, "CPU": 2.0})
    with raises("cluster.too-small", slots=3, resource="CPU", found=2.0):
        Slots(Colocate(3), [])


def test_an_unbound_role_is_refused(tiny: str) -> None:
    graph = job_of("grpo", tiny).graph
    bound = {role: backend for role, backend in graph.bindings.items() if role != "ref"}
    job = grpo(digits).bind(place=Colocate(1), **bound)
    with raises("job.unbound-role", role="ref"), job.open():
        raise AssertionError("opened")


def test_declared_memory_beyond_that_of_the_slot_is_refused(tiny: str, tmp_path: Path) -> None:
    job = toy_job(grpo(digits), tmp_path / "desk", tiny, place=Colocate(1, memory=10))
    actor = job.graph.bindings["actor"]
    job = job.edit(bind={"actor": type(actor)(desk=actor.desk, folder=actor.folder, memory=16.0)})
    with raises("place.too-large", slot=0, expected=10.0, found=16.0), job.open():
        raise AssertionError("opened")


@pytest.mark.usefixtures("disconnected")
@pytest.mark.parametrize(
    "response", [bytes([0, 0, 1, 1, 5, 0, 0, 0, 1, 0x8D]), bytes([0, 0, 0, 7, 0, 0, 0, 0, 0]), b""]
)
def test_a_proxy_without_ray_is_refused_before_ray_retries(response: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """A gateway accepts connections to hosts that are gone, and responds to HTTP/2 with 404, goes away or hangs up.

    Ray would retry for 20 seconds, with a line each time.
    """
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(settings + response)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        place = Colocate(1, address=f"127.0.0.1:{server.getsockname()[1]}")
        with raises("cluster.address", reason="another service responds there"), connected(place):
            raise AssertionError("connected")
        thread.join()
    assert capfd.readouterr() == ("", "")
