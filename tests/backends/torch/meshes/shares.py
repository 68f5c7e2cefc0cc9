"""What each process of a mesh gathers and sends in a sync (`outgoing`), against what one process would send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.backends.torch.train import sharded
from flowrl.sync.digest import tensor_digest
from flowrl.sync.weight_selection import outgoing, rounded

BUCKET = 40_000


class Share(NamedTuple):
    """The digests of all weights, gathered by every process; those of what one process sends, in rounds; the bytes of
    each tensor that it sends; and the bytes that it gathered for its share, and for all weights."""

    whole: dict[str, str]
    rounds: list[dict[str, str]]
    sizes: dict[str, int]
    gathered: int
    gathered_whole: int


def share_of(engine: Any, dtype: torch.dtype | None, part: str = "weights") -> Share:
    sizes, rounds = dict[str, int](), list[dict[str, str]]()
    with _counted(dist, "all_to_all_single") as gathered:
        for weights in outgoing(getattr(engine, part)(BUCKET), dtype, 0):
            sent = list(weights)
            sizes |= {name: tensor.nbytes for name, tensor in sent}
            rounds.append(_digests(sent))
    with _counted(sharded, "_all_gather") as gathered_whole:
        whole = _digests(rounded(getattr(engine, part)(), dtype))
    return Share(whole, rounds, sizes, sum(gathered), sum(gathered_whole))


@contextmanager
def _counted(module: Any, name: str) -> Iterator[list[int]]:
    """The bytes of the outputs of a collective."""
    honest, found = getattr(module, name), list[int]()

    def counting(output: Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(output.nbytes)
        honest(output, *args, **kwargs)

    setattr(module, name, counting)
    yield found
    setattr(module, name, honest)


def _digests(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensor_digest(name, tensor) for name, tensor in weights}


def assert_shared(ranks: Sequence[Sequence[Share]], together: int = 1) -> None:
    """In each sync, the processes send each tensor once, as one process would, in equally many rounds; their bytes are
    about equal, and they gather no others. At most `together` tensors are converted together."""
    for shares in zip(*ranks, strict=True):
        sent = [{name: digest for one in share.rounds for name, digest in one.items()} for share in shares]
        assert {name: digest for one in sent for name, digest in one.items()} == shares[0].whole
        assert sum(map(len, sent)) == len(shares[0].whole)
        assert len({len(share.rounds) for share in shares}) == 1
        loads = [sum(share.sizes.values()) for share in shares]
        heaviest = max(max(share.sizes.values(), default=0) for share in shares) * together
        assert max(loads) <= sum(loads) / len(loads) + heaviest
        assert all(share.gathered <= share.gathered_whole / len(shares) + 2 * heaviest for share in shares)
