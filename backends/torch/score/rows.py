"""Rows as a model runs over them: the columns that it reads, what it refuses, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.backends.torch.train.mesh import Mesh
from flowrl.errors import DataError
from flowrl.records import Sequences, Tokens

Rows = TypeVar("Rows", bound=NamedTuple)


class TokenInputs(NamedTuple):
    """The columns that a model runs over."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor

    @classmethod
    def of(cls, batch: Tokens, vocabulary: int) -> TokenInputs:
        """Just these columns of `batch`.

        Raises:
            DataError: a response token counts that the model cannot predict, or a token is not in the vocabulary.
        """
        check_tokens(batch, vocabulary)
        return cls(*(getattr(batch, name) for name in cls._fields))


class SequenceInputs(NamedTuple):
    """The columns that log-probs are computed from."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, batch: Sequences, vocabulary: int) -> SequenceInputs:
        """Just these columns of `batch`.

        Raises:
            DataError: as `check_sequences`.
        """
        check_sequences(batch, vocabulary)
        return cls(*(getattr(batch, name) for name in cls._fields))

    @classmethod
    def idle(cls, device: torch.device) -> SequenceInputs:
        """A row of two tokens, none of which counts: for a rank that has no rows left while others compute."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        no_token = torch.zeros(1, 1, dtype=torch.bool, device=device)
        positions = torch.arange(2, device=device)[None]
        return cls(ids, torch.ones_like(ids), positions, no_token, torch.ones(1, device=device))


