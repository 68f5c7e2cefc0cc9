"""`Spec`: a frozen, validated record of parameters; operators, losses and backends are specs.

A subclass is turned into a frozen pydantic dataclass where it is defined, so ``Repeat(8)`` and ``GAE(gamma=0.99)`` both
work, unknown or ill-typed parameters are refused at once, and equality is by value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Literal, TypeVar, cast, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import rebuild_dataclass
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import InitErrorDetails, PydanticCustomError

from flowrl.errors import DefinitionError, FlowrlError, FrozenError, ParameterError, offer, refuse_staleness

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_default=True, allow_inf_nan=False)


# pydantic's `Field` is left out of the specifiers: type checkers read their default by keyword only, and would take
# `Field(1.0)` for a field without one.
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Spec:
    """Base of everything that is declared by its parameters.

    Raises:
        DefinitionError: where the subclass is defined, for a field without annotation or with a mutable default.
        ParameterError: where it is called, for parameters that are missing, unknown or out of range.
    """

    timeless: ClassVar[bool] = False
    """Whether its numbers, and those of the specs in it, are the same in all steps: none may be a `Schedule`."""
    references: ClassVar[frozenset[str]] = frozenset()
    """Fields whose strings name functions: these are written to files with the hash of the function's source."""

    def __init_subclass__(cls, definer: FrameType | None = None, **kwargs: Any) -> None:
        """`definer` is the frame that defines the class; None asks who executes the class statement."""
        super().__init_subclass__(**kwargs)
        definer = definer or defining_frame()
        where = f"{where_defined(definer)}: {cls.__name__}"
        _refuse_untyped_fields(cls, where)
        if "__init__" in vars(cls):
            raise DefinitionError(f"{where} defines __init__; declare its parameters as fields (`coef: float = 0.1`).")
        try:
            pydantic_dataclass(cls, frozen=True, config=_CONFIG)
            # a class that a function defines may name types that the function defines
            rebuild_dataclass(cast(Any, cls), _types_namespace=dict(definer.f_locals))
        except PydanticUndefinedAnnotation as error:
            raise DefinitionError(
                f"{where} annotates a field with {error.name!r}, which is not defined; import or define it above the "
                "class."
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise DefinitionError(f"{where} is not well formed: {error}") from error
        known = {f.name for f in dataclasses.fields(cast(Any, cls))}
        if not isinstance(cls.references, frozenset) or not cls.references <= known:
            raise DefinitionError(
                f"{where}.references is {cls.references!r}; expected a frozenset of its fields: {', '.join(known)}."
            )
        _raise_parameter_errors(cls)
        _raise_frozen_errors(cls)

    def _check(self) -> None:
        """Refuse an instance whose parameters are valid one by one; called at the end of its construction."""
        if self.timeless:
            _refuse_over_time(self)


def defining_frame() -> FrameType:
    """The frame of the class statement, called from its ``__init_subclass__``: it knows the line and local names."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__init_subclass__":
        frame = cast(FrameType, frame.f_back)
    return frame


def where_defined(frame: FrameType) -> str:
    """``file:line`` of what `frame` executes."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
                f"would share; use a tuple, or Field(default_factory=...)."
            )
        # functions, properties, States and nested classes are members of the class
        member = isinstance(value, type) or hasattr(type(value), "__get__")
        if name not in annotations and not member:
            raise DefinitionError(
                f"{where}.{name} = {value!r} has no annotation, so it could not be set; write "
                f"`{name}: {type(getattr(value, 'default', value)).__name__} = ...` (or ClassVar[...] where it is a "
                "constant)."
            )


