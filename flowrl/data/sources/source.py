"""Where the rows of a graph's input come from: a `Source` says it, and the live `Stream` that it loads gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from flowrl.data.proto.dataproto import DataProto
from flowrl.data.proto.rows import refuse_no_count
from flowrl.data.sources.samplers import Drawn, Order
from flowrl.errors import DataError, ParameterError
from flowrl.spec import Spec, parameters

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


class Stream(ABC):
    """The rows of a source while they are drawn.

    The same source and seed give the same batches, and one that was taken to a `position` gives those that an
    uninterrupted one gives from there. So a run that was killed goes on with the same rows.
    """

    dropped: int = 0
    """How many rows were left out, as those that are too long."""

    @abstractmethod
    def next(self, n: int) -> DataProto:
        """The next batch: of `n` rows, or of `n` groups of rows (`flowrl.records.PreferenceBatch`).

        Raises:
            ParameterError: `n` is not at least 1.
        """

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, and what was learned, as JSON-able data: its part of a checkpoint."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`.

        Raises:
            DataError: not a position, or one in other data.
        """

    @property
    def size(self) -> int | None:
        """How many are drawn before any is drawn again; None has no end."""
        return None

    def batches(self, n: int) -> Iterator[DataProto]:
        """Everything once, in a fixed order, `n` at a time, with the position where it is; for validation.

        Raises:
            DataError: it has no end.
        """
        raise DataError(
            f"{type(self).__name__} has no end, so it cannot be validated on; give Validation(data=...) a source whose "
            f"stream has batches(n), such as PromptData."
        )

    def digest(self) -> str:
        """The digest of all that it could give; a run that is resumed with another one warns."""
        return ""

    def learn(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Hear how what was drawn scored; of sources that say that they `learns`.

        Args:
            step: that is done, counted from 1.
            scores: by `uid`, of each answer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no learn(step, scores)")

    @property
    def heard(self) -> int:
        """The last step whose scores it has heard, counted from 1; 0 is none."""
        return 0


class Source(Spec):
    """Where the rows of an input come from: a frozen spec, of which nothing is read before `load`.

    A subclass says which `record` it gives, and writes `load`.
    """

    timeless = True

    record: ClassVar[type]
    """The record whose columns its batches have, such as `flowrl.PromptBatch`."""

    @property
    def learns(self) -> bool:
        """Whether its stream is to hear how what it gave scored (`Stream.learn`)."""
        return False

    def load(self, tokenizer: ChatTokenizer, seed: int) -> Stream:
        """Read it.

        Args:
            tokenizer: of the model that is trained. A source whose record has no tokens is given None by a job without
                a language model.
            seed: of all that is random in it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load(tokenizer, seed)")

    def refuse_missing(self) -> None:
        """Refuse what `load` would not find on this machine, before any model is loaded.

        Raises:
            DataError: naming it.
        """

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on from: its parameters."""
        return dict(parameters(self))

    def digests(self) -> list[str]:
        """Of the content of what it reads, which must be the same, too.

        Raises:
            DataError: it cannot be read.
        """
        return []


class Numbered(Protocol):
    """A row that was read."""

    @property
    def index(self) -> int:
        """Its place in the files, by which a `uid`, ``"{epoch}/{index}/{draw}"``, names it."""
        ...


RowT = TypeVar("RowT", bound=Numbered)


class RowStream(Stream, Generic[RowT]):
    """Rows that were read once, drawn in an order; a subclass makes batches of them.

    Args:
        rows: all of them.
        dropped: how many were left out.
        order: of the draws.
    """

    def __init__(self, rows: Sequence[RowT], dropped: int, order: Order) -> None:
        self.dropped, self._rows, self._order = dropped, rows, order

    @abstractmethod
    def _batch(self, drawn: Sequence[tuple[Drawn, RowT]]) -> DataProto:
        """A batch of draws and their rows."""

    @abstractmethod
    def digest(self) -> str:
        """The xxh3-128 of all rows."""

    def __len__(self) -> int:
        """The number of rows of an epoch; dropped ones are not among them."""
        return len(self._rows)

    @property
    def size(self) -> int:
        return len(self)

    def next(self, n: int) -> DataProto:
        """The next `n` draws.

        Raises:
            ParameterError: `n` is not at least 1.
        """
        refuse_no_count("next", n, "row per batch", ParameterError)
        return self._drawn(self._order.next(n))

    def batches(self, n: int) -> Iterator[DataProto]:
        """Every row once, in the order of the files, `n` at a time (the last batch may be smaller); for validation.

        The position stays where it is. Rows carry the ids of epoch 0, so they are the same at every validation.

        Raises:
            ParameterError: `n` is not at least 1 (at the call, not at the first batch).
        """
        refuse_no_count("batches", n, "row per batch", ParameterError)
        every = [Drawn(0, row) for row in range(len(self))]
        return (self._drawn(every[start : start + n]) for start in range(0, len(self), n))

    def all(self) -> DataProto:
        """Every row once, in the order of the files, as one batch; see `batches`."""
        return self._drawn([Drawn(0, row) for row in range(len(self))])

    @property
    def position(self) -> dict[str, Any]:
        """Where the next row comes from (see `seek`), as its order tells it."""
        return self._order.position

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`: with the same data and seed, the batches are those that an uninterrupted stream gives.

        Raises:
            DataError: not a position, or one in other data.
        """
        self._order.seek(position)

    def learn(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Tell the order how rows scored.

        Raises:
            DataError: a group is none that was drawn here.
        """
        row_of = {row.index: number for number, row in enumerate(self._rows)}
        told: dict[int, list[float]] = {}
        for uid, answers in scores.items():
            first, _, again = str(uid).partition("+")
            _, index, draw = [*first.split("/"), "", "", ""][:3]
            if not index.isdecimal() or not draw.isdecimal() or int(index) not in row_of:
                raise DataError(
                    f"the scores of a group {str(uid)!r} were told, which is none that this stream has drawn; expected "
                    f"uids as they were drawn: put Feedback() where rows still have theirs, as behind Reward."
                )
            if not again:  # what a Collect has repeated was answered once
                told.setdefault(row_of[int(index)], []).extend(answers)
        self._order.learn(step, told)

    @property
    def heard(self) -> int:
        return self._order.heard

    def _drawn(self, drawn: Sequence[Drawn]) -> DataProto:
        return self._batch([(one, self._rows[one.row]) for one in drawn])
