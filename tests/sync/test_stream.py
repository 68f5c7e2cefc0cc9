"""Tests of `stream.py`, `group.py` and `received.py`: weights as a stream, over gloo between threads and processes.

Sides wait for each other longer than a test may take, so a test that ends shows that no side keeps waiting.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.protocols.protocols import Adapted, RemoteWeights, Trainer
from flowrl.records import Receipt
from flowrl.sync import ipc, stream
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.digest import weights_digest
from flowrl.sync.group import Interrupted, TransferGroup
from flowrl.sync.probe import Probe
from flowrl.sync.received import Manifest, Origin, ReceivedWeights
from flowrl.sync.stream import Ticket, send
from tests import ROOT
from tests.support.errors import raises

BUCKET = 4096
ORIGIN = Origin("actor", 3)
Weights = list[tuple[str, Tensor]]


def weights_of(seed: int = 0) -> Weights:
    """Many dtypes and shapes, of no dimension, empty, larger than a bucket, and seen through strides."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(3 * BUCKET // 4, generator=draw),
        "strided": torch.randn(20, 30, generator=draw).t(),
        "half": torch.randn(7, 3, generator=draw).bfloat16(),
        "mask": torch.rand(11, generator=draw) < 0.5,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
        "bytes": torch.randint(0, 255, (13,), generator=draw, dtype=torch.uint8),
    }
    layers = {f"layer{i:02}": torch.randn(16, 9, generator=draw) for i in range(20)}
    return sorted((tensors | layers).items())


@pytest.fixture
def meeting() -> Iterator[Callable[..., Ticket]]:
    """Makes tickets to a store of this test's own."""
    stores: list[Any] = []

    def ticket(receivers: int = 1, transport: str = "gloo", timeout: float = 600) -> Ticket:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
        stores.append(store)
        return Ticket(transport, "127.0.0.1", store.port, (0,) * receivers, timeout)

    yield ticket


def received(
    ticket: Ticket, rank: int = 0, take: Callable[[ReceivedWeights], Any] = lambda source: None
) -> tuple[Any, ...]:
    """What a receiver gets: the weights, its receipt, and what it took of the source before."""
    with ticket.open(rank) as source:
        taken = take(source)
        weights = dict(source.weights())
        receipt = Receipt(source.version, weights_digest(weights.items()), 0, 0.0, "copy")
        return weights, source.check(receipt), taken


def both(ticket: Ticket, weights: Iterable[tuple[str, Tensor]], **more: Any) -> tuple[Future[int], list[Future[Any]]]:
    """A sender and all receivers, to their ends."""
    with ThreadPoolExecutor(1 + len(ticket.senders)) as pool:
        takers = [pool.submit(received, ticket, rank, **more) for rank, _ in enumerate(ticket.senders)]
        sender = pool.submit(send, ticket, ORIGIN, weights, BUCKET)
    return sender, takers


@pytest.mark.parametrize("receivers", [1, 3])
def test_received_weights_equal_sent_weights(receivers: int, meeting: Callable[..., Ticket]) -> None:
    """Bit for bit, in order; and each tensor is the receiver's own."""
    weights = weights_of()
    for _ in range(3):  # that a rank leaves when it is done is no error of the others
        sender, takers = both(meeting(receivers), weights)
        assert sender.result() == sum(tensor.nbytes for _, tensor in weights)
        for taker in takers:
            received_weights, receipt, _ = taker.result()
            assert list(received_weights) == [name for name, _ in weights]
            assert weights_digest(received_weights.items()) == weights_digest(weights)
            assert receipt == Receipt(3, weights_digest(weights), 0, 0.0, "gloo")
            assert all(received_weights[name].equal(tensor) for name, tensor in weights if name != "nan")
            assert len(
                {tensor.untyped_storage().data_ptr() for tensor in received_weights.values() if tensor.nbytes}
            ) == len([name for name, tensor in weights if tensor.nbytes])


def test_received_weights_implement_the_trainer_interface(meeting: Callable[..., Ticket]) -> None:
    """With what an adapter is of, and the trainer's log-probs of the probe."""
    probe, scores = Probe([[1, 2], [3]], [[4, 5, 6], [7, 8, 9]]), tuple(-0.5 * i for i in range(6))
    for adapter_of in (None, "digest x 2"):
        ticket, origin = meeting(), Origin("actor", 3, adapter_of, probe, scores, "bfloat16")
        with ThreadPoolExecutor(1) as pool:
            sender = pool.submit(send, ticket, origin, weights_of(), BUCKET)
            with ticket.open(0) as source:
                assert isinstance(source, Adapted) == (adapter_of is not None)
                assert isinstance(source, RemoteWeights) and source.transport == "gloo"
                assert source.probe == probe and compute_dtype(source) == torch.bfloat16
                assert source.log_probs(probe.batch()).tolist() == [list(scores[:3]), list(scores[3:])]
                assert source.version == 3
                part = "weights" if adapter_of is None else "adapter_weights"
                assert getattr(source, "adapter_of", None) == adapter_of
                assert weights_digest(getattr(source, part)()) == weights_digest(weights_of())
            sender.result()
    assert {"version", "weights", "log_probs"} <= set(dir(source)) & set(dir(Trainer))
    other = Probe([[1, 2], [3]], [[4, 5, 6], [7, 8, 10]])
    with raises("sync.no-probe", role="actor"):
        source.log_probs(other.batch())


