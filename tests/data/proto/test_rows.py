"""Invalid row selections, counts and other arguments are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import DataProto
from flowrl.data.proto.column_math import objects
from flowrl.errors import DataError
from tests.support.errors import raises

FOUR = DataProto({"x": torch.arange(4), "o": objects("abcd")})


@pytest.mark.parametrize("n", [True, False, "a", 2.0, None, float("nan"), [2], torch.tensor(2)])
@pytest.mark.parametrize("call", [FOUR.split, FOUR.repeat])
def test_invalid_row_counts_are_refused(call: Callable[[Any], Any], n: Any) -> None:
    with pytest.raises(DataError):
        call(n)


def test_numpy_integers_are_valid_row_counts() -> None:
    two = np.int64(2)
    assert len(FOUR.split(two)) == 2
    assert len(FOUR.repeat(two)) == 8
    assert FOUR[two : np.int64(3)]["o"].tolist() == ["c"]


@pytest.mark.parametrize(
    "key",
    [slice("a", "b"), slice(0.0, 1.0), [[0], [1, 2]], [[0], [1]], None, 1.5, {"a": 1}, [0.5], ["a"], [4], [-5]],
    ids=str,
)
def test_invalid_row_selections_are_refused(key: Any) -> None:
    with raises("data.row-selection", rows=4):
        FOUR[key]


@pytest.mark.parametrize("columns", [None, 3, "ab", [("x", torch.zeros(1))], {"x": None}, {3: torch.zeros(1)}], ids=str)
def test_invalid_columns_are_refused(columns: Any) -> None:
    with pytest.raises(DataError):
        DataProto(columns)


@pytest.mark.parametrize("meta", [[], [1], 0, 3, "k", {"k": ()}], ids=str)
def test_invalid_meta_is_refused(meta: Any) -> None:
    with pytest.raises(DataError, match="meta"):
        DataProto({}, meta)


def test_meta_that_nests_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with raises("data.not-json", where="meta"):
        DataProto({}, {"k": deep})


@pytest.mark.parametrize("device", ["martian", 3.5, None, "cuda:4711", "cpu:x"])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with raises("backend.device"):
        FOUR.to(device)


def test_an_out_of_memory_error_of_a_device_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that torch raises while moving columns are not wrapped."""

    def full(self: torch.Tensor, *_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        FOUR.to("cpu")


def test_arguments_of_other_types_are_refused() -> None:
    anything: Any = DataProto
    four: Any = FOUR
    for call in (
        lambda: four.union(None),
        lambda: four.equal(3),
        lambda: four.rename("x"),
        lambda: four.select(["x"]),
        lambda: four.to_record(3),
        lambda: four.to_record(int),
        lambda: four.save(3),
        lambda: four.save("a\0b"),
        lambda: anything.load(None),
        lambda: anything.concat(3),
        lambda: anything.concat([FOUR, 3]),
        lambda: anything.concat([FOUR], pad=3),
        lambda: anything.concat([FOUR], pad={"x": 3}),
        lambda: anything.from_record(3),
        lambda: anything.from_verl({"batch": 3, "non_tensor_batch": {}, "meta_info": {}}),
        lambda: anything.from_verl({"batch": {}, "non_tensor_batch": [1], "meta_info": {}}),
        lambda: anything.from_verl({"batch": {}, "non_tensor_batch": {}, "meta_info": [1]}),
    ):
        with pytest.raises(DataError):
            call()
