"""Every prompt over the steps that sampled it, and the answers to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow.compute as pc

from flowrl.look.files import Record
from flowrl.look.page.plain import as_text, messages_of, prompt_text, short
from flowrl.look.page.watched import StepRows, WatchedRun

TRAINING = "training"
"""The rows of the training steps; other sources are named after a validation."""
_TEXT_STEPS = 40
_ANSWERS = 60


def prompts(run: WatchedRun, of: str | None = None) -> dict[str, Any]:
    """Every prompt with its mean score at each step that sampled it, and what became of it.

    Args:
        of: `TRAINING` or the name of a validation. By default the first validation, which asks the same prompts again.
    """
    held = run.predictions
    names = list(dict.fromkeys(str(one["validation"]) for one in held if "validation" in one))
    of = of or (names or [TRAINING])[0]
    attempts, texts = _trained(run) if of == TRAINING else _held_out(held, of)
    values = [score for scores in attempts.values() for score in scores.values()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    bar = (low + high) / 2
    found = [_prompt(prompt, scores, bar, texts) for prompt, scores in attempts.items()]
    steps = sorted({step for scores in attempts.values() for step in scores})
    every = min((b - a for a, b in pairwise(steps)), default=1) if of != TRAINING else None
    return {
        "of": of,
        "sources": [*names, TRAINING],
        "unit": "step",
        "first": steps[0] if steps else 0,
        "last": steps[-1] if steps else 0,
        "every": every,
        "low": short(low),
        "high": short(high),
        "prompts": found,
        "counts": dict(Counter(one["kind"] for one in found)),
        "basis": f"{len(found)} prompts, {len(values)} attempts. Solved: a mean score of {bar:g} or more, the middle "
        f"of the scores from {low:g} to {high:g}.",
    }


def _prompt(prompt: Any, scores: Mapping[int, float], bar: float, texts: Mapping[Any, str]) -> dict[str, Any]:
    solved = [step for step, score in scores.items() if score >= bar]
    latest = list(scores.values())[-1]
    kind = (
        "never"
        if not solved
        else "always"
        if len(solved) == len(scores)
        else "learned"
        if latest >= bar
        else "unlearned"
    )
    return {
        "prompt": prompt,
        "text": texts.get(prompt, "")[:400],
        "steps": list(scores),
        "scores": [short(score) for score in scores.values()],
        "attempts": len(scores),
        "first": solved[0] if solved else None,
        "latest": short(latest),
        "kind": kind,
    }


def _trained(run: WatchedRun) -> tuple[dict[Any, dict[int, float]], dict[Any, str]]:
    """Mean scores by prompt and step, and the prompts' texts as far as they were recorded."""
    table = run.all_rows
    if not {"prompt", "score"} <= {*table.column_names}:
        return {}, {}
    key = "prompt" if table["prompt"].null_count < len(table) else "uid"
    means = (
        table.group_by([key, "step"])
        .aggregate([("score", "mean")])
        .sort_by([(key, "ascending"), ("step", "ascending")])
    )
    found: dict[Any, dict[int, float]] = {}
    columns = (means[name].to_pylist() for name in (key, "step", "score_mean"))
    for prompt, step, score in zip(*columns, strict=True):
        if score is not None and prompt is not None:
            found.setdefault(prompt, {})[step] = score
    return found, _texts(run, key, set(found))


def _texts(run: WatchedRun, key: str, wanted: set[Any]) -> dict[Any, str]:
    found: dict[Any, str] = {}
    steps = pc.unique(run.all_rows["step"]).to_pylist()
    for step in sorted(steps, reverse=True)[:_TEXT_STEPS]:
        if wanted <= found.keys():
            break
        of = StepRows(run.run, step)
        for row_id, one in of.rows.items() if of.texts else ():
            if one[key] not in found and row_id in of.texts:
                found[one[key]] = prompt_text(of.texts[row_id]["prompt"])
    return found


def _held_out(held: Sequence[Record], of: str) -> tuple[dict[Any, dict[int, float]], dict[Any, str]]:
    sums: dict[Any, dict[int, list[float]]] = {}
    texts: dict[Any, str] = {}
    for one in held:
        if one.get("validation") != of:
            continue
        if one.get("score") is not None:
            sums.setdefault(one["uid"], {}).setdefault(one["step"], []).append(one["score"])
            texts.setdefault(one["uid"], prompt_text(one.get("prompt")))
    means = {uid: {step: sum(s) / len(s) for step, s in steps.items()} for uid, steps in sums.items()}
    return means, texts


def prompt(run: WatchedRun, prompt: str, of: str) -> dict[str, Any]:
    """One prompt with its answers at every step, at most some of each."""
    answers = _answers_trained(run, prompt) if of == TRAINING else _predicted(run, prompt, of)
    first: Mapping[str, Any] = next((one for one in answers if one.get("prompt") is not None), {})
    truth = first.get("ground_truth")
    return {
        "messages": messages_of(first.get("prompt")),
        "ground_truth": None if truth is None else as_text(truth),
        "answers": [
            {
                "step": one["step"],
                "row_id": one["row_id"],
                "score": short(one.get("score")),
                "response": one.get("response"),
            }
            for one in _spread(answers)
        ],
        "note": None
        if first
        else "The texts of this prompt were not recorded: Training(recording=Recording(texts=1)).",
    }


def _predicted(run: WatchedRun, prompt: str, of: str) -> list[Record]:
    return [one for one in run.predictions if one.get("validation") == of and one["uid"] == prompt]


def _answers_trained(run: WatchedRun, prompt: str) -> list[Record]:
    table = run.all_rows
    mine = pc.equal(table["prompt"], int(prompt)) if prompt.isdigit() else pc.equal(table["uid"], prompt)
    found = _spread(table.filter(mine).to_pylist())
    by_step = {step: run.run.texts(step) for step in dict.fromkeys(one["step"] for one in found)}
    texts = [by_step[one["step"]].get(one["row_id"], {"prompt": None}) for one in found]
    return [{**one, **text} for one, text in zip(found, texts, strict=True)]


def _spread(answers: list[Record]) -> list[Record]:
    """At most `_ANSWERS`, the first and the last among them."""
    if len(answers) <= _ANSWERS:
        return answers
    return [answers[round(i * (len(answers) - 1) / (_ANSWERS - 1))] for i in range(_ANSWERS)]