def _raise_parameter_errors(cls: type) -> None:
    """Make the constructor of `cls` raise `ParameterError` in place of pydantic's own error."""
    init = vars(cls)["__init__"]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _refuse_bools(cls, args, kwargs)
            if over_time := _over_time(cls, args, kwargs):
                _begin(cls, self, init, args, kwargs, over_time)
            else:
                init(self, *args, **kwargs)
        except ValidationError as error:
            refuse_staleness(cls.__name__, kwargs, cls.__pydantic_fields__)  # type: ignore[attr-defined]
            raise ParameterError(_describe(cls, error, args, kwargs), **_inner(error)) from None
        self._check()

    __init__.__module__, __init__.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    __init__.__signature__ = _signature(cls)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def _signature(cls: Any) -> inspect.Signature:
    """How a spec is called, for its help; from a field on that is required after an optional one, by name."""
    kinds = inspect.Parameter
    positional, closed = [kinds("self", kinds.POSITIONAL_ONLY)], False
    by_name: list[inspect.Parameter] = []
    for name, field in cls.__pydantic_fields__.items():
        required = field.is_required()
        closed = closed or (required and positional[-1].default is not kinds.empty)
        default = ... if field.default_factory else kinds.empty if required else field.default  # `...`: made anew
        kind = kinds.KEYWORD_ONLY if closed or field.kw_only else kinds.POSITIONAL_OR_KEYWORD
        parameter = kinds(name, kind, default=default, annotation=field.annotation)
        (positional if kind is kinds.POSITIONAL_OR_KEYWORD else by_name).append(parameter)
    return inspect.Signature([*positional, *by_name])


def _refuse_bools(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse True and False where a number is wanted: Python, and so pydantic, takes them for 1 and 0."""
    for name, value in _by_name(cls, args, kwargs).items():
        found = next(_bools(value, name), None)
        if found is not None and _takes_a_number(cls, name):
            wrong = PydanticCustomError("bool", "a number is expected, and this is a bool")
            raise ValidationError.from_exception_data(
                cls.__name__, [InitErrorDetails(type=wrong, loc=found[:-1], input=found[-1])]
            )


def _by_name(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a spec by the names of its parameters."""
    return dict(zip((f.name for f in dataclasses.fields(cls) if f.init), args, strict=False)) | dict(kwargs)


def _takes_a_number(cls: Any, name: str) -> bool:
    """Whether a number is wanted for a parameter, by itself or among other things, and no bool."""
    parts = _parts(cls.__pydantic_fields__[name].annotation) if name in cls.__pydantic_fields__ else []
    return any(part in (int, float) for part in parts) and not any(part in (bool, object, Any) for part in parts)


def _bools(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """Each bool in tuples, lists and mappings, behind the indices and keys that lead to it."""
    if isinstance(value, bool):
        yield (*way, value)
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _bools(item, *way, key)


def _parts(annotation: Any) -> list[Any]:
    """A type, and all that it is made of; of a Literal, the types of its values."""
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    return [annotation, *(part for argument in get_args(annotation) for part in _parts(argument))]


def _raise_frozen_errors(cls: type) -> None:
    """Make assignment to instances of `cls` raise `FrozenError`, which says what to do instead."""
    assign = vars(cls)["__setattr__"]

    @functools.wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            assign(self, name, value)
        except dataclasses.FrozenInstanceError:
            raise FrozenError(
                f"{type(self).__name__}.{name} cannot be assigned to: parameters are frozen. Make another by "
                f"dataclasses.replace(..., {name}=...); what an operator changes over steps is a State: "
                f"`{name} = State(lambda self: ...)`, and then self.{name}.value."
            ) from None

    cls.__setattr__ = __setattr__  # type: ignore[assignment,method-assign]


def _brief(value: Any) -> str:
    """The repr, or for one that is long (a graph, a tensor) the type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def _inner(error: ValidationError) -> dict[str, Any]:
    """Code and facts of the error of flowrl that a validator raised; empty without, or with several errors."""
    first, *others = (e.get("ctx", {}).get("error") for e in error.errors())
    return {**first.facts, "code": first.code} if isinstance(first, FlowrlError) and not others else {}


def _describe(cls: type, error: ValidationError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a spec, each parameter once."""
    names = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.init]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sentences: dict[str, None] = {}
    wrong: dict[str, list[str]] = {}  # of a union, pydantic says for each member what is wrong
    takes = ""
    for e in error.errors():
        # what a validator or __post_init__ of the class says is a sentence already
        raised = e.get("ctx", {}).get("error")
        said = getattr(raised, "message", str(raised)).rstrip(".") if isinstance(raised, Exception) else _said(e)
        first = e["loc"][0] if e["loc"] else ""
        name = names[first] if isinstance(first, int) and first < len(names) else str(first)
        if not e["loc"]:
            sentences[said] = None
        elif len(e["loc"]) == 1 and e["type"] in _MISNAMED:
            holder = "" if name in names else _holder(cls, name)
            sentences[_MISNAMED[e["type"]].format(name=name, value=_brief(e["input"])) + holder] = None
            takes = f" {offer('' if name in names or holder else name, names, 'It takes')}"
        else:
            path = ".".join([name, *_steps(given.get(name), e["loc"][1:])])
            members = wrong.setdefault(f"{path}={_brief(e['input'])}", [])
            members.append(said.removeprefix("input should be ").removeprefix("expected ") if members else said)
    reasons = [f"{what}: {', or '.join(dict.fromkeys(why))}" for what, why in wrong.items()]
    told = "; ".join([*sentences, *reasons])
    return f"{cls.__name__}(...): {told}{'' if told.endswith('?') else '.'}{takes}"


_MISNAMED = {
    "missing": "{name} is missing",
    "missing_argument": "{name} is missing",
    "unexpected_positional_argument": "{value} is one argument too many",
    "unexpected_keyword_argument": "there is no parameter {name!r} (given {value})",
}


def _holder(cls: Any, name: str) -> str:
    """Where a name belongs that is one of a parameter's own: ``", but optimizer=AdamW(lr=...) has one"``."""
    for field, info in cls.__pydantic_fields__.items():
        for part in _parts(info.annotation):
            if isinstance(part, type) and issubclass(part, Spec) and name in cast(Any, part).__pydantic_fields__:
                return f", but {field}={part.__name__}({name}=...) has one"
    return ""


def _said(error: Mapping[str, Any]) -> str:
    """What pydantic says of a value, in words of Python where its own are others."""
    match error["type"]:
        case "dataclass_type" | "dataclass_exact_type":
            return f"expected {error['ctx']['class_name']}(...)"
        case "tuple_type" if isinstance(error["input"], str):
            return f"expected a tuple: ({error['input']!r},)"
        case "missing":  # inside of the value
            return f"it lacks {'item ' if isinstance(error['loc'][-1], int) else ''}{error['loc'][-1]}"
        case _:
            return f"{error['msg'][0].lower()}{error['msg'][1:]}".rstrip(".")


def _steps(value: Any, path: Sequence[int | str]) -> list[str]:
    """Those of pydantic's steps into a value that lead somewhere; the others name members of a union."""
    steps: list[str] = []
    for step in path:
        inside: Any = parameters(value) if isinstance(value, Spec) else value
        if isinstance(inside, list | tuple):
            inside = dict(enumerate(inside))
        if isinstance(inside, Mapping) and step in inside:
            value = inside[step]
            steps.append(str(step))
    return steps


def parameters(spec: Spec) -> dict[str, Any]:
    """What `spec` was constructed from, by name."""
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(cast(Any, spec)) if f.init}


