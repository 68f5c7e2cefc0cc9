"""The demo: GRPO and PPO train a warm-started model that can think but rarely does.

`run_demo` is the full demo; `run_quick` trains by GRPO only, for a few steps.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from flowrl.backends import VLLM, AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.sources.prompts import PromptData
from flowrl.demo.curve import bars, svg
from flowrl.demo.model import STEPS, build
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.draw.html import page
from flowrl.edits.diff import Diff
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.report.terminal import Terminal
from flowrl.run.training.job import Job
from flowrl.run.training.loop import Run
from flowrl.run.training.training import Training
from flowrl.run.validation.validation import Validation
from flowrl.schedules import Constant

ROWS = 256
GROUP = 8
SOLVED = 0.95
"""A run ends at this share of right answers to held-out prompts, sampled."""

QUICK_STEPS = 12
QUICK_EVERY = 3
"""Steps of the quick demo, and between its validations."""

CURVES = {
    "reward/mean": "reward while training",
    "val/reward/mean": "held-out accuracy, sampled",
    "val/reward/thinks": "share of answers that think",
    "response_length/mean": "tokens per answer",
    "kl/ref": "KL to the reference, nats a token",
}


def graphs() -> tuple[Graph, Graph]:
    """GRPO and PPO for the demo's task, with two optimizer steps per step."""
    settings = {"max_new_tokens": 28, "mini_batch": ROWS // 2, "kl_coef": 0.001}
    return grpo(score_and_thinking, n=GROUP, **settings), ppo(score_and_thinking, **settings)  # type: ignore[call-overload]


def training(graph: Graph, model: Path, data: Path, folder: Path, steps: int, seed: int, *, every: int = 5) -> Training:
    """The training of one of the demo's graphs, with `ROWS` responses per step and a sampled validation."""
    warmup = Constant(1.0, warmup=10)
    engines: dict[str, Any] = {
        "actor": TorchTrainer(str(model), AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0), warmup),
        "ref": TorchScorer(str(model)),
        "critic": TorchCritic(str(model), AdamW(lr=1e-3, betas=(0.9, 0.95))),
        "rollout": TorchRollout(),
    }
    rows_per_prompt = graph["repeat"].rows_factor
    return Training(
        graph.bind(**{role: engines[role] for role in graph.roles()}),
        PromptData(data / "train.jsonl"),
        steps=steps,
        prompts=ROWS // rows_per_prompt,
        seed=seed,
        # Sampled rather than greedy: greedy accuracy jumps within a few steps and then hides what is learned.
        validation=Validation(
            PromptData(data / "heldout.jsonl"), every=every, changes={"repeat.n": 1}, batch=500, goal=SOLVED
        ),
        folder=str(folder),
    )


def run_demo(out: Console, folder: Path, steps: int, seed: int) -> dict[str, Run]:
    """Build the model, train it by GRPO and PPO, and print the results; returns the run of each algorithm, by name.

    `folder` holds data, warm-started model, runs and plot. `steps` is the maximum for each algorithm; a run ends when
    the task is solved.
    """
    torch.set_num_threads(1)  # more threads are slower at this size
    started = time.perf_counter()
    runs = _new_folder(folder)
    out.print("[bold]1. Warm start: a model that sometimes thinks[/]")
    data = write_dataset(folder / "data", seed)[0].parent
    model = _warm_start(out, folder / f"model-seed{seed}", seed)

    by_group, by_critic = graphs()
    out.print("\n[bold]2. GRPO as a graph[/]\n")
    for node in by_group.nodes.values():
        out.print(f"  {node.name:<16} <- {', '.join(node.sources) or 'prompts'}", markup=False)
    _picture(out, by_group, runs / "grpo.html")
    finished = {"grpo": training(by_group, model, data, runs / "grpo", steps, seed).run([Terminal(out)])}

    out.print("\n[bold]3. PPO as an edit of the graph[/]\n")
    by_edit = by_group.diff(by_critic)
    out.print(str(by_edit), markup=False)
    _picture(out, by_edit, runs / "grpo-to-ppo.html")
    job = training(by_critic, model, data, runs / "ppo", steps, seed)
    finished["ppo"] = job.run([Terminal(out)])

    out.print("\n[bold]4. Another rollout engine as an edit[/]\n")
    _show_swap(out, job.job, model)

    out.print("\n[bold]5. Results[/]\n")
    _show_samples(out, finished)
    _show_table(out, finished)
    plot(finished, runs / "curves.png")
    out.print(
        f"\nCurves: {runs / 'curves.png'}. Runs: {runs}. Model and data: {folder}. "
        f"Total: {time.perf_counter() - started:.0f} s.",
        markup=False,
    )
    return finished


