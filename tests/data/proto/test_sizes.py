"""What a DataProto takes outside of its process: its own rows, and not those that it was cut from."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from flowrl import DataProto
from flowrl.data.proto.column_math import objects

BIG = DataProto({"x": torch.zeros(1024, 1024), "o": objects(["text" * 1000] * 1024)})
"""4 MiB of numbers."""


@pytest.mark.parametrize(
    "part",
    [
        BIG[3:4],
        BIG[[3]],
        BIG.select("x")[:1],
        BIG.split(1)[7],
        BIG.to("cpu")[5:6],
        DataProto({"x": BIG["x"][:, :1]}),
    ],
)
def test_a_part_is_pickled_alone(part: DataProto) -> None:
    raw = pickle.dumps(part)
    assert len(raw) < 20_000
    assert pickle.loads(raw).equal(part)
    assert copy.deepcopy(part).equal(part)


def test_a_part_is_saved_alone(tmp_path: Path) -> None:
    BIG[3:4].save(tmp_path / "part")
    assert sum(file.stat().st_size for file in (tmp_path / "part").iterdir()) < 20_000
    assert DataProto.load(tmp_path / "part").equal(BIG[3:4])


def test_what_is_whole_or_repeats_is_not_copied() -> None:
    repeated = DataProto({"x": torch.ones(1).expand(1 << 20)})
    assert len(pickle.dumps(repeated)) < 2000
    assert len(pickle.dumps(BIG.select("x"))) < (4 << 20) + 2000


def test_a_part_that_asks_for_gradients_does_so_afterwards() -> None:
    weight = torch.ones(8, 2, requires_grad=True)
    part = DataProto({"x": (weight * 2)[2:3]})
    assert pickle.loads(pickle.dumps(part))["x"].requires_grad
