"""Tests of `dataproto.py` and `column_math.py`: operations on rows, and padding by the rule of each column.

They also cover records, and how a `DataProto` is printed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl import columns as c
from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto
from flowrl.records import PromptBatch, Sequences, Updated
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.rows.protos import protos, rollout, rows_of_tokens

fast = examples(40)


def rows(proto: DataProto, name: str = "policy_version") -> list[Any]:
    return list(proto[name].tolist())


# ---- construction


@pytest.mark.parametrize(
    ("columns", "code", "facts", "fix"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3, 1)}, "unequal-rows", {"rows": ("a: 2", "b: 3")}, ""),
        ({"a": torch.tensor(1.0)}, "column-type", {"column": "a"}, "unsqueeze"),
        ({"a": [1, 2]}, "column-type", {"column": "a", "found": "list"}, ""),
        ({"a": np.zeros(3)}, "column-type", {"column": "a", "found": "float64 [3]"}, "from_numpy"),
        ({"a": np.array([[1, 2], [3, 4]], dtype=object)}, "column-type", {"found": "object [2, 2]"}, "objects(rows)"),
        ({"": torch.zeros(1)}, "column-type", {"column": ""}, ""),
        ({"\ud800": torch.zeros(1)}, "column-type", {"column": "\ud800"}, "printable"),
        ({"a": torch.eye(2).to_sparse()}, "column-type", {"column": "a"}, "sparse"),
        (
            {"values": torch.zeros(2, 3, dtype=torch.bfloat16)},
            "column-definition",
            {"column": "values", "found": "bfloat16 [2, 3]"},
            ".to(torch.float32)",
        ),
        (
            {"values": torch.zeros(2)},
            "column-definition",
            {"found": "float32 [2]", "expected": "value[batch response] float32"},
            "",
        ),
        (
            {"attention_mask": torch.ones(2, 3, dtype=torch.int64)},
            "column-definition",
            {"column": "attention_mask"},
            ".to(torch.bool)",
        ),
        ({"uid": torch.zeros(2)}, "column-definition", {"column": "uid"}, ""),
        (
            {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)},
            "axis-mismatch",
            {"axis": "response", "column": "returns", "other": "values", "found": 4, "expected": 3},
            "",
        ),
    ],
)
def test_invalid_columns_are_refused_and_named(
    columns: Mapping[str, Any], code: str, facts: dict[str, Any], fix: str
) -> None:
    with raises(f"data.{code}", **facts) as caught:
        DataProto(columns)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("meta", "where"),
    [({"a": [1, (2,)]}, "meta['a'][1]"), ({"a": {1: 2}}, "meta['a']"), ({"x": np.float64(1)}, "meta['x']")],
)
def test_meta_must_be_json(meta: dict[str, Any], where: str) -> None:
    with raises("data.not-json", where=where):
        DataProto({}, meta)


def test_later_changes_of_the_inputs_do_not_change_a_proto(proto: DataProto) -> None:
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
    with pytest.raises(AttributeError, match="columns cannot be set"):
        made.columns = {}
    assert copy.deepcopy(made).equal(made)
    with pytest.raises(ValueError, match="read-only"):
        made["o"][0] = 5


def test_no_operation_changes_its_operand(proto: DataProto, tmp_path: Path) -> None:
    before, tensors = proto.digest(), {name: id(column) for name, column in proto.columns.items()}
    DataProto.concat(proto.split(3))
    DataProto.concat(
        [proto.select("input_ids", "prompts"), rollout([[1] * 9], [[2] * 9]).select("input_ids", "prompts")]
    )
    proto.with_meta({}), proto.select("uid"), proto.drop("uid"), proto.rename({"uid": "who"}), proto.union(proto)
    proto[1:], proto[[0, 0]], proto.repeat(2), proto.split(3)
    proto.to("cpu"), proto.groups(), repr(proto), proto.to_verl(), proto.to_tensordict()
    proto.save(tmp_path / "p")
    proto.to_verl()["non_tensor_batch"]["uid"][0] = "changed"
    proto.to_verl()["meta_info"]["step"] = 9
    assert proto.digest() == before and {name: id(column) for name, column in proto.columns.items()} == tensors


# ---- columns


def test_select_drop_and_rename_columns(proto: DataProto) -> None:
    assert list(proto.select("uid", "values").columns) == ["uid", "values"]
    assert list(proto.drop("uid", "input_ids", "attention_mask").columns) == [
        "prompts", "responses", "response_mask", "values", "policy_version",
    ]  # fmt: skip
    swapped = proto.select("values", "policy_version").rename({"values": "returns"})
    assert list(swapped.columns) == ["returns", "policy_version"] and swapped["returns"] is proto["values"]
    two = DataProto({"a": torch.zeros(1), "b": torch.ones(1)})
    assert two.rename({"a": "b", "b": "a"})["a"].item() == 1
    with raises("data.conflict", column="b"):
        two.rename({"a": "b"})
    with raises("data.unknown-column", column="valuse", known=tuple(proto.columns)):
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
    with raises("data.conflict", column="values") as caught:
        proto.union(DataProto({"values": values}))
    assert caught.value.facts["difference"].startswith("first in row 2")
    with raises("data.conflict", column="uid", difference="first in row 1, 'u1' and 'other'"):
        proto.union(DataProto({"uid": objects(["u2", "other", "u3", "u9"])}))
    with raises("data.conflict", column="values"):
        proto.select("values").union(DataProto({"values": torch.zeros(4, 2)}))
    with raises("data.unequal-rows", rows=(4, 1)):
        proto.union(DataProto({"score": torch.zeros(1)}))
    with raises("data.conflict", key="step", operation="union"):
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


def test_indexing_selects_rows(proto: DataProto) -> None:
    assert (
        rows(proto[1:3]) == [1, 2] and rows(proto[::-2]) == [3, 1] and rows(proto[-1:]) == [3] and len(proto[9:]) == 0
    )
    assert rows(proto[[3, 0, 0, -1]]) == [3, 0, 0, 3] and rows(proto[torch.tensor([2])]) == [2] and len(proto[[]]) == 0
    assert rows(proto[np.arange(4)[::-1]]) == [3, 2, 1, 0] and rows(proto[[True, False, False, True]]) == [0, 3]
    assert rows(proto[proto["response_mask"].any(1)]) == [0, 1, 3] and rows(proto[np.array([False] * 4)]) == []
    assert proto[[2, 0]]["uid"].tolist() == ["u3", "u2"] and proto[[2]].meta == {"step": 3}
    assert proto[1:3]["values"].data_ptr() == proto["values"][1:].data_ptr()  # a slice is a view
    for wrong in ([4], [-5], [0.5], [True], torch.zeros(2, 2, dtype=torch.int64), torch.tensor(1), ["uid"]):
        with raises("data.row-selection", rows=4):
            proto[wrong]  # type: ignore[index]
    with raises("data.row-selection", found=2):
        proto[2]  # type: ignore[call-overload]
    for part in (proto[1:], proto[[0, 2]], proto.select("uid")):
        with pytest.raises(ValueError, match="read-only"):
            part["uid"][0] = "another"


def test_split_and_repeat_rows(proto: DataProto) -> None:
    ten = DataProto({"x": torch.arange(10)})
    assert [len(part) for part in ten.split(4)] == [4, 4, 2] and [len(part) for part in ten[:0].split(4)] == [0]
    assert rows(proto[:2].repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert rows(proto[:2].repeat(2, interleave=False)) == [0, 1, 0, 1]
    for call in (ten.split, ten.repeat):
        with raises("data.not-a-count", found=0):
            call(0)


@pytest.mark.parametrize(("method", "replacement"), [("chunk", "proto.split(size)"), ("reorder", "proto[order]")])
def test_an_error_about_a_verl_method_names_its_replacement(proto: DataProto, method: str, replacement: str) -> None:
    with raises("data.verl-method", method=method) as caught:
        getattr(proto, method)
    assert isinstance(caught.value, AttributeError) and replacement in caught.value.message
    assert not hasattr(proto, method)
    with pytest.raises(AttributeError, match="'DataProto' object has no attribute 'x'"):
        _ = proto.x  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["bool", "uint16", "uint64", "float8_e4m3fn", "bfloat16", "float64"])
def test_row_selection_keeps_every_dtype(dtype: str) -> None:
    numbers = [[0, 1], [1, 0], [1, 1]]
    wide = torch.tensor(numbers).to(getattr(torch, dtype))
    picked = DataProto({"wide": wide, "flat": wide[:, 1], "across": wide.T.contiguous().T})[[2, 0, 2]]
    assert picked["wide"].dtype == wide.dtype and picked["wide"].double().tolist() == [[1, 1], [0, 1], [1, 1]]
    assert picked["across"].equal(picked["wide"]) and picked["flat"].double().tolist() == [1, 1, 1]


def test_groups_are_row_indices_by_uid() -> None:
    proto = DataProto({"uid": objects(["b", "a", "b", "c", "a"])})
    groups = proto.groups()
    assert list(groups) == ["b", "a", "c"] and [g.tolist() for g in groups.values()] == [[0, 2], [1, 4], [3]]
    assert all(g.dtype == torch.int64 for g in groups.values())
    with raises("data.unknown-column", column="uid"):
        DataProto({"x": torch.zeros(1)}).groups()
    with raises("data.wrong-type", row=1, found="2"):
        DataProto({"uid": objects(["a", 2])}).groups()


@fast
@given(protos(min_rows=1), st.data())
def test_concat_and_union_restore_a_split_proto(proto: DataProto, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(proto)))
    assert DataProto.concat(proto.split(n)).equal(proto)
    order = data.draw(st.permutations(range(len(proto))))
    assert proto[order][np.argsort(order)].equal(proto)
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
def test_concat_of_ragged_batches_equals_building_one_batch(
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


def test_concat_pads_with_the_pad_value_of_the_column() -> None:
    name = "test_proto_distance"
    column = c.register(c.ColumnType(name, "distance", "float32", ("batch", "response"), -1.5))
    joined = DataProto.concat([DataProto({column.name: torch.ones(1, 1)}), DataProto({column.name: torch.ones(1, 2)})])
    assert joined[name].tolist() == [[1, -1.5], [1, 1]]


def test_concat_aligns_sequences_of_equal_width_by_prompt_and_response() -> None:
    a, b = rollout([[1, 2, 3]], [[4]]), rollout([[5]], [[6, 7, 8]])
    assert a["input_ids"].shape == b["input_ids"].shape
    joined = DataProto.concat([p.select("input_ids", "response_mask") for p in (a, b)])
    assert joined["input_ids"].tolist() == [[1, 2, 3, 4, 0, 0], [0, 0, 5, 6, 7, 8]]


def test_concat_refuses_sequences_of_unknown_prompt_width() -> None:
    a, b = (rollout([[1] * n], [[2]]).select("input_ids") for n in (1, 3))
    with raises("data.concat-mismatch", column="input_ids", axis=1, found=(2, 4)):
        DataProto.concat([a, b])
    assert len(DataProto.concat([a, a])) == 2
    with raises("data.axis-mismatch", found=5, expected=4):
        odd = {
            "input_ids": torch.ones(1, 5).long(),
            "prompts": torch.ones(1, 2).long(),
            "responses": torch.ones(1, 2).long(),
        }
        DataProto.concat([DataProto(odd)])
    with raises("data.axis-mismatch", found=1):
        DataProto.concat([DataProto({"input_ids": torch.ones(1, 1).long(), "prompts": torch.ones(1, 2).long()})])


def test_concat_pads_unknown_columns_only_with_an_explicit_pad() -> None:
    a, b = DataProto({"mine": torch.ones(1, 1, 2).long()}), DataProto({"mine": torch.ones(1, 3, 2).long()})
    with raises("data.concat-mismatch", column="mine", axis=1, found=(1, 3)):
        DataProto.concat([a, b])
    assert DataProto.concat([a, b], pad={"mine": (-1, "left")})["mine"][0].tolist() == [[-1, -1], [-1, -1], [1, 1]]
    assert DataProto.concat([a, b], pad={"mine": (2**60, "right")})["mine"][0].tolist() == [
        [1, 1],
        [2**60] * 2,
        [2**60] * 2,
    ]
    with raises("data.concat-mismatch", column="mine", axis=2):
        DataProto.concat([a, DataProto({"mine": torch.ones(1, 3, 4).long()})], pad={"mine": (0, "left")})
    for pad in ({"mine": (0.5, "left")}, {"mine": (0, "middle")}):
        with raises("data.padding", column="mine"):
            DataProto.concat([a, b], pad=pad)  # type: ignore[arg-type]
    with raises("data.unknown-column", column="other"):
        DataProto.concat([a, b], pad={"other": (0, "left")})
    with raises("data.padding", column="flat"):
        DataProto.concat([DataProto({"flat": torch.ones(2)})], pad={"flat": (0, "left")})
    like_ids = [rollout([[1]], [[2]] * 1), rollout([[3, 4]], [[5, 6]])]
    like_ids = [p.select("prompts", "responses").union(DataProto({"seq": p["input_ids"]})) for p in like_ids]
    assert DataProto.concat(like_ids, pad={"seq": (9, "sequence")})["seq"].tolist() == [[9, 1, 2, 9], [3, 4, 5, 6]]


def test_concat_refuses_mismatched_protos() -> None:
    a = DataProto({"x": torch.zeros(1), "o": objects([1])}, {"k": 1})
    with raises("data.concat-mismatch", index=1, columns=("o",)):
        DataProto.concat([a, a.drop("o")])
    with raises("data.concat-mismatch", column="x", found=("torch.float32", "torch.float64")):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": torch.zeros(1).double()}))])
    with raises("data.concat-mismatch", column="x", found=("1", "2")):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": torch.zeros(1, 1)}))])
    with raises("data.concat-mismatch", column="x"):
        DataProto.concat([a, a.drop("x").union(DataProto({"x": objects([1])}))])
    with raises("data.conflict", key="k", operation="concat"):
        DataProto.concat([a, a.with_meta({"k": True})])
    with raises("data.concat-mismatch"):
        DataProto.concat([])


# ---- records


def prompt_batch() -> PromptBatch:
    text = objects(["a", "b"])
    return PromptBatch(
        torch.ones(2, 3).long(), torch.ones(2, 3).bool(), text, text, text, text, objects([{}, {}]), text
    )


def test_records_round_trip(proto: DataProto) -> None:
    batch = prompt_batch()
    made = DataProto.from_record(batch, {"k": 1})
    assert tuple(made.columns) == PromptBatch._fields and made["prompts"] is batch.prompts and made.meta == {"k": 1}
    back = made.to_record(PromptBatch)
    assert isinstance(back, PromptBatch) and back.prompts is batch.prompts and back.uid.tolist() == ["a", "b"]
    with raises("data.unknown-column", column="position_ids"):
        proto.to_record(Sequences)  # type: ignore[type-abstract]
    full = proto.union(
        DataProto({"position_ids": torch.zeros(proto["input_ids"].shape).long(), "temperature": torch.ones(4)})
    )
    read = full.to_record(Sequences)  # type: ignore[type-abstract]
    assert read.input_ids is proto["input_ids"] and read.temperature.tolist() == [1, 1, 1, 1]


class Scored(NamedTuple):
    values: c.Values
    update: Updated


def test_records_with_invalid_fields_are_refused() -> None:
    with raises("column.not-a-record", record="Scored", field="update"):
        DataProto.from_record(Scored(torch.zeros(1, 1), Updated(1)))
    with raises("column.not-a-record", record="Updated"):
        DataProto.from_record(Updated(1))
    with raises("data.column-definition", column="prompts", found="float32 [2, 3]"):
        DataProto.from_record(prompt_batch()._replace(prompts=torch.zeros(2, 3)))


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
