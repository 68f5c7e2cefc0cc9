"""Losses: what an update minimizes, as plain Python callables whose annotations are the columns that they read.

Like an operator, a loss is a frozen record of hyper-parameters plus one `__call__`::

    class Reinforce(Loss):
        def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor:
            return -advantages * log_probs

``UpdateActor(Reinforce())`` has a port `advantages`, since its loss reads that. The update passes the current output of
the model (`LogProbs`, `Entropies`, `NewValues`, `NewScores`); everything else is wired. Columns ``[rows response]`` are
0 off the mask, and the loss there is ignored. The update also aggregates over tokens and adds KL and entropy terms.
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
from flowrl.core.operators.session import State
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DefinitionError
from flowrl.record_types import FieldType, located
from flowrl.spec import defining_frame, where_defined

Unit = Literal["token", "row", "group", "batch"]

ModelQuantity = Literal["log-probs", "values", "scores", "entropies", "distributions"]

_QUANTITIES: dict[str, ModelQuantity] = {
    "log-prob of the policy that is trained": "log-probs",
    "value of the critic that is trained": "values",
    "score of the reward model that is trained": "scores",
    "entropy of the policy that is trained": "entropies",
    "distribution of the policy that is trained": "distributions",
}

_EXAMPLE = "def __call__(self, log_probs: LogProbs, advantages: Advantages) -> Tensor"


class Loss(HasEffects):
    """Base class of all losses; see the module's docstring.

    `__call__` returns the loss of each token, float ``[rows response]``, or of each row, ``[rows]``, which then applies
    to every token of the row. It may take ``metrics: Metrics = INJECTED``. With the unit ``"batch"`` it is called once
    per mini-batch and may take ``key: Key = INJECTED``, the key of the update in this step.

    A loss that reads `Distributions` is called within the model for some tokens at a time, so ``[rows response
    vocabulary]`` never exists. It gets log-probs ``[tokens vocabulary]``, every other column at these tokens
    (``[tokens ...]``; a row's column repeated for its tokens) and values such as a teacher's ``Head`` unchanged, and
    returns ``[tokens]``. It sees each token alone and takes no metrics.

    Class attributes:
        unit: what the loss must see at once: ``"token"`` or ``"row"`` (each alone), ``"group"`` (all rows of a group;
            the loss must read the group of a row, such as `Uid`), or ``"batch"`` (all rows of the mini-batch).
            Mini-batches consist of complete groups. A loss over more than a row gets all rows of the mini-batch at
            once; with several micro-batches or ranks, that costs another forward pass.

    Raises:
        DefinitionError: where a subclass is defined, with file and line: it reads something other than columns, does
            not read exactly one of `LogProbs`, `Distributions`, `NewValues` and `NewScores`, returns no tensor, has
            an unknown unit, or a `State`, which only operators have.
    """

    unit: ClassVar[Unit] = "token"
    model_ports: ClassVar[Mapping[ModelQuantity, str]] = {}
    """The parameter for each output of the trained model."""
    _signature: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        definer = defining_frame()
        where = f"{where_defined(definer)}: {cls.__name__}"
        _refuse_state(cls, where)
        if "__call__" in vars(cls):
            call = vars(cls)["__call__"]
            refuse_no_function(call, f"{where}.__call__", _EXAMPLE)
            reads = inputs_of(call, f"{where}.__call__", definer.f_locals)
            if return_of(call, f"{where}.__call__", definer.f_locals) is not Tensor:
                raise DefinitionError(
                    f"{where}.__call__ does not return a tensor. Return the loss of each token or row: `-> Tensor`.",
                    code="operator.return-type",
                    where=where,
                )
            cls.model_ports = _model_ports(reads, where)
            wired = {name: port for name, port in reads.ports.items() if name not in cls.model_ports.values()}
            cls._signature = replace(reads, ports=wired)
        elif not hasattr(cls, "_signature"):
            raise DefinitionError(
                f"{where} has no __call__. Define one whose annotations are the columns that it reads: `{_EXAMPLE}`.",
                code="operator.no-call",
                where=where,
            )
        _refuse_unit(cls, where)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    @property
    def signature(self) -> Signature:
        """The columns that are wired."""
        return self._signature

    def of(self, columns: Mapping[str, Any], metrics: Metrics, key: Key | None = None) -> Any:
        """The loss for these columns, by the names of the parameters."""
        names = (*self.model_ports.values(), *self.signature.ports)
        injected = {name: metrics if cls is Metrics else key for name, cls in self.signature.injected.items()}
        return self(**{name: columns[name] for name in names}, **injected)


def _model_ports(reads: Signature, where: str) -> dict[ModelQuantity, str]:
    """The parameters that take outputs of the model."""
    found: dict[ModelQuantity, str] = {}
    for name, port in reads.ports.items():
        with located(f"{where}.__call__({name})"):
            kind = _kind(_field(port))
        if kind in _QUANTITIES:
            found[_QUANTITIES[kind]] = name
    if len(found.keys() - {"entropies"}) != 1 or ("entropies" in found and "log-probs" not in found):
        raise DefinitionError(
            f"{where}.__call__ reads {', '.join(found.values()) or 'nothing'} of the trained model. Declare "
            f"`log_probs: LogProbs`, optionally with `entropies: Entropies`, or `distributions: Distributions` for a "
            f"policy, `new_values: NewValues` for a critic, or `new_scores: NewScores` for a reward model.",
            code="loss.ports",
            where=where,
            found=list(found.values()),
        )
    if other := [cls.__name__ for cls in reads.injected.values() if cls not in (Metrics, Key)]:
        raise DefinitionError(
            f"{where}.__call__ takes a {other[0]}, which losses do not get. Declare columns, and optionally "
            f"`metrics: Metrics` and `key: Key`.",
            code="loss.ports",
            where=where,
            found=other[0],
        )
    return found


def _field(port: Port) -> FieldType:
    found = port.fields.get(PortField(port.name))
    if found is None:
        raise DefinitionError(
            "A loss does not take records. Declare one parameter for each column, with a column of flowrl.columns.",
            code="loss.ports",
            port=port.name,
        )
    return found


def _kind(field: FieldType) -> str:
    """The kind of a column; empty for a value, which all rows share."""
    return field.kind if isinstance(field, ColumnType) else ""


def _refuse_state(cls: type[Loss], where: str) -> None:
    """Refuse state, which would depend on the micro-batches and ranks, for each of which the loss is called."""
    members = {name: value for base in cls.__mro__ for name, value in vars(base).items()}
    if state := next((name for name, value in members.items() if isinstance(value, State)), None):
        raise DefinitionError(
            f"{where}.{state} is a State, which losses cannot have: each rank calls them once per micro-batch. "
            f"Define it in an operator that writes a column, and declare that column as a port of the loss; or make it "
            f"a parameter with a schedule.",
            code="operator.state",
            where=where,
            state=state,
        )


def _refuse_unit(cls: type[Loss], where: str) -> None:
    if problem := _unit_problem(cls):
        raise DefinitionError(f"{where}{problem}", code="loss.unit", where=where, unit=cls.unit)


def _unit_problem(cls: type[Loss]) -> str | None:
    """Why a loss with these ports cannot have its unit."""
    units = typing.get_args(Unit)
    if cls.unit not in units:
        return f".unit is {cls.unit!r}. Expected {', '.join(map(repr, units[:-1]))} or {units[-1]!r}."
    if Key in cls._signature.injected.values() and cls.unit != "batch":
        return (
            f".__call__ takes a Key, but its unit is {cls.unit!r}, so it would sample the same numbers for every "
            f"micro-batch. Set the unit 'batch', which calls it once per mini-batch."
        )
    fields = {name: _field(port) for name, port in cls._signature.ports.items()}
    objects = [name for name, field in fields.items() if getattr(field, "dtype", None) == "object"]
    more = [*([f"the unit {cls.unit!r}"] if cls.unit != "token" else []), *cls._signature.injected, *objects]
    if "distributions" in cls.model_ports and more:
        return (
            f" reads distributions, which exist for some tokens at a time, so it cannot have {more[0]}. Set unit = "
            f"'token', and declare tensors only."
        )
    groups = [_kind(field) for field in fields.values()].count("group")
    if cls.unit == "group" and groups != 1:
        return f".unit is 'group', but its __call__ reads {groups} columns with the group of a row. Declare `uid: Uid`."
    return None
