"""The inputs of a model: tokens, or the columns of a custom record."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from pydantic import field_validator

from flowrl.core.operators.ports import Signature
from flowrl.record_types import record_columns
from flowrl.spec import Spec


class ModelInputs(Spec):
    """Mixin of operators whose port `rollout` is the input of a model.

    Args:
        reads: record of the model's inputs, a NamedTuple or Protocol that includes the columns which the operator
            itself reads; None for tokens.
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
            own = {field.name: typed for field, typed in cls._signature.ports["rollout"].fields.items()}
            if missing := sorted(name for name in cls.replicated if columns.get(name) != own[name]):
                raise ValueError(f"{cls.__name__} itself reads {', '.join(missing)}, which {reads.__name__} lacks")
        return reads

    @property
    def own_ports(self) -> Signature:
        """The ports of `__call__`, with the columns of `reads` in place of tokens."""
        return self._signature if self.reads is None else _reading(self._signature, self.reads)


@functools.lru_cache(maxsize=256)
def _reading(own: Signature, record: type) -> Signature:
    """Cached, since the layout of calls depends on the identity of the signature."""
    return own.retyped("rollout", record)
