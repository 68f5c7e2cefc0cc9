"""Tests of `flowrl/distributed/cluster/slots.py` and `flowrl/distributed/faults/machines.py` on two nodes of Ray.

Both are on this computer and stand for machines: trainers are sharded over both, layers are split and rows are shared
within one, both have engines, and one is lost during a run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup, placement_group_table

from flowrl import PromptData, Training
from flowrl.backends import AdamW, LoRA, Mesh, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.distributed.cluster import slots
from flowrl.distributed.cluster.slots import Slots
from flowrl.distributed.place import Colocate, Split
from flowrl.graphs import grpo
from flowrl.operators import Sync
from flowrl.protocols.protocols import BuildContext
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest
from tests.on_ray.conftest import SecondNode
from tests.on_ray.parity.test_context import assert_learns_as_one_process, close
from tests.on_ray.parity.test_parity import numbers, relative, saved
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.toys import Desk, toy_job
from tests.support.architectures import architecture
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto
from tests.support.models import tiny_folder
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SETTINGS: Mapping[str, Any] = {"n": 3, "mini_batch": 6, "optimizer": AdamW(lr=1e-3, eps=1e-5)}


def on_meshes(job: Job, model: str, mesh: Mesh) -> Job:
    """The job with an engine on each rank of a mesh, which all other roles have."""
    shared = {role: replace(one, mesh=mesh) for role, one in job.graph.bindings.items() if role != "rollout"}
    return job.edit(bind={**shared, "rollout": TorchRollout(model, device="cpu", ranks=mesh.ranks)})


def lose_once(called: Callable[[], object], node: SecondNode) -> threading.Thread:
    """Lose the node when the call returns."""

    def lose() -> None:
        called()
        node.lose()

    thread = threading.Thread(target=lose)
    thread.start()
    return thread


class WaitsInUpdate(TorchTrainer):
    """A trainer whose rank 1 writes to the pipe `fate` in its third update and never returns, if the pipe exists."""

    fate: str = ""

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        engine, fate = super().build(context), Path(self.fate)
        update = engine.update

        def waiting(*arguments: Any) -> Any:
            if context.rank == 1 and engine.version == 2 and fate.exists():
                fate.write_text("waits")  # returns once the test reads it
                signal.pause()
            return update(*arguments)

        engine.update = waiting  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize("second_node", [1], indirect=True)
def test_a_lost_machine_is_named_and_the_run_resumes_on_another(
    second_node: SecondNode, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Each role has a rank on both machines, and one is lost during an update; the resumed run ends as one process."""
    job = job_of("grpo", tiny, **SETTINGS).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    training = Training(job, PromptData(prompts_file), steps=4, prompts=4, folder=str(tmp_path / "local"))
    local = training.run()
    os.mkfifo(fate := tmp_path / "fate")
    actor = WaitsInUpdate(tiny, SETTINGS["optimizer"], device="cpu", fate=str(fate))
    job = on_meshes(job.edit(bind={"actor": actor}), tiny, Mesh(fsdp=2))
    there = replace(
        training,
        job=replace(job, place=Colocate(2, per_machine=1)),
        checkpoint_every=1,
        folder=str(tmp_path / "ray"),
    )
    thread = lose_once(fate.read_text, second_node)
    with leaves_nothing():
        with raises("host.machine-lost", task="update_actor in step 3", processes=("actor[1]", "ref[1]", "rollout[1]")):
            there.run()
        thread.join()
        fate.unlink()
        second_node.join()
        resumed = replace(there, resume=True).run()
    close(numbers(resumed.metrics), numbers(local.metrics))
    one, two = (saved(tmp_path / name / "actor") for name in ("local", "ray"))
    assert all(relative(one[name], two[name]) < 1e-5 for name in one)


