"""Tests of `flowrl/distributed/hosts/host.py` and `flowrl/distributed/hosts/hosts.py`, on different nodes.

Weights are streamed from trainer to engine, and errors name what failed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowrl.backends import SGD, TorchRollout, TorchScorer, TorchTrainer
from flowrl.distributed import delivery
from flowrl.distributed.place import Split
from flowrl.errors import SyncError
from flowrl.graphs import grpo
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.group import TransferGroup
from flowrl.sync.probe import Probe
from flowrl.sync.weight_selection import WeightSelection
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.toys import Desk, ToyTrainer, ToyTrainerEngine, kill_blocked, toy_job
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("three_nodes")]

PROMPTS = [[11, 12], [13], [14, 15, 16]]
GRAPH = grpo(digits, n=2, max_new_tokens=4)


def batch() -> Any:
    return proto(prompt_batch(PROMPTS))


def test_streamed_weights_are_bit_equal_to_those_of_the_object_store(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two FSDP ranks and an engine on three nodes, with many buckets; one job uses both transports."""
    monkeypatch.setattr(delivery, "BUCKET_BYTES", 20_000)
    bindings = {
        "actor": TorchTrainer(tiny, SGD(lr=0.05), device="cpu", ranks=2),
        "ref": TorchScorer(tiny, device="cpu"),
        "rollout": TorchRollout(tiny, device="cpu"),
    }
    found = {}
    with leaves_nothing() as processes, GRAPH.bind(**bindings, place=Split(2, 1)).open(seed=3) as executor:
        processes += process_ids(executor).values()
        assert len({seat.node for seat in executor.runner.hosts.locations.values()}) == 3
        selection = WeightSelection("weights", None, Probe([[9, 20], [12]], [[33, 41, 7], [8, 30, 31]]))
        exported = executor.runner.hosts.ask_role("actor", "test", "export", "actor", selection, 20_000)[0]
        scored = selection.probe.score(TorchScorer(tiny, device="cpu").build(EngineBuilder({}, seed=0)))
        assert exported.origin.scores == pytest.approx(scored, abs=1e-5)
        executor.save(tmp_path / "start")
        for way in ("gloo", "object store"):
            if way != "gloo":
                monkeypatch.setattr(delivery, "choose", lambda *locations: ("object store", ((0, 1),)))
            executor.load(tmp_path / "start")
            results = [executor.step(batch(), step) for step in range(2)]
            receipts = [result.values["sync"]["receipt"] for result in results]
            assert [receipt.transport for receipt in receipts] == [way, way]
            metrics = [result.metrics.compute() for result in results]
            assert [one.pop(f"sync/by/{way.replace(' ', '_')}") for one in metrics] == [1, 1]
            found[way] = list(zip(metrics, [receipt[:3] for receipt in receipts], strict=True))
    assert found["gloo"] == found["object store"]
    assert found["gloo"][0] != found["gloo"][1]


class CrookedEngine(ToyTrainerEngine):
    """Damages its weights once during a transfer, as the file ``mischief`` requests."""

    def mischief(self) -> str:
        file = self.desk.folder / "mischief"
        return file.read_text() if file.exists() else ""

    def weights(self) -> Any:
        yield from super().weights()
        if self.mischief() == "raise":
            raise ValueError("out of memory")


class SendsOtherWeights(ToyTrainer):
    def build(self, context: Any) -> CrookedEngine:
        engine = CrookedEngine("actor", self, context)
        announce, carry = TransferGroup.broadcast_message, GlooCarrier.send

        def damaged_message(group: TransferGroup, message: Any) -> None:
            match engine.mischief():
                case "missing" if "tensors" in message:
                    message = message | {"tensors": message["tensors"][:-1]}
                case "stale" if "tensors" in message:
                    message = message | {"version": message["version"] - 1}
                case "old" if "role" in message:
                    message = message | {"version": message["version"] - 1}
            announce(group, message)

        def damaged_send(carrier: GlooCarrier, flat: Tensor) -> None:
            if engine.mischief() == "flip":
                flat = flat.clone()
                flat[3] ^= 1
            carry(carrier, flat)

        TransferGroup.broadcast_message, GlooCarrier.send = damaged_message, damaged_send  # type: ignore[method-assign]
        return engine


def test_an_error_of_a_stream_is_reported_with_its_kind_and_the_next_sync_works(tiny: str, tmp_path: Path) -> None:
    """Each kind of damage, an error on each side, and a trainer that is killed while it sends."""
    desk = Desk(str(tmp_path))
    job = toy_job(GRAPH, tmp_path, tiny, place=Split(2, 1))
    job = job.edit(bind={"actor": SendsOtherWeights(desk=str(tmp_path), folder=tiny)})
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        for step, (what, (code, host)) in enumerate(
            {
                "flip": ("sync.damaged", "rollout rank 0"),
                "missing": ("sync.damaged", "rollout rank 0"),
                "stale": ("sync.damaged", "rollout rank 0"),
                "old": ("sync.damaged", "rollout rank 0"),
                "raise": ("step.node-failed", "actor rank 0"),
                "fail": ("step.node-failed", "rollout rank 0"),
            }.items()
        ):
            (tmp_path / "mischief").write_text(what)
            if what == "fail":
                desk.fail("rollout.sync")
            with raises(code, host=host) as caught:
                executor.step(batch(), step)
            assert f"in step {step + 1}" in caught.value.message
            assert isinstance(caught.value.__cause__, SyncError if step < 4 else ValueError), what
            (tmp_path / "mischief").unlink()
            executor.sync()
        receipt = executor.step(batch(), 6).values["sync"]["receipt"]
        assert (receipt.version, receipt.transport) == (7, "gloo")
        spans = [span for span in executor.timeline.spans if span.name == "send by sync"]
        assert [(span.place, span.bytes) for span in spans[-1:]] == [("actor rank 0", receipt.bytes)]

        thread = kill_blocked(desk, "actor.weights")
        with raises("host.died", task="sync in step 8", host="actor rank 0"):
            executor.step(batch(), 7)
        thread.join()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_engine_that_dies_or_hangs_while_it_receives_is_reported(how: str, tiny: str, tmp_path: Path) -> None:
    """The error does not name the trainer, which waits no longer than the deadline."""
    desk = Desk(str(tmp_path))
    job = toy_job(GRAPH, tmp_path, tiny, place=Split(2, 1, deadline=12.0 if how == "hangs" else 3600.0))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        if how == "dies":
            thread = kill_blocked(desk, "rollout.sync")
            with raises("host.died", task="sync in step 1", host="rollout rank 0"):
                executor.step(batch(), 0)
            thread.join()
        else:
            desk.block("rollout.sync")
            thread = threading.Thread(target=desk.blocked, args=("rollout.sync",))
            thread.start()
            with raises("host.stuck", task="sync in step 1", host="rollout rank 0"):
                executor.step(batch(), 0)
            thread.join()
