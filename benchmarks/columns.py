"""Join, permute and repeat the rows of 256 MB of columns, compared with verl's functions and one copy of the bytes.

Most of the time is spent on pages that are written for the first time; glibc reuses some, depending on earlier
deallocations. ``MALLOC_MMAP_THRESHOLD_=1048576`` allocates every column on new pages.
"""

from __future__ import annotations

import time

import torch
from harness import medians, peers, table
from torch import Tensor

from flowrl import DataProto

ROWS, WIDTH = 1024, 4096


def columns(rows: int) -> dict[str, Tensor]:
    """Ids and floats, half of the bytes each: 256 kB per row."""
    ids = {f"ids_{i}": torch.randint(0, 32000, (rows, WIDTH)) for i in range(4)}
    return ids | {f"floats_{i}": torch.rand(rows, WIDTH) for i in range(8)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole, few = columns(ROWS), columns(ROWS // 8)
    own, own_few, theirs, theirs_few = DataProto(whole), DataProto(few), peers.batch(whole), peers.batch(few)
    own_parts = own.split(ROWS // 8)
    theirs_parts = [peers.batch(dict(part.columns)) for part in own_parts]
    order = torch.randperm(ROWS)
    cases = {
        "concat of 8": (lambda: DataProto.concat(own_parts), lambda: type(theirs).concat(theirs_parts)),
        "permute": (lambda: own[order], lambda: theirs.select_idxs(order)),
        "repeat 8 times": (lambda: own_few.repeat(8), lambda: theirs_few.repeat(8)),
    }
    rows = []
    for name, (ours, verls) in cases.items():
        found = medians(
            {"flowrl": ours, "peer": verls, "copy": lambda: [column.clone() for column in whole.values()]},
            10.0,
            clock=time.process_time,
        )
        rows.append([name, *(f"{1e3 * found[who]:.1f}" for who in found), f"{found['peer'] / found['flowrl']:.2f}"])
    table(
        f"{ROWS} rows of 256 kB, CPU ms on one thread",
        ["", "flowrl", peers.PEER, "a copy", "times as fast"],
        rows,
    )
