"""The folder that examples of the docs assume: a model, data, and a reward file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from flowrl import PromptData, Training
from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo.task import write_dataset
from flowrl.graphs import grpo
from tests import ROOT
from tests.support.models import tiny_folder


def set_up_desk(folder: Path) -> Path:
    """Fill a new folder: ``model``, ``train.jsonl``, ``heldout.jsonl``, ``my_reward.py``, the ``train.py`` of
    docs/how-to/train.md and ``runs/first``, a run of three steps; returns it."""
    shutil.move(tiny_folder(folder), folder / "model")
    for path in write_dataset(folder):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:32]))
    shutil.copy(ROOT / "examples" / "reward.py", folder / "my_reward.py")
    page = (ROOT / "docs" / "how-to" / "train.md").read_text(encoding="utf-8")
    (folder / "train.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0])
    job = grpo(f"{folder / 'my_reward.py'}:score", n=4, max_new_tokens=8).bind(
        actor=TorchTrainer(str(folder / "model")), rollout=TorchRollout(), ref=TorchScorer(str(folder / "model"))
    )
    data = PromptData(str(folder / "train.jsonl"))
    Training(job, data, steps=3, prompts=4, folder=str(folder / "runs" / "first"), save_model=False).run()
    return folder
