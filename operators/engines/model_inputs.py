"""What a model is given of a row: tokens, or the columns of a record of your own."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from pydantic import field_validator

from flowrl.core.operators.ports import Signature
from flowrl.record_types import record_columns
from flowrl.spec import Spec


class AsksModel(Spec):
    """What operators share that hand rows to a model, by the port `rollout`.

    Args:
        reads: the record whose columns the model is given, where it reads something else than tokens: a NamedTuple or a
            Protocol. What the operator itself wants of the rows is among them. None is tokens.
    """

    replicated: ClassVar[frozenset[str]]
    _signature: ClassVar[Signature]
    reads: type | None = dataclasses.field(default=None, kw_only=True)  # a type checker does not know pydantic's

    @field_validator("reads")
    @classmethod
    def _refuse_unfit(cls, reads: type | None) -> type | None:
        if reads is not None:
            columns = record_columns(reads)
            if not columns:
                raise ValueError("expected a record of columns, such as a NamedTuple; see flowrl.records")
            own = {place.name: typed for place, typed in cls._signature.ports["rollout"].fields.items()}
            if missing := sorted(name for name in cls.replicated if columns.get(name) != own[name]):
                raise ValueError(f"{cls.__name__} itself reads {', '.join(missing)}, which {reads.__name__} lacks")
        return reads

    @property
    def own_ports(self) -> Signature:
        """Those of `__call__`, with the columns of `reads` in the place of tokens."""
        return self._signature if self.reads is None else _reading(self._signature, self.reads)


@functools.lru_cache(maxsize=256)
def _reading(own: Signature, record: type) -> Signature:
    """The same object each time, since calls are laid out by it."""
    return own.retyped("rollout", record)
