"""Trainer and engine on different nodes: weights stream between them, and whatever goes wrong is named."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowrl.backends import SGD, TorchRollout, TorchScorer, TorchTrainer
from flowrl.distributed import delivery
from flowrl.distributed.faults.faults import HostDiedError
from flowrl.distributed.place import Split
from flowrl.errors import NodeError, SyncError
from flowrl.graphs import grpo
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.group import TransferGroup
from flowrl.sync.probe import Probe
from flowrl.sync.wanted import WeightSelection
from tests.on_ray.leftovers import leaves_nothing, process_ids
from tests.on_ray.toys import Desk, ToyTrainer, ToyTrainerEngine, kill_blocked, toy_job
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("three_nodes")]

PROMPTS = [[11, 12], [13], [14, 15, 16]]
GRAPH = grpo(digits, n=2, max_new_tokens=4)


def batch() -> Any:
    return proto(prompt_batch(PROMPTS))


def test_a_stream_has_the_bits_of_the_object_store(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two FSDP ranks and an engine, each on a node of its own, in many buckets; one job goes both ways."""
    monkeypatch.setattr(delivery, "BUCKET_BYTES", 20_000)
    bindings = {
        "actor": TorchTrainer(tiny, SGD(lr=0.05), device="cpu", ranks=2),
        "ref": TorchScorer(tiny, device="cpu"),
        "rollout": TorchRollout(tiny, device="cpu"),
    }
    found = {}
    with leaves_nothing() as processes, GRAPH.bind(**bindings, place=Split(2, 1)).open(seed=3) as executor:
        processes += process_ids(executor).values()
        assert len({seat.node for seat in executor.runner.hosts.seats.values()}) == 3
        wanted = WeightSelection("weights", None, Probe([[9, 20], [12]], [[33, 41, 7], [8, 30, 31]]))
        exported = executor.runner.hosts.ask_role("actor", "test", "export", "actor", wanted, 20_000)[0]
        scored = wanted.probe.score(TorchScorer(tiny, device="cpu").build(EngineBuilder({}, seed=0)))
        assert exported.origin.scores == pytest.approx(scored, abs=1e-5)
        executor.save(tmp_path / "start")
        for way in ("gloo", "object store"):
            if way != "gloo":
                monkeypatch.setattr(delivery, "choose", lambda *seats: ("object store", (0,)))
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
    """Its weights go wrong on their way, once, as the file ``mischief`` of its desk says."""

    def mischief(self) -> str:
        file = self.desk.folder / "mischief"
        return file.read_text() if file.exists() else ""

    def weights(self) -> Any:
        yield from super().weights()
        if self.mischief() == "raise":
            raise ValueError("out of memory")


class Crooked(ToyTrainer):
    def build(self, context: Any) -> CrookedEngine:
        engine = CrookedEngine("actor", self, context)
        tell, carry = TransferGroup.tell, GlooCarrier.send

        def told(group: TransferGroup, message: Any) -> None:
            match engine.mischief():
                case "missing" if "tensors" in message:
                    message = message | {"tensors": message["tensors"][:-1]}
                case "stale" if "tensors" in message:
                    message = message | {"version": message["version"] - 1}
                case "old" if "role" in message:
                    message = message | {"version": message["version"] - 1}
            tell(group, message)

        def carried(carrier: GlooCarrier, flat: Tensor) -> None:
            if engine.mischief() == "flip":
                flat = flat.clone()
                flat[3] ^= 1
            carry(carrier, flat)

        TransferGroup.tell, GlooCarrier.send = told, carried  # type: ignore[method-assign]  # in this process alone
        return engine


def test_what_goes_wrong_is_named_and_the_next_sync_works(tiny: str, tmp_path: Path) -> None:
    """Damage of each kind, a side that raises; at last the trainer is killed while it sends."""
    desk = Desk(str(tmp_path))
    job = toy_job(GRAPH, tmp_path, tiny, place=Split(2, 1))
    job = job.edit(bind={"actor": Crooked(desk=str(tmp_path), folder=tiny)})
    refused = "sync failed in step {} on rollout rank 0: SyncError: the weights of actor at version {} .*{}"
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        for step, (what, said) in enumerate(
            {
                "flip": refused.format(1, 1, "damaged: first is not what was sent"),
                "missing": refused.format(2, 2, "incomplete: second did not arrive"),
                "stale": refused.format(3, 3, "mixed with others: a bucket has version 2"),
                "old": refused.format(4, 3, "mixed with others: a bucket has version 4"),
                "raise": "sync in step 5 failed on actor rank 0, which sends: ValueError: out of memory",
                "fail": "sync failed in step 6 on rollout rank 0: ValueError: rollout.sync was told to fail",
            }.items()
        ):
            (tmp_path / "mischief").write_text(what)
            if what == "fail":
                desk.fail("rollout.sync")
            with pytest.raises(NodeError, match=said) as caught:
                executor.step(batch(), step)
            assert isinstance(caught.value.__cause__, SyncError if step < 4 else ValueError), what
            (tmp_path / "mischief").unlink()
            executor.sync()
        receipt = executor.step(batch(), 6).values["sync"]["receipt"]
        assert (receipt.version, receipt.transport) == (7, "gloo")
        spans = [span for span in executor.timeline.spans if span.name == "send by sync"]
        assert [(span.place, span.bytes) for span in spans[-1:]] == [("actor rank 0", receipt.bytes)]

        thread = kill_blocked(desk, "actor.weights")
        with pytest.raises(HostDiedError, match="sync in step 8 lost actor rank 0, whose process died"):
            executor.step(batch(), 7)
        thread.join()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_engine_that_dies_or_hangs_while_it_receives(how: str, tiny: str, tmp_path: Path) -> None:
    """The trainer, which waits for it, is not blamed, and waits no longer than the deadline."""
    desk = Desk(str(tmp_path))
    job = toy_job(GRAPH, tmp_path, tiny, place=Split(2, 1, deadline=12.0 if how == "hangs" else 3600.0))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        if how == "dies":
            thread = kill_blocked(desk, "rollout.sync")
            with pytest.raises(HostDiedError, match="sync in step 1 lost rollout rank 0, whose process died"):
                executor.step(batch(), 0)
            thread.join()
        else:
            desk.block("rollout.sync")
            thread = threading.Thread(target=desk.blocked, args=("rollout.sync",))
            thread.start()
            with pytest.raises(NodeError, match="sync in step 1 is stuck on rollout rank 0: nothing was heard for"):
                executor.step(batch(), 0)
            thread.join()
