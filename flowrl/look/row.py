"""`RecordedRow` and `RecordedStep`: a row of a recorded step, and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from flowrl.columns import ColumnType
from flowrl.core.operators.symbols import Edge
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.draw.notebook import Html, block, colored, named, sparkline, table, visible
from flowrl.errors import DataError, offer
from flowrl.look.address import Address
from flowrl.look.files import Record
from flowrl.look.steps.step_reader import Recorded
from flowrl.run.recording.row_maps import axis_before, rows_before
from flowrl.run.recording.summaries import RowSummaries

SHOWN = 12
"""Metrics of a step that a notebook shows."""


class ReadsRows(Recorded, Protocol):
    """What is read of a run for a row or a step; see `flowrl.look.recorded_run.RecordedRun`."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> list[int]: ...
    @property
    def recorded_steps(self) -> list[int]: ...
    @property
    def alarms(self) -> list[Record]: ...
    @property
    def tokenizer(self) -> ChatTokenizer | None: ...
    def texts(self, step: int) -> dict[str, Record]: ...


@dataclass(frozen=True)
class RecordedRow:
    """A row of a recorded step: ``run.row("17[0/516/0#1]")``.

    Args:
        address: step and row.
        summary: its row of ``run.rows(step)``.
        text: prompt, response, ground truth and episode; empty if not recorded.
        tokens: by ``node.column``, the numbers of its tokens, without padding: arrays ``[tokens]``; empty if the
            columns of the step are not recorded.
        pieces: the text of each token of the response; ids if there is no tokenizer.
    """

    address: Address
    summary: Mapping[str, Any]
    text: Record
    tokens: Mapping[str, np.ndarray[Any, Any]]
    pieces: tuple[str, ...]

    def token_column(self, kind: str) -> str | None:
        """The last column of tokens whose name ends with `kind`, such as ``"advantages"``."""
        return next((name for name in reversed(list(self.tokens)) if name.endswith(f".{kind}")), None)

    def __repr__(self) -> str:
        score = self.summary.get("score")
        tokens = self.summary.get("response_tokens")
        response = visible(str(self.text.get("response", "")))
        return f"{self.address}: score {score}, {tokens} tokens\n{response[:400]}"

    def _repr_html_(self) -> str:
        numbers = {name: value for name, value in self.summary.items() if value is not None}
        parts = [f"<p>{part}</p>" for part in self._prompt()]
        name = self.token_column("advantages")
        known = [] if name is None else [float(value) for value in self.tokens[name]]
        values: list[float | None] = [*known, *[None] * len(self.pieces)][: len(self.pieces)]
        titles = [self._title(i) for i in range(len(self.pieces))]
        response = colored(self.pieces, values, titles) if self.pieces else Html("")
        return block(str(self.address), *parts, f"<p>{response}</p>", named(numbers))

    def _prompt(self) -> list[str]:
        messages = self.text.get("prompt") or []
        shown = [f"{m.get('role')}: {m.get('content')}" for m in messages if isinstance(m, dict)]
        return [colored([text], [None], [""]) for text in shown]

    def _title(self, token: int) -> str:
        found = {name: column[token] for name, column in self.tokens.items() if len(column) == len(self.pieces)}
        return ", ".join(f"{name} {float(value):.4g}" for name, value in found.items())


@dataclass(frozen=True)
class RecordedStep:
    """A step of a run: ``run.step(17)``.

    Args:
        address: the step.
        metrics: by name.
        before: the metrics of the steps up to this one, by name.
        alarms: that fired in it.
    """

    address: Address
    metrics: Mapping[str, float | None]
    before: Mapping[str, list[float | None]]
    alarms: tuple[Record, ...]

    @cached_property
    def _main(self) -> dict[str, float | None]:
        of_model = ("timing/", "throughput/", "total/", "step", "time", "sync/")
        return {name: value for name, value in self.metrics.items() if not name.startswith(of_model)}

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self._main.items() if value is not None)
        return f"{self.address}: {numbers}"

    def _repr_html_(self) -> str:
        rows = [(name, value, sparkline(self.before[name])) for name, value in list(self._main.items())[:SHOWN]]
        alarms = [(alarm.get("rule"), alarm.get("message")) for alarm in self.alarms]
        return block(str(self.address), table(rows), table(alarms) if alarms else "")