def non_default(spec: Spec) -> dict[str, Any]:
    """The parameters that people set and that differ from their defaults, by name."""
    fields: Mapping[str, Any] = cast(Any, type(spec)).__pydantic_fields__
    return {
        name: value
        for name, value in shown(spec).items()
        if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
    }


def written(spec: Spec) -> str:
    """A spec as it is written in Python."""
    return f"{type(spec).__name__}({', '.join(f'{name}={value!r}' for name, value in non_default(spec).items())})"


def shown(spec: Spec) -> dict[str, Any]:
    """The parameters that people set, by name; those with ``Field(repr=False)`` are filled in."""
    fields: Mapping[str, Any] = cast(Any, type(spec)).__pydantic_fields__
    return {name: value for name, value in parameters(spec).items() if fields[name].repr}


# ---- numbers over time

SpecT = TypeVar("SpecT", bound=Spec)
_FIRST = range(10_000)


class Schedule(Spec):
    """A number over time, where an operator, or a spec that is a parameter of one, takes a number.

    A subclass defines `at`; see `flowrl.schedules`. Integer parameters take the nearest integer.
    """

    timeless = True

    def at(self, step: int) -> float:
        """The number in a step, `step` of which were done before: a finite one, by `step` and the parameters alone."""
        raise NotImplementedError(f"{type(self).__name__} does not define at(step)")

    @property
    def turns(self) -> Iterable[int]:
        """Steps between which the number only rises or only falls: it is checked there. By default the first 10,000."""
        return _FIRST

    def sample_steps(self) -> tuple[int, ...]:
        """The steps that tell whether the number stays within bounds: the first, and those of its extremes."""
        turns = list(self.turns)
        numbers = [self._number(step) for step in turns]
        extremes = {turns[numbers.index(extreme(numbers))] for extreme in (min, max)}
        return tuple(sorted({turns[0], *extremes}))

    def _number(self, step: int) -> float:
        """What `at` gives.

        Raises:
            ParameterError: it raises, or gives something else than a finite number.
        """
        try:
            number: Any = self.at(step)
        except Exception as error:
            raise ParameterError(f"{self!r}.at({step}) raises {type(error).__name__}: {error}.") from error
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ParameterError(f"{self!r}.at({step}) is {number!r}; expected a finite number, a float.")
        return number


