"""A DataProto outside a process: digests, files, TensorDict and verl's three dicts."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import DataError
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.rows.protos import protos, rollout

fast = examples(40)


# ---- digest


def test_digest_depends_on_content_only() -> None:
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
        proto[[1, 0]],
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
        with raises("data.not-json") as caught:
            DataProto({"o": objects(["fine", value])}).digest()
        assert caught.value.facts["where"].startswith("column 'o', row 1: the object")
        assert caught.value.facts["found"] == kind


def test_empty_columns_from_numpy_are_compared_and_digested() -> None:
    empty = torch.from_numpy(np.zeros((0, 3), dtype=np.float32)), torch.zeros(0, 3)
    protos = [DataProto({"values": column}) for column in empty]
    assert protos[0].equal(protos[1])
    assert protos[0].digest() == protos[1].digest()


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


def test_views_of_one_storage_and_empty_protos_can_be_saved(tmp_path: Path) -> None:
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
    with raises("data.folder-exists", path=f"{tmp_path}/full"):
        proto.save(tmp_path / "full")
    with raises("data.not-json"):
        DataProto({"o": objects([{1}])}).save(tmp_path / "never")

    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("flowrl.data.proto.formats._manifest", full_disk)
    with pytest.raises(OSError, match="no space"):
        proto.save(tmp_path / "half")
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "mine"]


def test_load_detects_any_changed_byte(tmp_path: Path) -> None:
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


def test_load_detects_truncated_extended_and_missing_files(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    for path in sorted((tmp_path / "p").iterdir()):
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\n", b"null", b"[]", b"\xff\xfe"):
            path.write_bytes(damaged)
            with raises("data.damaged", path=str(path)):
                DataProto.load(tmp_path / "p")
        path.unlink()
        with raises("data.damaged", path=str(path)):
            DataProto.load(tmp_path / "p")
        path.write_bytes(whole)
    with raises("data.damaged"):
        DataProto.load(tmp_path / "nowhere")


def test_a_loaded_proto_does_not_depend_on_its_files(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    loaded = DataProto.load(tmp_path / "p")
    for path in (tmp_path / "p").iterdir():
        path.write_bytes(b"")
    assert loaded.equal(proto)


def test_load_detects_a_manifest_of_other_content(proto: DataProto, tmp_path: Path) -> None:
    proto.save(tmp_path / "p")
    path = tmp_path / "p" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "digest": "0" * 32}, indent=1))
    with raises("data.damaged", path=str(path)):
        DataProto.load(tmp_path / "p")
    path.write_text(json.dumps({**manifest, "format": "flowrl.DataProto/2"}, indent=1))
    with raises("data.damaged", path=str(path)):
        DataProto.load(tmp_path / "p")


def test_saved_tensors_open_without_flowrl(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    x = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    DataProto({"x": x, "o": objects([{"a": None}])}).save(tmp_path / "p")
    assert torch.equal(load_file(tmp_path / "p" / "tensors.safetensors")["x"], x)
    assert json.loads((tmp_path / "p" / "objects.json").read_text())["objects"] == {"o": [{"a": None}]}


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


def test_a_tensordict_made_elsewhere_can_be_converted() -> None:
    tensordict = pytest.importorskip("tensordict")
    x = torch.zeros(2, 1)
    made = tensordict.TensorDict({"x": x, "o": ["a", "b"], "data_source": "gsm8k", "note": "n"}, batch_size=[2])
    proto = DataProto.from_tensordict(made)
    assert (
        proto["o"].tolist() == ["a", "b"]
        and proto["data_source"].tolist() == ["gsm8k"] * 2
        and proto.meta == {"note": "n"}
    )
    with raises("data.conversion", column="deep"):
        DataProto.from_tensordict(tensordict.TensorDict({"deep": {"x": x}}, batch_size=[2]))
    with raises("data.conversion", found=(2, 1)):
        DataProto.from_tensordict(tensordict.TensorDict({"x": x}, batch_size=[2, 1]))
    with raises("data.conversion", found="dict"):
        DataProto.from_tensordict({"x": x})
    with raises("data.conversion", column="x"):
        DataProto({"x": x}, {"x": 1}).to_tensordict()
    with raises("data.conversion", column="o"):
        DataProto({"o": objects([])}).to_tensordict()


def test_a_missing_tensordict_package_is_named_with_its_extra(
    proto: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ({"batch": {"response_mask": torch.tensor([[0, 2]])}}, "'response_mask'.*contains 2"),
        ({"batch": {"a": torch.zeros(1)}, "non_tensor_batch": {"a": objects([1])}}, "'a'.*in batch as well"),
        ({"non_tensor_batch": {"a": ["x"]}}, "'a'.*list"),
        ({"meta_info": {"timing": {1: 2}}}, "timing"),
    ],
)
def test_invalid_verl_data_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        DataProto.from_verl({"batch": {}, "non_tensor_batch": {}, "meta_info": {}, **change})
    with raises("data.conversion", part="meta_info"):
        DataProto.from_verl({"batch": {}, "non_tensor_batch": {}})
