"""Rows as a model runs over them: the columns that it reads, what it refuses, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.backends.torch.mesh import Mesh
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
            f"{tuple(batch.response_mask.shape)}; the first response token needs a token that predicts it, so give "
            f"each sequence a prompt of at least one token."
        )
    attended = batch.attention_mask[:, before:].bool()
    bad = (batch.response_mask.bool() & ~(attended[:, 1:] & attended[:, :-1])).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        raise DataError(
            f"row {row} counts response token {token}, but attention_mask hides that token or the one before it; "
            f"expected left-padded prompts followed by right-padded responses, all real tokens attended. Rebuild "
            f"attention_mask as the prompt's mask and the response's side by side."
        )
    unknown = (batch.attention_mask.bool() & ((batch.input_ids < 0) | (batch.input_ids >= vocabulary))).nonzero()
    if len(unknown):
        row, place = unknown[0].tolist()
        raise DataError(
            f"row {row} holds the token id {int(batch.input_ids[row, place])}, and this model's vocabulary is 0 to "
            f"{vocabulary - 1}; expected rows of its own tokeniser: bind models of one vocabulary to all roles."
        )


def check_sequences(batch: Sequences, vocabulary: int) -> None:
    """`check_tokens`, and refuse temperatures that no log-prob can be taken at."""
    check_tokens(batch, vocabulary)
    bad = (~(batch.temperature > 0)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"temperature is {float(batch.temperature[bad[0]])} in row {bad[0]} ({len(bad)} rows are not positive); "
            f"log-probs are those of logits / temperature, and greedy samples have none. Sample rows that are scored "
            f"or trained on with Generate(temperature=1.0), and keep temperature 0 for validation."
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


def micro_batches(attention_mask: Tensor, max_tokens: int) -> list[slice]:
    """Cut rows, in order, into runs whose padded size (rows by width, less common padding) is at most `max_tokens`.

    A row that alone exceeds the budget is a run of its own. The cut depends on the mask and the budget only.
    """
    runs: list[slice] = []
    start = left = right = 0
    for row, (first, last) in enumerate(zip(*(side.tolist() for side in ends(attention_mask)), strict=True)):
        left, right = min(left, first), max(right, last)
        if row > start and (row + 1 - start) * (right - left) > max_tokens:
            runs.append(slice(start, row))
            start = row
        if row == start:
            left, right = first, last
    if len(attention_mask):
        runs.append(slice(start, len(attention_mask)))
    return runs


def score_rows(mesh: Mesh, inputs: Rows, max_tokens: int, score: Callable[[Rows], Tensor]) -> Tensor:
    """What `score` gives for each micro-batch of this rank's rows, put together: float32 ``[batch response]``.

    Ranks may have different numbers of rows, or none; all run equally many forward passes.
    """
    columns: Any = inputs
    out = torch.zeros(columns.response_mask.shape, device=columns.response_mask.device)
    fill_rows([out], mesh, inputs, max_tokens, lambda micro: [score(micro)])
    return out


def fill_rows(
    out: Sequence[Tensor], mesh: Mesh, inputs: Rows, max_tokens: int, score: Callable[[Rows], Sequence[Tensor]]
) -> None:
    """`score_rows` of what gives several tensors, into those that are there: ``[batch response ...]`` each."""
    for rows, micro in micro_rows(mesh, inputs, max_tokens):
        for held, found in zip(out, score(micro), strict=True):
            if rows is not None:
                held[rows] = found.to(held.device)


def micro_rows(mesh: Mesh, inputs: Rows, max_tokens: int) -> Iterator[tuple[slice | None, Rows]]:
    """The micro-batches of this rank's rows, and where these stand; then idle ones, which stand nowhere, until all
    ranks have had as many."""
    columns: Any = inputs
    runs = micro_batches(columns.attention_mask, max_tokens)
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
