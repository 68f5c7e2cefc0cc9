"""`Shadow`: syncs of changes leave the same bits as full ones, in every engine, and damage is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.backends import LoRA, TorchRollout, TorchTrainer
from flowrl.distributed import export
from flowrl.distributed.export import Export
from flowrl.distributed.place import Split
from flowrl.errors import SyncError
from flowrl.graphs import grpo
from flowrl.operators import Sync
from flowrl.records import Receipt
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.buckets import in_rounds
from flowrl.sync.changes import Changes
from flowrl.sync.digest import weights_digest
from flowrl.sync.received import Origin
from flowrl.sync.shadow import Shadow, common
from flowrl.sync.weight_selection import rounded
from tests.nightly import nightly
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.rewards import digits
from tests.sync.test_hashing import bfloat16_engine, engine_with_worker, hosted_engine, origin_of, torch_engine

BUCKET = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def trainer(folder: str) -> Any:
    return TorchTrainer(folder, device="cpu").build(EngineBuilder({}, seed=0))


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's own memory instead of Ray's."""
    monkeypatch.setattr(export, "ray", SimpleNamespace(put=lambda bucket: bucket, get=lambda bucket: bucket))


class Link:
    """A trainer's side, of one or several senders, and an engine's side of syncs of changes."""

    names = count()

    def __init__(self, dtype: torch.dtype | None = None, senders: int = 1) -> None:
        self.senders, self.held, self.dtype = [Shadow() for _ in range(senders)], Shadow(), dtype

    def export(self, trainer: Any, origin: Origin) -> Export:
        base, name = common(shadow.sync for shadow in (*self.senders, self.held)), str(next(self.names))
        weights, exports = list(rounded(trainer.weights(), self.dtype)), []
        rounds = list(in_rounds([tensor.nbytes for _, tensor in weights], len(self.senders), BUCKET))
        for share, shadow in enumerate(self.senders):
            sent = shadow.outgoing(([weights[i] for i in one[share]] for one in rounds), name, base)
            exports.append(Export.of(replace(origin, sync=name, base=base), chain.from_iterable(sent), BUCKET))
        return Export.joined(exports)

    def load(self, sent: Export, engine: Any) -> tuple[Receipt, float | None]:
        """The receipt, and the share of values that changed."""
        with self.held.loading(), sent.open(0, self.held) as source:
            receipt = source.check(engine.sync(source))
            assert source.changes is not None
            assert source.changes.nbytes == sent.nbytes
        return receipt, source.changes.share

    def sync(self, trainer: Any, engine: Any, origin: Origin | None = None) -> tuple[int, float | None, Receipt]:
        sent = self.export(trainer, origin or Origin("actor", trainer.version))
        receipt, share = self.load(sent, engine)
        return sent.nbytes, share, receipt


def updates(trainer: Any, lr: float) -> Iterator[None]:
    """Real steps of AdamW on random tokens, in float32, as `TorchTrainer` takes them."""
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=lr)
    draw = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(6, 80, (2, 24), generator=draw)
        trainer.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@pytest.mark.parametrize(("lr", "senders"), [(1e-6, 3), nightly(1e-5, 3), nightly(1e-6, 1), nightly(1e-5, 1)])
