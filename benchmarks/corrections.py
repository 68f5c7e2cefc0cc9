"""How much lag each correction tolerates: one task, one model, one budget; only the lag and the correction differ.

    python benchmarks/corrections.py                                     # five corrections, four lags, three seeds
    python benchmarks/corrections.py --methods none,truncated --lags 0,4 --seeds 0

The task is the demo's, addition of two digits, at a learning rate that moves the policy far in every step, so that rows
are clearly off-policy after a lag of a few steps. Everything runs in one process, where a lag costs memory and saves no
time. Results are stored in ``<folder>/<method>-<lag>-<seed>.json``; runs with a stored result of the same settings are
skipped, so an interrupted benchmark resumes. At the end it prints the tables of docs/evidence/corrections.md and writes
``<folder>/corrections.svg``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from harness.curves import spread
from harness.kept import Point, Result, add_numbers, kept_result, parsed, parser_of
from harness.pictures import panels, save
from transformers.utils import logging

from flowrl import After, Graph, PromptData, Training, Validation
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.graphs import grpo
from flowrl.operators import RolloutCorrection
from flowrl.schedules import Constant

ROWS = 128  # sampled answers per step
GROUP = 8
MINI_BATCH = 32  # rows per optimizer step
STEPS = 16
EVERY = 4  # steps between validations
LEARNING_RATE, WARM_UP = 4e-4, 10
LEVEL = 0.85  # held-out accuracy, for the column of steps to reach it
LAGS = (0, 1, 2, 4)
NOT_CORRECTED = "the benchmark measures the effect of a lag without a correction"

WEIGHTS = {
    "truncated": RolloutCorrection.preset("truncate"),
    "masked": RolloutCorrection.preset("icepop"),
    "decoupled": RolloutCorrection("token", "truncate", high=1e9),  # unbounded: ratios are at most exp(20)
}
METHODS = ("none", "to_rollout", *WEIGHTS)
WHY = {
    "rollout/kl": "KL, nats",
    "actor/pg_clipfrac": "clipped",
    "rollout_corr/bounded": "out of bounds",
    "rollout_corr/ess": "effective rows",
}


def graph_of(method: str, lag: int) -> Graph:
    """GRPO on answers sampled with the weights of `lag` steps before.

    - ``none``: no correction; the loss's ratio is to the trainer's log-probs at the start of the step.
    - ``to_rollout``: PPO's ratio is to the log-probs of the engine.
    - ``truncated``, ``masked``, ``decoupled``: as ``none``, with tokens weighted by trainer / engine: at most 2;
      0 outside 0.5 to 5; and unbounded (decoupled PPO: Hilton et al. 2021, arXiv:2110.00641).
    """
    graph = grpo(score_and_thinking, n=GROUP, max_new_tokens=28, mini_batch=MINI_BATCH, kl_coef=0.0).edit(lag=lag)
    if method == "none":
        return graph.edit(allow={"FR006": NOT_CORRECTED} if lag else {})
    if method == "to_rollout":
        return graph.edit(set={"update_actor.loss.ratio_to": "rollout"})
    return graph.edit(insert={"correction": After("group_advantage", WEIGHTS[method])})


def training(graph: Graph, model: Path, data: Path, folder: Path, steps: int, seed: int) -> Training:
    """The training of one graph; the engine has its own copy of the weights, as a lag requires."""
    optimizer = AdamW(lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return Training(
        graph.bind(
            actor=TorchTrainer(str(model), optimizer, Constant(1.0, warmup=WARM_UP)), rollout=TorchRollout(str(model))
        ),
        PromptData(data / "train.jsonl"),
        steps=steps,
        prompts=ROWS // GROUP,
        seed=seed,
        validation=Validation(PromptData(data / "heldout.jsonl"), every=EVERY, changes={"repeat.n": 1}, batch=500),
        folder=str(folder),
        save_model=False,
    )


def points_of(steps: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]]) -> list[Point]:
    """One point per validation: the accuracy, and the metrics of the steps since the previous one."""
    ends = [int(point["step"]) for point in validations]
    points: list[Point] = [{"step": ends[0], "accuracy": validations[0]["val/reward/mean"]}]
    for (begin, end), point in zip(pairwise(ends), validations[1:], strict=True):
        since = steps[begin:end]
        means = {key: statistics.fmean(step[key] for step in since) for key in WHY if key in since[0]}
        largest = max(step["rollout/logp_diff_max"] for step in since)
        points.append({"step": end, "accuracy": point["val/reward/mean"], "largest": math.exp(largest), **means})
    return points


def result_of(method: str, lag: int, base: Path, seed: int, steps: int) -> Result:
    """The result of a method with a lag, stored or new."""
    graph = graph_of(method, lag)
    run = {"rows": ROWS, "every": EVERY, "rate": LEARNING_RATE, "warm_up": WARM_UP}
    settings = {"seed": seed, "graph": graph.fingerprint(), **run}

    def points(folder: Path) -> list[Point]:
        model = build(base / f"model-seed{seed}", seed)
        found = training(graph, model, base / "data", folder, steps, seed).run()
        return points_of(found.metrics, found.validations)

    path = base / f"{method}-{lag}-{seed}.json"
    return kept_result(path, {"method": method, "lag": lag}, settings, steps, points)


def by_case(results: Iterable[Result]) -> dict[tuple[str, int], list[Result]]:
    """The results of each method with each lag, in the order of their seeds."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in sorted(results, key=lambda result: result["settings"]["seed"]):
        found.setdefault((result["method"], result["lag"]), []).append(result)
    return found


