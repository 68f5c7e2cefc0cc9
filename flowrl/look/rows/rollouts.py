"""Rollouts of a run: its rows with their texts, of training steps and of validations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.errors import DataError, ParameterError, offer
from flowrl.look.files import Record, listed
from flowrl.look.run_files import RunFiles

TRAINING = "training"
"""The origin of rows of training steps; those of a validation have its name."""


def origins(run: RunFiles) -> dict[str, list[int]]:
    """Where a run has rows from, and of which steps; the step of a validation is the number of steps before it."""
    found: dict[str, list[int]] = {}
    steps = run.row_steps or sorted({record["step"] for record in run.records("rollouts.jsonl")})
    if steps:
        found[TRAINING] = steps
    for record in run.predictions:
        known = found.setdefault(str(record.get("validation")), [])
        if record["step"] not in known:
            known.append(record["step"])
    return found


def rollouts(run: RunFiles, of: str | None = None, step: int | None = None) -> list[Record]:
    """The rows of a step with all that is recorded of them: their summaries, prompt, response and episode.

    Args:
        of: `TRAINING`, or the name of a validation; None is `TRAINING`, or else the first validation.
        step: None is the newest.

    Raises:
        DataError: the run has no rows, or none of this step.
        ParameterError: it has no such validation.
    """
    known = origins(run)
    if not known:
        raise DataError(
            f"{run.path} has no rows: neither row summaries nor predictions or logged rollouts. A run of this version "
            f"writes them to rows/, and those of a Validation(...) to predictions.jsonl.",
            code="look.not-recorded",
            path=run.path,
        )
    if of is not None and of not in known:
        raise ParameterError(
            f"{run.path} has no rows of {of!r}; {offer(of, known, 'it has those of')}",
            code="look.invalid-query",
            argument="of",
            found=of,
            known=list(known),
        )
    origin = next(iter(known)) if of is None else of
    number = known[origin][-1] if step is None else step
    if number not in known[origin]:
        raise DataError(
            f"{run.path} has no rows of {origin} in step {number}; it has those of the steps {listed(known[origin])}.",
            code="look.not-recorded",
            path=run.path,
            step=number,
        )
    if origin != TRAINING:
        return [{**row, "of": origin} for row in _logged(run.predictions, number) if row.get("validation") == origin]
    if not run.row_steps:
        return [{**row, "of": origin} for row in _logged(run.records("rollouts.jsonl"), number)]
    texts = run.texts(number)
    rows: list[dict[str, Any]] = run.rows(number).to_pylist()
    return [{**row, **_text(texts.get(str(row["row_id"]), {})), "of": origin} for row in rows]


def _text(text: Record) -> Record:
    """What is recorded of the text; the messages of the prompt under another name than its position."""
    return {"messages" if key == "prompt" else key: value for key, value in text.items()}


def _logged(found: Sequence[Record], step: int) -> list[Record]:
    return [_text(record) for record in found if record["step"] == step]
