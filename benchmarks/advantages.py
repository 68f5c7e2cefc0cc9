"""GAE and group advantages, compared with verl's functions and with one pass over the bytes that they read and write.

Outputs of megabytes are on new or on reused memory pages, depending on earlier deallocations. To compare on equal
pages, set ``MALLOC_MMAP_THRESHOLD_=1048576`` (all new), or 1073741824 and ``MALLOC_TRIM_THRESHOLD_=4294967296`` (none).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from harness import medians, peers, table
from torch import Tensor

from flowrl.operators import (
    GAE,
    DecoupledGAE,
    GPGAdvantage,
    GroupAdvantage,
    OPOAdvantage,
    OptimalTokenBaseline,
    PassAtKAdvantage,
    ReturnToGo,
    RLOOAdvantage,
    Whiten,
)

GAMMA, LAM = 0.99, 0.95
GROUP = 8


def masks(rows: int, width: int, holes: bool) -> Tensor:
    """Responses of random lengths; with holes, the mask excludes one in seven runs of 32 tokens."""
    mask = torch.arange(width) < torch.randint(width // 4, width + 1, (rows,))[:, None]
    return mask & (torch.rand(rows, width // 32).repeat_interleave(32, 1) > 0.15) if holes else mask


def of_tokens(rows: int, width: int, holes: bool) -> None:
    """GAE and its variants, whitened as in verl's function."""
    mask = masks(rows, width, holes)
    rewards, values, theirs = torch.randn(rows, width) * mask, torch.randn(rows, width), mask.long()

    def whitened_gae() -> object:
        out = GAE(GAMMA, LAM)(rewards, values, mask)
        return Whiten()(out.advantages, mask), out.returns

    show(
        f"{rows} rows of up to {width} tokens, masks {'with holes' if holes else 'are prefixes'}",
        {
            f"{peers.PEER}: GAE, whitened": lambda: peers.gae(rewards, values, theirs, GAMMA, LAM),
            "GAE, whitened": whitened_gae,
            "GAE": partial(GAE(GAMMA, LAM), rewards, values, mask),
            "DecoupledGAE, by length": partial(DecoupledGAE(GAMMA, alpha=0.05), rewards, values, mask),
            "ReturnToGo": partial(ReturnToGo(GAMMA), rewards, mask),
            "Whiten": partial(Whiten(), values, mask),
            "read rewards, values and mask, write both": lambda: (rewards * mask.float(), values * mask.float()),
        },
    )


def of_groups(rows: int, width: int) -> None:
    """Group advantages."""
    mask = masks(rows, width, holes=False)
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), mask.sum(1) - 1] = torch.randint(0, 2, (rows,)).float()
    uid = np.array([f"0/{row // GROUP}/0" for row in range(rows)], dtype=object)
    norms, theirs = torch.rand(rows, width) * mask, mask.long()
    operators = [
        GroupAdvantage(),
        GroupAdvantage(normalize_std=False),
        RLOOAdvantage(),
        OPOAdvantage(),
        OPOAdvantage(leave_one_out=True),
        GPGAdvantage(),
        PassAtKAdvantage(4),
    ]
    show(
        f"{rows} rows of up to {width} tokens, groups of {GROUP}",
        {
            f"{peers.PEER}: GRPO, vectorized": lambda: peers.group_advantage(rewards, theirs, uid),
            **{repr(operator): partial(operator, rewards, mask, uid) for operator in operators},
            # per token instead of per row: also reads the norms, and sums along rows and over groups at each token
            "OptimalTokenBaseline()": lambda: OptimalTokenBaseline()(rewards, norms, mask, uid),
            "read rewards and mask, write advantages": lambda: rewards * mask.float(),
        },
    )


def show(title: str, cases: Mapping[str, Callable[[], object]]) -> None:
    """Medians of alternating calls; the first case is the peer's."""
    found = medians(cases, seconds=10.0, clock=time.process_time)
    peer = next(iter(found.values()))
    table(
        f"{title}: CPU ms on one thread",
        ["", "ms", "times as fast"],
        [[name, f"{1e3 * seconds:.1f}", f"{peer / seconds:.1f}"] for name, seconds in found.items()],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for rows, width in ((1024, 1024), (256, 4096)):
        for holes in (False, True):
            of_tokens(rows, width, holes)
    of_groups(4096, 1024)