def test_fifty_syncs_of_changes_have_the_bits_of_full_ones(lr: float, senders: int, folder: str, trainer: Any) -> None:
    """With syncs that are lost on either side, a trainer that resumes in a new process, and a new engine; a sync after
    one of these sends all weights, and every other at most twice the bytes of the values that changed."""
    link, engine, fresh = Link(torch.bfloat16, senders), bfloat16_engine(folder, trainer), {0}
    fits = {name: tensor for name, tensor in rounded(trainer.weights(), torch.bfloat16)}
    full = sum(tensor.nbytes for tensor in fits.values())
    before: dict[str, Tensor] = {}
    for step, _ in zip(range(50), updates(trainer, lr), strict=False):
        if step in (10, 25):  # the engine never gets what was sent
            link.export(trainer, Origin("actor", trainer.version))
            fresh.add(step)
        if step == 15:  # a process of the trainer that resumed
            link.senders = [Shadow() for _ in link.senders]
            fresh.add(step)
        if step == 40:  # one sender stopped in the middle, so that its copy is of no sync
            next(iter(link.senders[-1].outgoing([trainer.weights()], "lost", link.held.sync)))
            fresh.add(step)
        if step == 20:
            link.held, engine = Shadow(), bfloat16_engine(folder, trainer)
            fresh.add(step)
        if step == 30:  # the engine's process could not load them
            sent = link.export(trainer, Origin("actor", trainer.version))
            with pytest.raises(RuntimeError, match="lost"), link.held.loading(), sent.open(0, link.held) as source:
                next(iter(source.weights()))
                raise RuntimeError("lost")
            fresh.add(step)
        nbytes, share, receipt = link.sync(trainer, engine)
        now = {name: tensor.clone() for name, tensor in rounded(trainer.weights(), torch.bfloat16)}
        assert receipt.digest == weights_digest(now.items())
        assert all(torch.equal(engine._synced_weights()[name], now[name].bfloat16()) for name in now)
        assert nbytes <= full and (share is None) == (step in fresh)
        if share is None:
            assert nbytes == full
        else:
            changes = {name: int((now[name] != before[name]).sum()) for name in now}
            assert share == sum(changes.values()) / sum(tensor.numel() for tensor in now.values())
            changed_bytes = sum(changes[name] * now[name].itemsize for name in now)
            assert nbytes <= 2 * changed_bytes + 32 * len(now)
        before = now


