"""Alarms: how many of the default rules fire in healthy runs, and how soon they find a run that leaves its reference.

    python benchmarks/alarms.py                  # 35 runs, about 8 CPU minutes; finished runs are skipped

Healthy runs are those that learn: eleven methods on the task of `benchmarks/learning.py`, the demo, PPO and GRPO on
the task of `tests/test_learning.py` with several seeds, epochs and two rewards, CartPole and the guessing game. In the
planted runs the learning rate of the demo is multiplied by 20 after the third step. The folders stay, for
``flowrl alarms``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import table
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import learning

import flowrl
from flowrl import After, PromptData, Training
from flowrl.backends import TorchTrainer
from flowrl.demo.model import build
from flowrl.demo.run import ROWS, graphs, training
from flowrl.demo.task import write_dataset
from flowrl.look.alarms import judge_run
from flowrl.operators import Matches, WeighRewards
from tests import test_learning
from tests.run.alarms.test_planted import TwentyFold
from tests.support.models import tiny_folder

LEFT = 0.2  # nats per token: KL above it has left the reference
PLANTED = 3  # the last step with the planned learning rate

Make = Callable[[Path], Training]


def healthy(base: Path) -> dict[str, Make]:
    """Runs that learn, by name."""
    found: dict[str, Make] = {}
    for name in test_learning.ALGORITHMS:
        found |= {f"{name} asked, seed {seed}": partial(asked, base, name, seed) for seed in range(4)}
        found[f"{name} asked, 3 epochs"] = partial(asked, base, name, 0, ppo_epochs=3)
        found |= {f"{name} two rewards, seed {seed}": partial(asked, base, name, seed, weighed=True) for seed in (0, 1)}
    methods = {name: graph for name, graph in learning.methods().items() if "shuffled" not in name}
    found |= {name: partial(addition, base, graph) for name, graph in methods.items()}
    found |= {f"{graph.name} thinks": partial(think, base, graph, 0) for graph in graphs()}
    return found | {"cartpole": partial(example, "cartpole"), "guess": partial(example, "guess")}


def planted(base: Path) -> dict[str, Make]:
    """Runs whose learning rate is multiplied by 20 from the third step on, by name."""
    return {f"{graph.name}, seed {seed}": partial(spiked, base, graph, seed) for graph in graphs() for seed in range(3)}


def addition(base: Path, graph: Any, folder: Path) -> Training:
    """A run of `benchmarks/learning.py`."""
    model = build(base / "model", 0, **learning.START)
    if not (base / "data" / "heldout.jsonl").exists():
        write_dataset(base / "data", digits=int(learning.START["digits"]))
    return learning.training(graph, model, base / "data", folder, learning.STEPS, 0)


def think(base: Path, graph: Any, seed: int, folder: Path, steps: int = 30) -> Training:
    """A run of the demo."""
    data = write_dataset(base / "think")[0].parent
    return training(graph, build(base / "think-model", 0), data, folder, steps, seed)


def spiked(base: Path, graph: Any, seed: int, folder: Path) -> Training:
    """Ten steps of the demo with the planted learning rate."""
    plain = think(base, graph, seed, folder, 10)
    actor = plain.job.graph.bindings["actor"]
    since = PLANTED * ROWS // graph["update_actor"].operator.mini_batch
    changed = plain.job.edit(bind={"actor": TorchTrainer(actor.model, actor.optimizer, TwentyFold(since))})
    return dataclasses.replace(plain, job=changed, validation=())


def asked(base: Path, name: str, seed: int, folder: Path, weighed: bool = False, **parameters: Any) -> Training:
    """A run of `tests/test_learning.py`, with a second reward for the format if `weighed`."""
    job = test_learning.job(name, tiny_folder(base / "tiny"), **parameters)
    if weighed:
        job = job.edit(
            insert={
                "form": After("generate", Matches(r"[A-Za-z0-9]*")),
                "weigh_rewards": After("reward", WeighRewards({"right": 1.0, "form": 0.5})),
            },
            wire={"weigh_rewards.right": "reward.token_level_scores", "weigh_rewards.form": "form.token_level_scores"},
            set={"reward.log": "reward/right"},
        )
    data = test_learning.write_task(base / "asked.jsonl")
    prompts = 64 // job.graph["repeat"].operator.n
    return Training(job, PromptData(data), steps=30, prompts=prompts, seed=seed, folder=str(folder), save_model=False)


def example(name: str, folder: Path) -> Training:
    """A run of `examples/`."""
    found: Training = __import__(name).training()
    return dataclasses.replace(found, folder=str(folder))


def folders(base: Path, kind: str, runs: Mapping[str, Make]) -> dict[str, Path]:
    """The folder of each run, which is trained unless it has finished."""
    found = {}
    for name, make in runs.items():
        found[name] = folder = base / kind / name.replace(", ", "-").replace(" ", "-")
        finished = (folder / "run.json").exists() and json.loads((folder / "run.json").read_text())[
            "status"
        ] == "finished"
        if not finished:
            make(folder).run()
        print(f"{kind} {name}: {len(flowrl.open(folder).alarms)} alarms", flush=True)
    return found


def row_of(name: str, folder: Path) -> tuple[str, ...]:
    """What the rules of today find in a planted run, and which rows make the change of KL."""
    run = flowrl.open(folder)
    values = dict(zip(run.steps, run.metrics["kl/ref"].to_pylist(), strict=True))
    left = next((step for step in run.steps if step > PLANTED and values[step] > LEFT), None)
    alarms = [alarm for alarm in judge_run(run) if alarm.step > PLANTED]
    if left is None or not alarms:
        return name, str(left), "none", "-", "-"
    blamed = run.blame("kl/ref", left, against=left - 1)
    share = sum(blamed.rows["share"].to_pylist()[: blamed.half])
    return (
        name,
        str(left),
        str(alarms[0].step),
        alarms[0].rule,
        f"{share:.0%} by {blamed.half} of {len(blamed.rows)} rows",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/alarms"), help="default: %(default)s")
    base = parser.parse_args().folder.resolve()
    base.mkdir(parents=True, exist_ok=True)
    os.chdir(base)  # the examples write into the working directory
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    leaving = folders(base, "planted", planted(base))
    heads = ("learning rate x 20 after step 3", "KL left in step", "first alarm", "rule", "blame")
    table("planted", heads, [row_of(name, folder) for name, folder in leaving.items()])
    found = {name: judge_run(flowrl.open(folder)) for name, folder in folders(base, "healthy", healthy(base)).items()}
    fired = [(name, str(alarm.step), alarm.rule, alarm.message) for name, alarms in found.items() for alarm in alarms]
    table(f"{len(fired)} alarms in {len(found)} healthy runs", ("run", "step", "rule", "message"), fired)


if __name__ == "__main__":
    main()
