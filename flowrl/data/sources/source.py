"""The rows of a graph's input: a `Source` is a frozen spec; the `Stream` that it loads yields the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from flowrl.data.proto.dataproto import DataProto
from flowrl.data.proto.rows import refuse_no_count
from flowrl.data.sources.samplers import Order, SampledRow
from flowrl.errors import DataError, ParameterError
from flowrl.hub.repositories import Commits
from flowrl.spec import Spec, parameters

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


class Stream(ABC):
    """The rows of a loaded source.

    The same source and seed give the same batches. After `seek`, a stream gives the same batches as an uninterrupted
    one from that `position`, so a resumed run continues with the same rows.
    """

    dropped: int = 0
    """Number of rows dropped, such as overlong ones."""

    @abstractmethod
    def next(self, n: int) -> DataProto:
        """The next batch: `n` rows, or `n` groups of rows (`flowrl.records.PreferenceBatch`).

        Raises:
            ParameterError: `n` is not at least 1.
        """

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """The complete state, including what it has learned, as JSON-able data; saved in checkpoints."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore `position`.

        Raises:
            DataError: not a position, or one in other data.
        """

    @property
    def size(self) -> int | None:
        """Number of rows before any is repeated; None is endless."""
        return None

    def batches(self, n: int) -> Iterator[DataProto]:
        """Every row once, in a fixed order, `n` at a time, for validation; the position does not change.

        Raises:
            DataError: the stream is endless.
        """
        raise DataError(
            f"{type(self).__name__} is endless, so it cannot be validated on. Pass Validation(data=...) a source whose "
            f"stream implements batches(n), such as PromptData.",
            code="prompts.endless-stream",
            stream=type(self).__name__,
        )

    def digest(self) -> str:
        """Digest of all its rows; resuming a run with a different digest warns."""
        return ""

    def learn(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Receive the scores of rows; called for sources whose `learns` is True.

        Args:
            step: the completed step, counted from 1.
            scores: the scores of the responses, by `uid`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no learn(step, scores)")

    @property
    def last_scored_step(self) -> int:
        """The last step whose scores it has received, counted from 1; 0 is none."""
        return 0


class Source(Spec):
    """The rows of an input, as a frozen spec; nothing is read before `load`.

    A subclass sets `record` and implements `load`.
    """

    schedulable = False

    record: ClassVar[type]
    """The record whose columns its batches have, such as `flowrl.PromptBatch`."""

    @property
    def learns(self) -> bool:
        """Whether its stream receives scores (`Stream.learn`)."""
        return False

    def pinned(self, commits: Commits) -> Self:
        """The same source with its repository, if it names one, resolved to a commit."""
        return self

    def load(self, tokenizer: ChatTokenizer, seed: int) -> Stream:
        """Read it.

        Args:
            tokenizer: of the model that is trained; None for a source whose record has no tokens, in a job without a
                language model.
            seed: of all its randomness.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load(tokenizer, seed)")

    def refuse_missing(self) -> None:
        """Check that everything that `load` reads exists, before any model is loaded.

        Raises:
            DataError: something is missing.
        """

    def missing_here(self) -> list[str]:
        """What would be downloaded to read it, so that `flowrl check` does not."""
        return []

    def identity(self) -> dict[str, Any]:
        """Its parameters that must not change when a run is resumed."""
        return dict(parameters(self))

    def digests(self) -> list[str]:
        """Digests of the content that it reads, which must not change either.

        Raises:
            DataError: it cannot be read.
        """
        return []


class IndexedRow(Protocol):
    """A row of a source."""

    @property
    def index(self) -> int:
        """Its index in the files, which is part of its `uid`: ``"{epoch}/{index}/{draw}"``."""
        ...


RowT = TypeVar("RowT", bound=IndexedRow)


class RowStream(Stream, Generic[RowT]):
    """Rows in memory, sampled in an order; a subclass makes batches of them. `dropped` counts the dropped rows."""

    def __init__(self, rows: Sequence[RowT], dropped: int, order: Order) -> None:
        self.dropped, self._rows, self._order = dropped, rows, order

    @abstractmethod
    def _batch(self, sampled: Sequence[tuple[SampledRow, RowT]]) -> DataProto:
        """A batch of draws and their rows."""

    @abstractmethod
    def digest(self) -> str:
        """xxh3-128 of all rows."""

    def __len__(self) -> int:
        """Number of rows in an epoch, without dropped ones."""
        return len(self._rows)

    @property
    def size(self) -> int:
        return len(self)

    def next(self, n: int) -> DataProto:
        """The next `n` draws."""
        refuse_no_count("next", n, "row per batch", ParameterError)
        return self._rows_of(self._order.next(n))

    def batches(self, n: int) -> Iterator[DataProto]:
        """Every row once, in file order, `n` at a time (the last batch may be smaller), for validation.

        The position does not change, and rows have the ids of epoch 0.
        """
        refuse_no_count("batches", n, "row per batch", ParameterError)
        every = [SampledRow(0, row) for row in range(len(self))]
        return (self._rows_of(every[start : start + n]) for start in range(0, len(self), n))

    def all(self) -> DataProto:
        """Every row once, in file order, as one batch; see `batches`."""
        return self._rows_of([SampledRow(0, row) for row in range(len(self))])

    @property
    def position(self) -> dict[str, Any]:
        """The position of its order; see `seek`."""
        return self._order.position

    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore `position`: with the same data and seed, the next batches are those of an uninterrupted stream."""
        self._order.seek(position)

    def learn(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Pass the scores of rows to the order."""
        row_of = {row.index: number for number, row in enumerate(self._rows)}
        by_row: dict[int, list[float]] = {}
        for uid, group_scores in scores.items():
            first, _, copy = str(uid).partition("+")
            _, index, draw = [*first.split("/"), "", "", ""][:3]
            if not index.isdecimal() or not draw.isdecimal() or int(index) not in row_of:
                raise DataError(
                    f"Feedback reported scores of the group {str(uid)!r}, which this stream has not sampled. Insert "
                    f"Feedback() where rows still have their original uid, such as directly after Reward.",
                    code="sampler.unknown-group",
                    uid=uid,
                )
            if not copy:  # Collect may repeat a group, whose responses count once
                by_row.setdefault(row_of[int(index)], []).extend(group_scores)
        self._order.learn(step, by_row)

    @property
    def last_scored_step(self) -> int:
        return self._order.last_scored_step

    def _rows_of(self, sampled: Sequence[SampledRow]) -> DataProto:
        return self._batch([(one, self._rows[one.row]) for one in sampled])
