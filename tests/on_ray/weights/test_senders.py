"""Several senders on Ray (`flowrl/distributed/delivery.py`): two sharded ranks of a real trainer send their shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from flowrl.backends import LoRA, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.distributed import delivery
from flowrl.distributed.hosts import host
from flowrl.distributed.place import Split
from flowrl.errors import SyncError
from flowrl.protocols.protocols import BuildContext
from flowrl.run.training.job import Job
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.digest import weights_digest
from flowrl.sync.group import connect
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

BUCKET = 20_000


class Faulty(TorchTrainer):
    """A trainer one of whose ranks flips a bit of what it sends, dies, or reaches no store, as `fault_file` says."""

    fault_file: str = ""

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        carry, fault_file, rank = GlooCarrier.send, Path(self.fault_file), context.rank

        def faulty_send(carrier: GlooCarrier, flat: Tensor) -> None:
            what = fault_file.read_text() if fault_file.exists() else ""
            if what == f"die {rank}":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == f"flip {rank}":
                flat = flat.clone()
                flat[3] ^= 1
            carry(carrier, flat)

        def faulty_connect(address: str, port: int, timeout: float) -> Any:
            unreachable = fault_file.exists() and fault_file.read_text() == f"unreachable {rank}"
            return connect(address, *((9, 1.0) if unreachable else (port, timeout)))

        host.connect = faulty_connect
        GlooCarrier.send = faulty_send  # type: ignore[method-assign]  # in this rank's process, which ends with the job
        return super().build(context)


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between machines, in many rounds."""
    monkeypatch.setattr(delivery, "choose", lambda *locations: ("gloo", ((0, 1),)))
    monkeypatch.setattr(delivery, "BUCKET_BYTES", BUCKET)


def test_each_rank_sends_half_and_faults_of_either_are_named(tiny: str, tmp_path: Path) -> None:
    fault_file, batch = tmp_path / "fault", proto(prompt_batch([[11, 12], [13]]))
    graph = job_of("grpo", tiny, n=2, trainer={"ranks": 2}).edit(bind={"rollout": TorchRollout(tiny)}).graph
    actor = Faulty(tiny, optimizer=graph.bindings["actor"].optimizer, ranks=2, device="cpu", fault_file=str(fault_file))
    with leaves_nothing() as processes, Job(graph, Split(2, 1)).edit(bind={"actor": actor}).open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        receipt = executor.step(batch, 0).values["sync"]["receipt"]
        executor.save_pretrained("actor", str(tmp_path / "actor"))
        saved = load_file(tmp_path / "actor" / "model.safetensors")
        assert (receipt.digest, receipt.transport) == (weights_digest(saved.items()), "gloo")
        sent = {s.place: s.bytes for s in executor.timeline.spans if s.name == "send by sync"}
        assert sent.keys() == {"actor rank 0", "actor rank 1"} and sum(sent.values()) == receipt.bytes
        assert max(sent.values()) <= receipt.bytes / 2 + max(tensor.nbytes for tensor in saved.values())
        for step in (1, 2):
            fault_file.write_text(f"flip {step - 1}")
            with raises("sync.damaged", host="rollout rank 0") as caught:
                executor.step(batch, step)
            assert isinstance(caught.value.__cause__, SyncError)
            assert any(name in caught.value.message for name in saved)
            fault_file.unlink()
            executor.sync()
        fault_file.write_text("unreachable 1")
        with raises("sync.interrupted", host="actor rank 1"):
            executor.step(batch, 3)
        fault_file.unlink()
        executor.sync()
        assert executor.step(batch, 4).values["sync"]["receipt"].version == 5
        fault_file.write_text("die 1")
        with raises("host.died", task="sync in step 6", host="actor rank 1"):
            executor.step(batch, 5)


@pytest.mark.nightly
def test_ranks_share_an_adapter(tiny: str, tmp_path: Path) -> None:
    lora, batch = LoRA(r=2), proto(prompt_batch([[11, 12], [13]]))
    job = job_of("grpo", tiny, n=2, trainer={"ranks": 2, "lora": lora}).edit(
        bind={"rollout": TorchRollout(tiny, lora=lora)}
    )
    with leaves_nothing() as processes, Job(job.graph, Split(2, 1)).open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        receipt = executor.step(batch, 0).values["sync"]["receipt"]
        executor.save_pretrained("actor", str(tmp_path / "actor"))
        saved = load_file(tmp_path / "actor" / "adapter" / "adapter_model.safetensors")
        assert receipt.digest == weights_digest(saved.items())
        sent = {s.place: s.bytes for s in executor.timeline.spans if s.name == "send by sync"}
        assert sum(sent.values()) == receipt.bytes == sum(tensor.nbytes for tensor in saved.values())
        assert min(sent.values()) > 0
