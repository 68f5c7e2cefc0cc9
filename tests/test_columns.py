"""Columns: their annotations, and which ports accept which columns."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int64, Shaped
from torch import Tensor

from flowrl import columns
from flowrl.columns import Column, ColumnType, lookup, parse, register
from tests.support.errors import raises

DEFINED = {
    name: value
    for name, value in vars(columns).items()
    if name[0] != "_" and get_args(value) and parse(value) is not None
}

# Name in the DataProto: kind, dtype, axes.
TABLE = {
    "prompts": ("tokens", "int64", "batch prompt"),
    "responses": ("tokens", "int64", "batch response"),
    "input_ids": ("tokens", "int64", "batch sequence"),
    "attention_mask": ("mask", "bool", "batch sequence"),
    "position_ids": ("positions", "int64", "batch sequence"),
    "response_mask": ("mask", "bool", "batch response"),
    "rollout_log_probs": ("log-prob of the rollout", "float32", "batch response"),
    "old_log_probs": ("log-prob of the old policy", "float32", "batch response"),
    "ref_log_prob": ("log-prob of the reference", "float32", "batch response"),
    "values": ("value", "float32", "batch response"),
    "returns": ("return", "float32", "batch response"),
    "advantages": ("advantage", "float32", "batch response"),
    "token_level_scores": ("score", "float32", "batch response"),
    "token_level_rewards": ("reward", "float32", "batch response"),
    "uid": ("group", "object", "batch"),
    "policy_version": ("version", "int64", "batch"),
    "token_version": ("version of a token", "int64", "batch response"),
    "data_source": ("source name", "object", "batch"),
    "ground_truth": ("ground truth", "object", "batch"),
    "extra_info": ("record", "object", "batch"),
    "raw_prompt": ("messages", "object", "batch"),
}


@pytest.mark.parametrize("name", TABLE)
def test_standard_columns_have_the_kinds_and_axes_of_the_table(name: str) -> None:
    kind, dtype, axes = TABLE[name]
    column = lookup(name)
    assert column is not None
    assert (column.name, column.kind, column.dtype, " ".join(column.axes)) == (name, kind, dtype, axes)
    assert str(column) == f"{kind}[{axes}] {dtype}"


def test_annotations_are_checked_by_jaxtyping_too() -> None:
    array = get_args(columns.Values)[0]
    assert isinstance(torch.zeros(2, 3), array)
    assert not isinstance(torch.zeros(2, 3, dtype=torch.float64), array)
    assert not isinstance(torch.zeros(2), array)


def test_only_a_score_is_accepted_as_another_kind() -> None:
    """Every pair of columns: kinds, dtypes and axes must match, except that a reward port accepts a score."""
    accepted = {
        (a, b)
        for a, wanted in DEFINED.items()
        for b, found in DEFINED.items()
        if a != b and parse(wanted).accepts(parse(found))  # type: ignore[union-attr, arg-type]
    }
    assert accepted == {("TokenLevelRewards", "TokenLevelScores")}


def test_pad_values_of_columns_are_neutral() -> None:
    for value in DEFINED.values():
        column = parse(value)
        assert column is not None
        others = {"temperature": 1.0, "policy_version": -1, "token_version": -1, "turn_ids": -1}
        assert column.pad == others.get(column.name, 0)
        if column.dtype != "object":
            assert torch.full((1,), column.pad, dtype=getattr(torch, column.dtype)).item() == column.pad


@pytest.mark.parametrize("annotation", [int, Tensor, Float32[Tensor, "batch"], Annotated[int, "text"], list[int], None])
def test_other_annotations_are_not_columns(annotation: Any) -> None:
    assert parse(annotation) is None


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (Float32[Tensor, "batch response"], ("float32", ("batch", "response"))),
        (Bool[Tensor, "batch"], ("bool", ("batch",))),
        (Int64[Tensor, " batch   prompt "], ("int64", ("batch", "prompt"))),
        (Shaped[np.ndarray, "batch"], ("object", ("batch",))),
    ],
)
def test_a_custom_annotation_is_a_column(array: Any, expected: tuple[str, tuple[str, ...]]) -> None:
    column = parse(Annotated[array, "a note", Column("mine", "kind", 0)])
    assert column == ColumnType("mine", "kind", *expected)


@pytest.mark.parametrize(
    ("array", "facts"),
    [
        (float, {"found": "<class 'float'>"}),
        (Tensor, {"found": "<class 'torch.Tensor'>"}),
        (Float[Tensor, "batch"], {"found": "Float[Tensor, 'batch']"}),
        (Shaped[Tensor, "batch"], {}),
        (Float32[np.ndarray, "batch"], {}),
        (Float32[Tensor, ""], {"axes": ""}),
        (Float32[Tensor, "response"], {"axes": "response"}),
        (Float32[Tensor, "batch 4"], {"axes": "batch 4"}),
        (Float32[Tensor, "batch *rest"], {"axes": "batch *rest"}),
        (Float32[Tensor, "batch response response"], {"axes": "batch response response"}),
    ],
)
def test_invalid_annotations_are_refused(array: Any, facts: dict[str, str]) -> None:
    with raises("column.definition", column="mine", **facts):
        parse(Annotated[array, Column("mine", "kind")])


def test_redefining_a_column_is_refused() -> None:
    mine = ColumnType("column_of_this_test", "kind", "float32", ("batch",))
    assert register(mine) is register(ColumnType("column_of_this_test", "kind", "float32", ("batch",)))
    assert lookup("column_of_this_test") is mine
    assert lookup("no_such_column") is None
    with raises("column.definition", column="column_of_this_test", expected="kind[batch] float32"):
        register(ColumnType("column_of_this_test", "kind", "float32", ("batch",), pad=1))