def run_quick(out: Console, folder: Path, steps: int, seed: int) -> Run:
    """Build the demo's model, train it by GRPO for a few steps, and print the learning curve.

    The run and ``curve.svg`` are in ``quick/001``, ``quick/002``, … of `folder`; all else is as in `run_demo`.
    """
    torch.set_num_threads(1)  # as in `run_demo`
    started = time.perf_counter()
    runs = _new_folder(folder / "quick")
    out.print("[bold]1. Warm start: a model that sometimes thinks[/]")
    data = write_dataset(folder / "data", seed)[0].parent
    model = _warm_start(out, folder / f"model-seed{seed}", seed)
    out.print("\n[bold]2. Training with GRPO[/]\n")
    run = training(graphs()[0], model, data, runs / "grpo", steps, seed, every=QUICK_EVERY).run([Terminal(out)])
    out.print("\n[bold]3. Results[/]: fraction of right answers to held-out prompts, sampled\n")
    heldout = [(int(record["step"]), record["val/reward/mean"]) for record in run.validations]
    trained = [(int(record["step"]), record["reward/mean"]) for record in run.metrics]
    out.print(bars(heldout), markup=False)
    curves = {"held-out prompts": heldout, "training prompts": trained}
    (runs / "curve.svg").write_text(svg("Share of right answers", curves), encoding="utf-8")
    seconds = time.perf_counter() - started
    out.print(
        f"\nCurve: {runs / 'curve.svg'}. Run: {run.folder}. Total: {seconds:.0f} s."
        "\nThe full demo also trains with PPO: flowrl demo",
        markup=False,
    )
    return run


def _new_folder(folder: Path) -> Path:
    """Create the first of ``001``, ``002``, … in `folder` that does not exist."""
    number = next(n for n in itertools.count(1) if not (folder / f"{n:03d}").exists())
    try:
        (created := folder / f"{number:03d}").mkdir(parents=True)
    except OSError as error:
        raise ParameterError(
            f"The folder {folder} cannot be written ({error.strerror}). Pass another one: flowrl demo --folder FOLDER.",
            code="data.unwritable-file",
            path=folder,
        ) from error
    return created


def _picture(out: Console, subject: Graph | Diff, path: Path) -> None:
    path.write_text(page(subject), encoding="utf-8")
    out.print(f"\nPicture: {path} (open it in a browser).\n", markup=False)


def _show_swap(out: Console, job: Job[Graph], model: Path) -> None:
    """Print the diff of replacing the rollout engine; loads nothing."""
    swapped = job.edit(bind={"rollout": VLLM(str(model))})
    out.print(str(job.graph.diff(swapped.graph)), markup=False)
    out.print(
        "\nNothing else changes: Sync sends the weights to vLLM and verifies that they arrive. To run it: make engines"
        "\nthen ENGINE=vllm .venv-engines/bin/flowrl run examples/think_by_engine.py:training",
        markup=False,
    )


def _warm_start(out: Console, folder: Path, seed: int) -> Path:
    bar = Progress(TextColumn("warm start"), BarColumn(bar_width=24), TextColumn("{task.fields[loss]}"), console=out)
    with bar:
        task = bar.add_task("warm start", total=STEPS, loss="")
        model = build(
            folder,
            seed,
            lambda step, total, loss: bar.update(task, completed=step, total=total, loss=f"loss {loss:.3f}"),
        )
    out.print(f"Model: {model}")
    return model


def _show_samples(out: Console, runs: Mapping[str, Run]) -> None:
    table = Table(
        "prompt",
        *(f"{name} {when}" for name in runs for when in ("before", "after")),
        title="the same prompts",
    )
    columns = []
    for run in runs.values():
        records = [json.loads(line) for line in (run.folder / "predictions.jsonl").read_text().splitlines()]
        for when in (records[0]["step"], records[-1]["step"]):
            columns.append([record for record in records if record["step"] == when][:5])
    for answers in zip(*columns, strict=True):
        shown = [Text(a["response"], "green" if a["score"] == 1 else "red") for a in answers]
        table.add_row(Text(answers[0]["prompt"][-1]["content"]), *shown)
    out.print(table)


def _show_table(out: Console, runs: Mapping[str, Run]) -> None:
    table = Table(
        "",
        "accuracy",
        "thinks",
        "tokens per answer",
        "KL",
        "seconds",
        title="held-out prompts, sampled: before -> after",
    )
    for name, run in runs.items():
        first, last = run.validations[0], run.validations[-1]
        keys = ("val/reward/mean", "val/reward/thinks", "val/response_length/mean")
        cells = [f"{first[key]:.2f} -> {last[key]:.2f}" for key in keys]
        seconds = sum(step["timing/step"] for step in run.metrics)
        table.add_row(name, *cells, f"{run.metrics[-1]['kl/ref']:.3f}", f"{seconds:.0f}")
    out.print(table)


def plot(runs: Mapping[str, Run], path: Path) -> None:
    """Draw the curves of `CURVES` for every run into a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ParameterError(
            "The demo plots its curves with matplotlib, which is not installed. Run: pip install 'flowrl[demo]'.",
            code="package.not-installed",
        ) from error
    figure = Figure(figsize=(15, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, title) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for name, run in runs.items():
            records: Sequence[Mapping[str, float]] = run.validations if key.startswith("val/") else run.metrics
            axes.plot([r["step"] for r in records], [r[key] for r in records], label=name.upper())
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)
