"""Deaths of Ray's processes, and signals to the driver: the error names them, and the job unwinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_ray.cluster.test_cluster import script

pytestmark = pytest.mark.ray


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("process", "named"), [("raylet", "the raylet"), ("gcs_server", "the GCS")])
def test_an_error_names_the_ray_process_that_died(process: str, named: str, tiny: str, tmp_path: Path) -> None:
    """During a node; Ray itself would end the driver without a message at its next use of the object store."""
    printed = script(
        """
        import logging, os, signal, sys, threading
        from flowrl.errors import NodeError
        from ray._private import worker
        desk, folder, process = sys.argv[1:]
        logging.basicConfig(level=logging.ERROR)
        job = toy_job(grpo(digits, n=2, max_new_tokens=4), Path(desk), folder, place=Colocate(1, restart="role"))

        def kill():
            Desk(desk).blocked("actor.update")
            os.kill(worker._global_node.all_processes[process][0].process.pid, signal.SIGKILL)

        try:
            with job.open() as executor:
                executor.sync()
                executor.step(proto(prompt_batch([[11, 12], [13]])), 0)
                Desk(desk).block("actor.update")
                threading.Thread(target=kill).start()
                executor.step(proto(prompt_batch([[11, 12], [13]])), 1)
        except NodeError as error:
            print("caught", error)
        """,
        str(tmp_path / "desk"),
        tiny,
        process,
    )
    expected = f"A process of Ray on this machine died ({named}, process "
    assert f"caught {expected}" in printed and "[cluster.ray-died]" in printed
    assert f"ERROR:flowrl.distributed.faults.ray_processes:{expected}" in printed


@pytest.mark.timeout(600)
def test_a_signal_ends_a_run_and_its_ranks_listen_on_the_loopback(tiny: str, tmp_path: Path) -> None:
    """The exception of the program's handler is raised unchanged, without a C++ stack, and the handler stays installed.

    Neither the store nor gloo of two ranks on one machine opens a socket on another interface.
    """
    printed = script(
        """
        import os, signal, sys, threading
        from tests.on_ray.cluster.test_cluster import listening

        class Ended(SystemExit):
            pass

        def end(number, frame):
            raise Ended(143)

        desk, folder = sys.argv[1:]
        signal.signal(signal.SIGTERM, end)
        ranks = {"actor": 2}
        job = toy_job(grpo(digits, n=2, max_new_tokens=4), Path(desk), folder, ranks, Colocate(2))

        def kill():
            Desk(desk).blocked("rollout.generate")
            print("at", *sorted(listening(os.getpid())))
            os.kill(os.getpid(), signal.SIGTERM)

        try:
            with job.open() as executor:
                executor.sync()
                Desk(desk).block("rollout.generate")
                threading.Thread(target=kill).start()
                executor.step(proto(prompt_batch([[11, 12], [13]])), 0)
        except BaseException as error:
            print("caught", type(error).__name__, error.code, signal.getsignal(signal.SIGTERM) is end)
        """,
        str(tmp_path / "desk"),
        tiny,
    )
    lines = [line for line in printed.splitlines() if "Loading weights" not in line]
    assert lines == ["at 0000000000000000FFFF00000100007F 0100007F", "caught Ended 143 True"]
