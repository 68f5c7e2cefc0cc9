"""Every prompt over the steps that sampled it, and the answers to one prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from flowrl.look.page.plain import messages_of, plain_text, prompt_text, short
from flowrl.look.page.rows import texts_of
from flowrl.look.recorded_run import RecordedRun

TRAINING = "training"
"""The rows of the training steps; other sources are named after a validation."""
_TEXT_STEPS = 40
_ANSWERS = 60


def prompts(run: RecordedRun, of: str | None = None) -> dict[str, Any]:
    """Every prompt with its mean score at each step that sampled it, and what became of it.

    Args:
        of: `TRAINING` or the name of a validation. By default the first validation, which asks the same prompts again.
    """
    held = run.predictions
    names = list(dict.fromkeys(held["validation"].to_pylist())) if "validation" in held.column_names else []
    of = of or (names or [TRAINING])[0]
    attempts, texts = _trained(run) if of == TRAINING else _held_out(held, of)
    values = [score for scores in attempts.values() for score in scores.values()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    bar = (low + high) / 2
    found = [_prompt(prompt, scores, bar, texts) for prompt, scores in attempts.items()]
    steps = sorted({step for scores in attempts.values() for step in scores})
    every = min((b - a for a, b in zip(steps, steps[1:], strict=False)), default=1) if of != TRAINING else None
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
        "basis": f"{len(found)} prompts, {sum(map(len, attempts.values()))} attempts. Solved: a mean score of {short(bar)} "
        f"or more, half of the range of scores from {short(low)} to {short(high)}.",
    }


def _prompt(prompt: Any, scores: Mapping[int, float], bar: float, texts: Mapping[Any, str]) -> dict[str, Any]:
    solved = [step for step, score in scores.items() if score >= bar]
    latest = next(reversed(scores.values()))
    kind = "never" if not solved else "always" if len(solved) == len(scores) else "learned" if latest >= bar else "unlearned"
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


def _trained(run: RecordedRun) -> tuple[dict[Any, dict[int, float]], dict[Any, str]]:
    """Mean scores by prompt and step, and the prompts' texts as far as they were recorded."""
    table = run.rows()
    if not {"prompt", "score"} <= {*table.column_names}:
        return {}, {}
    key = "prompt" if table["prompt"].null_count < len(table) else "uid"
    means = table.group_by([key, "step"]).aggregate([("score", "mean")]).sort_by([(key, "ascending"), ("step", "ascending")])
    found: dict[Any, dict[int, float]] = {}
    columns = (means[name].to_pylist() for name in (key, "step", "score_mean"))
    for prompt, step, score in zip(*columns, strict=True):
        if score is not None and prompt is not None:
            found.setdefault(prompt, {})[step] = score
    return found, _texts(run, key, set(found))


def _texts(run: RecordedRun, key: str, wanted: set[Any]) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for step in list(reversed(run.steps))[:_TEXT_STEPS]:
        if wanted <= found.keys():
            break
        if texts := texts_of(run, step):
            table = run.rows(step)
            for prompt, row_id in zip(table[key].to_pylist(), table["row_id"].to_pylist(), strict=True):
                if prompt not in found and row_id in texts:
                    found[prompt] = prompt_text(texts[row_id]["prompt"])
    return found


def _held_out(held: pa.Table, of: str) -> tuple[dict[Any, dict[int, float]], dict[Any, str]]:
    sums: dict[Any, dict[int, list[float]]] = {}
    texts: dict[Any, str] = {}
    for one in _of(held, of):
        if one.get("score") is not None:
            sums.setdefault(one["uid"], {}).setdefault(one["step"], []).append(one["score"])
            texts.setdefault(one["uid"], prompt_text(_json(one["prompt"])))
    means = {uid: {step: sum(s) / len(s) for step, s in steps.items()} for uid, steps in sums.items()}
    return means, texts


def _of(held: pa.Table, of: str) -> list[dict[str, Any]]:
    if "validation" not in held.column_names:
        return []
    return [one for one in held.to_pylist() if one["validation"] == of]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def prompt(run: RecordedRun, prompt: str, of: str) -> dict[str, Any]:
    """One prompt with its answers at every step, at most some of each."""
    answers = _answers_trained(run, prompt) if of == TRAINING else [o for o in _of(run.predictions, of) if o["uid"] == prompt]
    first: Mapping[str, Any] = next((one for one in answers if one.get("prompt") is not None), {})
    truth = first.get("ground_truth")
    return {
        "messages": messages_of(_json(first.get("prompt"))),
        "ground_truth": plain_text(truth) if isinstance(truth, str) or truth is None else _json(truth),
        "answers": [
            {"step": one["step"], "row_id": one["row_id"], "score": short(one.get("score")), "response": one.get("response")}
            for one in _spread(answers)
        ],
        "note": None if first else "The texts of this prompt were not recorded: Training(recording=Recording(texts=1)).",
    }


def _answers_trained(run: RecordedRun, prompt: str) -> list[dict[str, Any]]:
    table = run.rows(prompt=int(prompt)) if prompt.isdigit() else run.rows()
    found: list[dict[str, Any]] = table.to_pylist() if prompt.isdigit() else [o for o in table.to_pylist() if o["uid"] == prompt]
    by_step = {step: texts_of(run, step) for step in dict.fromkeys(one["step"] for one in found)}
    return [{**by_step[one["step"]].get(one["row_id"], {}), **_numbers(one, prompt)} for one in found]


def _numbers(one: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "prompt"}


def _spread(answers: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """At most `_ANSWERS`, the first and the last among them."""
    if len(answers) <= _ANSWERS:
        return answers
    return [answers[round(i * (len(answers) - 1) / (_ANSWERS - 1))] for i in range(_ANSWERS)]
