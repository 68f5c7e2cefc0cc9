"""The wire format: columns arrive bit-equal, padding is not sent, and parts of different width are joined."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.columns import ColumnType, lookup
from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.hosts.wire import join, pack, unpack
from tests.support.errors import raises

# quiet and signalling NaN with payloads, both zeros, both infinities, a denormal
FLOATS = np.array([0x7FC00001, 0x7F800123, 0xFFC0BEEF, 0, 1 << 31, 0x7F800000, 0xFF800000, 1, 0x3F800000], dtype="<u4")
WORDS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 151643])


def same_bits(a: Any, b: Any) -> bool:
    """Same type, dtype, shape and bits; the same objects."""
    if isinstance(a, Tensor) != isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not isinstance(a, Tensor):
        return all(x is y for x, y in zip(a, b, strict=True))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def sent(column: Any) -> Any:
    """The column after pickling, with its buffers out of band and read-only as in the object store."""
    buffers: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(pack(column), protocol=5, buffer_callback=buffers.append)
    return unpack(pickle.loads(raw, buffers=[bytes(b.raw()) for b in buffers]))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """1 to 3 axes, possibly empty, with few distinct values so that runs occur."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    n = int(np.prod(shape))
    picks = draw(st.lists(st.integers(0, draw(st.integers(0, 8))), min_size=n, max_size=n))
    index = np.array(picks, dtype=np.int64).reshape(shape)
    kind = draw(st.sampled_from(["float32", "int64", "bool", "float64", "bfloat16", "int32"]))
    if kind == "float32":
        return torch.from_numpy(FLOATS[index].view("<f4"))
    if kind == "bool":
        return torch.from_numpy(index % 2 == 1)
    if kind == "int64":
        return torch.from_numpy(WORDS[index % len(WORDS)])
    return torch.from_numpy(index - 3).to(getattr(torch, kind))


class TestPack:
    @given(tensors())
    def test_a_packed_column_is_unpacked_bit_equal(self, column: Tensor) -> None:
        assert same_bits(sent(column), column)

    @given(tensors())
    def test_a_packed_column_is_never_larger_than_the_column(self, column: Tensor) -> None:
        assert pack(column).nbytes <= column.nbytes

    @given(tensors())
    def test_transposed_and_strided_columns_are_unpacked_bit_equal(self, column: Tensor) -> None:
        assert same_bits(
            sent(column.mT if column.ndim > 1 else column[::2]), column.mT if column.ndim > 1 else column[::2]
        )

    def test_a_column_of_one_value_is_sent_without_data(self) -> None:
        for value in (0.0, -0.0, float("nan"), 1.5):
            column = torch.full((4, 100), value)
            assert same_bits(sent(column), column)
            assert pack(column).flat.size == 0

    def test_zeros_of_different_sign_are_not_merged_into_a_run(self) -> None:
        column = torch.tensor([[0.0, -0.0, 0.0, 0.0] * 10, [-0.0] * 39 + [0.0]])
        assert torch.equal(sent(column).signbit(), column.signbit())

    def test_columns_of_objects_are_unpacked_equal(self) -> None:
        column = objects(["a", None, {"k": [1]}, ("t",), float("nan")])
        assert same_bits(unpack(pack(column)), column)
        assert [str(x) for x in sent(column)] == [str(x) for x in column]
        assert len(sent(objects([]))) == 0

    def test_an_unpacked_column_does_not_require_grad(self) -> None:
        column = torch.ones(2, 3, requires_grad=True)
        assert not unpack(pack(column)).requires_grad

    def test_an_unpacked_column_is_writable(self) -> None:
        column = sent(torch.arange(12).reshape(3, 4))
        column[0, 0] = 7
        assert column[0].tolist() == [7, 1, 2, 3]


class TestPadding:
    """Only attended values are sent, plus 24 bytes per row (two counts and two values of 8 bytes)."""

    lengths = torch.tensor([3, 1000, 40, 1, 512])

    def test_padding_of_responses_is_not_sent(self) -> None:
        mask = torch.arange(1000) < self.lengths[:, None]
        for column in (torch.where(mask, torch.arange(1, 1001), 0), torch.where(mask, torch.arange(1, 1001), 151643)):
            assert pack(column).nbytes <= 8 * int(self.lengths.sum()) + 24 * len(column)
        assert pack(mask).nbytes <= 10 * len(mask)

    def test_padding_on_both_sides_of_a_sequence_is_not_sent(self) -> None:
        prompt = torch.arange(300) >= 300 - self.lengths.clamp(max=300)[:, None]
        mask = torch.cat([prompt, torch.arange(1000) < self.lengths[:, None]], 1)
        ids = torch.where(mask, torch.randint(5, 100, mask.shape), 0)
        assert pack(ids).nbytes <= 8 * int(mask.sum()) + 24 * len(ids)

    def test_padding_is_found_if_most_rows_end_in_the_same_token(self) -> None:
        column = torch.randint(5, 100, (10, 1000))
        column[:7, -1] = 2
        column[7:, 10:] = 0
        assert pack(column).nbytes <= 8 * (7 * 1000 + 3 * 10) + 24 * 10

    def test_a_column_without_padding_has_no_overhead(self) -> None:
        column = torch.randn(8, 16)
        assert pack(column).nbytes == column.nbytes


