"""`Origin`: raw rows of a source, which are mapped and checked later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from contextlib import closing
from typing import Any


class Origin(ABC):
    """Raw rows that can be read several times."""

    data_source: str = ""
    """What its rows have as `data_source` if they have none."""

    @abstractmethod
    def refuse_missing(self, source: str) -> None:
        """Check that it is there, without reading it; `source` is the class that reads it."""

    @abstractmethod
    def digests(self) -> list[str]:
        """Digests of its content."""

    @abstractmethod
    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        """Its rows, each with its place for errors; `columns` are needed, None is all."""

    def example(self) -> Any:
        """Its first row."""
        with closing(self.rows(None)) as rows:
            return next(rows)[1]