def row_of(run: ReadsRows, address: Address) -> RecordedRow:
    """The row at an address with step and row."""
    assert address.step is not None
    table = run.rows(address.step)
    ids = table["row_id"].to_pylist()
    if address.row not in ids:
        raise DataError(
            f"Step {address.step} of {run.path} has no row {address.row!r}; {offer(address.row, map(str, ids))}",
            code="look.not-recorded",
            path=run.path,
            step=address.step,
            found=address.row,
        )
    number = ids.index(address.row)
    summary = table.slice(number, 1).to_pylist()[0]
    tokens = _tokens(run, address.step, number) if address.step in run.recorded_steps else {}
    text = dict(run.texts(address.step).get(str(address.row), {}))
    return RecordedRow(address, summary, text, tokens, _pieces(run, tokens))


def step_of(run: ReadsRows, step: int) -> RecordedStep:
    """A step with metrics."""
    table, steps = run.metrics, run.steps
    if step not in steps:
        raise DataError(
            f"{run.path} has no step {step}; its steps with metrics are {min(steps, default=0)} to "
            f"{max(steps, default=0)}.",
            code="look.not-recorded",
            path=run.path,
            step=step,
        )
    last = steps.index(step)
    before = {name: table[name].to_pylist()[: last + 1] for name in table.column_names}
    alarms = tuple(alarm for alarm in run.alarms if alarm.get("step") == step)
    return RecordedStep(Address(run.name, step), {name: v[-1] for name, v in before.items()}, before, alarms)


def _tokens(run: ReadsRows, step: int, number: int) -> dict[str, np.ndarray[Any, Any]]:
    """The numbers of the tokens of a sampled row, in all columns on its responses."""
    graph, columns = run.graph, run.columns(step)
    summaries = RowSummaries(graph, 0)
    types = {**graph.types, **summaries.reported}
    of_graph = {edge: column for edge, column in columns.items() if edge in graph.types}
    mask = columns[summaries.edges["response_mask"]][number]
    length = int(np.flatnonzero(np.asarray(mask))[-1]) + 1 if bool(np.asarray(mask).any()) else 0
    found: dict[str, np.ndarray[Any, Any]] = {}
    at: dict[str, int | None] = {str(summaries.axis): number}
    for edge, column in columns.items():
        typed = types[edge]
        if len(typed.axes) != 2 or not isinstance(typed.type, ColumnType) or typed.type.axes[1] != "response":
            continue
        row = _row_in(run, typed.axes[0], step, of_graph, at)
        if row is not None:
            found[str(edge)] = np.asarray(column[row])[:length]
    return found


def _row_in(run: ReadsRows, axis: str, step: int, columns: Mapping[Edge, Any], at: dict[str, int | None]) -> int | None:
    """The number of the sampled row in an axis that gates made of it; None if it was dropped."""
    if axis not in at:
        before = axis_before(run.graph, axis)
        known = None if before is None else _row_in(run, before, step, columns, at)
        passed = None if known is None else rows_before(run.graph, axis, step - 1, columns)
        places = np.flatnonzero(passed == known) if passed is not None else np.array([])
        at[axis] = int(places[0]) if len(places) else None
    return at[axis]


def _pieces(run: ReadsRows, tokens: Mapping[str, np.ndarray[Any, Any]]) -> tuple[str, ...]:
    """The text of each token of the response."""
    ids = next((column for name, column in tokens.items() if name.endswith(".responses")), None)
    if ids is None:
        return ()
    tokenizer = run.tokenizer
    return tuple(str(i) if tokenizer is None else tokenizer.shown([int(i)]) for i in ids)
