"""Tests of `flowrl/distributed/delivery.py`: weight transfer to engines in other processes.

The received weights are those sent, for each transport.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.metrics import Metrics
from flowrl.distributed import delivery, export
from flowrl.distributed.export import Export
from flowrl.distributed.hosts.host import Report
from flowrl.distributed.hosts.reports import refuse_unequal
from flowrl.distributed.place import Colocate, Split
from flowrl.errors import NodeError, SyncError
from flowrl.graphs import grpo
from flowrl.operators import Sync
from flowrl.protocols.protocols import BuildContext
from flowrl.records import Receipt
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest
from flowrl.sync.received import Origin
from flowrl.sync.weight_selection import Since, WeightSelection
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

BUCKET = 20_000


class SendsOtherWeights(TorchTrainer):
    """A trainer whose exports are damaged as the file `fault_file` says."""

    fault_file: str = ""

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        honest, fault_file = Export.of, Path(self.fault_file)

        def damaged_export(*arguments: Any) -> Export:
            sent = honest(*arguments)
            what = fault_file.read_text() if fault_file.exists() else "nothing"
            return damaged(sent, what)

        export.Export.of = staticmethod(damaged_export)  # in the process of this rank, which ends with the job
        return super().build(context)


def damaged(sent: Export, what: str) -> Export:
    """A damaged export."""
    buckets = [[(*entry[:3], entry[3].copy()) for entry in ray.get(bucket)] for bucket in sent.buckets]
    origin = sent.origin
    match what:
        case "flip":
            buckets[-1][-1][3][5] ^= 1
        case "missing tensor":
            del buckets[0][0]
        case "missing bucket":
            del buckets[-1]
        case "twice":
            buckets.append(buckets[0][:1])
        case "stale":
            origin = replace(origin, version=origin.version - 1)
        case "shape":
            name, dtype, shape, raw = buckets[0][0]
            buckets[0][0] = (name, dtype, (shape[0] * shape[1],), raw)
        case _:
            return sent
    return Export(origin, sent.digests, sent.nbytes, tuple(ray.put(bucket) for bucket in buckets))


def refuse_other_exports(executor: Any, saved: dict[str, Any]) -> None:
    """Exports fill buckets, and are rounded if the engine's dtype is coarser."""
    sent = executor.runner.hosts.ask_role("actor", "test", "export", "actor", WeightSelection(), BUCKET)[0]
    sizes = [[raw.nbytes for *_, raw in ray.get(bucket)] for bucket in sent.buckets]
    assert len(sizes) > 5
    assert all(sum(bucket) <= BUCKET or len(bucket) == 1 for bucket in sizes)

    arguments = ("actor", WeightSelection(rounds_to=torch.bfloat16), BUCKET)
    rounded = executor.runner.hosts.ask_role("actor", "test", "export", *arguments)[0]
    halved = {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in saved.items()}
    assert (rounded.nbytes, rounded.digest) == (
        sum(t.nbytes for t in halved.values()),
        weights_digest(halved.items()),
    )