SEQUENCE = ["input_ids", "attention_mask", "position_ids"]
NAMES = [
    "prompts",
    "prompt_mask",
    "responses",
    "response_mask",
    "values",
    *SEQUENCE,
    "temperature",
    "policy_version",
    "uid",
]


@st.composite
def batches(draw: st.DrawFn) -> list[DataProto]:
    """One to four batches of different widths and numbers of rows, some empty, without padding."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    batches_of_columns = []
    for i in range(draw(st.integers(1, 4))):
        rows, prompt, response = draw(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)))
        widths = {"prompt": prompt, "response": response, "sequence": prompt + response}
        columns: dict[str, Any] = {}
        for name in NAMES:
            known = _known(name)
            shape = [rows, *(widths[axis] for axis in known.axes[1:])]
            numbers = torch.randint(-9, 9, shape, generator=generator)
            columns[name] = (
                objects([f"{i}.{r}" for r in range(rows)])
                if known.dtype == "object"
                else numbers.to(getattr(torch, known.dtype))
            )
        batches_of_columns.append(DataProto(columns))
    return batches_of_columns


def _known(name: str) -> ColumnType:
    known = lookup(name)
    assert known is not None
    return known


class TestJoin:
    @given(batches(), st.data())
    def test_joined_parts_equal_concatenated_batches(self, protos: list[DataProto], data: st.DataObject) -> None:
        """Parts hold any rows in any order; any rows are selected in any order."""
        concatenated = DataProto.concat(protos)
        total = len(concatenated)
        order = np.array(
            data.draw(st.permutations(range(total))), dtype=np.int64
        )  # row of the output by row of `concatenated`
        selected = np.array(
            data.draw(st.permutations(range(total)))[: data.draw(st.integers(0, total))], dtype=np.int64
        )
        shuffled = data.draw(st.permutations(range(len(protos))))
        starts = np.cumsum([0, *map(len, protos)])
        position = np.argsort(order)
        for name in NAMES:
            parts = []
            for i in shuffled:
                sizes = protos[i]["prompts"].shape[1], protos[i]["responses"].shape[1]
                parts.append((order[starts[i] : starts[i + 1]], sent(protos[i][name]), *sizes))
            known = _known(name)
            joined = join(parts, known.axes, known.pad, selected)
            expected = concatenated[position[selected]][name]
            same = same_bits(joined, expected) if isinstance(joined, Tensor) else joined.tolist() == expected.tolist()
            assert same, name

    def test_parts_of_different_width_are_aligned_and_padded(self) -> None:
        short = np.array([2]), torch.tensor([[1, 2, 3]]), 1, 2
        long = np.array([0, 1]), torch.tensor([[4, 5, 6, 7, 8], [9, 10, 11, 12, 13]]), 2, 3
        joined = join([short, long], ("batch", "sequence"), -1, np.array([1, 2]))
        assert joined.tolist() == [[9, 10, 11, 12, 13], [-1, 1, 2, 3, -1]]

    def test_missing_cells_get_the_pad_value_of_the_column(self) -> None:
        parts = [(np.array([i]), torch.ones(1, i + 1), 0, i + 1) for i in range(2)]
        assert join(parts, ("batch", "response"), 0.5, np.arange(2)).tolist() == [[1.0, 0.5], [1.0, 1.0]]

    def test_axes_after_the_padded_axis_are_preserved(self) -> None:
        parts = [(np.array([i]), torch.ones(1, i + 1, 2), 0, i + 1) for i in range(2)]
        joined = join(parts, ("batch", "response", "layer"), 0.0, np.arange(2))
        assert joined.tolist() == [[[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]

    def test_a_single_complete_part_is_not_copied(self) -> None:
        column = torch.ones(3, 4)
        assert join([(np.arange(3), column, 4, 0)], ("batch", "prompt"), 0, np.arange(3)) is column

    @pytest.mark.parametrize(
        ("rows", "selected", "facts"),
        [
            ([[0], [1]], [0, 1, 2], {"row": 2, "found": 0, "read": 1}),
            ([[0, 1], [1]], [0, 1], {"row": 1, "found": 2, "read": 1}),
            ([[0], [1]], [1, 1], {"row": 1, "found": 1, "read": 2}),
            ([[]], [0], {"row": 0, "found": 0, "count": 1}),
        ],
    )
    def test_missing_and_repeated_rows_are_refused(
        self, rows: list[list[int]], selected: list[int], facts: dict[str, int]
    ) -> None:
        parts = [(np.array(r, dtype=np.int64), torch.zeros(len(r)), 0, 0) for r in rows]
        with raises("host.unequal-pieces", **facts):
            join(parts, ("batch",), 0, np.array(selected))

    def test_parts_that_differ_on_an_unpadded_axis_are_refused(self) -> None:
        parts = [(np.array([i]), torch.zeros(1, i + 1), 0, 0) for i in range(2)]
        with raises("host.unequal-pieces", axes=("batch", "feature"), found=((1,), (2,))):
            join(parts, ("batch", "feature"), 0, np.arange(2))
