"""A sync hashes each tensor once per side with every transport, and detects damaged tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.backends import TorchRollout, TorchTrainer
from flowrl.backends.hosted.arrival import IncomingWeights
from flowrl.backends.hosted.base import HostedRollout
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.distributed import export
from flowrl.distributed.export import Export
from flowrl.protocols.protocols import Caches
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.digest import same_bits, tensor_digest, weights_digest
from flowrl.sync.probe import Probe
from flowrl.sync.received import Origin, ReceivedWeights, Weight, received
from flowrl.sync.stream import Ticket, send
from tests.support.errors import raises
from tests.support.hashes import hashes
from tests.support.models import tiny_folder

BUCKET = 20_000
PROBE = Probe([[9, 20], [12]], [[33, 41, 7], [8, 30, 31]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def trainer(folder: str) -> Any:
    return TorchTrainer(folder, device="cpu").build(EngineBuilder({}, seed=0))


def on(process: str) -> ThreadPoolExecutor:
    """A thread instead of a process."""
    return ThreadPoolExecutor(1, thread_name_prefix=process)


# Transports


@contextmanager
def here(trainer: Any) -> Iterator[Any]:
    """The trainer is in the engine's process."""
    yield trainer


def origin_of(trainer: Any) -> Origin:
    return Origin("actor", trainer.version, probe=PROBE, scores=PROBE.score(trainer))


