"""Results of `benchmarks/learning.py`: a table of accuracies, and curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from .kept import Result
from .pictures import panels, save

CONTROL = "grpo_on_shuffled_rewards"
PANELS = {
    "baselines and advantages": (
        "ppo",
        "reinforce_plus_plus",
        "grpo",
        "dr_grpo",
        "rloo",
        CONTROL,
    ),
    "losses": ("grpo", "gspo", "cispo", "dapo"),
    "DAPO and its parts": (
        "dapo",
        "dapo_without_clip_higher",
        "dapo_without_dynamic_sampling",
        "dapo_without_token_mean",
    ),
}


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each method, in the order of their seeds."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result["settings"]["seed"]):
        found.setdefault(result["method"], []).append(result)
    return found


def accuracies(runs: Sequence[Result], point: int) -> dict[int, float]:
    """The accuracy at one point of the curve, by seed."""
    return {run["settings"]["seed"]: run["points"][point]["accuracy"] for run in runs}


def differences(runs: Sequence[Result], others: Sequence[Result], point: int) -> list[float]:
    """Differences in accuracy to runs that started from the same model, by seed."""
    found, theirs = accuracies(runs, point), accuracies(others, point)
    return [found[seed] - theirs[seed] for seed in found if seed in theirs]


def spread(values: Iterable[float], sign: str = "") -> str:
    """Mean, lowest and highest: ``0.80 (0.78 to 0.81)``."""
    found = list(values)
    mean, low, high = statistics.mean(found), min(found), max(found)
    return f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def accuracy_table(results: Sequence[Result], against: str) -> str:
    """Markdown table with a row per method: mean, lowest and highest over seeds, early and at the end.

    Runs of one seed start from the same model, so differences to `against` are taken per seed.
    """
    methods = by_method(results)
    last = results[0]["points"]
    early = min(2, len(last) - 1)
    heads = ["method", f"after {last[early]['step']} steps", f"after {last[-1]['step']} steps", f"minus {against}"]
    rows = [[*heads, "answers sampled"], ["---"] * 5]
    for name, runs in methods.items():
        final = accuracies(runs, -1)
        ahead = differences(runs, methods.get(against, []), -1) if name != against else []
        rows.append(
            [
                f"`{name}`",
                spread(accuracies(runs, early).values()),
                spread(final.values()),
                spread(ahead, "+") if ahead else "",
                f"{statistics.mean(run['points'][-1]['answers'] for run in runs):,.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(results: Sequence[Result], path: Path, against: str) -> None:
    """Draw curves over the sampled answers, as SVG.

    Above, the mean accuracy of each method; below, its difference to `against` at the same step and seed: the mean,
    with a band from the lowest to the highest.
    """
    methods = by_method(results)
    shown = {title: [name for name in names if name in methods] for title, names in PANELS.items()}
    shown = {title: names for title, names in shown.items() if names}
    known = list(dict.fromkeys(name for names in PANELS.values() for name in names))
    figure, (above, below) = panels(2, len(shown), sharex=True, sharey="row")
    for upper, lower, (title, names) in zip(above, below, shown.items(), strict=True):
        for name in names:
            color = f"C{known.index(name) % 10}"
            points = list(zip(*(run["points"] for run in methods[name]), strict=True))
            answers = [statistics.mean(point["answers"] for point in at) / 1000 for at in points]
            means = [statistics.mean(point["accuracy"] for point in at) for at in points]
            upper.plot(answers, means, label=name.replace("_", " "), color=color, linewidth=1.4)
            ahead = [differences(methods[name], methods.get(against, []), i) for i in range(len(points))]
            if all(ahead) and name not in (against, CONTROL):
                lower.plot(answers, list(map(statistics.mean, ahead)), color=color, linewidth=1.4)
                low, high = list(map(min, ahead)), list(map(max, ahead))
                lower.fill_between(answers, low, high, color=color, alpha=0.12, linewidth=0)
        upper.set_title(title, fontsize=10)
        upper.legend(fontsize=7, frameon=False)
        lower.axhline(0.0, color="grey", linewidth=0.8)
        lower.set_xlabel("answers sampled, in thousands", fontsize=8)
    above[0].set_ylabel("held-out accuracy, sampled", fontsize=8)
    below[0].set_ylabel(f"difference to {against}", fontsize=8)
    save(figure, path)
