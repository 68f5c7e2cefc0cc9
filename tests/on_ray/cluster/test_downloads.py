"""Downloads of models by the processes of a run (`flowrl/distributed/hosts/hosts.py`, `host.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.hub import serving

pytestmark = pytest.mark.ray

PROGRAM = """
    from flowrl import Colocate, PromptData, Training
    from flowrl.backends import SGD, TorchRollout, TorchScorer, TorchTrainer
    from flowrl.graphs import grpo
    from tests.support.rewards import digits

    job = grpo(digits, n=2, max_new_tokens=4).bind(
        actor=TorchTrainer("org/tiny", SGD(lr=0.1), device="cpu", ranks=2),
        ref=TorchScorer("org/tiny", device="cpu"),
        rollout=TorchRollout("org/tiny", device="cpu"),
        place=Colocate(gpus=2),
    )
    Training(job, PromptData({prompts!r}), steps=1, prompts=4, folder="run", save_model=False).run()
"""


def test_processes_of_one_machine_download_a_model_once(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    with serving() as hub:
        commit = hub.add("org/tiny", tiny)
        # a process of its own, since huggingface_hub reads these variables when it is imported
        variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        program = textwrap.dedent(PROGRAM).format(prompts=prompts_file)
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert hub.downloads().count("model.safetensors") == 1
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["status"] == "finished" and described["commits"][0]["commit"] == commit