def check_tokens(batch: Tokens, vocabulary: int) -> None:
    """Refuse a response token under the mask that is not attended, or that has no attended token before it; and ids
    that are not in the vocabulary."""
    before = batch.input_ids.shape[1] - batch.response_mask.shape[1] - 1
    if before < 0:
        raise DataError(
            f"input_ids {tuple(batch.input_ids.shape)} leave no room for a prompt before response_mask "
            f"{tuple(batch.response_mask.shape)}, but the first response token needs a token that predicts it. Give "
            f"each sequence a prompt of at least one token.",
            code="model.invalid-rows",
        )
    attended = batch.attention_mask[:, before:].bool()
    bad = (batch.response_mask.bool() & ~(attended[:, 1:] & attended[:, :-1])).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        raise DataError(
            f"Row {row} counts response token {token}, but attention_mask hides that token or the one before it; "
            f"expected left-padded prompts followed by right-padded responses, all real tokens attended. Build "
            f"attention_mask by concatenating the masks of prompt and response.",
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
    """`check_tokens`, and refuse temperatures that no log-prob can be taken at."""
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
    """What runs at a time.

    Args:
        positions: that a micro-batch may compute.
        packed: a row takes as many as it has; False is as many as the longest row of its micro-batch.
    """

    positions: int
    packed: bool

    @classmethod
    def of(cls, max_tokens: int | None, device: torch.device, packed: bool) -> Budget:
        """That of a spec; where it says nothing, what suits `device`.

        On a CPU small micro-batches are the fastest, since what a layer makes of them stays in its caches. On a GPU
        large ones are, as far as memory goes.
        """
        return cls(max_tokens or (2048 if device.type == "cpu" else 16384), packed)


def micro_batches(attention_mask: Tensor, budget: Budget) -> list[Tensor]:
    """Cut rows, sorted by length, into micro-batches that compute as many positions as `budget` has, or fewer.

    A row counts from its first attended token to its last. One that alone exceeds the budget is a micro-batch of its
    own. The cut depends on the mask and the budget only, so what scores rows and what trains on the same rows run them
    alike.

    Returns:
        the rows of each micro-batch, int64 and ascending; short rows come before long ones.
    """
    first, last = ends(attention_mask.cpu())
    spans, order = (last - first).clamp(min=0).sort(stable=True)
    runs: list[Tensor] = []
    start = taken = 0
    for end, span in enumerate(spans.tolist()):
        wanted = taken + span if budget.packed else (end + 1 - start) * span
        if end > start and wanted > budget.positions:
            runs.append(order[start:end].sort().values)
            start, wanted = end, span
        taken = wanted
    if len(order):
        runs.append(order[start:].sort().values)
    return runs


def score_rows(mesh: Mesh, inputs: Rows, budget: Budget, score: Callable[[Rows], Tensor]) -> Tensor:
    """What `score` gives for each micro-batch of this rank's rows, put together: float32 ``[batch response]``.

    Ranks may have different numbers of rows, or none; all run equally many forward passes.
    """
    columns: Any = inputs
    out = torch.zeros(columns.response_mask.shape, device=columns.response_mask.device)
    fill_rows([out], mesh, inputs, budget, lambda micro: [score(micro)])
    return out


def fill_rows(
    out: Sequence[Tensor], mesh: Mesh, inputs: Rows, budget: Budget, score: Callable[[Rows], Sequence[Tensor]]
) -> None:
    """`score_rows` of what gives several tensors, into those that are there: ``[batch response ...]`` each."""
    for rows, micro in micro_rows(mesh, inputs, budget):
        for held, found in zip(out, score(micro), strict=True):
            if rows is not None:
                held[rows.to(held.device)] = found.to(held.device)


def micro_rows(mesh: Mesh, inputs: Rows, budget: Budget) -> Iterator[tuple[Tensor | None, Rows]]:
    """The micro-batches of this rank's rows, and where these stand; then idle ones, which stand nowhere, until all
    ranks have had as many."""
    columns: Any = inputs
    runs = micro_batches(columns.attention_mask, budget)
    idle_runs = mesh.max_over_ranks(len(runs)) - len(runs)
    for rows in runs:
        yield rows, take(inputs, rows, mesh.device)
    idle: Any = SequenceInputs.idle(mesh.device)
    for _ in range(idle_runs):
        yield None, idle


def ends(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First attended column of each row and one past the last; ``(width, 0)`` for a row that attends to nothing."""
    width, mask = attention_mask.shape[1], attention_mask.bool()
    columns = torch.arange(width, device=mask.device)
    return columns.where(mask, width).amin(1), (columns + 1).where(mask, 0).amax(1)


Runs = tuple[tuple[int, int], ...]
"""Rows one behind the other, as so many of so many tokens each."""


class Moved(NamedTuple):
    """Rows as a model runs over them, in lines.

    Args:
        input_ids, position_ids: int64 ``[line place]``, 0 where nothing is attended.
        attention_mask: bool, as these.
        lines, shifts: int64 ``[row]``; column ``c`` of a row stands in its line, at ``c + shift``.
        runs: of several rows in one line, where they end.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lines: Tensor
    shifts: Tensor
    runs: Runs | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is given."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask.long(),
            "position_ids": self.position_ids,
            "use_cache": False,
        }

    @property
    def within(self) -> dict[str, Runs]:
        """What its attention is given, and the model does not know."""
        return {} if self.runs is None else {"packed": self.runs}


def from_first_tokens(batch: Tokens) -> Moved:
    """The rows of `batch` moved to the left, so that prompts of unequal lengths take no columns of padding.

    Each begins with its first attended token, and is as wide as the longest of them. Rows that attend to nothing keep
    one column.
    """
    first, last = ends(batch.attention_mask)
    spans = last - first
    columns = torch.arange(max(1, int(spans.max())), device=first.device)
    places = (first[:, None] + columns).clamp(max=batch.input_ids.shape[1] - 1)
    mask = batch.attention_mask.bool().gather(1, places) & (columns < spans[:, None])
    # Padding may hold anything, ids that the vocabulary lacks included.
    ids, positions = (x.gather(1, places).masked_fill(~mask, 0) for x in (batch.input_ids, batch.position_ids))
    return Moved(ids, mask, positions, torch.arange(len(ids), device=first.device), -first)


def packed(batch: Tokens) -> Moved:
    """The rows of `batch` one behind the other, short ones before long ones, without padding.

    Rows are moved to their first tokens where one of them hides a token inside, or all attend to nothing.
    """
    mask = batch.attention_mask.bool()
    first, last = ends(mask)
    spans, order = (last - first).clamp(min=0).sort(stable=True)
    length, rows = (x.tolist() for x in spans.unique_consecutive(return_counts=True))
    tokens = sum(n * span for n, span in zip(rows, length, strict=True))
    if tokens != int(mask.sum()) or not tokens:
        return from_first_tokens(batch)
    attended = mask[order]
    ids, positions = (x[order][attended][None] for x in (batch.input_ids, batch.position_ids))
    shifts = torch.empty_like(first).index_copy_(0, order, spans.cumsum(0) - spans - first[order])
    runs = tuple((n, span) for n, span in zip(rows, length, strict=True) if span)
    return Moved(ids, torch.ones_like(ids, dtype=torch.bool), positions, torch.zeros_like(first), shifts, runs)