class Damaging(GlooCarrier):
    """A carrier that changes what it carries."""

    def send(self, flat: Tensor) -> None:
        flat = flat.clone()
        flat[len(flat) // 2] ^= 1
        super().send(flat)


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the heads of buckets on their way."""
    honest = TransferGroup.tell

    def tell(group: TransferGroup, message: Any) -> None:
        message = json.loads(json.dumps(message))
        change(message)
        honest(group, message)

    monkeypatch.setattr(TransferGroup, "tell", tell)


def test_a_flipped_bit_is_detected(meeting: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GlooCarrier", Damaging)
    sender, takers = both(meeting(2), weights_of())
    for taker in takers:
        with raises("sync.damaged", role="actor", version=3):
            taker.result()
    with raises("sync.interrupted"):
        sender.result()


def drop_tensor(message: dict[str, Any]) -> None:
    if "tensors" in message:  # the last of a bucket, so that the others stay where they are
        message["tensors"] = [entry for entry in message["tensors"] if entry[0] != "strided"]


def mix_versions(message: dict[str, Any]) -> None:
    if "digests" in message:
        message["version"] = 2


def another_shape(message: dict[str, Any]) -> None:
    for entry in message.get("tensors", ()):
        if entry[0] == "half":
            entry[2].reverse()


def another_digest(message: dict[str, Any]) -> None:
    if "digests" in message:
        message["digests"]["half"] = message["digests"]["mask"]


def twice(message: dict[str, Any]) -> None:
    for entry in message.get("tensors", ()):
        entry[0] = entry[0].replace("layer02", "layer01")


@pytest.mark.parametrize(
    ("change", "code", "detail"),
    [
        (drop_tensor, "sync.damaged", "strided did not arrive"),
        (mix_versions, "sync.damaged", "a bucket has version 2"),
        (another_shape, "sync.damaged", "half is not what was sent"),
        (another_digest, "sync.damaged", "half differ from the digests that the trainer sent last"),
        (twice, "sync.damaged", "layer01 (was not sent, or arrived twice|is not what was sent)"),
    ],
)
def test_damage_is_reported_with_its_kind(
    change: Callable[[dict[str, Any]], None],
    code: str,
    detail: str,
    meeting: Callable[..., Ticket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, change)
    _, [taker] = both(meeting(), weights_of())
    with raises(code, role="actor", version=3) as caught:
        taker.result()
    assert re.search(detail, str(caught.value))


def test_a_duplicate_tensor_is_refused() -> None:
    manifest, tensor = Manifest(ORIGIN), torch.zeros(2)
    manifest.enter("w", tensor, "digest")
    with raises("sync.damaged", reason="w was not sent, or arrived twice"):
        manifest.enter("w", tensor, "digest")
    with raises("sync.damaged", reason="v was not sent, or arrived twice"):
        manifest.enter("v", tensor, None)


def test_an_error_of_the_sender_ends_all_receivers(meeting: Callable[..., Ticket]) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights_of()[:5]
        raise ValueError("out of memory")

    sender, takers = both(meeting(2), broken())
    with pytest.raises(ValueError, match="out of memory"):
        sender.result()
    for taker in takers:
        with pytest.raises(Interrupted):
            taker.result()


def test_an_error_of_a_receiver_ends_sender_and_receivers(meeting: Callable[..., Ticket]) -> None:
    """In the middle, or before it takes any; a side that does not know the cause reports that the other has ended."""

    def refuse(source: ReceivedWeights) -> None:
        raise ValueError("not mine")

    def stop(source: ReceivedWeights) -> None:
        next(source.weights())
        raise ValueError("not mine")

    for take in (refuse, stop):
        sender, [taker] = both(meeting(), weights_of(), take=take)
        with pytest.raises(ValueError, match="not mine"):
            taker.result()
        with pytest.raises(Interrupted):
            sender.result()


def test_partially_read_weights_are_refused(meeting: Callable[..., Ticket]) -> None:
    ticket = meeting()
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send, ticket, ORIGIN, weights_of(), BUCKET)
        with ticket.open(0) as source:
            next(source.weights())
            with raises("sync.damaged", version=3):
                source.check(Receipt(3, "", 0, 0.0, "copy"))
    with pytest.raises(Interrupted):
        sender.result()


def test_a_closed_store_ends_waiting_participants() -> None:
    """Closing the store ends them; later participants find no store."""
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=600), wait_for_workers=False)  # type: ignore[attr-defined]
    ticket = Ticket("gloo", "127.0.0.1", store.port, (0,), 600)
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send, ticket, ORIGIN, weights_of(), BUCKET)
        while store.num_keys() < 1:  # until it is there
            threading.Event().wait(0.01)
        del store
        with pytest.raises(Interrupted):
            sender.result()


def test_the_memory_of_a_stream_is_bounded(meeting: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side at most one bucket, besides the tensor that was handed out last."""
    buckets: list[int] = []
    alive: dict[int, int] = {}
    sent: dict[str, int] = {}
    empty = torch.empty

    def counted(size: Any, **more: Any) -> Tensor:
        tensor = empty(size, **more)
        if more.get("dtype") == torch.uint8 and "device" in more:
            alive[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, id(tensor))
            buckets.append(sum(alive.values()))
        return tensor

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i in range(40):
            tensor = torch.full((BUCKET // 20,), float(i))
            sent[f"w{i:02}"] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), sent.pop, f"w{i:02}")
            yield f"w{i:02}", tensor
            del tensor
            assert sum(sent.values()) <= 2 * BUCKET // 5

    monkeypatch.setattr(torch, "empty", counted)
    sender, [taker] = both(meeting(), weights())
    assert sender.result() == 40 * 4 * (BUCKET // 20)
    assert all(
        torch.equal(tensor, torch.full_like(tensor, float(name[1:]))) for name, tensor in taker.result()[0].items()
    )
    assert 0 < max(buckets) <= 2 * BUCKET  # both sides are in this process


OTHER_SIDE = """if True:
    import sys, torch
    from flowrl.sync import ipc, stream
    from tests.sync.test_stream import ORIGIN, BUCKET, weights_of
    torch.multiprocessing.set_sharing_strategy("file_system")
    ipc.shared_device = lambda: torch.device("cpu")
    transport, port, what = sys.argv[1:]
    ticket = stream.Ticket(transport, "127.0.0.1", int(port), (0,), 600)
    if what == "send":
        print(stream.send(ticket, ORIGIN, weights_of(), BUCKET), flush=True)
    else:
        with ticket.open(0) as source:
            for name, tensor in source.weights():
                print(name, flush=True)
                if name == what:
                    sys.stdin.read()
"""


def other_side(ticket: Ticket, what: str) -> subprocess.Popen[str]:
    """A process that sends, or receives and waits for ever at a tensor; its output must be read by lines, since torch's
    manager of shared memory keeps it open."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER_SIDE, ticket.transport, str(ticket.port), what]
    return subprocess.Popen(command, text=True, env=environment, **pipes)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handles to shared memory of the CPU in place of a GPU's."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    monkeypatch.setattr(ipc, "shared_device", lambda: torch.device("cpu"))
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


def test_memory_handles_work_between_two_processes(meeting: Callable[..., Ticket], on_cpu: None) -> None:
    """The way of CUDA IPC, with memory of the CPU: a plain process sends, this one maps what it sends."""
    ticket = meeting(transport="cuda ipc")
    with other_side(ticket, "send") as process:
        assert process.stdout is not None
        weights, receipt, _ = received(ticket)
        assert int(process.stdout.readline()) == sum(tensor.nbytes for _, tensor in weights_of())
    assert process.returncode == 0
    assert weights_digest(weights.items()) == weights_digest(weights_of()) == receipt.digest
    assert receipt.transport == "cuda ipc"


@pytest.mark.parametrize("transport", ["gloo", "cuda ipc"])
def test_a_killed_receiver_ends_the_sender(transport: str, meeting: Callable[..., Ticket], on_cpu: None) -> None:
    """In the middle: the sender says so at once."""
    ticket = meeting(transport=transport)
    with other_side(ticket, "layer00") as process, ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        sender = pool.submit(send, ticket, ORIGIN, weights_of(), BUCKET)
        assert any(line == "layer00\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Interrupted):
            sender.result()


def test_each_sender_has_its_own_receivers(meeting: Callable[..., Ticket]) -> None:
    ticket = dataclasses.replace(meeting(), senders=(2, 0, 2))
    weights = weights_of()
    with ThreadPoolExecutor(5) as pool:
        takers = [pool.submit(received, ticket, rank) for rank, _ in enumerate(ticket.senders)]
        senders = [pool.submit(send, ticket, ORIGIN, weights, BUCKET, rank) for rank in (0, 2)]
    assert {sender.result() for sender in senders} == {sum(tensor.nbytes for _, tensor in weights)}
    assert {weights_digest(taker.result()[0].items()) for taker in takers} == {weights_digest(weights)}