def test_received_weights_are_bit_equal_or_refused(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one slot, so that a sync wakes the engine; with small buckets; with each kind of damage."""
    monkeypatch.setattr(delivery, "BUCKET_BYTES", BUCKET)
    fault_file = tmp_path / "fault_file"
    graph = job_of("grpo", tiny, n=2).edit(bind={"rollout": TorchRollout(tiny, device="cpu")}).graph
    actor = graph.bindings["actor"]
    damaged_export = SendsOtherWeights(tiny, optimizer=actor.optimizer, device="cpu", fault_file=str(fault_file))
    job = Job(graph, Colocate(1)).edit(bind={"actor": damaged_export})
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        batch = proto(prompt_batch([[11, 12], [13]]))
        receipt = executor.step(batch, 0).values["sync"]["receipt"]
        executor.save_pretrained("actor", str(tmp_path / "actor"))
        saved = load_file(tmp_path / "actor" / "model.safetensors")
        assert receipt == Receipt(1, weights_digest(saved.items()), receipt.bytes, receipt.seconds, "object store")
        assert receipt.bytes == sum(tensor.nbytes for tensor in saved.values())
        spans = [span for span in executor.timeline.spans if span.name == "export actor"]
        assert [span.bytes for span in spans] == [receipt.bytes] * 2  # the first sync, and that of the step

        refuse_other_exports(executor, saved)
        kinds = ("flip", "missing tensor", "missing bucket", "twice", "shape", "stale")
        for step, what in enumerate(kinds, 1):
            fault_file.write_text(what)
            with pytest.raises(NodeError, match=rf"sync failed in step {step + 1} on rollout rank 0: Sync") as caught:
                executor.step(batch, step)
            assert isinstance(caught.value.__cause__, SyncError), what
            assert (caught.value.facts["node"], caught.value.facts["host"]) == ("sync", "rollout rank 0"), what
            with pytest.raises(NodeError, match=r"sync failed between steps on rollout rank 0: SyncError"):
                executor.sync()
            if what == "flip":  # an engine whose sync failed does not generate
                with pytest.raises(NodeError, match=r"generate failed in step 2 on rollout rank 0: SyncError"):
                    executor.step(batch, step)
            fault_file.unlink()
            executor.sync()
        assert executor.step(batch, 7).values["sync"]["receipt"].version == 8


def test_weights_for_an_engine_with_lower_precision_are_rounded_before_they_are_sent(tiny: str) -> None:
    graph = job_of("grpo", tiny, n=2).edit(bind={"rollout": TorchRollout(tiny, dtype="bfloat16", device="cpu")}).graph
    with leaves_nothing() as processes, Job(graph, Colocate(1)).open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        saved = load_file(Path(tiny) / "model.safetensors").values()
        [sent] = [span.bytes for span in executor.timeline.spans if span.name == "export actor"]
        assert sent == sum(tensor.nbytes // (2 if tensor.ndim > 1 else 1) for tensor in saved)


@pytest.mark.parametrize("way", ["object store", "gloo"])
def test_a_sync_of_changes_has_the_digests_of_full_ones(
    way: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sharded ranks send to an engine in bfloat16. After a sync that did not arrive, all weights are sent."""
    monkeypatch.setattr(delivery, "choose", lambda *locations: (way, ((0, 1),)))
    monkeypatch.setattr(delivery, "BUCKET_BYTES", BUCKET)
    graph = job_of("grpo", tiny, n=2, optimizer=AdamW(lr=1e-6), trainer={"ranks": 2}).graph
    graph = graph.edit(bind={"rollout": TorchRollout(tiny, dtype="bfloat16", device="cpu")})
    changed = graph.edit(replace={"sync": Sync(changed=True)})
    batch, digests = proto(prompt_batch([[11, 12], [13]])), list[str]()
    with Job(graph, Split(2, 1)).open() as executor:
        executor.sync()
        for step in range(3):
            receipt = executor.step(batch, step).values["sync"]["receipt"]
            digests.append(receipt.digest)
        full = receipt.bytes
    with leaves_nothing() as processes, Job(changed, Split(2, 1)).open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        for step in range(3):
            result = executor.step(batch, step)
            receipt, share = result.values["sync"]["receipt"], result.metrics.compute()["sync/changed"]
            assert (receipt.digest, receipt.transport, receipt.version) == (digests[step], way, step + 1)
            assert receipt.bytes == result.metrics.compute()["sync/bytes"] <= 0.2 * full
            assert 0 < share < 0.1
        [engine] = executor.runner.hosts.ranks("rollout")
        [base] = executor.runner.hosts.ask([engine], "test", "last_sync", "rollout")
        assert base is not None
        sender = executor.runner.hosts.ranks("actor")
        selection = WeightSelection(rounds_to=torch.bfloat16, since=Since("rollout", base, "lost"))
        executor.runner.hosts.ask(sender, "test", "export", "actor", selection, BUCKET)  # and nothing arrives
        receipt = executor.step(batch, 3).values["sync"]["receipt"]
        assert (receipt.bytes, receipt.version) == (full, 4)
        assert executor.step(batch, 4).values["sync"]["receipt"].bytes <= 0.2 * full


def test_an_engine_in_the_trainers_process_shares_its_weights(tiny: str) -> None:
    with leaves_nothing() as processes, Job(job_of("grpo", tiny, n=2).graph, Colocate(1)).open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        result = executor.step(proto(prompt_batch([[11, 12], [13]])), 0)
        receipt = result.values["sync"]["receipt"]
        assert (receipt.transport, receipt.bytes, receipt.version) == ("alias", 0, 1)


def test_the_memory_of_an_export_is_bounded() -> None:
    """The sending process never has more than a bucket of live tensors in addition to the trainer's."""
    live_bytes: list[int] = []
    alive: dict[int, int] = {}

    def weights() -> Iterator[tuple[str, Tensor]]:
        """As of a sharded trainer: created lazily, each a fifth of a bucket."""
        for i in range(40):
            tensor = torch.full((BUCKET // 20,), float(i))
            alive[i] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), alive.pop, i)
            yield f"w{i:02}", tensor
            del tensor
            live_bytes.append(sum(alive.values()))

    sent = Export.of(Origin("actor", 3), weights(), BUCKET)
    assert sent.nbytes == 40 * BUCKET // 5
    assert max(live_bytes) <= BUCKET + BUCKET // 5
    assert len(sent.buckets) == 8
    with sent.open(0) as received:
        arrived = dict(received.weights())
    assert weights_digest(arrived.items()) == sent.digest
    assert all(torch.equal(tensor, torch.full_like(tensor, float(name[1:]))) for name, tensor in arrived.items())
    with raises("sync.wrong-receipt", role="actor", version=3, expected=sent.digest, found="other"):
        received.check(Receipt(3, "other", 0, 0.0, "copy"))
    assert received.check(Receipt(3, sent.digest, 0, 0.0, "copy")).transport == "object store"


def test_different_weights_of_the_ranks_of_an_engine_are_refused() -> None:
    """Receipts that differ only in their time are not refused."""
    [sync] = [node for node in grpo(digits).nodes.values() if node.name == "sync"]

    def report(digest: str, seconds: float) -> Report:
        receipt = Receipt(3, digest, 10, seconds, "object store")
        values = {"receipt": receipt}
        return Report({}, values, Metrics(), {}, [], [], None, received=0, started=0.0, fetched=0.0, ended=0.0)

    refuse_unequal([report("a", 0.1), report("a", 0.2)], sync)
    found = ("version 3, digest a", "version 3, digest b")
    with raises("sync.unequal-ranks", node="sync", found=found):
        refuse_unequal([report("a", 0.1), report("b", 0.1)], sync)
