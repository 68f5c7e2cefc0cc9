"""DataProto: operations, padding by the columns' own rules, digests, files and converters."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl import columns as c
from flowrl.data.column_math import objects
from flowrl.data.dataproto import DataProto
from flowrl.data.keys import Key
from flowrl.errors import ColumnNotFoundError, DataError
from flowrl.records import PromptBatch, Sequences, Updated

torch.set_num_threads(1)
fast = settings(max_examples=40, deadline=None)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def rollout(prompts: list[list[int]], responses: list[list[int]], prompt: int = 0, response: int = 0) -> DataProto:
    """Sequences laid out by plain Python loops: prompts end, and responses start, at one column."""
    prompt = max([prompt, *map(len, prompts)])
    response = max([response, *map(len, responses)])
    left = [[0] * (prompt - len(p)) + p for p in prompts]
    right = [r + [0] * (response - len(r)) for r in responses]
    both = [p + r for p, r in zip(left, right, strict=True)]

    def matrix(rows: list[list[int]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)

    ids, sampled = matrix(both, prompt + response), matrix(right, response)
    return DataProto(
        {
            "prompts": matrix(left, prompt),
            "responses": sampled,
            "input_ids": ids,
            "attention_mask": ids != 0,
            "response_mask": sampled != 0,
            "values": sampled / 7,
            "policy_version": torch.arange(len(prompts)),
            "uid": objects(f"u{len(p)}" for p in prompts),
        },
        {"step": 3},
    )


tokens = st.lists(st.integers(1, 99), max_size=5)
rows_of_tokens = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=7)


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    """Mixed columns, several dtypes with raw bytes in them (so NaN and infinities too), any JSON in the objects."""
    n = draw(st.integers(min_rows, 6))
    columns: dict[str, Tensor | np.ndarray] = {}
    for dtype in draw(
        st.sets(st.sampled_from(["float32", "bfloat16", "float16", "int64", "uint8", "float64"]), min_size=1)
    ):
        kind = getattr(torch, dtype)
        shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
        raw = draw(st.binary(min_size=8 * 9 * n, max_size=8 * 9 * n))
        flat = torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)
        columns[f"x_{dtype}"] = flat[: int(np.prod(shape))].reshape(shape)
    columns["flag"] = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    columns["extra_info"] = objects(draw(st.lists(json_values, min_size=n, max_size=n)))
    return DataProto(columns, draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)))


@pytest.fixture
def proto() -> DataProto:
    return rollout([[1, 2], [3], [4, 5, 6], [7]], [[8], [9, 10], [], [11, 12, 13]])


def rows(proto: DataProto, name: str = "policy_version") -> list[Any]:
    return list(proto[name].tolist())


# ---- construction


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3, 1)}, ["a has 2", "b has 3"]),
        ({"a": torch.tensor(1.0)}, ["'a'", "0 axes"]),
        ({"a": [1, 2]}, ["'a'", "list"]),
        ({"a": np.zeros(3)}, ["'a'", "float64", "from_numpy"]),
        ({"a": np.array([[1, 2], [3, 4]], dtype=object)}, ["'a'", "2 axes", "objects(rows)"]),
        ({"": torch.zeros(1)}, ["''"]),
        ({"a": torch.eye(2).to_sparse()}, ["'a'", "sparse"]),
        ({"values": torch.zeros(2, 3, dtype=torch.bfloat16)}, ["'values'", "bfloat16", ".to(torch.float32)"]),
        ({"values": torch.zeros(2)}, ["'values'", "[2]", "value[batch response] float32"]),
        ({"attention_mask": torch.ones(2, 3, dtype=torch.int64)}, ["'attention_mask'", "int64", ".to(torch.bool)"]),
        ({"uid": torch.zeros(2)}, ["'uid'", "object"]),
        (
            {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)},
            ["'response'", "'returns'", "'values'", "4", "3"],
        ),
    ],
)
def test_what_is_no_column_is_refused_and_named(columns: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        DataProto(columns)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("meta", "where"),
    [({"a": [1, (2,)]}, "meta['a'][1]"), ({"a": {1: 2}}, "meta['a']"), ({"x": np.float64(1)}, "meta['x']")],
)
def test_meta_must_be_json(meta: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as error:
        DataProto({}, meta)
    assert where in str(error.value)


def test_nothing_reaches_in_from_outside(proto: DataProto) -> None:
    meta = {"a": [1]}
    source: dict[str, Tensor | np.ndarray] = {"x": torch.zeros(2), "o": objects([1, 2])}
    made = DataProto(source, meta)
    meta["a"].append(2)
    made.meta["a"].append(3)
    source["y"] = torch.zeros(5)
    assert made.meta == {"a": [1]} and list(made.columns) == ["x", "o"] and len(made) == 2
    with pytest.raises(TypeError):
        made.columns["z"] = torch.zeros(2)  # type: ignore[index]
    with pytest.raises(TypeError):
        made["x"] = torch.zeros(2)  # type: ignore[index]
    with pytest.raises(AttributeError):
        made.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        made.columns = {}  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        made["o"][0] = 5


def test_no_operation_changes_its_operand(proto: DataProto, tmp_path: Path) -> None:
    before, tensors = proto.digest(), {name: id(column) for name, column in proto.columns.items()}
    for parts in (proto.chunk(3), proto.split(3), proto.minibatches(2, Key.of(0))):
        DataProto.concat(list(parts))
    DataProto.concat(
        [proto.select("input_ids", "prompts"), rollout([[1] * 9], [[2] * 9]).select("input_ids", "prompts")]
    )
    proto.with_meta({}), proto.select("uid"), proto.drop("uid"), proto.rename({"uid": "who"}), proto.union(proto)
    proto[1:], proto[[0, 0]], proto.repeat(2), proto.reorder([3, 2, 1, 0]), proto.pad_to_divisor(3), proto.unpad(1)
    proto.to("cpu"), proto.groups(), repr(proto), proto.to_verl(), proto.to_tensordict()
    proto.save(tmp_path / "p")
    proto.to_verl()["non_tensor_batch"]["uid"][0] = "changed"
    proto.to_verl()["meta_info"]["step"] = 9
    assert proto.digest() == before and {name: id(column) for name, column in proto.columns.items()} == tensors


# ---- columns


def test_select_drop_rename(proto: DataProto) -> None:
    assert list(proto.select("uid", "values").columns) == ["uid", "values"]
    assert list(proto.drop("uid", "input_ids", "attention_mask").columns) == [
        "prompts", "responses", "response_mask", "values", "policy_version",
    ]  # fmt: skip
    swapped = proto.select("values", "policy_version").rename({"values": "returns"})
    assert list(swapped.columns) == ["returns", "policy_version"] and swapped["returns"] is proto["values"]
    two = DataProto({"a": torch.zeros(1), "b": torch.ones(1)})
    assert two.rename({"a": "b", "b": "a"})["a"].item() == 1
    with pytest.raises(DataError, match="'b'"):
        two.rename({"a": "b"})
    with pytest.raises(ColumnNotFoundError, match=r"no column 'valuse'.*it has prompts, responses"):
        proto.select("valuse")
    with pytest.raises(KeyError):
        proto["nothing"]
    assert "uid" in proto and "nothing" not in proto
    assert proto.select("uid").meta == {"step": 3} and proto.with_meta({**proto.meta, "k": 1}).meta == {
        "step": 3,
        "k": 1,
    }


def test_union_refuses_a_clash_unless_equal(proto: DataProto) -> None:
    scored = DataProto({"score": torch.arange(4.0), "uid": proto["uid"].copy()}, {"model": "m"})
    both = proto.union(scored)
    assert list(both.columns) == [*proto.columns, "score"] and both.meta == {"step": 3, "model": "m"}
    values = proto["values"].clone()
    values[2, 1] = 5
    with pytest.raises(DataError, match=r"'values'.*first in row 2"):
        proto.union(DataProto({"values": values}))
    with pytest.raises(DataError, match=r"'uid'.*first in row 1, 'u1' and 'other'"):
        proto.union(DataProto({"uid": objects(["u2", "other", "u3", "u9"])}))
    with pytest.raises(DataError, match=r"\[4, 3\].*\[4, 2\]"):
        proto.select("values").union(DataProto({"values": torch.zeros(4, 2)}))
    with pytest.raises(DataError, match="4 rows with 1"):
        proto.union(DataProto({"score": torch.zeros(1)}))
    with pytest.raises(DataError, match=r"meta\['step'\] is 3 .* 4"):
        proto.union(DataProto({"score": torch.zeros(4)}, {"step": 4}))
    nan = DataProto({"x": torch.tensor([float("nan")])})
    assert nan.union(DataProto({"x": torch.tensor([float("nan")])})).equal(nan)


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (1, 1.0), ("1", 1), ({"a": [1]}, {"a": [1.0]}), (None, 0), ([1], (1,)), (0.0, -0.0)]
)
def test_objects_of_another_type_are_not_equal(a: Any, b: Any) -> None:
    assert not DataProto({"o": objects([a])}).equal(DataProto({"o": objects([b])}))
    assert DataProto({"o": objects([a])}).equal(DataProto({"o": objects([copy.deepcopy(a)])}))


def test_equal_looks_inside_arrays_and_tensors_in_object_columns() -> None:
    def images(last: float) -> DataProto:
        return DataProto({"o": objects([{"image": np.array([1.0, last]), "t": torch.tensor([1.0, last])}])})

    assert images(2).equal(images(2)) and not images(2).equal(images(3))


# ---- rows


def test_indexing(proto: DataProto) -> None:
    assert (
        rows(proto[1:3]) == [1, 2] and rows(proto[::-2]) == [3, 1] and rows(proto[-1:]) == [3] and len(proto[9:]) == 0
    )
    assert rows(proto[[3, 0, 0, -1]]) == [3, 0, 0, 3] and rows(proto[torch.tensor([2])]) == [2] and len(proto[[]]) == 0
    assert rows(proto[np.arange(4)[::-1]]) == [3, 2, 1, 0] and rows(proto[[True, False, False, True]]) == [0, 3]
    assert rows(proto[proto["response_mask"].any(1)]) == [0, 1, 3] and rows(proto[np.array([False] * 4)]) == []
    assert proto[[2, 0]]["uid"].tolist() == ["u3", "u2"] and proto[[2]].meta == {"step": 3}
    assert proto[1:3]["values"].data_ptr() == proto["values"][1:].data_ptr()  # a slice is a view
    for wrong in ([4], [-5], [0.5], [True], torch.zeros(2, 2, dtype=torch.int64), torch.tensor(1), ["uid"]):
        with pytest.raises(DataError):
            proto[wrong]  # type: ignore[index]
    with pytest.raises(DataError, match=r"proto\[2:3\]"):
        proto[2]  # type: ignore[call-overload]


def test_chunks_are_as_even_as_possible() -> None:
    ten = DataProto({"x": torch.arange(10)})
    assert (
        [len(part) for part in ten.chunk(4)] == [3, 3, 2, 2] == [len(part) for part in np.array_split(np.arange(10), 4)]
    )
    assert [len(part) for part in ten.split(4)] == [4, 4, 2] and [len(part) for part in ten[:0].split(4)] == [0]
    for n in (0, 11):
        with pytest.raises(DataError, match=f"chunk\\({n}\\) of 10 rows"):
            ten.chunk(n)
    with pytest.raises(DataError):
        ten.split(0)


def test_repeat_reorder_pad(proto: DataProto) -> None:
    assert rows(proto[:2].repeat(3)) == [0, 0, 0, 1, 1, 1] and rows(proto[:2].repeat(2, interleave=False)) == [
        0,
        1,
        0,
        1,
    ]
    assert rows(proto.reorder([2, 0, 3, 1])) == [2, 0, 3, 1]
    for wrong in ([0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 3, 3]):
        with pytest.raises(DataError, match="exactly once"):
            proto.reorder(wrong)
    padded, n = proto.pad_to_divisor(3)
    assert (rows(padded), n) == ([0, 1, 2, 3, 0, 1], 2) and padded.unpad(n).equal(proto)
    padded, n = proto[:2].pad_to_divisor(7)
    assert (rows(padded), n) == ([0, 1, 0, 1, 0, 1, 0], 5)  # cyclically, more than once round
    assert proto.pad_to_divisor(2) == (proto, 0)
    for call in (
        lambda: proto.repeat(0),
        lambda: proto.unpad(5),
        lambda: proto.unpad(-1),
        lambda: proto.pad_to_divisor(0),
    ):
        with pytest.raises(DataError):
            call()


def test_minibatches_are_seeded_and_must_divide() -> None:
    proto = DataProto({"x": torch.arange(12)})
    drawn = [rows(part, "x") for part in proto.minibatches(4, Key.of(1))]
    assert [len(part) for part in drawn] == [4, 4, 4] and sorted(list(itertools.chain(*drawn))) == list(range(12))
    assert drawn == [rows(part, "x") for part in proto.minibatches(4, Key.of(1))]
    assert drawn != [rows(part, "x") for part in proto.minibatches(4, Key.of(2))] and list(
        itertools.chain(*drawn)
    ) != list(range(12))
    with pytest.raises(DataError, match="mini-batches of 5 do not divide 12 rows"):
        proto.minibatches(5, Key.of(1))  # at the call
    assert list(proto[:0].minibatches(4, Key.of(1))) == []


def test_groups() -> None:
    proto = DataProto({"uid": objects(["b", "a", "b", "c", "a"])})
    groups = proto.groups()
    assert list(groups) == ["b", "a", "c"] and [g.tolist() for g in groups.values()] == [[0, 2], [1, 4], [3]]
    assert all(g.dtype == torch.int64 for g in groups.values())
    with pytest.raises(ColumnNotFoundError, match="'uid'"):
        DataProto({"x": torch.zeros(1)}).groups()
    with pytest.raises(DataError, match=r"row 1.*int"):
        DataProto({"uid": objects(["a", 2])}).groups()


@fast
@given(protos(min_rows=1), st.data())
def test_parts_join_to_the_whole(proto: DataProto, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(proto)))
    parts = proto.chunk(n)
    assert len(parts) == n and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert DataProto.concat(parts).equal(proto)
    assert DataProto.concat(proto.split(n)).equal(proto)
    order = data.draw(st.permutations(range(len(proto))))
    assert proto.reorder(order).reorder(np.argsort(order)).equal(proto)
    padded, extra = proto.pad_to_divisor(n)
    assert len(padded) % n == 0 and extra < n and padded.unpad(extra).digest() == proto.digest()
    half = [name for i, name in enumerate(proto.columns) if i % 2]
    assert proto.select(*half).union(proto.drop(*half)).equal(proto)


# ---- concat


def test_concat_pads_prompt_left_response_right_and_sequence_both() -> None:
    joined = DataProto.concat([rollout([[1, 2, 3]], [[4]]), rollout([[5]], [[6, 7]])])
    assert joined["prompts"].tolist() == [[1, 2, 3], [0, 0, 5]]
    assert joined["responses"].tolist() == [[4, 0], [6, 7]]
    assert joined["input_ids"].tolist() == [[1, 2, 3, 4, 0], [0, 0, 5, 6, 7]]
    assert joined["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert joined["uid"].tolist() == ["u3", "u1"] and joined.meta == {"step": 3}


@fast
@given(rows_of_tokens, rows_of_tokens, st.integers(0, 7), st.integers(0, 7))
def test_concat_of_ragged_batches_is_the_batch_laid_out_at_once(
    a: list[tuple[list[int], list[int]]], b: list[tuple[list[int], list[int]]], prompt: int, response: int
) -> None:
    parts = [
        rollout([p for p, _ in rows], [r for _, r in rows], prompt * i, response * i) for i, rows in enumerate([a, b])
    ]
    whole = rollout([p for p, _ in a + b], [r for _, r in a + b], prompt, response).drop("policy_version")
    joined = DataProto.concat([part.drop("policy_version") for part in parts])
    assert joined.equal(whole)
    # the prompt's width follows from the other two, and the response's likewise
    for other in ("prompts", "responses"):
        names = [other, "input_ids", "attention_mask"]
        assert DataProto.concat([part.select(*names) for part in parts]).equal(whole.select(*names))


def test_concat_pads_with_the_columns_own_value() -> None:
    name = "test_proto_distance"
    column = c.register(c.ColumnType(name, "distance", "float32", ("batch", "response"), -1.5))
    joined = DataProto.concat([DataProto({column.name: torch.ones(1, 1)}), DataProto({column.name: torch.ones(1, 2)})])
    assert joined[name].tolist() == [[1, -1.5], [1, 1]]


def test_sequences_of_equal_width_are_aligned_all_the_same() -> None:
    a, b = rollout([[1, 2, 3]], [[4]]), rollout([[5]], [[6, 7, 8]])
    assert a["input_ids"].shape == b["input_ids"].shape
    joined = DataProto.concat([p.select("input_ids", "response_mask") for p in (a, b)])
    assert joined["input_ids"].tolist() == [[1, 2, 3, 4, 0, 0], [0, 0, 5, 6, 7, 8]]


def test_sequences_whose_parts_are_unknown_are_refused() -> None:
    a, b = (rollout([[1] * n], [[2]]).select("input_ids") for n in (1, 3))
    with pytest.raises(DataError, match=r"'input_ids'.*\[2, 4\].*response_mask"):
        DataProto.concat([a, b])
    assert len(DataProto.concat([a, a])) == 2
    with pytest.raises(DataError, match=r"5 wide.*prompt \(2\).*response \(2\)"):
        odd = {
            "input_ids": torch.ones(1, 5).long(),
            "prompts": torch.ones(1, 2).long(),
            "responses": torch.ones(1, 2).long(),
        }
        DataProto.concat([DataProto(odd)])
    with pytest.raises(DataError, match="1 wide"):
        DataProto.concat([DataProto({"input_ids": torch.ones(1, 1).long(), "prompts": torch.ones(1, 2).long()})])


def test_unknown_columns_are_padded_as_told_or_refused() -> None:
    a, b = DataProto({"mine": torch.ones(1, 1, 2).long()}), DataProto({"mine": torch.ones(1, 3, 2).long()})
    with pytest.raises(DataError, match=r"'mine'.*\[1, 3\] along axis 1.*pad=\{\"mine\": \(value, side\)\}"):
        DataProto.concat([a, b])
    assert DataProto.concat([a, b], pad={"mine": (-1, "left")})["mine"][0].tolist() == [[-1, -1], [-1, -1], [1, 1]]
    assert DataProto.concat([a, b], pad={"mine": (2**60, "right")})["mine"][0].tolist() == [
        [1, 1],
        [2**60] * 2,
        [2**60] * 2,
    ]
    with pytest.raises(DataError, match="axis 2"):
        DataProto.concat([a, DataProto({"mine": torch.ones(1, 3, 4).long()})], pad={"mine": (0, "left")})
    for pad in ({"mine": (0.5, "left")}, {"mine": (0, "middle")}):
        with pytest.raises(DataError, match="mine"):
            DataProto.concat([a, b], pad=pad)  # type: ignore[arg-type]
    with pytest.raises(ColumnNotFoundError):
        DataProto.concat([a, b], pad={"other": (0, "left")})
    with pytest.raises(DataError, match="two axes"):
        DataProto.concat([DataProto({"flat": torch.ones(2)})], pad={"flat": (0, "left")})
    like_ids = [rollout([[1]], [[2]] * 1), rollout([[3, 4]], [[5, 6]])]
    like_ids = [p.select("prompts", "responses").union(DataProto({"seq": p["input_ids"]})) for p in like_ids]
    assert DataProto.concat(like_ids, pad={"seq": (9, "sequence")})["seq"].tolist() == [[9, 1, 2, 9], [3, 4, 5, 6]]


def test_concat_refuses_what_does_not_belong_together() -> None:
    a = DataProto({"x": torch.zeros(1), "o": objects([1])}, {"k": 1})
    with pytest.raises(DataError, match=r"numbers 0 and 1 differ in \['o'\]"):
        DataProto.concat([a, a.drop("o")])
    with pytest.raises(DataError, match=r"'x' differs in dtype.*float64"):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": torch.zeros(1).double()}))])
    with pytest.raises(DataError, match="'x' differs in ndim"):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": torch.zeros(1, 1)}))])
    with pytest.raises(DataError, match="'x' is a tensor in some"):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": objects([1])}))])
    with pytest.raises(DataError, match=r"meta\['k'\] is 1 .* True"):
        DataProto.concat([a, a.with_meta({"k": True})])
    with pytest.raises(DataError, match="at least one"):
        DataProto.concat([])


# ---- digest


def test_digest_is_that_of_the_content() -> None:
    x, o = torch.arange(6.0).reshape(2, 3), objects([{"a": 1, "b": 2}, "s"])
    proto = DataProto({"x": x, "o": o}, {"k": 1, "l": 2})
    strided = x.t().contiguous().t()
    assert strided.stride() != x.stride()
    same = DataProto({"o": objects([{"b": 2, "a": 1}, "s"]), "x": strided}, {"l": 2, "k": 1})
    assert same.digest() == proto.digest() and same.equal(proto) and len(proto.digest()) == 32
    assert DataProto({"x": torch.ones(1, 1).expand(2, 3)}).digest() == DataProto({"x": torch.ones(2, 3)}).digest()
    others = [
        proto.with_meta({"k": 1}),
        proto.rename({"x": "y"}),
        proto.reorder([1, 0]),
        DataProto({"x": x.reshape(2, 3, 1), "o": o}, proto.meta),
        DataProto({"x": x.view(torch.int32), "o": o}, proto.meta),
        DataProto({"x": x, "o": objects([{"a": 1, "b": 2.0}, "s"])}, proto.meta),
    ]
    digests = {p.digest() for p in [proto, *others]}
    assert len(digests) == len(others) + 1 and not any(proto.equal(p) for p in others)


@fast
@given(protos())
def test_equal_content_has_an_equal_digest(proto: DataProto) -> None:
    reverse = dict(reversed(list(proto.columns.items())))
    twin = DataProto(
        {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in reverse.items()}, proto.meta
    )
    assert twin.equal(proto) and twin.digest() == proto.digest()


def test_digest_of_objects_that_json_cannot_hold_is_refused() -> None:
    for value, kind in ((np.int64(1), "int64"), ((1,), "tuple"), (object(), "object"), ({"a": {1}}, "set")):
        with pytest.raises(DataError, match=rf"column 'o', row 1: the object.* {kind}"):
            DataProto({"o": objects(["fine", value])}).digest()


# ---- files


@fast
@given(protos())
def test_save_and_load_round_trip(tmp_path_factory: pytest.TempPathFactory, proto: DataProto) -> None:
    folder = tmp_path_factory.mktemp("round") / "proto"
    proto.save(folder)
    loaded = DataProto.load(folder)
    assert loaded.equal(proto) and list(loaded.columns) == list(proto.columns) and loaded.digest() == proto.digest()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["proto"]
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def test_save_of_views_of_one_storage_and_of_nothing(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for name, proto in (
        (
            "views",
            DataProto(
                {"a": base[:, :2], "b": base[:, 2:], "c": base, "d": base.t()[:3], "e": base[:, :1].expand(3, 5)}
            ),
        ),
        ("empty", DataProto({})),
        ("objects", DataProto({"o": objects([[1, 2], [3, 4]])})),
    ):
        proto.save(tmp_path / "deep" / name)
        assert DataProto.load(tmp_path / "deep" / name).equal(proto)


def test_save_is_all_or_nothing(proto: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    with pytest.raises(DataError, match="full exists and is not an empty folder"):
        proto.save(tmp_path / "full")
    with pytest.raises(DataError, match="row 0"):
        DataProto({"o": objects([{1}])}).save(tmp_path / "never")

    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("flowrl.data.formats._manifest", full_disk)
    with pytest.raises(OSError, match="no space"):
        proto.save(tmp_path / "half")
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "mine"]


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    rollout([[1]], [[2]]).select("values", "uid").save(tmp_path / "p")
    for path in sorted((tmp_path / "p").iterdir()):
        whole = path.read_bytes()
        for position in range(len(whole)):
            for damaged in (whole[position] ^ 1, whole[position] ^ 0x80, 0x20, 0x09):
                if damaged == whole[position]:
                    continue
                path.write_bytes(whole[:position] + bytes([damaged]) + whole[position + 1 :])
                with pytest.raises(DataError, match=path.name):
                    DataProto.load(tmp_path / "p")
        path.write_bytes(whole)
    DataProto.load(tmp_path / "p")


def test_truncated_extended_and_missing_files_are_found(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    for path in sorted((tmp_path / "p").iterdir()):
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\n", b"null", b"[]", b"\xff\xfe"):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=f"{path.name}.* is damaged"):
                DataProto.load(tmp_path / "p")
        path.unlink()
        with pytest.raises(DataError, match=f"{path.name} is missing"):
            DataProto.load(tmp_path / "p")
        path.write_bytes(whole)
    with pytest.raises(DataError, match="missing"):
        DataProto.load(tmp_path / "nowhere")


def test_what_was_loaded_outlives_its_files(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    loaded = DataProto.load(tmp_path / "p")
    for path in (tmp_path / "p").iterdir():
        path.write_bytes(b"")
    assert loaded.equal(proto)


def test_a_manifest_of_another_content_is_found(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    path = tmp_path / "p" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "digest": "0" * 32}, indent=1))
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        DataProto.load(tmp_path / "p")
    path.write_text(json.dumps({**manifest, "format": "flowrl.DataProto/2"}, indent=1))
    with pytest.raises(DataError, match=r"not flowrl.DataProto/1"):
        DataProto.load(tmp_path / "p")


def test_saved_tensors_open_without_flowrl(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    x = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    DataProto({"x": x, "o": objects([{"a": None}])}).save(tmp_path / "p")
    assert torch.equal(load_file(tmp_path / "p" / "tensors.safetensors")["x"], x)
    assert json.loads((tmp_path / "p" / "objects.json").read_text())["objects"] == {"o": [{"a": None}]}


# ---- records


def prompt_batch() -> PromptBatch:
    text = objects(["a", "b"])
    return PromptBatch(
        torch.ones(2, 3).long(), torch.ones(2, 3).bool(), text, text, text, text, objects([{}, {}]), text
    )


def test_records(proto: DataProto) -> None:
    batch = prompt_batch()
    made = DataProto.from_record(batch, {"k": 1})
    assert tuple(made.columns) == PromptBatch._fields and made["prompts"] is batch.prompts and made.meta == {"k": 1}
    back = made.to_record(PromptBatch)
    assert isinstance(back, PromptBatch) and back.prompts is batch.prompts and back.uid.tolist() == ["a", "b"]
    with pytest.raises(ColumnNotFoundError, match="'position_ids'"):
        proto.to_record(Sequences)  # type: ignore[type-abstract]
    full = proto.union(
        DataProto({"position_ids": torch.zeros(proto["input_ids"].shape).long(), "temperature": torch.ones(4)})
    )
    read = full.to_record(Sequences)  # type: ignore[type-abstract]
    assert read.input_ids is proto["input_ids"] and read.temperature.tolist() == [1, 1, 1, 1]


class Scored(NamedTuple):
    values: c.Values
    update: Updated


def test_records_of_other_things_are_refused() -> None:
    with pytest.raises(DataError, match=r"Scored\.update is Updated"):
        DataProto.from_record(Scored(torch.zeros(1, 1), Updated(1)))
    with pytest.raises(DataError, match="Updated is no record of columns"):
        DataProto.from_record(Updated(1))
    with pytest.raises(DataError, match=r"'prompts'.*float32.*int64"):
        DataProto.from_record(prompt_batch()._replace(prompts=torch.zeros(2, 3)))


# ---- converters


@fast
@given(protos(min_rows=1))
def test_tensordict_round_trip(proto: DataProto) -> None:
    tensordict = pytest.importorskip("tensordict")
    proto = proto.with_meta({f"m_{key}": value for key, value in proto.meta.items()})
    converted = proto.to_tensordict()
    assert isinstance(converted, tensordict.TensorDict) and list(converted.batch_size) == [len(proto)]
    assert DataProto.from_tensordict(converted).equal(proto)
    assert DataProto.from_tensordict(converted[:1]).equal(proto[:1])  # sliced by tensordict, by us


def test_tensordict_of_other_hands() -> None:
    tensordict = pytest.importorskip("tensordict")
    x = torch.zeros(2, 1)
    made = tensordict.TensorDict({"x": x, "o": ["a", "b"], "data_source": "gsm8k", "note": "n"}, batch_size=[2])
    proto = DataProto.from_tensordict(made)
    assert (
        proto["o"].tolist() == ["a", "b"]
        and proto["data_source"].tolist() == ["gsm8k"] * 2
        and proto.meta == {"note": "n"}
    )
    with pytest.raises(DataError, match=r"'deep'.*flatten_keys"):
        DataProto.from_tensordict(tensordict.TensorDict({"deep": {"x": x}}, batch_size=[2]))
    with pytest.raises(DataError, match=r"batch size \[2, 1\]"):
        DataProto.from_tensordict(tensordict.TensorDict({"x": x}, batch_size=[2, 1]))
    with pytest.raises(DataError, match="found a dict"):
        DataProto.from_tensordict({"x": x})
    with pytest.raises(DataError, match="'x' is both"):
        DataProto({"x": x}, {"x": 1}).to_tensordict()
    with pytest.raises(DataError, match="'o' has no rows"):
        DataProto({"o": objects([])}).to_tensordict()


def test_without_tensordict_the_error_says_so(proto: DataProto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"flowrl\[tensordict\]"):
        proto.to_tensordict()


def test_verl_round_trip(proto: DataProto) -> None:
    converted = proto.to_verl()
    assert sorted(converted) == ["batch", "meta_info", "non_tensor_batch"] and converted["meta_info"] == {"step": 3}
    assert list(converted["non_tensor_batch"]) == ["uid"]
    assert converted["batch"]["attention_mask"].dtype == torch.int64  # verl sums and multiplies its masks
    assert DataProto.from_verl(converted).equal(proto)
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict(converted["batch"], batch_size=[len(proto)])
    assert DataProto.from_verl(SimpleNamespace(**{**converted, "batch": batch})).equal(proto)
    assert DataProto.from_verl(SimpleNamespace(**{**converted, "batch": None})).equal(proto.select("uid"))


def test_verl_arrays_become_one_object_per_row() -> None:
    ids = np.array([[1, 2], [3, 4]], dtype=object)  # what NumPy makes of prompts that happen to be of equal length
    data = {"batch": None, "non_tensor_batch": {"raw_prompt_ids": ids, "index": np.array([7, 8])}, "meta_info": {}}
    proto = DataProto.from_verl(data)
    assert proto["raw_prompt_ids"].tolist() == [[1, 2], [3, 4]] and proto["raw_prompt_ids"].shape == (2,)
    assert [type(x) for x in proto["index"]] == [int, int]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": {"response_mask": torch.tensor([[0, 2]])}}, "'response_mask'.*holds 2"),
        ({"batch": {"a": torch.zeros(1)}, "non_tensor_batch": {"a": objects([1])}}, "'a'.*in batch as well"),
        ({"non_tensor_batch": {"a": ["x"]}}, "'a'.*list"),
        ({"meta_info": {"timing": {1: 2}}}, "timing"),
    ],
)
def test_verl_data_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        DataProto.from_verl({"batch": {}, "non_tensor_batch": {}, "meta_info": {}, **change})
    with pytest.raises(DataError, match="no 'meta_info'"):
        DataProto.from_verl({"batch": {}, "non_tensor_batch": {}})


# ---- repr


def test_repr_reads_as_a_table() -> None:
    proto = DataProto(
        {
            "responses": torch.arange(2 * 300).reshape(2, 300),
            "response_mask": torch.ones(2, 300).bool(),
            "mine": torch.tensor([[[0.5]], [[2.0]]]),
            "ground_truth": objects(["forty-two " * 20, "b"]),
        },
        {"step": 3},
    )
    lines = repr(proto).split("\n")
    assert lines[0] == "DataProto: 2 rows, 4 columns, 5.3 KiB of tensors on cpu"
    cells = [line.split("  ") for line in lines[1:6]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    assert cells[0] == ["column", "axes", "dtype", "kind", "bytes", "row 0"]
    assert cells[1] == ["responses", "batch=2 response=300", "int64", "tokens", "4.7 KiB", "[0, 1, 2, 3, 4, 5, …]"]
    assert cells[2] == ["response_mask", "batch=2 response=300", "bool", "mask", "600 B", "300 of 300 true"]
    assert cells[3] == ["mine", "batch=2 1 1", "float32", "-", "8 B", "[0.5]"]
    assert cells[4][:5] == ["ground_truth", "batch=2", "object", "ground truth", "-"] and cells[4][5].endswith("…")
    assert lines[6] == "meta: {'step': 3}" and max(map(len, lines)) <= 120
    assert repr(DataProto({})).startswith("DataProto: 0 rows, 0 columns, 0 B of tensors on no device")
    assert "2.0 GiB of tensors" in repr(DataProto({"big": torch.zeros(1).expand(2**29)}))


def test_empty_columns_from_numpy_are_compared_and_digested() -> None:
    empty = torch.from_numpy(np.zeros((0, 3), dtype=np.float32)), torch.zeros(0, 3)
    protos = [DataProto({"values": column}) for column in empty]
    assert protos[0].equal(protos[1])
    assert protos[0].digest() == protos[1].digest()
