"""Overrides are typed as OmegaConf types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.importers import hydra
from flowrl.importers.words import Word
from tests.support.errors import raises


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a.lr=1e-6", "a.lr", 1e-6),
        ("+a.b=3", "a.b", 3),
        ("++a=null", "a", None),
        ("~a.b", "a.b", None),
        ('a=\'["x","y"]\'', "a", '["x","y"]'),
        ('a=["x","y"]', "a", ["x", "y"]),
        ("a=['~/x', '~/y']", "a", ["~/x", "~/y"]),
        ("a={b: 1}", "a", {"b": 1}),
        ("a=True", "a", True),
        ("a=0.5_5.0", "a", "0.5_5.0"),
        ("a=Qwen/Qwen3-8B", "a", "Qwen/Qwen3-8B"),
        ("a=", "a", None),
    ],
)
def test_overrides(text: str, key: str, value: Any) -> None:
    setting = hydra.override(Word(text, line=4))
    assert setting is not None and (setting.key, setting.value, setting.line) == (key, value, 4)


def test_words_that_are_no_override() -> None:
    assert hydra.override(Word("--config-name=x")) is None
    assert hydra.override(Word("main.py")) is None


def test_a_file_gives_dotted_keys_with_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("defaults: [_self_]\na:\n  b: 1e-6\n  c: {d: [1]}\n")
    assert [(s.key, s.value, s.line) for s in hydra.of_file(file)] == [("a.b", 1e-6, 3), ("a.c.d", [1], 4)]
    file.write_text("!!python/object/apply:os.getcwd []")
    with raises("import.unreadable-file"):
        hydra.of_file(file)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python3", []),
        ("torchrun --nnodes=2 --nproc_per_node 4 -m", ["8", "2"]),
        ("torchrun --nproc-per-node=gpu", ["", "1"]),
        ("python3 -m torch.distributed.run --nproc_per_node 2", ["2", "1"]),
        ("deepspeed --num_nodes 3 --num_gpus 4 --module", ["12", "3"]),
        ("accelerate launch --config_file zero3.yaml", ["8", "2"]),
        ("accelerate launch --config_file zero3.yaml --num_processes 2 --num_machines 1", ["2", "1"]),
        ("accelerate launch --config_file missing.yaml", ["", "1"]),
    ],
)
def test_processes_and_machines_of_launchers(
    command: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\n")
    monkeypatch.chdir(tmp_path)
    assert [*hydra.launched([Word(text) for text in command.split()]).values()] == expected
