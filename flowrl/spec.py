"""`Spec`: a frozen, validated record of parameters; operators, losses and backends are specs.

Each subclass becomes a frozen pydantic dataclass where it is defined: ``Repeat(8)`` and ``GAE(gamma=0.99)`` both work,
unknown or ill-typed parameters are errors, and equality is by value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import rebuild_dataclass
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import InitErrorDetails, PydanticCustomError

from flowrl.errors import DefinitionError, FrozenError, ParameterError, refuse_staleness
from flowrl.parameter_errors import by_name, parameter_at, parameter_error, parts_of, positional

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_default=True, allow_inf_nan=False)


# pydantic's `Field` is not a specifier: type checkers read a default by keyword only, so `Field(1.0)` would have none.
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Spec:
    """Base of all classes that are declared by their parameters.

    Raises:
        DefinitionError: where the subclass is defined, for a field without annotation or with a mutable default.
        ParameterError: on construction, for parameters that are missing, unknown or out of range.
    """

    schedulable: ClassVar[bool] = True
    """Whether a number in it, or in a spec that it contains, may be a `Schedule`."""
    references: ClassVar[frozenset[str]] = frozenset()
    """Fields whose strings name functions: files store these with the hash of the function's source."""
    commands: ClassVar[frozenset[str]] = frozenset()
    """Fields whose lists are commands: files with these are loaded only with ``imports=True``."""

    def __init_subclass__(cls, definer: FrameType | None = None, **kwargs: Any) -> None:
        """`definer` is the frame that defines the class; None finds the one that executes the class statement."""
        super().__init_subclass__(**kwargs)
        definer = definer or defining_frame()
        where = f"{where_defined(definer)}: {cls.__name__}"
        _refuse_untyped_fields(cls, where)
        if "__init__" in vars(cls):
            raise DefinitionError(
                f"{where} defines __init__. Declare its parameters as fields: `coef: float = 0.1`.",
                code="parameter.definition",
                where=where,
                member="__init__",
            )
        try:
            pydantic_dataclass(cls, frozen=True, config=_CONFIG)
            # a class that a function defines may name types that the function defines
            rebuild_dataclass(cast(Any, cls), _types_namespace=dict(definer.f_locals))
        except PydanticUndefinedAnnotation as error:
            raise DefinitionError(
                f"{where} annotates a field with {error.name!r}, which is not defined. Import it, or define it above "
                f"the class.",
                code="column.undefined-name",
                where=where,
                reason=error.name,
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            reason = str(error)
            raise DefinitionError(
                f"{where} has invalid fields: {reason}", code="parameter.definition", where=where, reason=reason
            ) from error
        _refuse_unknown_references(cls, where)
        _raise_parameter_errors(cls)
        _raise_frozen_errors(cls)

    def _check(self) -> None:
        """Check an instance whose single parameters are valid; called at the end of its construction."""
        if not self.schedulable:
            _refuse_over_time(type(self), schedules(self))


def defining_frame() -> FrameType:
    """The frame of the class statement, called from its ``__init_subclass__``."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__init_subclass__":
        frame = cast(FrameType, frame.f_back)
    return frame


def where_defined(frame: FrameType) -> str:
    """``file:line`` of what `frame` executes."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _refuse_unknown_references(cls: type[Spec], where: str) -> None:
    known = [f.name for f in dataclasses.fields(cast(Any, cls))]
    if not isinstance(cls.references, frozenset) or not cls.references <= set(known):
        raise DefinitionError(
            f"{where}.references is {cls.references!r}. Expected a frozenset of its fields: {', '.join(known)}.",
            code="parameter.definition",
            where=where,
            member="references",
            known=known,
        )


def _refuse_untyped_fields(cls: type, where: str) -> None:
    """A plain ``gamma = 0.9`` would be a class attribute that cannot be set, and a list default would be shared."""
    annotations = inspect.get_annotations(cls)
    constants = {n for base in cls.__mro__ for n, a in inspect.get_annotations(base).items() if "ClassVar" in str(a)}
    for name, value in cls.__dict__.items():
        if name.startswith("_") or name in constants:
            continue
        if any(isinstance(v, list | dict | set) for v in (value, getattr(value, "default", None))):
            raise DefinitionError(
                f"{where}.{name} has the mutable default {getattr(value, 'default', value)!r}, which all instances "
                f"would share. Use a tuple, or Field(default_factory=...).",
                code="parameter.definition",
                where=where,
                member=name,
            )
        # functions, properties, States and nested classes are members of the class
        member = isinstance(value, type) or hasattr(type(value), "__get__")
        if name not in annotations and not member:
            raise DefinitionError(
                f"{where}.{name} = {value!r} has no annotation, so it is not a parameter. Write "
                f"`{name}: {type(getattr(value, 'default', value)).__name__} = ...`, or ClassVar[...] for a constant.",
                code="parameter.definition",
                where=where,
                parameter=name,
            )


def _raise_parameter_errors(cls: type) -> None:
    """Make the constructor of `cls` raise `ParameterError` instead of pydantic's error."""
    init = vars(cls)["__init__"]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _refuse_bools(cls, args, kwargs)
            if over_time := _over_time(cls, args, kwargs):
                if not self.schedulable:
                    _refuse_over_time(cls, over_time)
                _begin(cls, self, init, args, kwargs, over_time)
            else:
                init(self, *args, **kwargs)
        except ValidationError as error:
            refuse_staleness(cls.__name__, kwargs, cls.__pydantic_fields__)  # type: ignore[attr-defined]
            raise parameter_error(cls, error, args, kwargs) from None
        self._check()

    __init__.__module__, __init__.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    __init__.__signature__ = _signature(cls)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def _signature(cls: Any) -> inspect.Signature:
    """The signature for `help`; keyword-only from the first required field after an optional one."""
    kinds = inspect.Parameter
    positional, closed = [kinds("self", kinds.POSITIONAL_ONLY)], False
    keyword_only: list[inspect.Parameter] = []
    for name, field in cls.__pydantic_fields__.items():
        required = field.is_required()
        closed = closed or (required and positional[-1].default is not kinds.empty)
        default = ... if field.default_factory else kinds.empty if required else field.default  # `...`: a factory's
        kind = kinds.KEYWORD_ONLY if closed or field.kw_only else kinds.POSITIONAL_OR_KEYWORD
        parameter = kinds(name, kind, default=default, annotation=field.annotation)
        (positional if kind is kinds.POSITIONAL_OR_KEYWORD else keyword_only).append(parameter)
    return inspect.Signature([*positional, *keyword_only])


def _refuse_bools(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse True and False for numbers, which pydantic would accept as 1 and 0."""
    for name, value in by_name(cls, args, kwargs).items():
        found = next(_bools(value, name), None)
        if found is not None and _takes_a_number(cls, name):
            wrong = PydanticCustomError("bool", "expected a number, not a bool")
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=wrong, loc=found[:-1], input=found[-1])]
            )


def _takes_a_number(cls: Any, name: str) -> bool:
    """Whether the type of a parameter includes a number and no bool."""
    parts = parts_of(cls.__pydantic_fields__[name].annotation) if name in cls.__pydantic_fields__ else []
    return any(part in (int, float) for part in parts) and not any(part in (bool, object, Any) for part in parts)


def _bools(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """Each bool in tuples, lists and mappings, after the indices and keys that lead to it."""
    if isinstance(value, bool):
        yield (*way, value)
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _bools(item, *way, key)


def _raise_frozen_errors(cls: type) -> None:
    """Make assignment to instances of `cls` raise `FrozenError`."""
    assign = vars(cls)["__setattr__"]

    @functools.wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            assign(self, name, value)
        except dataclasses.FrozenInstanceError:
            raise FrozenError(
                f"{type(self).__name__}.{name} cannot be assigned: parameters are frozen. Create a changed copy with "
                f"dataclasses.replace(..., {name}=...). For a value that an operator changes over steps, define "
                f"`{name} = State(lambda self: ...)` and assign self.{name}.value.",
                code="parameter.frozen",
                spec=type(self).__name__,
                parameter=name,
            ) from None

    cls.__setattr__ = __setattr__  # type: ignore[assignment,method-assign]


def parameters(spec: Spec) -> dict[str, Any]:
    """The parameters of `spec`, by name."""
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(cast(Any, spec)) if f.init}


def non_default(spec: Spec) -> dict[str, Any]:
    """The parameters that users set and that differ from their defaults, by name."""
    fields: Mapping[str, Any] = cast(Any, type(spec)).__pydantic_fields__
    return {
        name: value
        for name, value in shown(spec).items()
        if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
    }


def written(spec: Spec) -> str:
    """The Python expression of a spec."""
    return f"{type(spec).__name__}({', '.join(f'{name}={value!r}' for name, value in non_default(spec).items())})"


def shown(spec: Spec) -> dict[str, Any]:
    """The parameters that users set, by name: all but those with ``Field(repr=False)``."""
    fields: Mapping[str, Any] = cast(Any, type(spec)).__pydantic_fields__
    return {name: value for name, value in parameters(spec).items() if fields[name].repr}


# ---- numbers over time

SpecT = TypeVar("SpecT", bound=Spec)
_FIRST = range(10_000)


class Schedule(Spec):
    """A number over steps, for a numeric parameter of an operator or of a spec in it.

    A subclass defines `at`; see `flowrl.schedules`. Integer parameters get the nearest integer.
    """

    schedulable = False

    def at(self, step: int) -> float:
        """The finite number in step `step`, counted from 0; it depends on `step` and the parameters only."""
        raise NotImplementedError(f"{type(self).__name__} does not define at(step)")

    @property
    def over_run(self) -> bool:
        """Whether it depends on the number of steps of the run; see `over`."""
        return False

    def over(self, steps: int) -> Schedule:
        """The schedule of a run of this many steps; itself if it does not depend on their number."""
        return self

    @property
    def turns(self) -> Iterable[int]:
        """Steps between which the number is monotonic: it is checked there. By default the first 10,000."""
        return _FIRST

    def sample_steps(self) -> tuple[int, ...]:
        """The steps at which to check the bounds of the number: the first, and those of its extremes."""
        turns = list(self.turns)
        numbers = [self._number(step) for step in turns]
        extremes = {turns[numbers.index(extreme(numbers))] for extreme in (min, max)}
        return tuple(sorted({turns[0], *extremes}))

    def _number(self, step: int) -> float:
        """What `at` returns, which must be a finite number."""
        try:
            number: Any = self.at(step)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise ParameterError(
                f"{self!r}.at({step}) raised {raised}.", code="parameter.schedule", schedule=self, step=step
            ) from error
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ParameterError(
                f"{self!r}.at({step}) returned {number!r}. Return a finite float.",
                code="parameter.schedule",
                schedule=self,
                step=step,
                found=repr(number),
            )
        return number


def in_step(spec: SpecT, step: int) -> SpecT:
    """`spec` with the numbers of its schedules, and of those in its specs, in a step; itself without schedules."""
    now = {name: _now(type(spec), name, value, step) for name, value in parameters(spec).items()}
    changed = {name: value for name, value in now.items() if value is not getattr(spec, name)}
    return cast("SpecT", dataclasses.replace(cast(Any, spec), **changed)) if changed else spec


def _now(cls: type, name: str, value: Any, step: int) -> Any:
    """The value of a parameter in a step."""
    if isinstance(value, Schedule):
        return _number_of(cls, name, value, step) if _takes_a_number(cls, name) else value
    if isinstance(value, Spec):
        return in_step(value, step)
    if isinstance(value, tuple) and any(isinstance(item, Spec) for item in value):
        items = tuple(in_step(item, step) if isinstance(item, Spec) else item for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def _number_of(cls: Any, name: str, schedule: Schedule, step: int) -> float:
    """The number of a parameter in a step, rounded if its type has no float."""
    number = schedule._number(step)
    return number if float in parts_of(cls.__pydantic_fields__[name].annotation) else round(number)


def schedules(spec: Spec) -> dict[str, Schedule]:
    """The schedules of a spec, and of the specs in it, by path: ``{"loss.clip_low": Linear(...)}``."""
    found: dict[str, Schedule] = {}
    for name, value in parameters(spec).items():
        if isinstance(value, Schedule):
            found |= {name: value} if _takes_a_number(type(spec), name) else {}
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Spec):
                found |= {f"{name}.{path}": schedule for path, schedule in schedules(item).items()}
    return found


def _over_time(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Schedule]:
    """The arguments that are schedules for a number."""
    if not any(isinstance(value, Schedule) for value in (*args, *kwargs.values())):
        return {}
    given = by_name(cls, args, kwargs).items()
    return {name: value for name, value in given if isinstance(value, Schedule) and _takes_a_number(cls, name)}


def _begin(
    cls: type,
    spec: Any,
    init: Callable[..., None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    over_time: Mapping[str, Schedule],
) -> None:
    """Construct a spec some of whose numbers have schedules, after checking it at their `sample_steps`."""
    names = [*positional(cls), *([""] * len(args))]  # `init` refuses too many arguments

    def begin(made: Any, step: int) -> None:
        numbers = {name: _number_of(cls, name, schedule, step) for name, schedule in over_time.items()}
        values = [numbers.get(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: numbers.get(name, value) for name, value in kwargs.items()}
        try:
            init(made, *values, **named)
        except ValidationError as error:
            wrong = parameter_error(cls, error, values, named)
            about = {parameter_at(e["loc"][0], cls) for e in error.errors() if e["loc"]}
            if about and not about & numbers.keys():
                raise wrong from None
            shown = ", ".join(f"{name} is {number:g}" for name, number in numbers.items())
            of = ", ".join(repr(schedule) for schedule in over_time.values())
            raise ParameterError(
                f"{wrong.message} That is step {step + 1}, in which {shown}, by {of}.",
                code=wrong.code,
                **{**wrong.facts, "step": step},
            ) from None

    sample_steps = sorted({step for schedule in over_time.values() for step in schedule.sample_steps()})
    for step in sample_steps:
        begin(object.__new__(cls), step)
    begin(spec, sample_steps[0])
    for name, schedule in over_time.items():
        object.__setattr__(spec, name, schedule)


def _refuse_over_time(cls: type, over_time: Mapping[str, Schedule]) -> None:
    """Refuse schedules, by path, in a spec that does not change during a run."""
    for path, schedule in over_time.items():
        raise ParameterError(
            f"{cls.__name__}(...): {path}={schedule!r} changes over steps, but this parameter is constant "
            f"during a run. Pass a number. Only operators and their losses take schedules; for a learning rate, use "
            f"TorchTrainer(..., schedule=Cosine(1.0, 0.0, steps=1000)).",
            code="parameter.constant",
            spec=cls.__name__,
            parameter=path,
            given=schedule,
        )
