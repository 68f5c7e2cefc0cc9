"""Hosts are forks of a process that has imported their modules, and are independent of earlier jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from flowrl.distributed.cluster import ray_worker
from flowrl.distributed.place import Colocate
from flowrl.graphs import grpo
from flowrl.protocols.protocols import Scorer
from flowrl.workers import fork_server_process
from tests.on_ray.toys import Desk, ToyScorer, ToyScorerEngine, toy_job
from tests.support.rewards import digits
from tests.workers.poison import poison, state

pytestmark = pytest.mark.ray


class RecordsState(ToyScorer):
    """A scorer that records the state of its process, and may then change it."""

    serves = (Scorer,)
    changes_state: bool = False

    def build(self, context: Any) -> ToyScorerEngine:
        Desk(self.desk).record("ref", 0, "state", state=state())
        if self.changes_state:
            poison()
            Desk(self.desk).record("ref", 0, "state", state=state())
        return ToyScorerEngine("ref", self, context)


def states(desk: Path, folder: str, changes_state: bool) -> list[dict[str, Any]]:
    """The states of the process of a new job's scorer."""
    job = toy_job(grpo(digits, n=2), desk, folder, place=Colocate(1))
    with job.edit(
        bind={"ref": RecordsState(desk=str(desk), folder=folder, changes_state=changes_state)}
    ).open() as executor:
        actors = [executor.runner.hosts.general, *executor.runner.hosts.actors.values()]
        for pid in ray.get([actor.pid.remote() for actor in actors]):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert os.path.basename(fork_server_process.__file__) in Path(f"/proc/{parent}/cmdline").read_text()
    return [event["state"] for event in Desk(str(desk)).events() if event["what"] == "state"]


def test_a_job_does_not_see_process_state_of_earlier_jobs(tiny: str, tmp_path: Path) -> None:
    [clean] = states(tmp_path / "clean", tiny, changes_state=False)
    found, poisoned = states(tmp_path / "changes_state", tiny, changes_state=True)
    [after] = states(tmp_path / "after", tiny, changes_state=False)
    kinds = clean.keys() - {"sockets"}  # Ray opens some, whose number varies
    assert {kind for kind in kinds if poisoned[kind] != clean[kind]} == kinds
    for kind in kinds:
        assert clean[kind] == found[kind] == after[kind], kind


def test_a_worker_without_a_fork_server_runs_rays_own_program() -> None:
    """The program fails here because it has no arguments."""
    done = subprocess.run(
        [sys.executable, ray_worker.__file__],
        env=os.environ | {ray_worker.ADDRESS: "flowrl-no-such-server"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "default_worker.py: error: the following arguments are required" in done.stderr
