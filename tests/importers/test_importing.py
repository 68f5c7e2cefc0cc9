"""Which files an importer reads; tests importing.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.importers.importing import Source, import_file
from tests.support.errors import raises


@pytest.mark.parametrize(
    ("framework", "name"), [("verl", "train.py"), ("openrlhf", "train.py"), ("openrlhf", "train.yaml")]
)
def test_files_that_an_importer_does_not_read_are_refused(framework: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("lr: 1\n")
    with raises("import.no-training", file=str(tmp_path / name)):
        import_file(framework, Source(tmp_path / name))


@pytest.mark.parametrize(
    ("framework", "command", "other"),
    [
        ("verl", "deepspeed --module openrlhf.cli.train_dpo --adam.lr 1e-6", "openrlhf"),
        ("openrlhf", "trl dpo --beta 0.2", "trl"),
        ("trl", "python3 -m verl.trainer.main_ppo trainer.nnodes=1", "verl"),
    ],
)
def test_a_script_of_another_framework_names_its_importer(
    framework: str, command: str, other: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"{command}\n")
    with raises("import.no-training") as caught:
        import_file(framework, Source(tmp_path / "run.sh"))
    assert f"flowrl from-{other}" in str(caught.value)
