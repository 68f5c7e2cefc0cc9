"""Group advantages beside one pass over the bytes that they read and write."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from harness import medians, table

from flowrl.operators import (
    GPGAdvantage,
    GroupAdvantage,
    OPOAdvantage,
    OptimalTokenBaseline,
    PassAtKAdvantage,
    RLOOAdvantage,
)

ROWS, WIDTH, GROUP = 4096, 1024, 8

if __name__ == "__main__":
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(WIDTH // 8, WIDTH + 1, (ROWS,), generator=generator)
    mask = torch.arange(WIDTH) < lengths[:, None]
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[torch.arange(ROWS), lengths - 1] = torch.randint(0, 2, (ROWS,), generator=generator).float()
    uid = np.array([f"0/{row // GROUP}/0" for row in range(ROWS)], dtype=object)
    norms = torch.rand(ROWS, WIDTH, generator=generator) * mask
    operators = [
        GroupAdvantage(),
        GroupAdvantage(normalize_std=False),
        RLOOAdvantage(),
        OPOAdvantage(),
        OPOAdvantage(leave_one_out=True),
        GPGAdvantage(),
        PassAtKAdvantage(4),
    ]
    found = medians(
        {
            "read rewards and mask, write advantages": lambda: rewards * mask.float(),
            **{repr(operator): partial(operator, rewards, mask, uid) for operator in operators},
            # by token, and not by row: it also reads the norms, and sums along rows and over groups at each token
            "OptimalTokenBaseline()": lambda: OptimalTokenBaseline()(rewards, norms, mask, uid),
        },
        seconds=10.0,
    )
    one_pass = next(iter(found.values()))
    table(
        f"{ROWS} rows of up to {WIDTH} tokens, groups of {GROUP}",
        ["", "ms", "passes"],
        [[name, f"{1e3 * seconds:.1f}", f"{seconds / one_pass:.2f}"] for name, seconds in found.items()],
    )
