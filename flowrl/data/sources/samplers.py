"""The order in which rows are sampled: a `Sampler` is a frozen spec, its `Order` is live and has a position."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from flowrl.data.keys import Key
from flowrl.data.proto.column_math import short
from flowrl.data.proto.rows import is_count
from flowrl.errors import DataError
from flowrl.spec import Spec

Scores = Mapping[int, Sequence[float]]
"""The scores of each row's responses, by row."""


class SampledRow(NamedTuple):
    """One draw.

    Args:
        epoch: counted from 0.
        row: index among the rows that were read.
        draw: number of earlier draws of the row in this epoch, so that no two draws are equal.
    """

    epoch: int
    row: int
    draw: int = 0


class Order(ABC):
    """A live order of rows; `position` holds its complete state.

    Attributes:
        last_scored_step: the last step whose scores it has received, counted from 1; 0 is none.
    """

    last_scored_step: int = 0

    @abstractmethod
    def next(self, n: int) -> list[SampledRow]:
        """The next `n` draws."""

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """The complete state, including what it has learned, as JSON-able data."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore `position`.

        Raises:
            DataError: it is not a position of this order.
        """

    def learn(self, step: int, scores: Scores) -> None:
        """Receive the scores of rows; called for samplers with ``learns = True``.

        Args:
            step: the completed step, counted from 1.
            scores: of the rows with responses in this step, including those that a gate dropped.
        """
        self.last_scored_step = step


