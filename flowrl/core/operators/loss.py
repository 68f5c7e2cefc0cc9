"""Losses: what an update minimises, as plain Python callables whose annotations are the columns that they read.

A loss is a frozen record of hyper-parameters plus one `__call__`, as an operator is::

    class Reinforce(Loss):
        def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor:
            return -advantages * log_probs

``UpdateActor(Reinforce())`` has a port `advantages`, since its loss reads that. What the model says now (`LogProbs`,
`Entropies`, `NewValues`) is handed in by the update; everything else is wired. Columns ``[rows response]`` are 0 off
the mask, and what a loss returns there does not count. How tokens are aggregated, KL and entropy are composed with a
loss by the update.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from flowrl.columns import ColumnType
from flowrl.core.operators.effects import HasEffects
from flowrl.core.operators.ports import Port, PortField, Signature, inputs_of, refuse_no_function, return_of
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DefinitionError
from flowrl.record_types import FieldType, located
from flowrl.spec import defining_frame, where_defined

Unit = Literal["token", "row", "group", "batch"]

ModelQuantity = Literal["log-probs", "values", "entropies", "distributions"]

_SAID: dict[str, ModelQuantity] = {
    "log-prob of the policy that is trained": "log-probs",
    "value of the critic that is trained": "values",
    "entropy of the policy that is trained": "entropies",
    "distribution of the policy that is trained": "distributions",
}

_EXAMPLE = "def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor"


class Loss(HasEffects):
    """Base class of all losses; see the module's docstring.

    A loss that reads `Distributions` is called within the model, for some tokens at a time, so that ``[rows response
    vocabulary]`` never exists: it gets log-probs ``[tokens vocabulary]``, every other column at these tokens
    (``[tokens ...]``; of a row, the row's at each), values such as a teacher's `Head` as they are, and returns
    ``[tokens]``. It sees each token alone, and takes no metrics.

    `__call__` returns the loss of each token, float ``[rows response]``; or of each row, ``[rows]``, which is then that
    of every token of the row. It may take ``metrics: Metrics = INJECTED``; and, where its unit is ``"batch"`` and it is
    called once for a mini-batch, ``key: Key = INJECTED`` to draw from, which is that of the update in this step.

    Class attributes:
        unit: what must be seen together for the loss to be right: ``"token"`` or ``"row"`` (each alone), ``"group"``
            (all rows of a group; the loss must read which group a row is of, as by `Uid`), or ``"batch"`` (the whole
            mini-batch). A mini-batch holds whole groups, and a loss over more than a row is given all rows of the
            mini-batch at once, whatever micro-batches and ranks these are computed in. Where they are more than one,
            that costs another forward pass.

    Raises:
        DefinitionError: where a subclass is defined, with file and line: what it reads is no column, it does not read
            just one of `LogProbs`, `Distributions` and `NewValues`, it returns no tensor, or its unit is not one of
            these.
    """

    unit: ClassVar[Unit] = "token"
    said: ClassVar[Mapping[ModelQuantity, str]] = {}
    """What it reads of the model that is trained, and the parameter that takes it."""
    _signature: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        definer = defining_frame()
        where = f"{where_defined(definer)}: {cls.__name__}"
        if "__call__" in vars(cls):
            call = vars(cls)["__call__"]
            refuse_no_function(call, f"{where}.__call__", _EXAMPLE)
            reads = inputs_of(call, f"{where}.__call__", definer.f_locals)
            if return_of(call, f"{where}.__call__", definer.f_locals) is not Tensor:
                raise DefinitionError(
                    f"{where}.__call__ returns something else than a tensor; expected the loss of each token, or of "
                    f"each row: `-> Tensor`."
                )
            cls.said = _what_is_said(reads, where)
            wired = {name: port for name, port in reads.ports.items() if name not in cls.said.values()}
            cls._signature = replace(reads, ports=wired)
        elif not hasattr(cls, "_signature"):
            raise DefinitionError(
                f"{where} has no __call__; define one whose annotations are the columns that it reads: `{_EXAMPLE}`."
            )
        _refuse_unit(cls, where)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    @property
    def signature(self) -> Signature:
        """The columns that are wired."""
        return self._signature

    def of(self, columns: Mapping[str, Any], metrics: Metrics, key: Key | None = None) -> Any:
        """What `__call__` returns for these columns, each under the name of the parameter that takes it."""
        names = (*self.said.values(), *self.signature.ports)
        injected = {name: metrics if cls is Metrics else key for name, cls in self.signature.injected.items()}
        return self(**{name: columns[name] for name in names}, **injected)


def _what_is_said(reads: Signature, where: str) -> dict[ModelQuantity, str]:
    """The parameters that take what the model says; refuses those that take no column."""
    said: dict[ModelQuantity, str] = {}
    for name, port in reads.ports.items():
        with located(f"{where}.__call__({name})"):
            kind = _kind(_field(port))
        if kind in _SAID:
            said[_SAID[kind]] = name
    if len(said.keys() - {"entropies"}) != 1 or ("entropies" in said and "log-probs" not in said):
        raise DefinitionError(
            f"{where}.__call__ reads {', '.join(said.values()) or 'nothing'} of the model that is trained; expected "
            f"`log_probs: LogProbs` for a policy, with `entropies: Entropies` or without; `distributions: "
            f"Distributions` for all that it could have said; or `new_values: NewValues` for a critic."
        )
    if other := [cls.__name__ for cls in reads.injected.values() if cls not in (Metrics, Key)]:
        raise DefinitionError(
            f"{where}.__call__ takes a {other[0]}; expected columns, and perhaps `metrics: Metrics` and `key: Key`."
        )
    return said


def _field(port: Port) -> FieldType:
    wanted = port.fields.get(PortField(port.name))
    if wanted is None:
        raise DefinitionError("a loss reads columns, each by a parameter; expected a column of flowrl.columns.")
    return wanted


def _kind(wanted: FieldType) -> str:
    """Of a column; nothing of a value, which is the same for all rows."""
    return wanted.kind if isinstance(wanted, ColumnType) else ""


def _refuse_unit(cls: type[Loss], where: str) -> None:
    if cls.unit not in typing.get_args(Unit):
        raise DefinitionError(
            f"{where}.unit is {cls.unit!r}; expected one of {', '.join(map(repr, typing.get_args(Unit)))}: what must "
            f"be seen together."
        )
    if Key in cls._signature.injected.values() and cls.unit != "batch":
        raise DefinitionError(
            f"{where}.__call__ takes a Key, and its unit is {cls.unit!r}, so it would draw the same numbers again for "
            f"every micro-batch; expected the unit 'batch', of which it is called once for a mini-batch."
        )
    fields = {name: _field(port) for name, port in cls._signature.ports.items()}
    objects = [name for name, wanted in fields.items() if getattr(wanted, "dtype", None) == "object"]
    more = [*([f"a whole {cls.unit}"] if cls.unit != "token" else []), *cls._signature.injected, *objects]
    if "distributions" in cls.said and more:
        raise DefinitionError(
            f"{where} reads distributions, which exist for some tokens at a time, and wants {more[0]}; expected unit = "
            f"'token', and a __call__ that takes tensors alone."
        )
    kinds = [_kind(wanted) for wanted in fields.values()]
    if cls.unit == "group" and kinds.count("group") != 1:
        raise DefinitionError(
            f"{where}.unit is 'group', and its __call__ reads {kinds.count('group')} columns that say which group a "
            f"row is of; expected one, such as `uid: Uid`."
        )