def in_step(spec: SpecT, step: int) -> SpecT:
    """`spec` with the numbers that its schedules give, and those of the specs in it; itself where it has none.

    Raises:
        ParameterError: a number that is not allowed there.
    """
    now = {name: _now(type(spec), name, value, step) for name, value in parameters(spec).items()}
    changed = {name: value for name, value in now.items() if value is not getattr(spec, name)}
    return cast("SpecT", dataclasses.replace(cast(Any, spec), **changed)) if changed else spec


def _now(cls: type, name: str, value: Any, step: int) -> Any:
    """What a parameter is in a step."""
    if isinstance(value, Schedule):
        return _number_of(cls, name, value, step) if _takes_a_number(cls, name) else value
    if isinstance(value, Spec):
        return in_step(value, step)
    if isinstance(value, tuple) and any(isinstance(item, Spec) for item in value):
        items = tuple(in_step(item, step) if isinstance(item, Spec) else item for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def _number_of(cls: Any, name: str, schedule: Schedule, step: int) -> float:
    """The number of a parameter in a step: a whole one where only whole ones are wanted."""
    number = schedule._number(step)
    return number if float in _parts(cls.__pydantic_fields__[name].annotation) else round(number)


def schedules(spec: Spec) -> dict[str, Schedule]:
    """The parameters of a spec, and of the specs in it, that change over steps: ``{"loss.clip_low": Linear(...)}``."""
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
    """The arguments that are schedules, where a number is wanted."""
    if not any(isinstance(value, Schedule) for value in (*args, *kwargs.values())):
        return {}
    given = _by_name(cls, args, kwargs).items()
    return {name: value for name, value in given if isinstance(value, Schedule) and _takes_a_number(cls, name)}


def _begin(
    cls: type,
    spec: Any,
    init: Callable[..., None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    over_time: Mapping[str, Schedule],
) -> None:
    """Construct a spec some of whose numbers change over time, once it was tried at every moment that tells."""
    own = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.init]
    names = [*own, *([""] * len(args))]  # `init` refuses too many arguments

    def begin(made: Any, step: int) -> None:
        numbers = {name: _number_of(cls, name, schedule, step) for name, schedule in over_time.items()}
        values = [numbers.get(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: numbers.get(name, value) for name, value in kwargs.items()}
        try:
            init(made, *values, **named)
        except ValidationError as error:
            said = _describe(cls, error, values, named)
            wrong = [e["loc"][0] for e in error.errors() if e["loc"]]
            about = {names[first] if isinstance(first, int) else first for first in wrong}
            if about and not about & numbers.keys():
                raise ParameterError(said) from None
            shown = ", ".join(f"{name} is {number:g}" for name, number in numbers.items())
            of = ", ".join(repr(schedule) for schedule in over_time.values())
            raise ParameterError(f"{said} That is step {step + 1}, in which {shown}, by {of}.") from None

    sample_steps = sorted({step for schedule in over_time.values() for step in schedule.sample_steps()})
    for step in sample_steps:
        begin(object.__new__(cls), step)
    begin(spec, sample_steps[0])
    for name, schedule in over_time.items():
        object.__setattr__(spec, name, schedule)


def _refuse_over_time(spec: Spec) -> None:
    """Refuse schedules in what does not change while a run goes."""
    for path, schedule in schedules(spec).items():
        raise ParameterError(
            f"{type(spec).__name__}(...): {path}={schedule!r} would change over the steps, and this is one number "
            f"for a whole run; expected a number. Those of operators and their losses may change, and a learning rate "
            f"by schedule=, as in TorchTrainer(..., schedule=Cosine(1.0, 0.0, steps=1000))."
        )
