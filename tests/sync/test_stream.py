"""Tests of `stream.py`, `group.py` and `received.py`: weights as a stream, over gloo between threads and processes.

Sender and receivers have timeouts longer than that of a test, so a test that ends proves that none is blocked.
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

from flowrl.protocols.protocols import Adapted, Trainer
from flowrl.protocols.remote import RemoteWeights
from flowrl.records import Receipt
from flowrl.sync import ipc, stream
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.digest import weights_digest
from flowrl.sync.group import Interrupted, TransferGroup
from flowrl.sync.probe import Probe, compute_dtype
from flowrl.sync.received import Manifest, Origin, ReceivedWeights
from flowrl.sync.stream import Ticket, send
from tests import ROOT
from tests.support.errors import raises

BUCKET = 4096
ORIGIN = Origin("actor", 3)
Weights = list[tuple[str, Tensor]]


def weights_of(seed: int = 0) -> Weights:
    """Many dtypes and shapes: scalars, empty, larger than a bucket, and strided."""
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
def new_ticket() -> Iterator[Callable[..., Ticket]]:
    """A function that creates tickets for a store of this test."""
    stores: list[Any] = []

    def ticket(receivers: int = 1, transport: str = "gloo", timeout: float = 600) -> Ticket:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
        stores.append(store)
        return Ticket(transport, "127.0.0.1", store.port, ((0,),) * receivers, timeout)

    yield ticket


def received(
    ticket: Ticket, rank: int = 0, take: Callable[[ReceivedWeights], Any] = lambda source: None
) -> tuple[Any, ...]:
    """The results of a receiver: the weights, its receipt, and the result of `take` on the source."""
    with ticket.open(rank) as source:
        taken = take(source)
        weights = dict(source.weights())
        receipt = Receipt(source.version, weights_digest(weights.items()), 0, 0.0, "copy")
        return weights, source.check(receipt), taken


def send_and_receive(
    ticket: Ticket, weights: Iterable[tuple[str, Tensor]], **more: Any
) -> tuple[Future[int], list[Future[Any]]]:
    """Run a sender and all receivers; returns their futures, which are done."""
    with ThreadPoolExecutor(1 + len(ticket.senders)) as pool:
        takers = [pool.submit(received, ticket, rank, **more) for rank, _ in enumerate(ticket.senders)]
        sender = pool.submit(send, ticket, ORIGIN, [weights], BUCKET)
    return sender, takers


@pytest.mark.parametrize("receivers", [1, 3])
def test_received_weights_equal_sent_weights(receivers: int, new_ticket: Callable[..., Ticket]) -> None:
    """Bit-equal and in order; each tensor is a copy owned by the receiver."""
    weights = weights_of()
    for _ in range(3):  # a rank that ends early is not an error for the others
        sender, takers = send_and_receive(new_ticket(receivers), weights)
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


def test_received_weights_implement_the_trainer_interface(new_ticket: Callable[..., Ticket]) -> None:
    """Including `adapter_of`, and the trainer's log-probs of the probe."""
    probe, scores = Probe([[1, 2], [3]], [[4, 5, 6], [7, 8, 9]]), tuple(-0.5 * i for i in range(6))
    for adapter_of in (None, "digest x 2"):
        ticket, origin = new_ticket(), Origin("actor", 3, adapter_of, probe, scores, "bfloat16")
        with ThreadPoolExecutor(1) as pool:
            sender = pool.submit(send, ticket, origin, [weights_of()], BUCKET)
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
    """A carrier that flips a bit."""

    def send(self, flat: Tensor) -> None:
        flat = flat.clone()
        flat[len(flat) // 2] ^= 1
        super().send(flat)


def change_messages(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the messages between sender and receivers."""
    original = TransferGroup.broadcast_message

    def broadcast_message(group: TransferGroup, message: Any) -> None:
        message = json.loads(json.dumps(message))
        change(message)
        original(group, message)

    monkeypatch.setattr(TransferGroup, "broadcast_message", broadcast_message)


def test_a_flipped_bit_is_detected(new_ticket: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GlooCarrier", Damaging)
    sender, takers = send_and_receive(new_ticket(2), weights_of())
    for taker in takers:
        with raises("sync.damaged", role="actor", version=3):
            taker.result()
    with raises("sync.interrupted"):
        sender.result()


def drop_tensor(message: dict[str, Any]) -> None:
    if "tensors" in message:  # the last of a bucket, so that offsets of the others do not change
        message["tensors"] = [entry for entry in message["tensors"] if entry[0] != "strided"]


def mix_versions(message: dict[str, Any]) -> None:
    if "digests" in message:
        message["version"] = 2


def change_shape(message: dict[str, Any]) -> None:
    for entry in message.get("tensors", ()):
        if entry[0] == "half":
            entry[2].reverse()


def change_digest(message: dict[str, Any]) -> None:
    if "digests" in message:
        message["digests"]["half"] = message["digests"]["mask"]


def repeat_tensor(message: dict[str, Any]) -> None:
    for entry in message.get("tensors", ()):
        entry[0] = entry[0].replace("layer02", "layer01")


@pytest.mark.parametrize(
    ("change", "code", "detail"),
    [
        (drop_tensor, "sync.damaged", "strided did not arrive"),
        (mix_versions, "sync.damaged", "a bucket has version 2"),
        (change_shape, "sync.damaged", "half is not what was sent"),
        (change_digest, "sync.damaged", "half differ from the digests that the trainer sent last"),
        (repeat_tensor, "sync.damaged", "layer01 (was not sent, or arrived twice|is not what was sent)"),
    ],
)
def test_damaged_messages_are_refused_with_the_kind_of_damage(
    change: Callable[[dict[str, Any]], None],
    code: str,
    detail: str,
    new_ticket: Callable[..., Ticket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_messages(monkeypatch, change)
    _, [taker] = send_and_receive(new_ticket(), weights_of())
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


def test_an_error_of_the_sender_ends_all_receivers(new_ticket: Callable[..., Ticket]) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights_of()[:5]
        raise ValueError("out of memory")

    sender, takers = send_and_receive(new_ticket(2), broken())
    with pytest.raises(ValueError, match="out of memory"):
        sender.result()
    for taker in takers:
        with pytest.raises(Interrupted):
            taker.result()


def test_an_error_of_a_receiver_ends_sender_and_receivers(new_ticket: Callable[..., Ticket]) -> None:
    """Before or after the first tensor; the side without the cause reports that the other has ended."""

    def refuse(source: ReceivedWeights) -> None:
        raise ValueError("change_messages")

    def stop(source: ReceivedWeights) -> None:
        next(source.weights())
        raise ValueError("change_messages")

    for take in (refuse, stop):
        sender, [taker] = send_and_receive(new_ticket(), weights_of(), take=take)
        with pytest.raises(ValueError, match="change_messages"):
            taker.result()
        with pytest.raises(Interrupted):
            sender.result()


def test_partially_read_weights_are_refused(new_ticket: Callable[..., Ticket]) -> None:
    ticket = new_ticket()
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send, ticket, ORIGIN, [weights_of()], BUCKET)
        with ticket.open(0) as source:
            next(source.weights())
            with raises("sync.damaged", version=3):
                source.check(Receipt(3, "", 0, 0.0, "copy"))
    with pytest.raises(Interrupted):
        sender.result()


def test_a_closed_store_ends_waiting_participants() -> None:
    """Later participants cannot connect."""
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=600), wait_for_workers=False)  # type: ignore[attr-defined]
    ticket = Ticket("gloo", "127.0.0.1", store.port, ((0,),), 600)
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send, ticket, ORIGIN, [weights_of()], BUCKET)
        while store.num_keys() < 1:  # until the participant waits
            threading.Event().wait(0.01)
        del store
        with pytest.raises(Interrupted):
            sender.result()


def test_the_memory_of_a_stream_is_bounded(new_ticket: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one bucket on each side, plus the last tensor."""
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
    sender, [taker] = send_and_receive(new_ticket(), weights())
    assert sender.result() == 40 * 4 * (BUCKET // 20)
    assert all(
        torch.equal(tensor, torch.full_like(tensor, float(name[1:]))) for name, tensor in taker.result()[0].items()
    )
    assert 0 < max(buckets) <= 2 * BUCKET  # send_and_receive sides are in this process


OTHER_SIDE = """if True:
    import sys, torch
    from flowrl.sync import ipc, stream
    from tests.sync.test_stream import ORIGIN, BUCKET, weights_of
    torch.multiprocessing.set_sharing_strategy("file_system")
    ipc.shared_device = lambda: torch.device("cpu")
    transport, port, what = sys.argv[1:]
    ticket = stream.Ticket(transport, "127.0.0.1", int(port), ((0,),), 600)
    if what == "send":
        print(stream.send(ticket, ORIGIN, [weights_of()], BUCKET), flush=True)
    elif what == "stop":
        def stops():
            print("gathers", flush=True)
            sys.stdin.read()
            yield []
        ticket = stream.Ticket(transport, "127.0.0.1", int(port), ((0, 1),), 600)
        stream.send(ticket, ORIGIN, stops(), BUCKET, 1)
    else:
        with ticket.open(0) as source:
            for name, tensor in source.weights():
                print(name, flush=True)
                if name == what:
                    sys.stdin.read()
"""


def other_process(ticket: Ticket, what: str) -> subprocess.Popen[str]:
    """A process that sends, is the second of two senders and stops, or receives and then blocks at a tensor. Read its
    output by lines: torch's shared memory manager does not close it."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER_SIDE, ticket.transport, str(ticket.port), what]
    return subprocess.Popen(command, text=True, env=environment, **pipes)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handles to shared memory of the CPU instead of CUDA IPC."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    monkeypatch.setattr(ipc, "shared_device", lambda: torch.device("cpu"))
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


def test_memory_handles_work_between_two_processes(new_ticket: Callable[..., Ticket], on_cpu: None) -> None:
    """The protocol of CUDA IPC, with CPU memory: another process sends, this process maps its memory."""
    ticket = new_ticket(transport="cuda ipc")
    with other_process(ticket, "send") as process:
        assert process.stdout is not None
        weights, receipt, _ = received(ticket)
        assert int(process.stdout.readline()) == sum(tensor.nbytes for _, tensor in weights_of())
    assert process.returncode == 0
    assert weights_digest(weights.items()) == weights_digest(weights_of()) == receipt.digest
    assert receipt.transport == "cuda ipc"


@pytest.mark.parametrize("transport", ["gloo", "cuda ipc"])
def test_a_killed_receiver_ends_the_sender(transport: str, new_ticket: Callable[..., Ticket], on_cpu: None) -> None:
    """Killed after the first tensors; the sender raises without waiting for its timeout."""
    ticket = new_ticket(transport=transport)
    with other_process(ticket, "layer00") as process, ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        sender = pool.submit(send, ticket, ORIGIN, [weights_of()], BUCKET)
        assert any(line == "layer00\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Interrupted):
            sender.result()


def test_each_sender_has_its_own_receivers(new_ticket: Callable[..., Ticket]) -> None:
    ticket = dataclasses.replace(new_ticket(), senders=((2,), (0,), (2,)))
    weights = weights_of()
    with ThreadPoolExecutor(5) as pool:
        takers = [pool.submit(received, ticket, rank) for rank, _ in enumerate(ticket.senders)]
        senders = [pool.submit(send, ticket, ORIGIN, [weights], BUCKET, rank) for rank in (0, 2)]
    assert {sender.result() for sender in senders} == {sum(tensor.nbytes for _, tensor in weights)}
    assert {weights_digest(taker.result()[0].items()) for taker in takers} == {weights_digest(weights)}
