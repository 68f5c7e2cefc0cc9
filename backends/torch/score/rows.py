"""Input rows of a model: the columns that it reads, their checks, and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.data.segments import begins
from flowrl.errors import DataError
from flowrl.protocols.footprint import MICRO_BATCH
from flowrl.records import Sequences, Tokens

Rows = TypeVar("Rows", bound=NamedTuple)


class TokenInputs(NamedTuple):
    """The input columns of a model."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor

    @classmethod
    def of(cls, batch: Tokens, vocabulary: int) -> TokenInputs:
        """These columns of `batch`; raises as `check_tokens`."""
        check_tokens(batch, vocabulary)
        return cls(*(getattr(batch, name) for name in cls._fields))


class SequenceInputs(NamedTuple):
    """The input columns of log-probs."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, batch: Sequences, vocabulary: int) -> SequenceInputs:
        """These columns of `batch`; raises as `check_sequences`."""
        check_sequences(batch, vocabulary)
        return cls(*(getattr(batch, name) for name in cls._fields))

    @classmethod
    def idle(cls, device: torch.device) -> SequenceInputs:
        """A row of two tokens outside the mask: for a rank without rows while others compute."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        no_token = torch.zeros(1, 1, dtype=torch.bool, device=device)
        positions = torch.arange(2, device=device)[None]
        return cls(ids, torch.ones_like(ids), positions, no_token, torch.ones(1, device=device))


def check_tokens(batch: Tokens, vocabulary: int) -> None:
    """Raise `DataError` for a response token under the mask that is not attended, or has no attended token before it in
    its segment, and for ids outside the vocabulary."""
    before = batch.input_ids.shape[1] - batch.response_mask.shape[1] - 1
    if before < 0:
        raise DataError(
            f"input_ids {tuple(batch.input_ids.shape)} leave no room for a prompt before response_mask "
            f"{tuple(batch.response_mask.shape)}, but the first response token needs a token that predicts it. Give "
            f"each sequence a prompt of at least one token.",
            code="model.invalid-rows",
        )
    attended = batch.attention_mask[:, before:].bool()
    first = begins(batch.attention_mask, batch.position_ids)[:, before + 1 :]
    bad = (batch.response_mask.bool() & ~(attended[:, 1:] & attended[:, :-1] & ~first)).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        raise DataError(
            f"Row {row} counts response token {token}, but attention_mask hides that token or the one before it, or a "
            f"segment begins with it; expected left-padded prompts followed by right-padded responses, all real tokens "
            f"attended, and positions that restart only at a context. Build attention_mask by concatenating the masks "
            f"of prompt and response.",
            code="model.invalid-rows",
            row=row,
            token=token,
        )
    unknown = (batch.attention_mask.bool() & ((batch.input_ids < 0) | (batch.input_ids >= vocabulary))).nonzero()
    if len(unknown):
        row, place = unknown[0].tolist()
        raise DataError(
            f"Row {row} has the token id {int(batch.input_ids[row, place])}, but this model's vocabulary is 0 to "
            f"{vocabulary - 1}. Bind models with the same vocabulary to all roles.",
            code="model.unknown-token",
            row=row,
            token_id=int(batch.input_ids[row, place]),
            vocabulary=vocabulary,
        )


def check_sequences(batch: Sequences, vocabulary: int) -> None:
    """`check_tokens`, and refuse temperatures that are not positive."""
    check_tokens(batch, vocabulary)
    bad = (~(batch.temperature > 0)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"temperature is {float(batch.temperature[bad[0]])} in row {bad[0]} ({len(bad)} rows are not positive), "
            f"but log-probs are those of logits / temperature. Sample rows that are scored or trained on with "
            f"Generate(temperature=1.0), and use temperature 0 only for validation.",
            code="model.temperature",
            row=bad[0],
            temperature=float(batch.temperature[bad[0]]),
        )


