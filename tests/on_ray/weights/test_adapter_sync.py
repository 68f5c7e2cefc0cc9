"""LoRA on Ray: only the adapter is sent to an engine that has the base weights."""

from __future__ import annotations

import pytest

from flowrl.backends import LoRA, TorchRollout, TorchScorer
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.place import Colocate
from flowrl.distributed.runner import open_ray
from flowrl.errors import NodeError, SyncError
from flowrl.graphs import grpo
from tests.support.errors import raises
from tests.support.jobs import bind_tiny, prompt_batch
from tests.support.rewards import digits

pytestmark = pytest.mark.ray


GRAPH = grpo(digits, n=2, max_new_tokens=4)


def test_only_the_adapter_is_sent(tiny: str) -> None:
    batch = DataProto.from_record(prompt_batch([[5, 6, 7], [8, 9]]))
    moved = {}
    for name, rollout in {"full": TorchRollout(tiny), "adapter": TorchRollout(tiny, lora=LoRA(r=4))}.items():
        job = bind_tiny(GRAPH, tiny, trainer={"lora": LoRA(r=4)}, ref=TorchScorer(), rollout=rollout)
        with open_ray(job.graph, Colocate(1), 0) as executor:
            executor.sync()
            result = executor.step(batch, 0)
            moved[name] = (result.metrics["sync/bytes"].compute(), result.metrics["actor/pg_loss"].compute())
    assert 0 < moved["adapter"][0] < moved["full"][0] / 2
    assert moved["adapter"][1] == pytest.approx(moved["full"][1], abs=1e-6)


def test_an_engine_that_needs_an_adapter_refuses_full_weights(tiny: str) -> None:
    job = bind_tiny(GRAPH, tiny, rollout=TorchRollout(tiny, lora=LoRA(r=4)))
    task = "sync between steps, exporting actor,"
    with (
        open_ray(job.graph, Colocate(1), 0) as executor,
        raises("sync.no-adapter", task=task, host="actor rank 0", role="actor") as caught,
    ):
        executor.sync()
    assert isinstance(caught.value, NodeError) and isinstance(caught.value.__cause__, SyncError)
