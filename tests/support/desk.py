"""The folder that examples of the docs assume: a model, data, and a reward file."""

from __future__ import annotations

import shutil
from pathlib import Path

from flowrl.demo.task import write_dataset
from tests import ROOT
from tests.support.models import tiny_folder


def set_up_desk(folder: Path) -> Path:
    """Fill a new folder: ``model``, ``train.jsonl``, ``heldout.jsonl`` and ``my_reward.py``; returns it."""
    shutil.copytree(tiny_folder(folder / "build"), folder / "model")
    for path in write_dataset(folder):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:32]))
    shutil.copy(ROOT / "examples" / "reward.py", folder / "my_reward.py")
    return folder
