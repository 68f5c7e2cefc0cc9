"""Steps of edited jobs, predicted from a run of the job before the edit, against measurements.

Every base runs in one process for some steps, with a validation of fewer rows, and so does every edit of it. The edits
of `TUNED` were looked at while the model was written; those of `HELD_OUT` were fixed before it, and only score it.

    python benchmarks/edited.py                            # measure and score; on a quiet core, five minutes
    python benchmarks/edited.py {measure,score} [FOLDER]   # one of both; FOLDER is build/edited by default
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from generate import write_model
from harness import table
from harness.pinned import alone, digits
from placement import Case, few_held_out
from transformers.utils import logging

from flowrl import After, Graph, PromptData, Training
from flowrl.demo.task import write_dataset
from flowrl.graphs import dr_grpo, grpo, ppo, reinforce_plus_plus
from flowrl.operators import PassAtK, RolloutCorrection
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict

RESULTS = "edits.json"
STEPS = 6


@dataclass(frozen=True)
class Plain(Case):
    """A case without a correction, with nodes that an edit inserts."""

    insert: Mapping[str, After] | None = None

    def graph(self) -> Graph:
        """The graph of the algorithm, edited."""
        whole = self.algorithm(digits, n=self.group, max_new_tokens=self.tokens, **self.settings)
        return whole.edit(insert=self.insert) if self.insert else whole

    def but(self, **changes: Any) -> Plain:
        """With other parameters: of the case, or else of the algorithm."""
        own = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        rest = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, settings={**self.settings, **rest})


_GRPO = Plain(grpo, 3, 128, 8, 8, 24, {"kl_coef": 0.0})
_PPO = Plain(ppo, 2, 128, 32, 1, 20, {"mini_batch": 16})
TUNED = {
    "GRPO": (
        _GRPO,
        {
            "twice the tokens": _GRPO.but(tokens=48),
            "half the tokens": _GRPO.but(tokens=12),
            "two epochs": _GRPO.but(ppo_epochs=2),
            "mini-batches of 16": _GRPO.but(mini_batch=16),
            "n=16": _GRPO.but(group=16),
            "a reference": _GRPO.but(kl_coef=0.001),
            "a critic": _GRPO.but(algorithm=ppo),
        },
    ),
    "PPO": (
        _PPO,
        {
            "two epochs": _PPO.but(ppo_epochs=2),
            "twice the tokens": _PPO.but(tokens=40),
            "mini-batches of 8": _PPO.but(mini_batch=8),
            "no critic": _PPO.but(algorithm=reinforce_plus_plus),
        },
    ),
}
"""By name: a base, and edits of it."""

_NARROW = Plain(grpo, 4, 96, 12, 8, 20, {"kl_coef": 0.0, "mini_batch": 48})
_REFERENCE = Plain(grpo, 2, 192, 8, 8, 16, {"kl_coef": 0.001})
_CRITIC = Plain(ppo, 3, 128, 24, 1, 24, {"mini_batch": 12})
_DOCTOR = Plain(dr_grpo, 3, 96, 16, 4, 32, {})
HELD_OUT = {
    "GRPO": (
        _NARROW,
        {
            "twice the tokens": _NARROW.but(tokens=40),
            "half the tokens": _NARROW.but(tokens=10),
            "two epochs": _NARROW.but(ppo_epochs=2),
            "mini-batches of 16": _NARROW.but(mini_batch=16),
            "n=4": _NARROW.but(group=4),
            "a reference": _NARROW.but(kl_coef=0.001),
            "a critic": _NARROW.but(algorithm=ppo),
        },
    ),
    "GRPO with a reference": (
        _REFERENCE,
        {
            "three epochs": _REFERENCE.but(ppo_epochs=3),
            "mini-batches of 16": _REFERENCE.but(mini_batch=16),
            "no reference": _REFERENCE.but(kl_coef=0.0),
            "twice the tokens": _REFERENCE.but(tokens=32),
            "n=16": _REFERENCE.but(group=16),
            "pass@k": _REFERENCE.but(insert={"pass_at_k": After("reward", PassAtK(4))}),
        },
    ),
    "PPO": (
        _CRITIC,
        {
            "two epochs": _CRITIC.but(ppo_epochs=2),
            "mini-batches of 6": _CRITIC.but(mini_batch=6),
            "n=2": _CRITIC.but(group=2),
            "no critic": _CRITIC.but(algorithm=reinforce_plus_plus),
            "half the tokens": _CRITIC.but(tokens=12),
        },
    ),
    "Dr. GRPO": (
        _DOCTOR,
        {
            "a correction": _DOCTOR.but(
                insert={"correction": After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))}
            ),
            "two epochs of a reference": _DOCTOR.but(algorithm=grpo, ppo_epochs=2),
        },
    ),
}
"""Twenty edits."""


def run(base: Path, folder: Path, case: Plain, measured: bool) -> float:
    """The median seconds of a step; with a validation of fewer rows if its costs are used."""
    model = write_model(base / "models" / f"{case.layers}-{case.width}", case.layers, case.width)
    train, held = write_dataset(base / "data")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier measurement
    training = Training(
        case.job(model, "one process"),
        PromptData(str(train)),
        steps=STEPS,
        prompts=case.prompts,
        folder=str(folder),
        save_model=False,
        validation=few_held_out(held, case) if measured else (),
        alarms=(),
    )
    return median(line["timing/step"] for line in training.run([]).metrics[1:])


def measure(base: Path) -> None:
    """Run all bases and edits, and write the seconds of their steps."""
    found: dict[str, dict[str, float]] = {}
    for part, cases in {"tuned": TUNED, "held out": HELD_OUT}.items():
        for name, (before, edits) in cases.items():
            folder, key = base / part / name, f"{part}: {name}"
            found[key] = {"before": run(base, folder / "before", before, measured=True)}
            found[key] |= {edit: run(base, folder / edit, case, measured=False) for edit, case in edits.items()}
            print(key, found[key], flush=True)
    rounded = {key: {edit: round(seconds, 4) for edit, seconds in each.items()} for key, each in found.items()}
    (base / RESULTS).write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def score(base: Path) -> None:
    """Print the predicted step of each edit, with its interval, and how many intervals hold the measured one."""
    measured = json.loads((base / RESULTS).read_text(encoding="utf-8"))
    for part, cases in {"tuned": TUNED, "held out": HELD_OUT}.items():
        lines, held, widths = [], 0, []
        for name, (before, edits) in cases.items():
            costs = Costs.measured(base / part / name / "before")
            for edit, case in {"before": before, **edits}.items():
                job, seconds = case.job(str(base / "models"), "one process"), measured[f"{part}: {name}"][edit]
                one = predict(job.graph, None, case.prompts, costs)
                inside = one.low <= seconds <= one.high
                interval = f"{one.low:.3f} to {one.high:.3f}"
                error = f"{one.seconds / seconds - 1.0:+.0%}"
                lines.append([f"{name}: {edit}", f"{one.seconds:.3f}", interval, f"{seconds:.3f}", error, str(inside)])
                if edit != "before":
                    held += inside
                    widths.append((one.high - one.low) / 2.0 / one.seconds)
        heads = ["", "predicted", "80 %", "measured", "error", "inside"]
        table(f"{part}: {held} of {len(widths)} inside, median width ±{median(widths):.0%}", heads, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("measure", "score"), help="default: both")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/edited"), help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if given.part != "score":
        time.time = time.perf_counter = time.process_time  # other processes of the machine do not count
        with alone():
            measure(given.folder)
    if given.part != "measure":
        score(given.folder)
