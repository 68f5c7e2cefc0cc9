"""Size of a pickled or saved DataProto: its own rows, not those of the batch it was sliced from."""

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
def test_pickling_a_slice_writes_only_its_rows(part: DataProto) -> None:
    raw = pickle.dumps(part)
    assert len(raw) < 20_000
    assert pickle.loads(raw).equal(part)
    assert copy.deepcopy(part).equal(part)


def test_saving_a_slice_writes_only_its_rows(tmp_path: Path) -> None:
    BIG[3:4].save(tmp_path / "part")
    assert sum(file.stat().st_size for file in (tmp_path / "part").iterdir()) < 20_000
    assert DataProto.load(tmp_path / "part").equal(BIG[3:4])


def test_full_and_expanded_columns_are_pickled_without_a_copy() -> None:
    repeated = DataProto({"x": torch.ones(1).expand(1 << 20)})
    assert len(pickle.dumps(repeated)) < 2000
    assert len(pickle.dumps(BIG.select("x"))) < (4 << 20) + 2000


def test_pickling_a_slice_keeps_requires_grad() -> None:
    weight = torch.ones(8, 2, requires_grad=True)
    part = DataProto({"x": (weight * 2)[2:3]})
    assert pickle.loads(pickle.dumps(part))["x"].requires_grad
