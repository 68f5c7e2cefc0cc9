"""Several senders (`stream.py`, `buckets.py`): each gathers and sends its share of the weights, in rounds.

Senders and receivers are threads; a barrier stands for the collective by which senders gather a round. Timeouts are
longer than a test's, so a test that ends proves that none is blocked.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.records import Receipt
from flowrl.sync import buckets, digest, group
from flowrl.sync.buckets import in_rounds
from flowrl.sync.carriers import GlooCarrier
from flowrl.sync.digest import tensor_digest, weights_digest
from flowrl.sync.group import Interrupted
from flowrl.sync.stream import Ticket, send
from tests.support.errors import raises
from tests.sync.test_stream import BUCKET, ORIGIN, Weights, new_ticket, on_cpu, other_process, received, weights_of

__all__ = ["new_ticket", "on_cpu"]  # fixtures

Rounds = list[list[Weights]]
"""By sender, what it sends in each round."""


def dealt(weights: Weights, senders: int, limit: int = BUCKET) -> Rounds:
    rounds = list(in_rounds([tensor.nbytes for _, tensor in weights], senders, limit))
    return [[[weights[i] for i in one[share]] for one in rounds] for share in range(senders)]


def collective(rounds: Sequence[Weights], meeting: threading.Barrier) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """A sender's rounds, each of which it gathers with the other senders."""
    for weights in rounds:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(600)
        yield iter(weights)


def sync(
    ticket: Ticket, shares: Rounds, sending: Callable[..., int] = send
) -> tuple[list[Future[int]], list[Future[Any]]]:
    """Run all senders and receivers; returns their futures, which are done. A sender that fails gathers to the end, as
    `Host.send` does."""
    meeting = threading.Barrier(len(shares))

    def run(number: int) -> int:
        rounds = collective(shares[number], meeting)
        try:
            return sending(ticket, ORIGIN, rounds, BUCKET, number)
        finally:
            for _ in rounds:
                pass

    with ThreadPoolExecutor(len(shares) + len(ticket.senders)) as pool:
        takers = [pool.submit(received, ticket, rank) for rank, _ in enumerate(ticket.senders)]
        senders = [pool.submit(run, number) for number in range(len(shares))]
    return senders, takers


def of(ticket: Ticket, senders: int) -> Ticket:
    return dataclasses.replace(ticket, senders=(tuple(range(senders)),) * len(ticket.senders))


UNEQUAL: Rounds = [
    [[("a", torch.ones(3000))], [], [("b", torch.ones(2))]],  # larger than a bucket, and a round without any
    [[], [("c", torch.ones(700)), ("d", torch.ones(700))], []],  # two buckets in one round
    [[], [], []],
]


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (4, 3), (3, 2)])
def test_the_receipt_is_that_of_one_sender(senders: int, receivers: int, new_ticket: Callable[..., Ticket]) -> None:
    """Names, bits and digest; with shares dealt by bytes, and with very unequal ones."""
    weights = weights_of()
    shares = UNEQUAL if senders == 3 else dealt(weights, senders)
    weights = sorted(one for share in shares for part in share for one in part)
    assert all(len(share) > 1 for share in shares)
    sent, takers = sync(of(new_ticket(receivers), senders), shares)
    sizes = [sum(tensor.nbytes for part in share for _, tensor in part) for share in shares]
    assert [future.result() for future in sent] == sizes
    for taker in takers:
        found, receipt, _ = taker.result()
        assert sorted(found) == [name for name, _ in weights]
        assert receipt == Receipt(3, weights_digest(weights), 0, 0.0, "gloo")
        assert weights_digest(found.items()) == receipt.digest


@pytest.mark.parametrize("number", range(3))
def test_a_flipped_bit_of_any_sender_is_refused_by_name(number: int, new_ticket: Callable[..., Ticket]) -> None:
    shares = dealt(weights_of(), 3)
    names = [name for part in shares[number] for name, tensor in part if tensor.nbytes]

    class Damaging(GlooCarrier):
        def send(self, flat: Tensor) -> None:
            flat = flat.clone()
            flat[0] ^= 1
            super().send(flat)

    def sending(ticket: Ticket, *arguments: Any) -> int:
        sender = arguments[-1]

        class Own(Ticket):
            def _carrier(self, group: Any, *rest: Any) -> Any:
                return (Damaging if sender == number else GlooCarrier)(group)

        return send(Own(**dataclasses.asdict(ticket)), *arguments)

    sent, takers = sync(of(new_ticket(2), 3), shares, sending)
    for taker in takers:
        with raises("sync.damaged", role="actor", version=3) as caught:
            taker.result()
        assert str(caught.value.facts["reason"]).removesuffix(" is not what was sent") in names
    for future in sent:
        with raises("sync.interrupted"):
            future.result()