def take(batch: Rows, rows: Tensor | slice, device: torch.device | None = None) -> Rows:
    """`rows` of every column of a record, moved to `device`; columns that are None stay None."""

    def pick(column: Any) -> Any:
        if isinstance(column, Tensor):
            picked = column[rows.to(column.device) if isinstance(rows, Tensor) else rows]
            return picked if device is None else picked.to(device)
        if isinstance(column, np.ndarray):
            return column[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
        return column

    return batch._make(pick(column) for column in batch)


class Budget(NamedTuple):
    """The most positions in a micro-batch; if not `packed`, each row counts as its longest one."""

    positions: int
    packed: bool

    @classmethod
    def of(cls, max_tokens: int | None, device: torch.device, packed: bool) -> Budget:
        """The budget of a spec, by default by `device`; see `MICRO_BATCH`."""
        return cls(max_tokens or MICRO_BATCH["cpu" if device.type == "cpu" else "cuda"], packed)


def micro_batches(attention_mask: Tensor, budget: Budget) -> list[Tensor]:
    """Split rows, sorted by length, into micro-batches within the positions of `budget`.

    A row counts from its first attended token to its last. One that exceeds the budget is a micro-batch by itself. The
    split depends only on the mask and the budget, so scoring and training run the same rows alike.

    Returns:
        the rows of each micro-batch, int64 and ascending; short rows come before long ones.
    """
    first, last = ends(attention_mask.cpu())
    spans, order = (last - first).clamp(min=0).sort(stable=True)
    runs: list[Tensor] = []
    start = used = 0
    for end, span in enumerate(spans.tolist()):
        needed = used + span if budget.packed else (end + 1 - start) * span
        if end > start and needed > budget.positions:
            runs.append(order[start:end].sort().values)
            start, needed = end, span
        used = needed
    if len(order):
        runs.append(order[start:].sort().values)
    return runs


class Run(NamedTuple):
    """The rows of a micro-batch; of a single row maybe only some segments, those in these columns."""

    rows: Tensor
    columns: tuple[int, int] | None = None

    def take(self, batch: Rows, device: torch.device) -> Rows:
        """These rows of every column of a record, moved to `device`, with only the run's columns attended."""
        part: Any = take(batch, self.rows, device)
        if self.columns is None:
            return cast(Rows, part)
        width = part.attention_mask.shape[1]
        masks = {name: self._inside(getattr(part, name), width) for name in ("attention_mask", "response_mask")}
        return cast(Rows, part._replace(**masks))

    def of(self, weights: Tensor, sequence: int) -> Tensor:
        """Its part of a column of tokens, the last ``response`` of `sequence`; 0 in other segments."""
        own = weights[self.rows]
        return own if self.columns is None else self._inside(own, sequence)

    def _inside(self, column: Tensor, sequence: int) -> Tensor:
        """A column of its rows, whose last column is the last of `sequence`; 0 in other segments."""
        assert self.columns is not None
        place = torch.arange(sequence - column.shape[1], sequence, device=column.device)
        return column.masked_fill((place < self.columns[0]) | (place >= self.columns[1]), 0)


def by_segments(batch: Rows, runs: Sequence[Tensor], budget: Budget) -> list[Run]:
    """The same micro-batches; a row that exceeds the budget by itself in several, of as many whole segments as fit."""
    found: list[Run] = []
    for run in runs:
        row: Any = take(batch, run) if len(run) == 1 else None
        starts = [] if row is None else begins(row.attention_mask, row.position_ids)[0].nonzero().flatten().tolist()
        if not starts:
            found.append(Run(run))
            continue
        first, last = (int(x) for x in ends(row.attention_mask))
        cuts = [first]
        for start, end in itertools.pairwise([*starts, last]):
            if end - cuts[-1] > budget.positions:
                cuts.append(start)
        found += [Run(run, columns) for columns in itertools.pairwise([*cuts, last])]
    return found


def score_rows(mesh: ProcessMesh, inputs: Rows, budget: Budget, score: Callable[[Rows], Tensor]) -> Tensor:
    """`score` of each micro-batch of this rank's rows, combined: float32 ``[batch response]``.

    Ranks may have different numbers of rows, or none; all run the same number of forward passes.
    """
    columns: Any = inputs
    out = torch.zeros(columns.response_mask.shape, device=columns.response_mask.device)
    fill_rows([out], mesh, inputs, budget, lambda micro: [score(micro)])
    return out


def fill_rows(
    out: Sequence[Tensor], mesh: ProcessMesh, inputs: Rows, budget: Budget, score: Callable[[Rows], Sequence[Tensor]]
) -> None:
    """`score_rows` for a score of several tensors, into `out`: ``[batch response ...]`` each."""
    for run, micro in micro_rows(mesh, inputs, budget):
        put(out, run, score(micro))


def put(out: Sequence[Tensor], run: Run | None, scores: Sequence[Tensor]) -> None:
    """Put the scores of a micro-batch, if it is not idle, into the rows of `out`."""
    for column, found in zip(out, scores, strict=True):
        if run is not None and run.columns is None:
            column[run.rows.to(column.device)] = found.to(column.device)
        elif run is not None:  # 0 in other segments
            column[run.rows.to(column.device)] += found.to(column.device)


def micro_rows(mesh: ProcessMesh, inputs: Rows, budget: Budget) -> Iterator[tuple[Run | None, Rows]]:
    """The micro-batches of this rank; then idle ones (None), until all ranks have run as many."""
    columns: Any = inputs
    runs = by_segments(inputs, micro_batches(columns.attention_mask, budget), budget)
    idle_runs = mesh.max_over_ranks(len(runs)) - len(runs)
    for run in runs:
        yield run, run.take(inputs, mesh.device)
    idle: Any = SequenceInputs.idle(mesh.device)
    for _ in range(idle_runs):
        yield None, idle


def last_of(mask: Tensor) -> Tensor:
    """Only the last true element of each row of a bool mask."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def ends(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First attended column of each row and one past the last; ``(width, 0)`` for a row without attended tokens."""
    width, mask = attention_mask.shape[1], attention_mask.bool()
    columns = torch.arange(width, device=mask.device)
    return columns.where(mask, width).amin(1), (columns + 1).where(mask, 0).amax(1)


Runs = tuple[tuple[int, int], ...]
"""Packed rows, as pairs of a number of rows and their tokens each."""


class ShiftedRows(NamedTuple):
    """Rows without left padding, or packed into one line. A row with several segments is several rows of the model.

    Args:
        input_ids, position_ids: int64 ``[line place]``, 0 where not attended.
        attention_mask: bool, of the same shape.
        lines, shifts: int64 ``[segment]``; column ``c`` of a segment is in its line at ``c + shift``.
        runs: the lengths of packed segments, or None.
        segment_of: int64 ``[row column]``, the segment of each column; None if each row is one.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lines: Tensor
    shifts: Tensor
    runs: Runs | None = None
    segment_of: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The model's inputs."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask.long(),
            "position_ids": self.position_ids,
            "use_cache": False,
        }

    @property
    def within(self) -> dict[str, Runs]:
        """Further arguments for attention."""
        return {} if self.runs is None else {"packed": self.runs}

    def find(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The line and the place of some columns of rows."""
        segments = rows if self.segment_of is None else self.segment_of[rows, columns]
        return self.lines[segments], columns + self.shifts[segments]


class _Segments(NamedTuple):
    """The segments of rows, by row: int64 ``[segment]`` each, and `ShiftedRows.segment_of`.

    They end one past the last attended column; a row without attended tokens is one segment, from its width to 0.
    """

    rows: Tensor
    first: Tensor
    last: Tensor
    of: Tensor | None


def _segments(batch: Tokens) -> _Segments:
    first, last = ends(batch.attention_mask)
    rows = torch.arange(len(first), device=first.device)
    starts = begins(batch.attention_mask, batch.position_ids)
    if not starts.any():
        return _Segments(rows, first, last, None)
    starts[rows, first.clamp(max=starts.shape[1] - 1)] = True  # the first of each row, also of an empty one
    of = (starts.flatten().cumsum(0) - 1).view(starts.shape)
    row, column = starts.nonzero(as_tuple=True)
    begin = torch.where(last[row] > 0, column, first[row])
    follows = torch.nn.functional.pad(row[1:] == row[:-1], (0, 1))
    end = torch.where(follows, column.roll(-1), last[row])
    return _Segments(row, begin, end, of)


def from_first_tokens(batch: Tokens) -> ShiftedRows:
    """The rows of `batch` without left padding: each begins with its first attended token. Rows without attended tokens
    keep one column."""
    rows, first, last, of = _segments(batch)
    spans = last - first
    columns = torch.arange(max(1, int(spans.max())), device=first.device)
    places = (first[:, None] + columns).clamp(max=batch.input_ids.shape[1] - 1)
    mask = batch.attention_mask.bool()[rows].gather(1, places) & (columns < spans[:, None])
    # Padding may contain any ids, even outside the vocabulary.
    ids, positions = (x[rows].gather(1, places).masked_fill(~mask, 0) for x in (batch.input_ids, batch.position_ids))
    return ShiftedRows(ids, mask, positions, torch.arange(len(ids), device=first.device), -first, None, of)


def packed(batch: Tokens) -> ShiftedRows:
    """The rows of `batch` concatenated, short ones before long ones, without padding; as `from_first_tokens` if a row
    has a hole in its mask, or none has attended tokens."""
    row, first, last, of = _segments(batch)
    spans, order = (last - first).clamp(min=0).sort(stable=True)
    length, rows = (x.tolist() for x in spans.unique_consecutive(return_counts=True))
    tokens = sum(n * span for n, span in zip(rows, length, strict=True))
    if tokens != int(batch.attention_mask.bool().sum()) or not tokens:
        return from_first_tokens(batch)
    before = spans.cumsum(0) - spans
    shifts = torch.empty_like(first).index_copy_(0, order, before - first[order])
    from_row = row[order].repeat_interleave(spans)
    column = torch.arange(tokens, device=first.device) - shifts[order].repeat_interleave(spans)
    ids, positions = (x[from_row, column][None] for x in (batch.input_ids, batch.position_ids))
    runs = tuple((n, span) for n, span in zip(rows, length, strict=True) if span)
    return ShiftedRows(
        ids, torch.ones_like(ids, dtype=torch.bool), positions, torch.zeros_like(first), shifts, runs, of
    )
