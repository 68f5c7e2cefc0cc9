"""Episodes at the scale of real runs (nightly), and a run killed during a batch of episodes; with PyTorch engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import PromptData, Training
from flowrl.backends import TorchRollout
from flowrl.data.metrics import Metrics
from flowrl.operators import Interact
from flowrl.references import load_object
from flowrl.run.engine.build import EngineBuilder
from tests import ROOT
from tests.episodes.exact import KEY, Recorded, assert_exact, failures
from tests.operators.engines.test_interact import prompts_of
from tests.run.training.interrupted import equal, flat, without_times
from tests.support.jobs import column, job_of

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.nightly
def test_failures_in_ten_thousand_episodes_lose_no_group() -> None:
    failures(10_000)


@pytest.mark.parametrize(
    ("episodes", "model_of"),
    [(256, {"steps": 20, "rows": 32}), pytest.param(15_360, {}, marks=pytest.mark.nightly)],
)
def test_triage_episodes_have_exact_tokens(episodes: int, model_of: dict[str, int], tmp_path: Path) -> None:
    """examples/triage.py plays 15,360 episodes in training; here with its initial model, whose responses vary most."""
    example = str(ROOT / "examples" / "triage.py")
    triage, build, incident, environment = (
        load_object(f"{example}:{name}") for name in ("Triage", "build", "write_data", "graph")
    )
    model, (train, _) = build(tmp_path / "model", **model_of), incident(tmp_path / "data")
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    engine = Recorded(TorchRollout(str(model), frozen=True, device="cpu").build(EngineBuilder({}, seed=0)))
    operator = environment["interact"].operator
    interact = Interact(
        triage,
        rollout=engine,
        max_turns=operator.max_turns,
        context=operator.context,
        max_new_tokens=16,
        check="strict",
    )
    checked, size = 0, min(512, episodes)
    for start in range(0, episodes, size):
        chosen = [rows[i % len(rows)] for i in range(start, start + size)]
        prompts = prompts_of(engine.tokenizer, size)
        names = [str(start + i) for i in range(size)]
        ids, mask = engine.tokenizer.pad_left([engine.tokenizer.prompt_ids(row["prompt"]) for row in chosen])
        prompts = prompts._replace(
            prompts=ids,
            prompt_mask=mask,
            row_id=column(names),
            raw_prompt=column([row["prompt"] for row in chosen]),
            extra_info=column([row["extra_info"] for row in chosen]),
        )
        batch = interact(prompts, key=KEY, metrics=Metrics())
        checked += assert_exact(batch, names, engine, "<|assistant|>", tools=False, worth=lambda response: 0.0)
        assert set(batch.turns.tolist()) == {2}
    assert checked == episodes


ENVIRONMENT = """
import os, signal
from flowrl.episodes import Environment, Reply

class Longer(Environment):
    async def reset(self, row):
        self.row = row
        return Reply(row.messages)

    async def step(self, answer):
        if os.environ.get("KILLED_AT") == f"{self.row.row_id} {answer.turn}":
            os.kill(os.getpid(), signal.SIGKILL)
        with open(os.environ["EPISODE_LOG"], "a") as file:
            file.write(f"{self.row.row_id} {answer.turn} {answer.text!r}\\n")
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn == 2)
"""


def training(home: Path, model: str, data: str, **settings: Any) -> Training:
    operator = Interact(f"{home}/environment.py:Longer", max_turns=3, context=150, max_new_tokens=8)
    job = job_of("grpo", model, n=2).edit(replace={"generate": operator}, drop=["reward"])
    return Training(job, PromptData(data), steps=3, prompts=4, checkpoint_every=1, save_model=False, **settings)


@pytest.mark.runs
def test_a_run_killed_during_a_batch_resumes_with_the_same_rows(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("EPISODE_LOG", str(tmp_path / "uninterrupted.txt"))
    uninterrupted = training(tmp_path, tiny, prompts_file, folder=str(tmp_path / "uninterrupted")).run()
    logged = (tmp_path / "uninterrupted.txt").read_text().splitlines()
    last = [line for line in logged[2 * len(logged) // 3 :] if line.split()[1] == "1"][3].split()[0]
    script = f"""
        from pathlib import Path
        from tests.engines.test_episodes import training
        training(Path({str(tmp_path)!r}), {tiny!r}, {prompts_file!r}, folder={str(tmp_path / "cut")!r}).run()
    """
    monkeypatch.setenv("EPISODE_LOG", str(tmp_path / "cut.txt"))
    monkeypatch.setenv("KILLED_AT", f"{last} 1")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    monkeypatch.delenv("KILLED_AT")
    before = (tmp_path / "cut.txt").read_text().splitlines()
    monkeypatch.setenv("EPISODE_LOG", str(tmp_path / "resumed.txt"))
    found = training(tmp_path, tiny, prompts_file, folder=str(tmp_path / "cut"), resume=True).run()
    after = (tmp_path / "resumed.txt").read_text().splitlines()
    assert len(after) == len(logged) // 3 and set(before) < set(logged)
    assert sorted(after) == sorted(logged[-len(after) :])
    resumed_metrics, expected_metrics = (without_times(run.folder / "metrics.jsonl") for run in (found, uninterrupted))
    assert [{k: v for k, v in line.items() if k != "episodes/waiting"} for line in resumed_metrics] == [
        {k: v for k, v in line.items() if k != "episodes/waiting"} for line in expected_metrics
    ]
    a, b = (flat(run.engines["actor"].state_dict()) for run in (found, uninterrupted))
    assert a.keys() == b.keys() and [name for name in a if not equal(a[name], b[name])] == []
    assert all(torch.isfinite(value).all() for value in a.values() if isinstance(value, torch.Tensor))