class Sampler(Spec):
    """The order in which rows are sampled, as a frozen spec; `start` makes the live `Order`.

    Class attributes:
        learns: whether the order depends on scores. The graph must then report them with `Feedback`.
    """

    schedulable = False
    learns: ClassVar[bool] = False

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        """The order of these rows.

        The same `key` must give the same order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start(rows, key)")


class Epochs(Order):
    """Every row once per epoch, in file order, or with a `key` in that of ``torch.randperm`` under (key, "data", e).

    A batch may cross the end of an epoch.
    """

    def __init__(self, rows: int, key: Key | None) -> None:
        self._rows, self._key = rows, key
        self._begin(0)

    def next(self, n: int) -> list[SampledRow]:
        sampled: list[SampledRow] = []
        while len(sampled) < n:
            picked = self._order[self._offset : self._offset + n - len(sampled)]
            sampled += [SampledRow(self._epoch, row) for row in picked]
            self._offset += len(picked)
            if self._offset == self._rows:
                self._begin(self._epoch + 1)
        return sampled

    @property
    def position(self) -> dict[str, Any]:
        """``{"epoch": ..., "offset": ..., "rows": ...}``."""
        return {"epoch": self._epoch, "offset": self._offset, "rows": self._rows}

    def seek(self, position: Mapping[str, Any]) -> None:
        found = dict(position) if isinstance(position, Mapping) else {}
        complete = found.keys() == self.position.keys() and all(is_count(value, 0) for value in found.values())
        if not complete or found["rows"] != self._rows or found["offset"] >= self._rows:
            raise DataError(
                f"seek({position!r}): not a position in {self._rows} rows. Expected epoch, offset (less than rows) and "
                f"rows; pass what `position` returned for the same files and max_prompt_length.",
                code="sampler.wrong-position",
                found=str(position),
                rows=self._rows,
            )
        self._begin(found["epoch"])
        self._offset = found["offset"]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._offset = epoch, 0
        self._order: Sequence[int] = range(self._rows)
        if self._key is not None:
            generator = self._key.derive("data", epoch).generator()
            self._order = torch.randperm(self._rows, generator=generator).tolist()


class Shuffled(Sampler):
    """Every epoch in a new random order; the default."""

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return Epochs(len(rows), key)


class InOrder(Sampler):
    """Every epoch in file order."""

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return Epochs(len(rows), None)


class ByDifficulty(Sampler):
    """Prompts with a success rate near `target`: a group whose responses are all right or all wrong has no gradient.

    The posterior of each prompt's success rate is a Beta distribution. The sampler samples one rate per prompt and
    takes the prompts nearest to the target (MoPPS: Qu et al. 2025, arXiv:2507.04632: Thompson sampling), so it explores
    uncertain prompts. A score counts as a fraction of a success, and evidence decays as the policy changes:
    ``a <- decay a + (1 - decay) + successes``, and likewise for failures, whenever a prompt has scores.

    A pending prompt (in the rounds of a `Collect`, or with a lag) is not sampled again unless all prompts are pending.
    It is no longer pending once its scores, or those of a later step, arrive. There are no epochs.

    Args:
        target: the success rate.
        decay: of evidence; 1 keeps all evidence.
        worst, best: the scores of a failure and a success; scores beyond are clamped.

    Raises:
        ParameterError: `worst` is not less than `best`.
    """

    learns: ClassVar[bool] = True

    target: float = Field(default=0.5, ge=0, le=1)
    decay: float = Field(default=0.5, gt=0, le=1)
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        if self.worst >= self.best:
            raise ValueError(
                f"worst={self.worst:g} is not less than best={self.best:g}; pass the lowest and the highest score of a "
                f"response, worst < best"
            )

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return _Posterior(self, len(rows), key)


class _Posterior(Order):
    """The order of `ByDifficulty`; the position holds the number of draws and two Beta parameters per sampled row."""

    def __init__(self, sampler: ByDifficulty, rows: int, key: Key) -> None:
        self._sampler, self._key = sampler, key
        self._calls = 0
        self._draws = np.zeros(rows, dtype=np.int64)
        self._betas = np.ones((2, rows))
        self._pending = np.zeros(rows, dtype=np.int64)  # the call that sampled a pending row; 0 if not pending

    def next(self, n: int) -> list[SampledRow]:
        sampled: list[SampledRow] = []
        call = self._calls + 1
        while len(sampled) < n:
            seed = self._key.derive("by difficulty", self._calls).bits
            rates = np.random.Generator(np.random.Philox(key=seed)).beta(*self._betas)
            waiting = self._pending > 0
            nearest = np.lexsort((np.abs(rates - self._sampler.target), waiting))
            nearest = nearest[: min(n - len(sampled), (~waiting).sum() or len(nearest))]
            sampled += [SampledRow(0, row, int(self._draws[row])) for row in nearest.tolist()]
            self._draws[nearest] += 1
            self._pending[nearest] = call
            self._calls += 1
        return sampled

    def learn(self, step: int, scores: Scores) -> None:
        sampler = self._sampler
        for row, row_scores in scores.items():
            fractions = [(score - sampler.worst) / (sampler.best - sampler.worst) for score in row_scores]
            passed = sum(min(max(fraction, 0.0), 1.0) for fraction in fractions)
            evidence = np.array([passed, len(row_scores) - passed])
            self._betas[:, row] = sampler.decay * self._betas[:, row] + (1.0 - sampler.decay) + evidence
        # With a lag, rows of later steps stay pending. Steps sample in order, so rows sampled no later than the first
        # of these rows are complete, even without a score.
        calls = self._pending[list(scores)]
        self._pending[self._pending <= calls[calls > 0].min(initial=self._calls)] = 0
        self._pending[list(scores)] = 0
        self.last_scored_step = step

    @property
    def position(self) -> dict[str, Any]:
        sampled = self._draws.nonzero()[0].tolist()
        known = {str(row): [int(self._draws[row]), *self._betas[:, row].tolist()] for row in sampled}
        pending = {str(row): int(self._pending[row]) for row in self._pending.nonzero()[0].tolist()}
        counts = {"rows": len(self._draws), "calls": self._calls, "last_scored_step": self.last_scored_step}
        return {**counts, "pending": pending, "known": known}

    def seek(self, position: Mapping[str, Any]) -> None:
        found = _checked(position, self.position, len(self._draws), "ByDifficulty")
        draws, betas = np.zeros_like(self._draws), np.ones_like(self._betas)
        pending = np.zeros_like(self._pending)
        if not _is_mapping_of_rows(found["pending"], len(draws)):
            _refuse_position(position, len(draws), "ByDifficulty")
        for row, call in found["pending"].items():
            if not is_count(call) or call > found["calls"]:
                _refuse_position(position, len(draws), "ByDifficulty")
            pending[int(row)] = call
        for row, known in found["known"].items():
            complete = isinstance(known, list) and len(known) == 3 and is_count(known[0])
            if not complete or any(type(beta) is not float or not beta > 0 for beta in known[1:]):
                _refuse_position(position, len(draws), "ByDifficulty")
            draws[int(row)], betas[:, int(row)] = known[0], known[1:]
        self._draws, self._betas, self._pending = draws, betas, pending
        self._calls, self.last_scored_step = found["calls"], found["last_scored_step"]


class ReplaySampler(Sampler):
    """Every epoch in a new random order, plus replays of hard prompts.

    A prompt whose mean score is between `above` and `below` enters a first-in-first-out queue. At most `share` of each
    batch are replays from this queue; a prompt that scores well in its replay does not enter it again.

    Args:
        share: maximum fraction of replays in a batch.
        below: prompts with a lower mean score are hard.
        above: prompts must have a higher mean score; with 0, at least one response must score.
    """

    learns: ClassVar[bool] = True

    share: float = Field(default=0.25, gt=0, lt=1)
    below: float = 0.5
    above: float = 0.0

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return _ReplayOrder(self, len(rows), key)


class _ReplayOrder(Order):
    """The order of `ReplaySampler`: epochs, and a queue of rows."""

    def __init__(self, sampler: ReplaySampler, rows: int, key: Key) -> None:
        self._sampler, self._rows = sampler, rows
        self._epochs = Epochs(rows, key)
        self._queue: list[int] = []
        self._replays: dict[int, int] = {}

    def next(self, n: int) -> list[SampledRow]:
        replayed, self._queue = (self._queue[: (count := int(self._sampler.share * n))], self._queue[count:])
        sampled = self._epochs.next(n - len(replayed))
        for row in replayed:
            self._replays[row] = self._replays.get(row, 0) + 1
            sampled.append(SampledRow(sampled[0].epoch, row, self._replays[row]))
        return sampled

    def learn(self, step: int, scores: Scores) -> None:
        for row, row_scores in scores.items():
            if row not in self._queue and self._sampler.above < statistics.fmean(row_scores) < self._sampler.below:
                self._queue.append(row)
        self.last_scored_step = step

    @property
    def position(self) -> dict[str, Any]:
        known = {str(row): times for row, times in self._replays.items()}
        epochs = self._epochs.position
        return {
            "rows": self._rows,
            "last_scored_step": self.last_scored_step,
            "fresh": epochs,
            "waiting": list(self._queue),
            "known": known,
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        found = _checked(position, self.position, self._rows, "ReplaySampler")
        counted = all(is_count(times) for times in found["known"].values())
        if not _is_list_of_rows(found["waiting"], self._rows) or not counted:
            _refuse_position(position, self._rows, "ReplaySampler")
        self._epochs.seek(found["fresh"])
        self._queue, self.last_scored_step = list(found["waiting"]), found["last_scored_step"]
        self._replays = {int(row): times for row, times in found["known"].items()}


def _is_list_of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, list) and all(is_count(row, 0) and row < rows for row in value)


def _is_mapping_of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Mapping) and all(str(row).isdecimal() and int(row) < rows for row in value)


def _checked(position: Any, like: Mapping[str, Any], rows: int, sampler: str) -> dict[str, Any]:
    """`position`, if it has the keys of `like` and this number of rows."""
    found = dict(position) if isinstance(position, Mapping) else {}
    counts = [value for key, value in found.items() if key in ("rows", "calls", "last_scored_step")]
    complete = found.keys() == like.keys() and all(is_count(count, 0) for count in counts)
    if not complete or not _is_mapping_of_rows(found["known"], rows) or found["rows"] != rows:
        _refuse_position(position, rows, sampler)
    return found


def _refuse_position(position: Any, rows: int, sampler: str) -> None:
    text = short(position, 200)
    raise DataError(
        f"seek({text}): not a position of {sampler} over {rows} rows. Pass what `position` returned for the same "
        f"files, max_prompt_length and sampler.",
        code="sampler.wrong-position",
        found=text,
        rows=rows,
        sampler=sampler,
    )
