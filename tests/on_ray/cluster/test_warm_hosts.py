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


class Looks(ToyScorer):
    """A scorer that records the state of its process, and may then change it."""

    serves = (Scorer,)
    poisons: bool = False

    def build(self, context: Any) -> ToyScorerEngine:
        Desk(self.desk).record("ref", 0, "state", state=state())
        if self.poisons:
            poison()
            Desk(self.desk).record("ref", 0, "state", state=state())
        return ToyScorerEngine("ref", self, context)


def states(desk: Path, folder: str, poisons: bool) -> list[dict[str, Any]]:
    """The states of the process of a new job's scorer."""
    job = toy_job(grpo(digits, n=2), desk, folder, place=Colocate(1))
    with job.edit(bind={"ref": Looks(desk=str(desk), folder=folder, poisons=poisons)}).open() as executor:
        actors = [executor.runner.hosts.general, *executor.runner.hosts.actors.values()]
        for pid in ray.get([actor.pid.remote() for actor in actors]):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert os.path.basename(fork_server_process.__file__) in Path(f"/proc/{parent}/cmdline").read_text()
    return [event["state"] for event in Desk(str(desk)).events() if event["what"] == "state"]


def test_a_job_is_independent_of_earlier_jobs(tiny: str, tmp_path: Path) -> None:
    [clean] = states(tmp_path / "clean", tiny, poisons=False)
    found, poisoned = states(tmp_path / "poisons", tiny, poisons=True)
    [after] = states(tmp_path / "after", tiny, poisons=False)
    kinds = clean.keys() - {"sockets"}  # Ray opens some, whose number varies
    assert {kind for kind in kinds if poisoned[kind] != clean[kind]} == kinds
    for kind in kinds:
        assert clean[kind] == found[kind] == after[kind], kind


def test_without_a_server_a_worker_imports_for_itself() -> None:
    """It runs Ray's own program, which here lacks its arguments."""
    done = subprocess.run(
        [sys.executable, ray_worker.__file__],
        env=os.environ | {ray_worker.ADDRESS: "flowrl-no-such-server"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "default_worker.py: error: the following arguments are required" in done.stderr