@pytest.mark.nightly
@pytest.mark.parametrize("second_node", [1], indirect=True)
def test_two_jobs_that_need_both_machines_do_not_wait_for_each_other(
    second_node: SecondNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has one machine at first; one of them gives it back, and both run, one after the other."""
    place = Colocate(2, per_machine=1)
    plans = [ProcessSpec(("actor",), rank, Mesh(fsdp=2), (rank,)) for rank in range(2)]
    both, mine, reserve = threading.Barrier(2), threading.local(), slots.placement_group

    def one_machine_each(*arguments: Any, **options: Any) -> PlacementGroup:
        group = reserve(*arguments, **options)
        if not hasattr(mine, "first"):
            mine.first = group
            assert group.wait(60)
            both.wait(60)
        return group

    def job() -> int:
        reserved = Slots(place, plans)
        nodes = {table["bundles_to_node_id"][0] for table in map(placement_group_table, reserved._groups)}
        reserved.release()
        return len(nodes)

    monkeypatch.setattr(slots, "placement_group", one_machine_each)
    with ThreadPoolExecutor(2) as jobs:
        found = [jobs.submit(job) for _ in range(2)]
        assert [one.result() for one in found] == [2, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("second_node", [1], indirect=True)
@pytest.mark.parametrize(
    "call",
    [
        "rollout[1].generate",
        "ref[1].log_probs",
        "actor[1].update",
        "actor[1].weights",
        "rollout[1].sync",
        "ref[1].wake",
    ],
)
def test_a_machine_lost_in_any_call_is_named(call: str, second_node: SecondNode, tiny: str, tmp_path: Path) -> None:
    """The rank of the role on the second machine waits in the call as the machine is lost."""
    desk = Desk(str(tmp_path))
    ranks = {"actor": 2, "ref": 2, "rollout": 2}
    job = toy_job(grpo(digits, n=2, max_new_tokens=4), tmp_path, tiny, ranks, Colocate(2, per_machine=1))
    batch = proto(prompt_batch([[11, 12], [13], [14, 15]]))
    with leaves_nothing() as processes:
        with raises("host.machine-lost", processes=("actor[1]", "ref[1]", "rollout[1]")), job.open() as executor:
            processes += process_ids(executor).values()
            executor.sync()
            executor.step(batch, 0)
            desk.block(call)
            thread = lose_once(lambda: desk.blocked(call), second_node)
            executor.step(batch, 1)
        thread.join()


@pytest.mark.nightly
@pytest.mark.parametrize("second_node", [1], indirect=True)
def test_a_machine_that_stops_responding_is_named(second_node: SecondNode, tiny: str, tmp_path: Path) -> None:
    """Its connections stay open, so that only Ray's health checks notice it."""
    desk = Desk(str(tmp_path))
    ranks = {"actor": 2, "ref": 2, "rollout": 2}
    job = toy_job(grpo(digits, n=2, max_new_tokens=4), tmp_path, tiny, ranks, Colocate(2, per_machine=1))
    frozen: list[int] = []

    def freeze() -> None:
        desk.blocked("actor[1].update")
        second_node.freeze()
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    with leaves_nothing() as processes:
        with raises("host.machine-lost", processes=("actor[1]", "ref[1]", "rollout[1]")), job.open() as executor:
            pids = process_ids(executor)
            processes += pids.values()
            frozen += [pid for plan, pid in pids.items() if plan is not None and plan.rank == 1]
            executor.sync()
            desk.block("actor[1].update")
            thread = threading.Thread(target=freeze)
            thread.start()
            executor.step(proto(prompt_batch([[11, 12], [13], [14, 15]])), 0)
        thread.join()
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)  # they would wait for their machine


@pytest.mark.nightly
@pytest.mark.parametrize("second_node", [2], indirect=True)
@pytest.mark.parametrize(
    ("algorithm", "kind", "mesh", "lora"),
    [
        ("grpo", "llama", Mesh(fsdp=2, tensor=2), None),
        ("ppo", "llama", Mesh(fsdp=2, tensor=2), None),
        ("grpo", "llama", Mesh(fsdp=4, context=2), None),
        ("grpo", "llama", Mesh(replicate=2, tensor=2), LoRA(r=4)),
        ("grpo", "qwen3_moe", Mesh(fsdp=2, tensor=2, expert=2), None),
        ("grpo", "qwen3_moe", Mesh(fsdp=4, expert=4), None),  # the experts of a layer are on both machines
    ],
)
def test_every_mesh_learns_over_two_machines_as_one_process(
    algorithm: str,
    kind: str,
    mesh: Mesh,
    lora: LoRA | None,
    second_node: SecondNode,
    prompts_file: str,
    tmp_path: Path,
) -> None:
    """Two ranks of each role on both machines: the same metrics and weights; a resumed run is the same to the bit."""
    make = tiny_folder if kind == "llama" else architecture
    model = make(tmp_path, kind, num_key_value_heads=2)
    job = job_of(algorithm, model, trainer={"lora": lora}, **SETTINGS)
    job = job.edit(bind={"rollout": TorchRollout(model, device="cpu")})
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4)
    there = replace(on_meshes(job, model, mesh), place=Colocate(4, per_machine=2))
    assert_learns_as_one_process(training, there, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("second_node", [2], indirect=True)
@pytest.mark.parametrize("changed", [False, True])
def test_weights_reach_the_engines_of_another_machine(changed: bool, second_node: SecondNode, tmp_path: Path) -> None:
    """Two ranks that split layers are on one machine, two engines on the other; each sync has what the actor saves."""
    model = tiny_folder(tmp_path, "llama", num_key_value_heads=2)
    job = job_of("grpo", model, n=2, optimizer=AdamW(lr=1e-3, eps=1e-5))
    engines = TorchRollout(model, device="cpu", ranks=2)
    job = on_meshes(job, model, Mesh(tensor=2)).edit(bind={"rollout": engines})
    if changed:
        job = job.edit(replace={"sync": Sync(changed=True)})
    with leaves_nothing() as processes, replace(job, place=Split(2, 2, per_machine=2)).open() as executor:
        processes += process_ids(executor).values()
        nodes = {plan.name: location.node for plan, location in executor.runner.hosts.locations.items()}
        assert nodes["actor[0]"] == nodes["actor[1]"] != nodes["rollout[0]"] == nodes["rollout[1]"]
        executor.sync()
        for step in range(3):
            result = executor.step(proto(prompt_batch([[11, 12], [13], [14, 15]])), step)
            receipt = result.values["sync"]["receipt"]
            executor.save_pretrained("actor", str(tmp_path / "saved"))
            assert (receipt.version, receipt.transport) == (step + 1, "gloo")
            assert receipt.digest == weights_digest(saved(tmp_path / "saved").items())