@pytest.mark.parametrize("make", [torch_engine, bfloat16_engine, hosted_engine, engine_with_worker])
def test_every_engine_loads_changes(make: Callable[..., Any], folder: str, trainer: Any) -> None:
    engine, link = make(folder, trainer), Link(torch.bfloat16 if make is bfloat16_engine else None)
    if make in (hosted_engine, engine_with_worker):
        engine._fixed_scores = origin_of(trainer).scores
    first, *_ = link.sync(trainer, engine, origin_of(trainer))
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight[0, 3] += 1.0
    origin = origin_of(trainer)
    if make in (hosted_engine, engine_with_worker):
        engine._fixed_scores = origin.scores
    nbytes, share, receipt = link.sync(trainer, engine, origin)
    assert receipt.digest == weights_digest(rounded(trainer.weights(), link.dtype))
    assert share == 1 / sum(tensor.numel() for _, tensor in trainer.weights())
    assert nbytes < first / 50


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_plan_shows_the_bytes_of_the_copies(dtype: Any, kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    trainer, backend = TorchTrainer(folder, device="cpu"), TorchRollout(folder, dtype=dtype, device="cpu")
    engine, link = backend.build(EngineBuilder({}, seed=0)), Link(None if dtype is None else torch.bfloat16)
    link.sync(trainer.build(EngineBuilder({}, seed=0)), engine)
    [sender] = link.senders
    sizes = {sum(tensor.nbytes for tensor in side.tensors.values()) for side in (sender, link.held)}
    assert sizes == {backend.synced_bytes}
    graph = grpo(digits, kl_coef=0.0).edit(replace={"sync": Sync(changed=True)})
    apart = graph.bind(actor=trainer, rollout=backend, place=Split(1, 1))
    [line] = [line for line in apart.plan().splitlines() if "copy of the weights" in line]
    assert line.endswith(f"in CPU memory, {sizes.pop() / 2**30:.3g} GiB each")
    two = graph.bind(actor=replace(trainer, ranks=2), rollout=backend, place=Split(2, 1))
    assert "the 2 ranks of actor together, and each rank of rollout keep a copy" in two.plan()
    together = graph.bind(actor=trainer, rollout=backend)
    assert "sync copies all weights: actor and rollout are in one process" in together.plan().splitlines()
    adapter = LoRA(r=2)
    small = apart.edit(bind={"actor": replace(trainer, lora=adapter), "rollout": replace(backend, lora=adapter)})
    assert "copy of the weights" not in small.plan()


def test_weights_that_all_change_take_the_bytes_of_a_full_sync(folder: str, trainer: Any) -> None:
    link, engine = Link(), torch_engine(folder, trainer)
    full, *_ = link.sync(trainer, engine)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    nbytes, share, _ = link.sync(trainer, engine)
    assert (nbytes, share) == (full, 1.0)


def test_a_flipped_bit_is_refused_by_name_and_all_weights_follow(folder: str, trainer: Any) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    link, engine = Link(torch.bfloat16, senders=2), bfloat16_engine(folder, trainer)
    full, *_ = link.sync(trainer, engine)
    step = updates(trainer, 1e-5)
    for damage in ("changes", "held"):
        next(step)
        sent = link.export(trainer, Origin("actor", 0))
        if damage == "changes":
            [raw] = [raw for bucket in sent.buckets for entry, *_, raw in bucket if entry == f"changes of {name}"]
            raw[-1] ^= 1
        else:  # in the memory of the engine's process
            link.held.tensors[name].view(torch.int16)[5, 7] ^= 1
        with raises("sync.damaged", version=0) as caught:
            link.load(sent, engine)
        assert name in caught.value.message
        assert engine.receipt is None and link.held.sync is None
        assert link.sync(trainer, engine)[:2] == (full, None)
        next(step)
        nbytes, share, _ = link.sync(trainer, engine)
        assert nbytes < full and share is not None


def test_a_change_that_was_not_found_is_refused_by_name(
    folder: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is that of the trainer's tensor, not of what both sides made of the changes."""
    link, engine, honest = Link(torch.bfloat16), bfloat16_engine(folder, trainer), Changes.between
    link.sync(trainer, engine)
    next(updates(trainer, 1e-5))

    def loses_one(old: Tensor, new: Tensor) -> Changes:
        found = honest(old, new)
        return Changes(found.places[1:], found.values[1:], found.size)

    monkeypatch.setattr(Changes, "between", loses_one)
    with raises("sync.damaged", version=0) as caught:
        link.sync(trainer, engine)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value.facts["faults"])


def test_changes_of_other_weights_are_refused(folder: str, trainer: Any) -> None:
    link, engine = Link(), torch_engine(folder, trainer)
    link.sync(trainer, engine)
    sent, base = link.export(trainer, Origin("actor", 0)), link.held.sync
    link.held = Shadow()
    with raises("sync.other-base", role="actor", version=0, expected=base, found=None):
        link.load(sent, engine)
    assert isinstance(link.sync(trainer, engine)[2], Receipt)


def test_a_tensor_that_comes_or_goes_is_sent_or_dropped() -> None:
    link, tensors = Link(), {"a": torch.zeros(100), "b": torch.ones(100)}
    model: Any = SimpleNamespace(weights=lambda: tensors.items(), version=0)

    def arrive() -> dict[str, Tensor]:
        sent = link.export(model, Origin("actor", 0))
        with link.held.loading(), sent.open(0, link.held) as source:
            return dict(source.weights())

    arrive()
    tensors = {"b": torch.ones(50), "c": torch.full((3,), 2.0)}
    assert {name: tensor.tolist() for name, tensor in arrive().items()} == {"b": [1.0] * 50, "c": [2.0] * 3}
    assert link.held.tensors.keys() == {"b", "c"}


def test_what_arrives_is_the_receivers_own(folder: str, trainer: Any) -> None:
    """An engine may write to it, and the next changes still fit."""
    link = Link()
    for _ in range(3):
        sent = link.export(trainer, Origin("actor", 0))
        with link.held.loading(), sent.open(0, link.held) as source:
            for _, tensor in source.weights():
                tensor.zero_()
    with pytest.raises(SyncError), sent.open(0, link.held) as source:
        source.check(Receipt(0, "", 0, 0.0, "copy"))
    assert weights_digest(link.held.tensors.items()) == weights_digest(trainer.weights())