def test_an_error_of_one_sender_ends_all(new_ticket: Callable[..., Ticket]) -> None:
    """Also while another sender waits for its turn."""

    def sending(ticket: Ticket, origin: Any, rounds: Any, limit: int, sender: int) -> int:
        def broken() -> Iterator[Any]:
            yield next(rounds)
            raise ValueError("out of memory")

        return send(ticket, origin, broken() if sender == 1 else rounds, limit, sender)

    sent, takers = sync(of(new_ticket(2), 3), dealt(weights_of(), 3), sending)
    with pytest.raises(ValueError, match="out of memory"):
        sent[1].result()
    for future in (sent[0], sent[2], *takers):
        with pytest.raises(Interrupted):
            future.result()


def test_a_sender_that_the_receivers_cannot_reach_is_named(
    new_ticket: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails before the timeout, although it still gathers with the other sender, which waits for the receivers."""
    address, away = group._address_towards, set[int]()

    def sending(ticket: Ticket, *arguments: Any) -> int:
        if arguments[-1] == 1:
            away.add(threading.get_ident())
        return send(ticket, *arguments)

    monkeypatch.setattr(group, "_TO_OTHERS", timedelta(seconds=3))
    monkeypatch.setattr(
        group, "_address_towards", lambda host: "192.0.2.1" if threading.get_ident() in away else address(host)
    )
    sent, takers = sync(of(new_ticket(2), 2), dealt(weights_of(), 2), sending)
    for future in (sent[1], *takers):
        with raises("sync.not-connected", sender="Rank 1 of the trainer", seconds=3.0):
            future.result()
    with raises("sync.interrupted"):
        sent[0].result()


def test_a_killed_sender_is_reported_by_all(new_ticket: Callable[..., Ticket], on_cpu: None) -> None:
    """One of two senders is another process, which is killed in its first round."""
    ticket = of(new_ticket(), 2)
    with ThreadPoolExecutor(2) as pool, other_process(ticket, "stop") as process:
        assert process.stdout is not None
        taker = pool.submit(received, ticket)
        sender = pool.submit(send, ticket, ORIGIN, [weights_of()], BUCKET, 0)
        assert process.stdout.readline() == "gathers\n"
        process.send_signal(signal.SIGKILL)
        for future in (taker, sender):
            with pytest.raises(Interrupted):
                future.result()


def test_two_senders_of_one_tensor_are_refused(new_ticket: Callable[..., Ticket]) -> None:
    same = [("w", torch.ones(4))]
    _, [taker] = sync(of(new_ticket(), 2), [[same], [same]])
    with raises("sync.damaged", reason="w was not sent, or arrived twice"):
        taker.result()


def test_digests_on_a_device_are_named(new_ticket: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a device: what is packed there is hashed there, and each receiver hashes by the same name."""
    monkeypatch.setattr(buckets, "algorithm_for", lambda tensor: "hash64")
    seen: list[str] = []

    def take(ticket: Ticket) -> Receipt:
        with ticket.open(0) as source:
            digests = {}
            for name, _, sent in source.checked():
                digests[name] = sent
            seen.extend(digests.values())
            return source.check(Receipt(3, digest.combine(digests), 0, 0.0, "copy"))

    shares, ticket = dealt(weights_of(), 2), of(new_ticket(), 2)
    with ThreadPoolExecutor(3) as pool:
        meeting = threading.Barrier(2)
        taker = pool.submit(take, ticket)
        for number, share in enumerate(shares):
            pool.submit(send, ticket, ORIGIN, collective(share, meeting), BUCKET, number)
    expected = {name: tensor_digest(name, tensor, "hash64") for name, tensor in weights_of()}
    assert sorted(seen) == sorted(expected.values())
    assert taker.result().digest == digest.combine(expected)
    assert taker.result().digest.startswith("hash64:")
