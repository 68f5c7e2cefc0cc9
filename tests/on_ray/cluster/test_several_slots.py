"""Engines with several slots each: turns, the rows of each process, and deaths."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.distributed.place import Colocate
from flowrl.graphs import grpo
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.training.job import Job
from tests.on_ray.process_leaks import ends, leaves_nothing, process_ids
from tests.on_ray.toys import Desk, ToyRollout, assert_same_numbers, toy_job
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

GRAPH = grpo(digits, n=2, max_new_tokens=6)
PROMPTS = [[11, 12], [13], [14, 15, 16, 17, 18]]
STEPS = 4


def job_at(desk: Path, tiny: str, place: Colocate) -> Job:
    """An actor of three ranks, and a rollout of two, each with two slots and without a process group."""
    desk.mkdir()
    rollout = ToyRollout(desk=str(desk), folder=tiny, ranks=2, slots_per_rank=2, collective=False)
    return replace(toy_job(GRAPH, desk, tiny, {"actor": 3}), place=place).edit(bind={"rollout": rollout})


def run(executor: Any, on_step: Any = lambda step: lambda node: None) -> list[dict[str, float]]:
    """The metrics of some steps, without the numbers of syncs by transport."""
    executor.sync()
    found = []
    for step in range(STEPS):
        result = executor.step(proto(prompt_batch(PROMPTS)), step, on_node=on_step(step))
        found.append({key: value for key, value in result.metrics.compute().items() if not key.startswith("sync/by")})
    return [*found, {"digest": result.values["sync"]["receipt"].digest}]


def refuse_two_at_once(events: list[dict[str, Any]], plans: list[ProcessSpec]) -> None:
    """On each slot at most one process is awake at any time."""
    of = {(role, plan.rank): plan for plan in plans for role in plan.roles}
    awake: dict[tuple[str, int], ProcessSpec] = {}
    for event in events:
        who = event["role"], event["rank"]
        if event["what"] in ("sleep", "dead"):
            awake.pop(who, None)
        elif event["what"] in ("build", "wake"):
            others = [other for other in awake if of[who].shares_slots_with(awake[other])]
            assert not others, f"{event} while {others} are awake"
            awake[who] = of[who]


@pytest.mark.timeout(900)
def test_engines_with_several_slots_take_turns_and_are_rebuilt_after_deaths(tiny: str, tmp_path: Path) -> None:
    """One rank of two dies, and a rank of another role on the same slot."""
    with toy_job(GRAPH, tmp_path / "local", tiny).open(seed=5) as executor:
        expected = run(executor)
    job = job_at(tmp_path / "ray", tiny, Colocate(4, restart="role"))
    desk = Desk(str(tmp_path / "ray"))
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        plans = executor.runner.hosts.processes
        slots = {plan.name: plan.slots for plan in plans}
        assert slots == {
            "actor[0]": (0,), "actor[1]": (1,), "actor[2]": (2,), "ref[0]": (3,),
            "rollout[0]": (0, 1), "rollout[1]": (2, 3),
        }  # fmt: skip

        def kill_once(step: int) -> Any:
            due = {1: ("generate", "rollout[1]"), 2: ("update_actor", "actor[0]")}.get(step)

            def on_node(node: str) -> None:
                nonlocal due
                if due is None or node != due[0]:
                    return
                ids = {plan.name: pid for plan, pid in process_ids(executor).items() if plan is not None}
                processes.extend(ids.values())
                os.kill(ids[due[1]], signal.SIGKILL)
                assert ends(ids[due[1]])
                role = due[1].partition("[")[0]
                for plan in executor.runner.hosts.ranks(role):  # all of which end with it
                    desk.record(role, plan.rank, "dead")
                due = None

            return on_node

        *found, last = run(executor, kill_once)
        assert last == expected[-1]
        for there, here in zip(found, expected[:-1], strict=True):
            assert_same_numbers(there, here)
        processes += process_ids(executor).values()
    events = desk.events()
    refuse_two_at_once(events, plans)
    rows = [event["rows"] for event in events if event["what"] == "generate"]
    assert len(rows) >= 2 * STEPS
    assert all(count == len(PROMPTS) for count in rows), "two ranks split the rows"
    grouped = {event["role"]: event["grouped"] for event in events if event["what"] == "build"}
    assert grouped == {"actor": True, "ref": False, "rollout": False}
