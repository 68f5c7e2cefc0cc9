"""Trainer and engine on shared devices: the engine maps the trainer's memory while both are awake, then one sleeps.

The device is the CPU local, whose memory is passed by handles like that of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.distributed import delivery
from flowrl.distributed.place import Colocate
from flowrl.graphs import grpo
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import Closable
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync import ipc
from flowrl.sync.route import Location
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.toys import (
    Desk,
    Toy,
    ToyRollout,
    ToyRolloutEngine,
    ToyTrainer,
    ToyTrainerEngine,
    kill_blocked,
    toy_job,
    without_placement,
)
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS = [[11, 12], [13], [14, 15, 16]]
GRAPH = grpo(digits, n=2, max_new_tokens=4)


def share_the_cpu() -> None:
    """Use the CPU as the shared device, in a role's process, which ends with the job."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    ipc.shared_device = lambda: torch.device("cpu")  # type: ignore[assignment]


class Trainer(ToyTrainer):
    def build(self, context: Any) -> ToyTrainerEngine:
        share_the_cpu()
        return super().build(context)


class RolloutEngine(ToyRolloutEngine):
    def close(self) -> None:
        self.desk.record(self.role, self.rank, "close")


class Rollout(ToyRollout):
    serves = (*ToyRollout.serves, Closable)

    def build(self, context: Any) -> RolloutEngine:
        share_the_cpu()
        return RolloutEngine("rollout", self, context)


@pytest.mark.timeout(900)
def test_syncs_by_memory_handles_have_the_numbers_of_one_process(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the trainer or the engine is killed during a sync and rebuilt."""
    monkeypatch.setattr(delivery, "choose", lambda senders, receivers: ("cuda ipc", ((0,),)))
    batch, local, remote = proto(prompt_batch(PROMPTS)), tmp_path / "local", tmp_path / "ray"
    with toy_job(GRAPH, local, tiny).open(seed=5) as executor:
        executor.sync()
        local = [executor.step(batch, step) for step in range(4)]
    desk = Desk(str(remote))
    specs = {"actor": Trainer(str(remote), tiny), "rollout": Rollout(str(remote), tiny)}
    job = toy_job(GRAPH, remote, tiny, place=Colocate(1, restart="role")).edit(bind=specs)
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        remote = [executor.step(batch, 0)]
        turns = [f"{e['role']}.{e['what']}" for e in desk.events() if e["what"] in ("sleep", "wake", "sync", "weights")]
        last = len(turns) - 1 - turns[::-1].index("rollout.sync")
        woken = last - 1 - turns[:last][::-1].index("rollout.wake")
        one, *both, other = turns[woken : woken + 4]  # both sides of the transfer run concurrently
        assert (one, {*both}, other) == ("rollout.wake", {"actor.weights", "rollout.sync"}, "actor.sleep")
        for step, call in enumerate(("actor.weights", "rollout.sync"), 1):
            thread = kill_blocked(desk, call)
            remote.append(executor.step(batch, step))
            thread.join()
        remote.append(executor.step(batch, 3))
        processes += process_ids(executor).values()
    assert desk.events()[-1]["what"] == "close"  # engines are closed
    for a, b in zip(local, remote, strict=True):
        receipt, other = a.values["sync"]["receipt"], b.values["sync"]["receipt"]
        assert (receipt.version, receipt.digest, receipt.bytes) == (other.version, other.digest, other.bytes)
        assert (receipt.transport, other.transport) == ("copy", "cuda ipc")
        assert without_placement(a.metrics.compute()) == without_placement(b.metrics.compute())


def test_each_rank_sends_to_the_rank_on_its_device(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on two devices: each rank of the engine receives from a different rank of the trainer."""
    monkeypatch.setattr(delivery, "choose", lambda senders, receivers: ("cuda ipc", ((1,), (0,))))
    desk = Desk(str(tmp_path))
    specs = {"actor": Trainer(str(tmp_path), tiny, ranks=2), "rollout": Rollout(str(tmp_path), tiny, ranks=2)}
    job = toy_job(GRAPH, tmp_path, tiny, place=Colocate(2)).edit(bind=specs)
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        step = executor.step(proto(prompt_batch(PROMPTS)), 0)
        sent = [span for span in executor.timeline.spans if span.name == "send by sync"]
    assert step.values["sync"]["receipt"].transport == "cuda ipc"
    assert step.values["sync"]["receipt"].version == 1
    assert sorted(event["rank"] for event in desk.events() if event["what"] == "sync") == [0, 0, 1, 1]
    assert {span.place for span in sent} == {"actor rank 0", "actor rank 1"}
    assert len({span.bytes for span in sent}) == 1 and sent[0].bytes > 0


@pytest.mark.parametrize(("memory", "transport"), [(None, "cuda ipc"), (24.0, "cuda ipc"), (23.0, "object store")])
def test_trainer_and_engine_are_awake_together_only_if_both_fit_in_memory(memory: float | None, transport: str) -> None:
    """By their declared sizes, including that of a scorer in the trainer's process."""
    actor, rollout = ProcessSpec(("actor", "ref"), 0, Mesh(), (0,)), ProcessSpec(("rollout",), 0, Mesh(), (0,))
    sizes = {"actor": 8.0, "ref": 4.0, "rollout": 12.0}
    hosts: Any = SimpleNamespace(
        ranks=lambda role: [actor] if role == "actor" else [rollout],
        bindings={role: Toy(desk="", memory=size) for role, size in sizes.items()},
        locations={actor: Location("local", 1, ("0",)), rollout: Location("local", 2, ("0",))},
        place=Colocate(1, memory=memory),
    )
    chosen = delivery.Delivery(hosts, "actor", "rollout", "sync")
    assert chosen.transport == transport
    assert chosen.stay_awake == ([actor] if transport == "cuda ipc" else [])
