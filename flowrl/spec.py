"""`Spec`: a frozen, validated record of parameters; operators, losses and backends are specs.

A subclass is turned into a frozen pydantic dataclass where it is defined, so ``Repeat(8)`` and ``GAE(gamma=0.99)`` both
work, unknown or ill-typed parameters are refused at once, and equality is by value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Literal, cast, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import rebuild_dataclass
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import InitErrorDetails, PydanticCustomError

from flowrl.errors import DefinitionError, FrozenError, ParameterError, offer

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

    references: ClassVar[frozenset[str]] = frozenset()
    """Fields whose strings name functions: these are written to files with the hash of the function's source."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        definer = defining_frame()
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


def defining_frame() -> FrameType:
    """The frame that executes the class statement, asked from within its ``__init_subclass__``.

    Only a frame knows the line for messages, and the names that annotations use in a class that a function defines.
    """
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

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _refuse_bools(cls, args, kwargs)
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise ParameterError(_describe(cls, error, args, kwargs)) from None

    cls.__init__ = __init__  # type: ignore[misc]


def _refuse_bools(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse True and False where a number is wanted: Python, and so pydantic, takes them for 1 and 0."""
    given = dict(zip((f.name for f in dataclasses.fields(cls) if f.init), args, strict=False)) | dict(kwargs)
    for name, value in given.items():
        found = next(_bools(value, name), None)
        if found is not None and name in cls.__pydantic_fields__:
            parts = _parts(cls.__pydantic_fields__[name].annotation)
            if any(part in (int, float) for part in parts) and not any(part in (bool, object, Any) for part in parts):
                wrong = PydanticCustomError("bool", "a number is expected, and this is a bool")
                raise ValidationError.from_exception_data(
                    cls.__name__, [InitErrorDetails(type=wrong, loc=found[:-1], input=found[-1])]
                )


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
        said = str(raised).rstrip(".") if isinstance(raised, Exception) else _said(e)
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
    return f"{cls.__name__}(...): {'; '.join([*sentences, *reasons])}.{takes}"


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


def shown(spec: Spec) -> dict[str, Any]:
    """The parameters that people set, by name; those with ``Field(repr=False)`` are filled in."""
    fields: Mapping[str, Any] = cast(Any, type(spec)).__pydantic_fields__
    return {name: value for name, value in parameters(spec).items() if fields[name].repr}