@contextmanager
def by_object_store(trainer: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, on("trainer") as process:
        patch.setattr(export, "ray", SimpleNamespace(put=lambda bucket: bucket, get=lambda bucket: bucket))
        sent = process.submit(Export.of, origin_of(trainer), trainer.weights(), BUCKET).result()
        with sent.open(0) as source:
            yield source


@contextmanager
def by_stream(trainer: Any) -> Iterator[Any]:
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    ticket = Ticket("gloo", "127.0.0.1", store.port, ((0,),), 60)
    with on("trainer") as process:
        sender = process.submit(send, ticket, origin_of(trainer), [trainer.weights()], BUCKET)
        with ticket.open(0) as source:
            yield source
        sender.result()


# Engines


class Hosted(HostedRollout):
    """A hosted engine that only receives weights, in this process or in a worker."""

    name = "Hosted"
    received: dict[str, Tensor]

    def __init__(self, folder: str, scores: tuple[float, ...], worker: bool) -> None:
        super().__init__(EngineSpec(folder), ChatTokenizer(folder), 0)
        self._fixed_scores, self._worker = scores, worker
        self._probe, self._arithmetic = PROBE, self._dtype()

    def _halt(self, caches: Caches | None) -> tuple[str, ...]:
        return ()

    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        if not self._worker:
            self.received = {name: tensor.clone() for name, tensor in arrival.weights()}
            return "copy"
        with on("worker") as process:
            self.received = {name: tensor.clone() for name, tensor in arrival.to_send()}
            digests = process.submit(
                lambda: {name: tensor_digest(name, received) for name, received in self.received.items()}
            )
        arrival.check(digests.result(), "the worker")
        return "pipe"

    def _score(self, probe: Probe) -> list[float]:
        return [*self._fixed_scores]

    def _dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def _lives(self) -> bool:
        return True

    def _nothing(self, *_: Any) -> Any: ...

    _start = _stop = _limits = _settings = _begin = _advance = _abort = _release = _resume = _nothing


def torch_engine(folder: str, trainer: Any) -> Any:
    return TorchRollout(folder, device="cpu").build(EngineBuilder({}, seed=0))


def bfloat16_engine(folder: str, trainer: Any) -> Any:
    return TorchRollout(folder, device="cpu", dtype="bfloat16").build(EngineBuilder({}, seed=0))


def hosted_engine(folder: str, trainer: Any) -> Any:
    return Hosted(folder, PROBE.score(trainer), worker=False)


def engine_with_worker(folder: str, trainer: Any) -> Any:
    return Hosted(folder, PROBE.score(trainer), worker=True)


@pytest.mark.parametrize(
    ("way", "engine", "counts"),
    [
        # Both sides are in the engine's process: one hash as a tensor is sent, one of the received copy.
        (here, torch_engine, {"MainThread": 2}),
        (here, bfloat16_engine, {"MainThread": 2}),
        (here, hosted_engine, {"MainThread": 1}),  # weights do not leave the process
        (here, engine_with_worker, {"MainThread": 1, "worker": 1}),
        *(
            (way, engine, {"trainer": 1, "worker" if engine is engine_with_worker else "MainThread": 1})
            for way in (by_object_store, by_stream)
            for engine in (torch_engine, bfloat16_engine, hosted_engine, engine_with_worker)
        ),
    ],
)
def test_each_side_hashes_a_tensor_once(
    way: Callable[..., Any], engine: Callable[..., Any], counts: dict[str, int], folder: str, trainer: Any
) -> None:
    live, names = engine(folder, trainer), [name for name, _ in trainer.weights()]
    expected = weights_digest(trainer.weights())
    with hashes() as hashed, way(trainer) as source:
        receipt = live.sync(source)
        if isinstance(source, ReceivedWeights):
            receipt = source.check(receipt)
    assert (receipt.version, receipt.digest) == (trainer.version, expected)
    assert hashed == {(process, name): count for process, count in counts.items() for name in names}


def test_an_alias_hashes_nothing(trainer: Any) -> None:
    context: Any = SimpleNamespace(engine=lambda role: trainer, seed=0, rank=0, world_size=1)
    with hashes() as hashed:
        assert TorchRollout().build(context).sync(trainer).transport == "alias"
    assert not hashed


class Damaged:
    """A shipment with one tensor that changes in transit."""

    def __init__(self, shipment: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self._shipment, self._name, self._change = shipment, name, change
        self.transport, self.digest = shipment.transport, shipment.digest

    def weights(self) -> Iterator[Weight]:
        for weight in self._shipment.weights():
            yield weight._replace(tensor=self._change(weight.tensor)) if weight.name == self._name else weight


def flip(tensor: Tensor) -> Tensor:
    """Flip a bit that a cast to bfloat16 removes."""
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[4] ^= 1
    return changed


@pytest.mark.parametrize("change", [flip, torch.Tensor.flatten])
@pytest.mark.parametrize("engine", [torch_engine, bfloat16_engine, hosted_engine, engine_with_worker])
def test_every_engine_names_damaged_tensors(
    engine: Callable[..., Any],
    change: Callable[[Tensor], Tensor],
    folder: str,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "ray", SimpleNamespace(put=lambda bucket: bucket, get=lambda bucket: bucket))
    name = "model.layers.1.mlp.up_proj.weight"
    sent = Export.of(origin_of(trainer), trainer.weights(), BUCKET)
    live: Any = engine(folder, trainer)
    with raises("sync.damaged", version=0) as caught:
        live.sync(received(sent.origin, Damaged(sent, name, change)))
    assert name in caught.value.message
    assert live.receipt is None
    assert live.sync(received(sent.origin, sent)).digest == sent.digest


def test_the_digest_of_weights_does_not_depend_on_their_order() -> None:
    weights = [("b", torch.ones(2)), ("a", torch.zeros(3)), ("c", torch.ones(2))]
    swapped = [("b", torch.zeros(3)), ("a", torch.ones(2)), ("c", torch.ones(2))]
    assert weights_digest(weights) == weights_digest(reversed(weights)) != weights_digest(swapped)


def test_same_bits_compares_bitwise() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())
    assert same_bits(torch.tensor(2.5).bfloat16(), torch.tensor(2.5).bfloat16())


def test_an_engine_scores_the_probe_that_was_sent_with_the_weights(folder: str, trainer: Any) -> None:
    """Not its own probe: with several ranks, the trainer scored the probe of the first."""
    live: Any = hosted_engine(folder, trainer)
    live._probe = Probe([[5]], [[6, 7]])
    with by_stream(trainer) as source:
        assert live.sync(source).version == trainer.version
