"""In which order rows are drawn: `Sampler` says it, and the live `Order` that it starts has a state in checkpoints."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from flowrl.data.keys import Key
from flowrl.data.proto.rows import is_count
from flowrl.errors import DataError
from flowrl.spec import Spec

Scores = Mapping[int, Sequence[float]]
"""By row, what each answer to it scored."""


class Drawn(NamedTuple):
    """One draw.

    Args:
        epoch: in which; counted from 0.
        row: which, counted from 0 among the rows that were read.
        draw: how often the epoch had drawn it before, so that no two draws are the same.
    """

    epoch: int
    row: int
    draw: int = 0


class Order(ABC):
    """An order while it is drawn from: all that it knows is in `position`.

    Attributes:
        heard: the last step whose scores it has heard, counted from 1; 0 is none.
    """

    heard: int = 0

    @abstractmethod
    def next(self, n: int) -> list[Drawn]:
        """The next `n` draws."""

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where it is, and what it has learned, as JSON-able data."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`, as if nothing had come between.

        Raises:
            DataError: it is no position of this order.
        """

    def learn(self, step: int, scores: Scores) -> None:
        """Hear what the answers to rows scored; of samplers that say that they `learns`.

        Args:
            step: that is done, counted from 1.
            scores: of the rows that were answered in it, also of those that a gate kept out.
        """
        self.heard = step


