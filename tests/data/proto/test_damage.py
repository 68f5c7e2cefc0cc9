"""Damaged saved DataProtos, also with a valid digest: the error names the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save as dump

from flowrl import DataProto
from flowrl.data.proto.column_math import objects
from flowrl.data.proto.formats import MANIFEST, OBJECTS, TENSORS
from flowrl.errors import DataError
from tests.support.errors import raises

PROTO = DataProto({"x": torch.arange(3), "o": objects([1, "b", None])}, {"k": 1})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    PROTO.save(tmp_path / "saved")
    return tmp_path / "saved"


def seal(folder: Path) -> None:
    """Make the digests of the files right again."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in (TENSORS, OBJECTS)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (OBJECTS, b""),
        (OBJECTS, b"3"),
        (OBJECTS, b"[]"),
        (OBJECTS, b"{}"),
        (OBJECTS, b'{"columns": 3, "objects": {}, "meta": {}}'),
        (OBJECTS, b'{"columns": ["x", "o"], "objects": {}, "meta": {}}'),
        (OBJECTS, b'{"columns": ["x", "o"], "objects": [], "meta": {}}'),
        (OBJECTS, b'{"columns": ["x", "o"], "objects": {"o": 3}, "meta": {}}'),
        (OBJECTS, b'{"columns": ["x", ["o"]], "objects": {"o": [1, 2, 3]}, "meta": {}}'),
        (OBJECTS, b'{"columns": ["x"], "objects": {}, "meta": [1]}'),
        (OBJECTS, b'{"columns": ["x"], "objects": {}, "meta": {"k": 2}}'),
        (OBJECTS, b"[" * 100_000),
        (OBJECTS, b"\xff\xfe"),
        (TENSORS, b""),
        (TENSORS, b"\xff" * 64),
        (TENSORS, dump({"x": torch.zeros(2)})),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_content_with_a_valid_digest_is_refused(saved: Path, file: str, content: bytes) -> None:
    (saved / file).write_bytes(content)
    seal(saved)
    with pytest.raises(DataError, match=str(saved)):
        DataProto.load(saved)


@pytest.mark.parametrize("content", [b"", b"3", b"[]", b"{}", b'{"digest": 3}', b"[" * 100_000, b"\xff", b"null"])
def test_an_invalid_manifest_is_refused(saved: Path, content: bytes) -> None:
    (saved / MANIFEST).write_bytes(content)
    with raises("data.damaged", path=str(saved / MANIFEST)):
        DataProto.load(saved)


@pytest.mark.parametrize("replace", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("name", [MANIFEST, TENSORS, OBJECTS])
def test_a_missing_or_irregular_file_is_refused(saved: Path, name: str, replace: Callable[[Path], Any]) -> None:
    (saved / name).unlink()
    replace(saved / name)
    with raises("data.damaged", path=str(saved / name)):
        DataProto.load(saved)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises("data.folder-exists", path=f"{tmp_path}/file"):
        PROTO.save(tmp_path / "file")
    with raises("data.unwritable-file", path=f"{tmp_path}/file/below"):
        PROTO.save(tmp_path / "file" / "below")
    PROTO.save(tmp_path / "missing" / "too" / "saved")  # folders are made
    assert DataProto.load(tmp_path / "missing" / "too" / "saved").equal(PROTO)
