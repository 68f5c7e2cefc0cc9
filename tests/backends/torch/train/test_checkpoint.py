"""Damaged, incomplete or malicious checkpoints are refused, and no code in them runs."""

from __future__ import annotations

import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.backends import AdamW
from flowrl.backends.torch.train import checkpoint
from tests.backends.torch.train.trainers import Bomb, Folder, Pull, all_rows, snapshot, trainer
from tests.support.errors import raises
from tests.support.models import ragged

PART = "part-00001-of-00001.safetensors"
HEAD = "weights.lm_head.weight"
DAMAGED, MISMATCH = "checkpoint.damaged", "checkpoint.mismatch"


def trained_once(folder: str) -> Any:
    """A trainer after one step, so that its optimizer has state."""
    engine = trainer(folder, optimizer=AdamW(lr=0.01))
    engine.update(ragged(), [all_rows(ragged())], Pull())
    return engine


def test_loading_a_checkpoint_unpickles_nothing(folder: Folder, tmp_path: Path) -> None:
    engine, marker = trained_once(folder("llama")), tmp_path / "run"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists()  # the pickle is malicious
    marker.unlink()
    engine.save_checkpoint(str(tmp_path / "saved"))
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} == {".safetensors"}
    for name in (PART, ".metadata", "__0_0.distcp"):
        planted = tmp_path / f"planted {name}"
        shutil.copytree(tmp_path / "saved", planted)
        (planted / name).write_bytes(bomb)
        if name == PART:
            with raises(DAMAGED, path=str(planted)):
                engine.load_checkpoint(str(planted))
        else:
            engine.load_checkpoint(str(planted))  # unrelated files are ignored
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / ".metadata").write_bytes(bomb)
    with raises("checkpoint.missing", path=str(tmp_path / "foreign")):
        engine.load_checkpoint(str(tmp_path / "foreign"))
    assert not marker.exists()


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / PART)
    tensors.pop("weights.lm_head.weight")
    save_file(tensors, path / PART)


def with_a_narrower_tensor(path: Path) -> None:
    tensors = load_file(path / PART)
    save_file(tensors | {"weights.lm_head.weight": tensors["weights.lm_head.weight"].bfloat16()}, path / PART)


def truncated(path: Path) -> None:
    tensors = load_file(path / PART)
    save_file(tensors | {"weights.lm_head.weight": tensors["weights.lm_head.weight"][1:]}, path / PART)


def without_axes(number: int) -> Callable[[Path], None]:
    """Write a second part with a scalar tensor that has rows in the first part."""

    def damage(path: Path) -> None:
        (path / PART).rename(path / f"part-0000{number}-of-00002.safetensors")
        scalar = {"weights.lm_head.weight": torch.tensor(1.0)}
        save_file(scalar, path / f"part-0000{3 - number}-of-00002.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "code", "facts"),
    [
        (without_axes(1), MISMATCH, {"differ": (HEAD,)}),
        (without_axes(2), MISMATCH, {"differ": (HEAD,)}),
        (lambda path: (path / PART).write_bytes(b""), DAMAGED, {}),
        (lambda path: (path / PART).write_bytes((path / PART).read_bytes()[:-1]), DAMAGED, {}),
        (lambda path: (path / PART).write_bytes(b"\xff" * 64), DAMAGED, {}),
        (
            lambda path: (path / PART).rename(path / "part-00001-of-00002.safetensors"),
            DAMAGED,
            {"expected": 2},
        ),
        (
            lambda path: shutil.copy(path / PART, path / "part-00002-of-00002.safetensors"),
            DAMAGED,
            {"expected": 1},
        ),
        (lambda path: (path / PART).rename(path / "weights.safetensors"), "checkpoint.missing", {}),
        (without_a_tensor, MISMATCH, {"differ": (HEAD,)}),
        (with_a_narrower_tensor, MISMATCH, {"differ": (HEAD,)}),
        (truncated, MISMATCH, {"differ": (HEAD,)}),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    damage: Callable[[Path], Any], code: str, facts: dict[str, Any], folder: Folder, tmp_path: Path
) -> None:
    engine = trained_once(folder("llama"))
    engine.save_checkpoint(str(tmp_path / "saved"))
    damage(tmp_path / "saved")
    engine.update(ragged(), [all_rows(ragged())], Pull())
    before = snapshot(engine)
    with raises(code, **facts):
        engine.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())
    assert engine.version == 2


def test_safetensors_reads_a_checkpoint_part(tmp_path: Path) -> None:
    """Tensors of several dtypes and shapes, also empty ones."""
    tensors = {
        "short": torch.arange(3.0),
        "scalar": torch.tensor(7.0),
        "number": torch.tensor(1 << 40),
        "none": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
        "längere": torch.full((5, 1, 2), float("nan"), requires_grad=True),
    }
    checkpoint._write(str(tmp_path / PART), tensors)
    found = load_file(tmp_path / PART)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].nan_to_num(-1), tensor.nan_to_num(-1))


@pytest.mark.parametrize("length", range(1, 10))
def test_tensors_of_a_checkpoint_part_are_aligned_to_8_bytes(length: int, tmp_path: Path) -> None:
    """Independent of the length of the header, so that the file can be memory-mapped."""
    checkpoint._write(str(tmp_path / PART), {"x" * length: torch.tensor(1 << 40)})
    raw = (tmp_path / PART).read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    assert int.from_bytes(raw[-8:], "little") == 1 << 40


def test_a_checkpoint_part_is_written_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(copy() is not None for copy in copies))
        copy = tensor.clone()
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    checkpoint._write(str(tmp_path / PART), {str(number): torch.ones(4) for number in range(5)})
    assert alive == [0] * 5