class Sampler(Spec):
    """Says in which order rows are drawn; a frozen spec, as everything that a run is made of. `start` makes it live.

    Class attributes:
        learns: whether its order depends on scores: then the graph must tell them, by a `Feedback`.
    """

    timeless = True
    learns: ClassVar[bool] = False

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        """The order of these rows.

        Args:
            rows: as they were read, such as `flowrl.data.sources.prompt_rows.Row`.
            key: of all that is random in it; the same key must give the same order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start(rows, key)")


class Epochs(Order):
    """Every row once an epoch, in the order of a permutation. A batch may cross the end of an epoch into the next.

    Args:
        rows: how many there are.
        key: of the permutations, of which epoch ``e`` has ``torch.randperm`` under (key, "data", e); None keeps the
            order of the files.
    """

    def __init__(self, rows: int, key: Key | None) -> None:
        self._rows, self._key = rows, key
        self._begin(0)

    def next(self, n: int) -> list[Drawn]:
        drawn: list[Drawn] = []
        while len(drawn) < n:
            picked = self._order[self._offset : self._offset + n - len(drawn)]
            drawn += [Drawn(self._epoch, row) for row in picked]
            self._offset += len(picked)
            if self._offset == self._rows:
                self._begin(self._epoch + 1)
        return drawn

    @property
    def position(self) -> dict[str, Any]:
        """``{"epoch": ..., "offset": ..., "rows": ...}``."""
        return {"epoch": self._epoch, "offset": self._offset, "rows": self._rows}

    def seek(self, position: Mapping[str, Any]) -> None:
        found = dict(position) if isinstance(position, Mapping) else {}
        whole = found.keys() == self.position.keys() and all(is_count(value, 0) for value in found.values())
        if not whole or found["rows"] != self._rows or found["offset"] >= self._rows:
            raise DataError(
                f"seek({position!r}) is no position in a stream of {self._rows} rows; expected epoch, offset (below "
                f"the rows) and rows as `position` gave them for the same files and max_prompt_length."
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
    """Every epoch in an order of its own; the default."""

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return Epochs(len(rows), key)


class InOrder(Sampler):
    """Every epoch in the order of the files."""

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return Epochs(len(rows), None)


class ByDifficulty(Sampler):
    """Prompts whose success rate is about `target`: where all answers are right, or all wrong, a group teaches nothing.

    What is believed of a prompt's success rate is a Beta distribution. Of all prompts one rate each is sampled from it,
    and those nearest to the target are drawn (MoPPS: Qu et al. 2025, arXiv:2507.04632: Thompson sampling); so prompts
    of which little is known are tried. An answer's score counts as a share of a success, and evidence fades as the
    policy changes: ``a <- decay a + (1 - decay) + successes``, and alike for failures, whenever a prompt was answered.

    What was drawn and is not over, as in the rounds of a `Collect` and with a lag, is not drawn again, unless all was.
    It is over as scores of it are heard, or of a later step. There are no epochs.

    Args:
        target: the success rate.
        decay: of evidence; 1 forgets nothing.
        worst, best: the scores of a failure and a success; what lies beyond counts as these.

    Raises:
        ParameterError: `worst` is not below `best`.
    """

    learns: ClassVar[bool] = True

    target: float = Field(default=0.5, ge=0, le=1)
    decay: float = Field(default=0.5, gt=0, le=1)
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        if self.worst >= self.best:
            raise ValueError(
                f"worst={self.worst:g} and best={self.best:g} tell no failure from a success; give the least and the "
                f"highest score of an answer, worst < best"
            )

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return _Believed(self, len(rows), key)


class _Believed(Order):
    """The order of `ByDifficulty`.

    Its position holds, of each row that was drawn, how often, and the two parameters of what is believed of it.
    """

    def __init__(self, sampler: ByDifficulty, rows: int, key: Key) -> None:
        self._sampler, self._key = sampler, key
        self._asked = 0
        self._draws = np.zeros(rows, dtype=np.int64)
        self._beliefs = np.ones((2, rows))
        self._unheard = np.zeros(rows, dtype=np.int64)  # by which call a row was drawn that is not over; 0 is none

    def next(self, n: int) -> list[Drawn]:
        drawn: list[Drawn] = []
        call = self._asked + 1
        while len(drawn) < n:
            seed = self._key.derive("by difficulty", self._asked).bits
            rates = np.random.Generator(np.random.Philox(key=seed)).beta(*self._beliefs)
            waiting = self._unheard > 0
            nearest = np.lexsort((np.abs(rates - self._sampler.target), waiting))
            nearest = nearest[: min(n - len(drawn), (~waiting).sum() or len(nearest))]
            drawn += [Drawn(0, row, int(self._draws[row])) for row in nearest.tolist()]
            self._draws[nearest] += 1
            self._unheard[nearest] = call
            self._asked += 1
        return drawn

    def learn(self, step: int, scores: Scores) -> None:
        sampler = self._sampler
        for row, answers in scores.items():
            shares = [(score - sampler.worst) / (sampler.best - sampler.worst) for score in answers]
            passed = sum(min(max(share, 0.0), 1.0) for share in shares)
            evidence = np.array([passed, len(answers) - passed])
            self._beliefs[:, row] = sampler.decay * self._beliefs[:, row] + (1.0 - sampler.decay) + evidence
        # Not all that was drawn: with a lag, later steps are under way. Steps are drawn for in their order, so what was
        # drawn no later than the first of these rows is over, even where nobody has scored it.
        told = self._unheard[list(scores)]
        self._unheard[self._unheard <= told[told > 0].min(initial=self._asked)] = 0
        self._unheard[list(scores)] = 0
        self.heard = step

    @property
    def position(self) -> dict[str, Any]:
        drawn = self._draws.nonzero()[0].tolist()
        known = {str(row): [int(self._draws[row]), *self._beliefs[:, row].tolist()] for row in drawn}
        unheard = {str(row): int(self._unheard[row]) for row in self._unheard.nonzero()[0].tolist()}
        told = {"rows": len(self._draws), "asked": self._asked, "heard": self.heard}
        return {**told, "unheard": unheard, "known": known}

    def seek(self, position: Mapping[str, Any]) -> None:
        found = _checked(position, self.position, len(self._draws), "ByDifficulty")
        draws, beliefs = np.zeros_like(self._draws), np.ones_like(self._beliefs)
        unheard = np.zeros_like(self._unheard)
        if not _are_numbered(found["unheard"], len(draws)):
            _refuse_position(position, len(draws), "ByDifficulty")
        for row, call in found["unheard"].items():
            if not is_count(call) or call > found["asked"]:
                _refuse_position(position, len(draws), "ByDifficulty")
            unheard[int(row)] = call
        for row, known in found["known"].items():
            whole = isinstance(known, list) and len(known) == 3 and is_count(known[0])
            if not whole or any(type(belief) is not float or not belief > 0 for belief in known[1:]):
                _refuse_position(position, len(draws), "ByDifficulty")
            draws[int(row)], beliefs[:, int(row)] = known[0], known[1:]
        self._draws, self._beliefs, self._unheard = draws, beliefs, unheard
        self._asked, self.heard = found["asked"], found["heard"]


class Replay(Sampler):
    """Every epoch in an order of its own, and beside it hard prompts again: those that were answered worst once more.

    A prompt whose answers scored within `above` and `below` on average waits for its replay, behind those that wait
    already. Of each batch at most `share` are replays, those that have waited longest; what is answered well then is
    not replayed any more.

    Args:
        share: of a batch.
        below: the mean score under which a prompt is hard.
        above: the mean score at which it is not yet hopeless: at 0, some answer must have scored.
    """

    learns: ClassVar[bool] = True

    share: float = Field(default=0.25, gt=0, lt=1)
    below: float = 0.5
    above: float = 0.0

    def start(self, rows: Sequence[Any], key: Key) -> Order:
        return _Replayed(self, len(rows), key)


class _Replayed(Order):
    """The order of `Replay`: that of epochs, and a queue of rows."""

    def __init__(self, sampler: Replay, rows: int, key: Key) -> None:
        self._sampler, self._rows = sampler, rows
        self._fresh = Epochs(rows, key)
        self._waiting: list[int] = []
        self._replays: dict[int, int] = {}

    def next(self, n: int) -> list[Drawn]:
        again, self._waiting = (self._waiting[: (count := int(self._sampler.share * n))], self._waiting[count:])
        drawn = self._fresh.next(n - len(again))
        for row in again:
            self._replays[row] = self._replays.get(row, 0) + 1
            drawn.append(Drawn(drawn[0].epoch, row, self._replays[row]))
        return drawn

    def learn(self, step: int, scores: Scores) -> None:
        for row, answers in scores.items():
            if row not in self._waiting and self._sampler.above < statistics.fmean(answers) < self._sampler.below:
                self._waiting.append(row)
        self.heard = step

    @property
    def position(self) -> dict[str, Any]:
        known = {str(row): times for row, times in self._replays.items()}
        fresh = self._fresh.position
        return {"rows": self._rows, "heard": self.heard, "fresh": fresh, "waiting": list(self._waiting), "known": known}

    def seek(self, position: Mapping[str, Any]) -> None:
        found = _checked(position, self.position, self._rows, "Replay")
        counted = all(is_count(times) for times in found["known"].values())
        if not _are_rows(found["waiting"], self._rows) or not counted:
            _refuse_position(position, self._rows, "Replay")
        self._fresh.seek(found["fresh"])
        self._waiting, self.heard = list(found["waiting"]), found["heard"]
        self._replays = {int(row): times for row, times in found["known"].items()}


def _are_rows(said: Any, rows: int) -> bool:
    """Whether it is a list of numbers of rows."""
    return isinstance(said, list) and all(is_count(row, 0) and row < rows for row in said)


def _are_numbered(said: Any, rows: int) -> bool:
    """Whether it is a mapping by numbers of rows."""
    return isinstance(said, Mapping) and all(str(row).isdecimal() and int(row) < rows for row in said)


def _checked(position: Any, like: Mapping[str, Any], rows: int, sampler: str) -> dict[str, Any]:
    """A position of so many rows, with the keys of one like it."""
    found = dict(position) if isinstance(position, Mapping) else {}
    counts = [value for key, value in found.items() if key in ("rows", "asked", "heard")]
    whole = found.keys() == like.keys() and all(is_count(count, 0) for count in counts)
    if not whole or not _are_numbered(found["known"], rows) or found["rows"] != rows:
        _refuse_position(position, rows, sampler)
    return found


def _refuse_position(position: Any, rows: int, sampler: str) -> None:
    said = repr(position)
    raise DataError(
        f"seek({said[:200]}{'...' if len(said) > 200 else ''}) is no position of {sampler} over {rows} rows; expected "
        f"one as `position` gave it for the same files, max_prompt_length and sampler."
    )
