"""Signs of another version than that of the tables are listed, for all three frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.importers.importing import Source, import_file
from flowrl.importers.settings import Table

COMMANDS = {
    "openrlhf": "python3 -m openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d.jsonl",
    "trl": "trl sft --model_name_or_path m --dataset_name d.jsonl",
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=d.parquet",
}
OPTION = {"openrlhf": "--no.such_key 1", "trl": "--no_such_key 1", "verl": "+no.such_key=1"}


def _warnings(framework: str, folder: Path, text: str) -> list[str]:
    (folder / "run.sh").write_text(text)
    return import_file(framework, Source(folder / "run.sh"))[0].warnings


@pytest.mark.parametrize("framework", COMMANDS)
def test_other_versions_are_named(framework: str, tmp_path: Path) -> None:
    pinned, command = Table.version_of(framework), COMMANDS[framework]
    assert _warnings(framework, tmp_path, f"pip install {framework}=={pinned}\n{command}\n") == []
    (one,) = _warnings(framework, tmp_path, f"pip install {framework}==0.5.0\n{command}\n")
    assert "run.sh, line 1" in one and "==0.5.0" in one and pinned in one
    (one,) = _warnings(framework, tmp_path, f"{command} {OPTION[framework]}\n")
    assert "no.such_key" in one.replace("no_such", "no.such") and pinned in one


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [
        ("trl>=1.0,<2", True),
        ("trl[vllm,peft]>=1.17", False),
        ("trl~=1.16.0", True),
        ("trl~=1.15.0", False),
        ("trl<=1.16", True),
        ("trl!=1.16.0", False),
        ("trl===1.16.0", True),
        ("trl~=1", True),
        ("trl~=2", False),
        ("# written for trl 0.19.1", False),
        ("# trl 1.16", True),
        ("my-trl==0.1", True),
        ("trl", True),
    ],
)
def test_requirements_beside_a_script(requirement: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"torch\n{requirement}\n")
    found = _warnings("trl", tmp_path, f"{COMMANDS['trl']}\n")
    assert bool(found) != fits and all("requirements.txt, line 2" in one for one in found)


def test_an_installed_package_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "trl-1.2.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = _warnings("trl", tmp_path, f"{COMMANDS['trl']}\n")
    assert one.startswith("trl 1.2.3 is installed")
