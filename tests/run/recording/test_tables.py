"""Columns come back from Parquet with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.columns import ColumnType
from flowrl.run.recording.tables import Typed, read_columns, read_row, write_columns
from tests.support.errors import raises

ROWS = 35


def of(dtype: str, *axes: str, pad: int | float | bool = 0) -> ColumnType:
    return ColumnType("any", "any", dtype, ("batch", *axes), pad)


def tokens(lengths: torch.Tensor, width: int, side: str, dtype: torch.dtype, pad: float) -> torch.Tensor:
    """Random numbers in `lengths` tokens of each row, the rest is `pad`."""
    place = torch.arange(width)
    on = place < lengths[:, None] if side == "right" else place >= width - lengths[:, None]
    return torch.where(on, torch.randn(len(lengths), width) * 100, pad).to(dtype)


@given(
    seed=st.integers(0, 99),
    width=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]),
    axis=st.sampled_from(["prompt", "response", "sequence"]),
    pad=st.sampled_from([0, 1, -1]),
)
def test_a_column_of_tokens_comes_back_with_its_bits(
    tmp_path_factory: pytest.TempPathFactory, seed: int, width: int, dtype: torch.dtype, axis: str, pad: int
) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(0, width + 1, (ROWS,))
    column = tokens(lengths, width, "left" if axis == "prompt" else "right", dtype, pad)
    if dtype.is_floating_point and column.numel():
        column[torch.rand(column.shape) < 0.1] = float("nan")
        column[torch.rand(column.shape) < 0.1] = -0.0
    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    write_columns(path, {"node.a": Typed(column, of(str(dtype), axis, pad=pad))}, {})
    found = read_columns(path)["node.a"]
    assert isinstance(found, torch.Tensor) and found.dtype == dtype and found.shape == column.shape
    assert torch.equal(found.view(torch.uint8), column.view(torch.uint8))


def test_numbers_and_objects_of_rows_come_back_equal(tmp_path: Path) -> None:
    objects = np.empty(3, dtype=object)
    objects[:] = [{"a": [1, 2.5, None]}, "text \ud800 \x00 ü", -0.0]
    columns: dict[str, Any] = {
        "batch.temperature": (torch.tensor([1.0, float("nan"), -0.0]), of("float32")),
        "batch.version": (torch.tensor([3, -1, 2**62]), of("int64")),
        "batch.extra": (objects, of("object")),
    }
    write_columns(tmp_path / "a.parquet", {name: Typed(*given) for name, given in columns.items()}, {})
    found = read_columns(tmp_path / "a.parquet")
    assert found["batch.extra"].tolist() == objects.tolist()
    for name in ("batch.temperature", "batch.version"):
        assert torch.equal(found[name].view(torch.uint8), columns[name][0].view(torch.uint8))
    assert list(read_columns(tmp_path / "a.parquet", ["batch.version", "batch.other"])) == ["batch.version"]


def test_a_repeated_or_concatenated_column_is_stored_once(tmp_path: Path) -> None:
    prompts, responses = torch.randint(1, 9, (64, 50)), torch.randint(1, 9, (64, 70))
    joined = torch.cat([prompts, responses], 1)
    parts = {
        "g.prompts": Typed(prompts, of("int64", "prompt")),
        "g.responses": Typed(responses, of("int64", "response")),
    }
    derived = {
        "g.input_ids": Typed(joined, of("int64", "sequence")),
        "f.responses": Typed(responses.clone(), of("int64", "response")),
    }
    write_columns(tmp_path / "parts.parquet", parts, {})
    write_columns(tmp_path / "all.parquet", {**parts, **derived}, {})
    grown = (tmp_path / "all.parquet").stat().st_size - (tmp_path / "parts.parquet").stat().st_size
    assert grown < 500
    found = read_columns(tmp_path / "all.parquet", ["g.input_ids", "f.responses"])
    assert torch.equal(found["g.input_ids"], joined) and torch.equal(found["f.responses"], responses)


def test_a_row_is_read_without_padding(tmp_path: Path) -> None:
    lengths = torch.arange(ROWS) % 5
    column = tokens(lengths, 5, "right", torch.float32, 0.0)
    typed = {"g.a": Typed(column, of("float32", "response")), "g.n": Typed(lengths, of("int64"))}
    write_columns(tmp_path / "a.parquet", typed, {})
    row = read_row(tmp_path / "a.parquet", 33)
    assert row["g.n"] == 3 and np.array_equal(row["g.a"], column[33, :3].numpy())


@pytest.mark.parametrize(("rows", "width", "groups"), [(300, 5, 1), (150, 1019, 3), (300, 512, 3)])
def test_rows_with_few_tokens_share_a_row_group(tmp_path: Path, rows: int, width: int, groups: int) -> None:
    column = tokens(torch.arange(rows) % width, width, "right", torch.float32, 0.0)
    write_columns(tmp_path / "a.parquet", {"g.a": Typed(column, of("float32", "response"))}, {})
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == groups
    for row in (1, rows - 1):
        assert np.array_equal(read_row(tmp_path / "a.parquet", row)["g.a"], column[row, : row % width].numpy())


def test_a_row_is_read_from_row_groups_of_any_size(tmp_path: Path) -> None:
    """As files of earlier versions have them."""
    column = torch.arange(1, ROWS + 1)
    write_columns(tmp_path / "a.parquet", {"g.n": Typed(column, of("int64"))}, {})
    pq.write_table(pq.read_table(tmp_path / "a.parquet"), tmp_path / "b.parquet", row_group_size=16)
    assert [read_row(tmp_path / "b.parquet", row)["g.n"] for row in range(ROWS)] == column.tolist()
    assert torch.equal(torch.as_tensor(read_columns(tmp_path / "b.parquet")["g.n"]), column)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_columns(path, {"g.n": Typed(torch.arange(3), of("int64"))}, {})
    path.write_bytes(path.read_bytes()[:-9])
    with raises("run.damaged", path=str(path)):
        read_columns(path)


def test_eight_columns_of_floats_take_at_most_16_bytes_a_token(tmp_path: Path) -> None:
    """Log-probs, values, advantages and the like: random float32 numbers of a normal distribution."""
    torch.manual_seed(0)
    lengths = torch.randint(100, 1020, (64,))
    columns = {f"g.{i}": tokens(lengths, 1019, "right", torch.float32, 0.0) for i in range(4)}
    mask = torch.arange(1019) < lengths[:, None]
    columns |= {f"h.{i}": torch.where(mask, torch.randn(64, 1), 0.0) for i in range(4)}  # one number per row
    write_columns(tmp_path / "a.parquet", {n: Typed(c, of("float32", "response")) for n, c in columns.items()}, {})
    assert (tmp_path / "a.parquet").stat().st_size / int(lengths.sum()) <= 16