def accuracy_table(results: Sequence[Result]) -> str:
    """Final held-out accuracy, in Markdown: a row per method, a column per lag; mean, lowest and highest seed.

    It is the mean of the last two validations, because the policy fluctuates from step to step.
    """
    cases = by_case(results)
    lags = sorted({lag for _, lag in cases})
    rows = [["", *(f"lag {lag}" for lag in lags)], ["---"] * (len(lags) + 1)]
    for method in dict.fromkeys(method for method, _ in cases):
        ends = [[_end(run) for run in cases.get((method, lag), [])] for lag in lags]
        rows.append([f"`{method}`", *(spread(of_lag) if of_lag else "" for of_lag in ends)])
    return _markdown(rows)


def reasons_table(results: Sequence[Result]) -> str:
    """Diagnostics, in Markdown: a row per method and lag; steps to the level for each seed, and means over seeds."""
    heads = [f"steps to {LEVEL}", "best", *WHY.values(), "largest ratio"]
    rows = [["", "lag", *heads], ["---"] * (len(heads) + 2)]
    for (method, lag), runs in sorted(by_case(results).items(), key=lambda case: case[0][1]):
        points = [point for run in runs for point in run["points"][1:]]
        best = statistics.fmean(max(point["accuracy"] for point in run["points"]) for run in runs)
        means = [[point[key] for point in points if key in point] for key in WHY]
        cells = [f"{statistics.fmean(values):.3f}" if values else "" for values in means]
        largest = f"{max(point['largest'] for point in points):.3g}"
        rows.append([f"`{method}`", str(lag), ", ".join(map(_reached, runs)), f"{best:.3f}", *cells, largest])
    return _markdown(rows)


def _end(run: Result) -> float:
    return statistics.fmean(point["accuracy"] for point in run["points"][-2:])


def _reached(run: Result) -> str:
    """Steps until the first validation with an accuracy of at least `LEVEL`."""
    return next((str(point["step"]) for point in run["points"] if point["accuracy"] >= LEVEL), "never")


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw held-out accuracy over steps as SVG, a panel per lag: means, with bands over the seeds."""
    cases = by_case(results)
    lags = sorted({lag for _, lag in cases})
    figure, axes = panels(1, len(lags), sharey=True)
    for one, lag in zip(axes[0], lags, strict=True):
        for number, method in enumerate(METHODS):
            if not (runs := cases.get((method, lag))):
                continue
            points = list(zip(*(run["points"] for run in runs), strict=True))
            steps = [at[0]["step"] for at in points]
            found = [[point["accuracy"] for point in at] for at in points]
            one.plot(steps, list(map(statistics.fmean, found)), label=method, color=f"C{number}", linewidth=1.4)
            one.fill_between(steps, list(map(min, found)), list(map(max, found)), color=f"C{number}", alpha=0.1)
        one.set_title(f"lag {lag}", fontsize=10)
        one.set_xlabel("steps", fontsize=8)
    axes[0][0].set_ylabel("held-out accuracy, sampled", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has no stored result, then print the tables and draw the curves."""
    parser = parser_of(__doc__, METHODS, STEPS, EVERY, "runs/corrections")
    add_numbers(parser, "--lags", LAGS)
    options = parsed(parser, arguments, METHODS, EVERY)
    torch.set_num_threads(1)  # more threads are slower at this size
    logging.disable_progress_bar()
    if not (options.folder / "data" / "heldout.jsonl").exists():
        write_dataset(options.folder / "data")
    results = []
    for seed in options.seeds:
        for lag in options.lags:
            for method in options.methods:
                results.append(result := result_of(method, lag, options.folder, seed, options.steps))
                curve = " ".join(f"{point['accuracy']:.3f}" for point in result["points"])
                print(f"{method}, lag {lag}, seed {seed}: {curve}", flush=True)
    print(f"\n{accuracy_table(results)}\n\n{reasons_table(results)}")
    draw(results, options.folder / "corrections.svg")


if __name__ == "__main__":
    main()
