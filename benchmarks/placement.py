"""The best place of a job, predicted from costs measured in one process, against measurements of every place.

Each of twelve jobs runs at four places: in one process, on two ranks, split in two slots, and split with a lag. The
process of a slot is pinned to a core, computes with one thread, and all places of a job are open at once and alternate
in runs of a few steps, because the speed of a shared machine varies. `measure` writes medians and quartiles of
`RUNS` runs; `score` predicts every place from a run in one process and chooses the fastest. A choice is right if its
measured time is within 5 % of the best. A job whose best and worst place do not differ by 15 % beyond their quartiles
shows nothing, and a reserve replaces it.

    python benchmarks/placement.py                            # measure and score; on two quiet cores, a minute a job
    python benchmarks/placement.py measure [FOLDER [JOB ...]]   # FOLDER is build/placement by default
    python benchmarks/placement.py score [FOLDER]

``placed/`` has the measurements of two quiet cores, what `score` printed, and what it printed of the first measurement,
with the model of that time (``places-before.txt``).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generate import write_model
from harness import table
from harness.pinned import Seconds, alone, digits, interleaved, opened
from transformers.utils import logging

from flowrl import After, Colocate, Graph, PromptData, Split, Training, Validation
from flowrl.backends import AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo.task import write_dataset
from flowrl.graphs import dr_grpo, grpo, ppo
from flowrl.operators import RolloutCorrection
from flowrl.run.engine.timeline import Timeline
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.measured.machine import Elsewhere, Machine, measured, weights_of
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.job import Job

RESULTS = "places.json"
RUNS, STEPS = 5, 4
SOURCE_STEPS = 10
RIGHT, APART, COUNTED = 1.05, 1.15, 12
PLACES = {"one process": (None, 1, 0), "two ranks": (Colocate(gpus=2, deadline=30), 2, 0)} | {
    "split" + f", lag {lag}" * bool(lag): (Split(train=1, rollout=1, deadline=30), 1, lag) for lag in (0, 1)
}
"""By name: the place, ranks of every role, and the lag."""


@dataclass(frozen=True)
class Case:
    """A job: an algorithm, a random Llama, and the rows of a step."""

    algorithm: Callable[..., Graph]
    layers: int
    width: int
    prompts: int
    group: int
    tokens: int
    settings: Mapping[str, Any]
    at_once: int = 256

    def graph(self) -> Graph:
        """The graph, corrected for older weights at every lag, so that all places run the same nodes."""
        whole = self.algorithm(digits, n=self.group, max_new_tokens=self.tokens, **self.settings)
        after = "whiten" if "whiten" in whole.nodes else "group_advantage"
        return whole.edit(insert={"correction": After(after, RolloutCorrection("token", "truncate", high=2.0))})

    def job(self, model: str, where: str) -> Job[Any]:
        """The job at a place."""
        place, ranks, lag = PLACES[where]
        graph = self.graph().edit(lag=lag)
        engines: dict[str, Any] = {
            "actor": TorchTrainer(model, AdamW(lr=1e-6), ranks=ranks),
            "ref": TorchScorer(model, ranks=ranks),
            "critic": TorchCritic(model, AdamW(lr=1e-6), ranks=ranks),
            "rollout": TorchRollout(model, max_rows=self.at_once, ranks=ranks),
        }
        return graph.bind(**{role: engines[role] for role in graph.roles()}, place=place)


CASES = {
    "GRPO, small": Case(grpo, 2, 64, 16, 8, 24, {"kl_coef": 0.0, "mini_batch": 64}),
    "GRPO": Case(grpo, 4, 128, 12, 8, 28, {"kl_coef": 0.0}),
    "GRPO with a reference": Case(grpo, 4, 128, 8, 8, 24, {"mini_batch": 32}),
    "GRPO, wide": Case(grpo, 2, 384, 4, 8, 16, {"kl_coef": 0.0}),
    "GRPO, deep": Case(grpo, 10, 64, 8, 4, 24, {"kl_coef": 0.0}),
    "GRPO, long": Case(grpo, 2, 128, 4, 8, 96, {"kl_coef": 0.0}),
    "GRPO, three epochs": Case(grpo, 3, 128, 8, 8, 20, {"kl_coef": 0.0, "ppo_epochs": 3}),
    "GRPO, small mini-batches": Case(grpo, 4, 128, 8, 8, 16, {"kl_coef": 0.0, "mini_batch": 8}),
    "GRPO, few rows at once": Case(grpo, 2, 128, 16, 8, 24, {"kl_coef": 0.0}, 32),
    "Dr. GRPO, short": Case(dr_grpo, 2, 256, 24, 8, 6, {}),
    "PPO": Case(ppo, 2, 128, 48, 1, 24, {"mini_batch": 24}),
    "PPO, wide": Case(ppo, 2, 256, 24, 1, 12, {}),
    "reserve: GRPO of many rows": Case(grpo, 2, 96, 48, 8, 12, {"kl_coef": 0.0}),
    "reserve: PPO, deep": Case(ppo, 6, 96, 24, 1, 20, {}),
    "reserve: GRPO, wide and two epochs": Case(grpo, 3, 320, 4, 8, 12, {"kl_coef": 0.0, "ppo_epochs": 2}),
    "reserve: GRPO, longest": Case(grpo, 3, 64, 4, 4, 160, {"kl_coef": 0.0}),
}
"""The first twelve that separate count, in this order."""

MACHINE = {
    "machine, small": Case(grpo, 2, 96, 10, 6, 20, {"mini_batch": 30}),
    "machine, large": Case(grpo, 5, 224, 6, 6, 14, {"mini_batch": 18}),
}
"""Jobs that measure what places cost on this machine; they are not scored."""


def measure(base: Path, name: str, case: Case) -> dict[str, Any]:
    """Seconds of a step at each place, and the runs whose costs predict them."""
    model = write_model(base / "models" / f"{case.layers}-{case.width}", case.layers, case.width)
    train, held = write_dataset(base / "data")
    data = PromptData(str(train))
    jobs = {where: case.job(model, where) for where in PLACES if name in MACHINE or where != "split"}
    with opened(jobs, data) as steps:
        with alone():  # here, since Ray takes its part of the machine from now on
            source(base, name, "one process", jobs["one process"], case, data, few_held_out(held, case))
        runs = interleaved(steps, case.prompts, RUNS, STEPS)
        for where, one in steps.items():
            one.steps.timeline.save(base / "runs" / name / f"{where}.json")
    seconds = {where: Seconds.of(found) for where, found in runs.items()}
    print(name, *(f"{where} {one.median:.3f}" for where, one in seconds.items()), sep=" | ", flush=True)
    return {where: [round(number, 4) for number in one] for where, one in seconds.items()}


def few_held_out(held: Path, case: Case) -> Validation:
    """A validation of a quarter of the prompts and half of the group, whose rows differ from those of a step."""
    few = held.with_name(f"held-{case.prompts}.jsonl")
    few.write_text("".join(held.read_text().splitlines(True)[: max(case.prompts // 4, 2)]))
    return Validation(PromptData(str(few)), every=2, changes={"repeat.n": max(case.group // 2, 1)})


def source(base: Path, name: str, where: str, job: Job[Any], case: Case, data: PromptData, check: Validation) -> None:
    """Run a short training, which a user would have."""
    folder = str(base / "runs" / name / where)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier measurement
    Training(
        job,
        data,
        steps=SOURCE_STEPS,
        prompts=case.prompts,
        folder=folder,
        save_model=False,
        validation=check,
        alarms=(),
    ).run([])


def apart(places: Mapping[str, Iterable[float]]) -> bool:
    """Whether the best and the worst place differ by 15 % beyond their quartiles."""
    seconds = sorted(Seconds(*found) for found in places.values())
    return seconds[-1].low > APART * seconds[0].high


def machine_of(base: Path) -> Machine:
    """The machine, from the jobs that are not scored."""
    found = []
    for name, case in MACHINE.items():
        runs = base / "runs" / name
        weights = weights_of([base / "models" / f"{case.layers}-{case.width}"])
        alone = Costs.measured(runs / "one process")
        elsewhere = (where for where, (place, _, _) in PLACES.items() if place is not None)
        found += [Elsewhere(Timeline.load(runs / f"{where}.json"), alone, weights) for where in elsewhere]
    return measured(found)


def score(base: Path) -> None:
    """Print the measured and the predicted seconds at each place, and whether the choice is right."""
    results = json.loads((base / RESULTS).read_text(encoding="utf-8"))
    machine, lines = machine_of(base), []
    print(machine)
    for name, case in CASES.items():
        if name not in results or not apart(results[name]):
            continue
        costs = Costs.measured(base / "runs" / name / "one process").on(machine)
        predicted = {}
        for where in results[name]:
            job = case.job(str(base / "models" / f"{case.layers}-{case.width}"), where)
            predicted[where] = predict(job.graph, job.place, case.prompts, costs).seconds
        seconds = {where: found[0] for where, found in results[name].items()}
        chosen = min(predicted, key=predicted.__getitem__)
        right = seconds[chosen] <= RIGHT * min(seconds.values())
        each = [f"{predicted[where]:.3f} / {seconds[where]:.3f}" for where in seconds]
        lines.append([name, *each, chosen, "right" if right else "wrong"])
    lines = lines[:COUNTED]
    title = f"seconds of a step, predicted / measured: {sum(line[-1] == 'right' for line in lines)} of {len(lines)}"
    table(title, ["", *(where for where in PLACES if where != "split"), "chosen", ""], lines)


def measure_all(base: Path, chosen: Iterable[str]) -> None:
    """Measure jobs, and add them to the results."""
    results = base / RESULTS
    for name in chosen or [*MACHINE, *CASES]:
        known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
        known[name] = measure(base, name, {**MACHINE, **CASES}[name])
        results.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("measure", "score"), help="default: both")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/placement"), help="default: %(default)s")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="jobs to measure (default: all)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if given.part != "score":
        measure_all(given.folder, given.jobs)
    if given.part != "measure":
        score(given.folder)
