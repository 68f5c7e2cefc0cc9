"""The trackers, really installed: `wandb.py`, `mlflow.py`, `trackio.py`, `tensorboard.py`; killed, resumed, exported
(`export.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from flowrl.report.names import BUILT_IN
from tests import ROOT
from tests.report import holdings, killed
from tests.report.killed import STEPS
from tests.support.jobs import job_of
from tests.support.runs import train

pytestmark = [
    pytest.mark.runs,
    pytest.mark.timeout(600),
]  # the fixtures import every tracker, in processes of their own

NAMES = sorted(BUILT_IN)
EVERY_STEP_ONCE = {
    "reward/mean": [*range(1, STEPS + 1)],
    "kl/ref": [*range(1, STEPS + 1)],
    "val/reward/mean": [0, 3, 6],
    "rows": [*range(1, STEPS + 1)],
}


class Place(NamedTuple):
    """Where the trackers have their data."""

    folder: Path
    environment: dict[str, str]

    @classmethod
    def at(cls, path: Path) -> Place:
        environment = {
            "MLFLOW_TRACKING_URI": f"sqlite:///{path / 'mlflow.db'}",
            "TRACKIO_DIR": str(path / "trackio"),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
        }
        return cls(path, environment)

    def run(self, *command: str) -> int:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | self.environment
        done = subprocess.run([sys.executable, *command], cwd=self.folder, env=environment, capture_output=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        return done.returncode

    def held(self, tracker: str) -> holdings.Held:
        """What a tracker holds, read in a process that never wrote to it."""
        call = {
            "mlflow": f"mlflow({self.environment['MLFLOW_TRACKING_URI']!r}, 'flowrl')",
            "tensorboard": "tensorboard(Path('run'))",
            "trackio": "trackio('flowrl')",
            "wandb": "wandb(Path('run'))",
        }[tracker]
        code = f"import json; from pathlib import Path; from tests.report.holdings import *; held = {call}"
        code += "; Path('held.json').write_text(json.dumps(held))"
        self.run("-c", code)
        found: holdings.Held = json.loads((self.folder / "held.json").read_text())
        return found


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for package in ("mlflow", "tensorboard", "trackio", "wandb"):
        pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def resumed(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run that was killed in its fourth step, with a checkpoint after the second one, and resumed."""
    place = Place.at(tmp_path_factory.mktemp("resumed"))
    run = ("-m", "tests.report.killed", tiny, prompts_file, "run")
    assert place.run(*run, "3", *NAMES) == -signal.SIGKILL
    assert place.run(*run, "99", *NAMES) == 0
    return place


@pytest.fixture(scope="module")
def exported(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run without trackers and with an alarm, exported twice."""
    place = Place.at(tmp_path_factory.mktemp("exported"))
    train(job_of("grpo", tiny), prompts_file, place.folder / "run", **killed.settings(prompts_file))
    alarm = {"step": 3, "rule": "KL", "address": "run@3/kl.ref", "message": "0.3 nats"}
    (place.folder / "run" / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    options = [option for name in NAMES for option in ("--to", name)]
    for _ in range(2):
        assert place.run("-m", "flowrl", "export", "run", *options) == 0
    return place


@pytest.mark.parametrize("tracker", NAMES)
def test_a_killed_and_resumed_run_is_one_run_with_each_step_once(resumed: Place, tracker: str) -> None:
    assert list(resumed.held(tracker).values()) == [EVERY_STEP_ONCE]


@pytest.mark.parametrize("tracker", NAMES)
def test_an_export_is_one_run_with_each_step_once(exported: Place, tracker: str) -> None:
    assert list(exported.held(tracker).values()) == [EVERY_STEP_ONCE | {"alarms": [3]}]
