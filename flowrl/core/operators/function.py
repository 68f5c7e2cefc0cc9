"""`operator`: an ordinary function as an operator.

The arguments before the ``*`` of the function are its ports, like those of a `__call__`; those after it are its
parameters, each with a default::

    @operator
    def scaled(advantages: Advantages, *, factor: float = 0.5) -> Advantages:
        return advantages * factor

`scaled` is then an operator with these defaults, and ``scaled(factor=2.0)`` one with another factor. Roles, keys and
metrics are declared as in a class. An operator with its own granularity, effects or state needs a class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import is_injected, refuse_no_function
from flowrl.errors import DefinitionError, ParameterError, PortError, offer
from flowrl.record_types import hints_of, located
from flowrl.references import reference, resolve
from flowrl.spec import non_default

Parameters = Mapping[str, inspect.Parameter]
Fields = tuple[str, ...]


def operator(function: Callable[..., Any]) -> Operator:
    """Decorator: the function as an operator; see the module's docstring.

    Raises:
        DefinitionError: with file and line: not a plain function, a port or parameter without annotation, a parameter
            without a default.
    """
    frame = sys._getframe(1)
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise DefinitionError(
            f"{where}: {function!r} is not a function with a name and annotations. Write @operator above a `def`, or "
            f"define a subclass of Operator.",
            code="operator.not-a-function",
            where=where,
            found=repr(function),
        )
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
    refuse_no_function(function, where, "def __call__(self, values: Values) -> Returns")
    with located(where):
        hints = hints_of(function, frame.f_locals)
    made = _made(function, hints, frame, f"{function.__module__}:{function.__qualname__}:{uuid.uuid4().hex}")
    for name in ("__name__", "__qualname__", "__doc__"):  # as functools.wraps does
        made.__dict__[name] = getattr(function, name)
    return made


class OfFunction:
    """Extra members of a function's operator class; the underscores keep all names free for parameters."""

    _function: ClassVar[Callable[..., Any]]
    _hints: ClassVar[Mapping[str, Any]]
    _token: ClassVar[str]
    """The same in all processes."""
    _plain: ClassVar[Operator]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in non_default(cast(Operator, self)).items())
        return f"{type(self).__name__}({given})" if given else type(self).__name__

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # By name if every process can import it; else by value, as `cloudpickle` (and so Ray) pickles functions.
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("__")}
        path = reference(cast(Any, self._plain))
        if path is not None and ".py:" not in path:
            return _blank, (path,), state
        return _blank_by_value, (self._token, self._function, dict(self._hints)), state


def function_of(operator: OfFunction) -> Callable[..., Any]:
    """The function under `@operator`."""
    return operator._function


def plain_of(operator: OfFunction) -> Operator:
    """The operator with its defaults, which the name of the function refers to."""
    return operator._plain


_classes: WeakValueDictionary[str, type[OfFunction]] = WeakValueDictionary()


def _blank(path: str) -> Any:
    """An empty instance of the class of the operator that `path` names."""
    return object.__new__(type(resolve(path)))


def _blank_by_value(token: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> Any:
    """An empty instance of the class of a function that came from another process."""
    cls = _classes[token] if token in _classes else type(_made(function, hints, sys._getframe(0), token))
    return object.__new__(cls)


def _made(function: Callable[..., Any], hints: Mapping[str, Any], definer: types.FrameType, token: str) -> Operator:
    """The operator with the defaults of a function whose annotations are `hints`."""
    name, given = function.__name__, inspect.signature(function).parameters
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {name}"
    keyword_only = {n: p for n, p in given.items() if p.kind is p.KEYWORD_ONLY}
    fields = {n: p for n, p in keyword_only.items() if not is_injected(hints.get(n), f"{where}({n})")}
    _refuse_misplaced(given, fields, hints, where)
    ports = {n: p for n, p in given.items() if n not in fields}
    members = {
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "__annotations__": {field: hints[field] for field in fields},
        "__call__": _call_of(function, ports, tuple(fields), hints),
        "__repr__": OfFunction.__repr__,  # a dataclass would write its own
        **{field: parameter.default for field, parameter in fields.items()},
    }
    bases = (OfFunction, Operator)
    cls: Any = types.new_class(name, bases, {"definer": definer}, lambda namespace: namespace.update(members))
    cls.__call__ = _with_parameters(cls.__call__, function, tuple(fields))
    cls._function, cls._hints, cls._token = staticmethod(function), types.MappingProxyType(dict(hints)), token
    _classes[token] = cls
    try:
        cls._plain = cls()
    except ParameterError as error:
        message, facts = f"{where} has an invalid default: {error.message}", {**error.facts, "where": where}
        raise DefinitionError(message, code=error.code, **facts) from None
    return cast(Operator, cls._plain)


def _call_of(
    function: Callable[..., Any], ports: Parameters, fields: Fields, hints: Mapping[str, Any]
) -> Callable[..., Any]:
    """The `__call__` of the class: the function with the operator's parameters."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **{field: getattr(self, field) for field in fields})

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([own, *ports.values()])  # type: ignore[attr-defined]
    call.__annotations__ = {name: hint for name, hint in hints.items() if name not in fields}
    return call


def _with_parameters(dispatch: Callable[..., Any], function: Callable[..., Any], fields: Fields) -> Callable[..., Any]:
    """A `__call__` that returns a changed operator if it gets parameters only."""
    known = inspect.signature(function).parameters

    @functools.wraps(dispatch.__wrapped__)  # type: ignore[attr-defined]
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(self).__name__
        if other := next((given for given in kwargs if given not in known), None):
            raise ParameterError(
                f"{name}(...): there is no parameter or port {other!r}; {offer(other, known, 'it takes')}",
                code="parameter.unknown",
                spec=name,
                parameter=other,
                known=list(known),
            )
        if kwargs and not args and kwargs.keys() <= set(fields):
            return dataclasses.replace(self, **kwargs).in_place_of(self)
        if parameter := next((given for given in kwargs if given in fields), None):
            raise PortError(
                f"{name}(...) got the parameter {parameter!r} together with columns. Pass the parameters first: "
                f"{name}({parameter}=...)({', '.join(self.signature.ports)}).",
                code="operator.mixed-call",
                operator=name,
                parameter=parameter,
            )
        return dispatch(self, *args, **kwargs)

    return __call__


def _refuse_misplaced(given: Parameters, fields: Parameters, hints: Mapping[str, Any], where: str) -> None:
    """Refuse ports and parameters on the wrong side of the ``*``, and parameters without an annotation."""
    for name, parameter in given.items():
        at = f"{where}({name})"
        if name == "self":
            raise DefinitionError(
                f"{at} is a method. Write @operator above a function outside of classes, or define a subclass of "
                f"Operator.",
                code="operator.not-a-function",
                where=where,
                found="a method",
            )
        if name not in fields:
            if parameter.default is not parameter.empty and parameter.default is not None:
                raise DefinitionError(
                    f"{at} is among the ports, but its default {parameter.default!r} makes it a parameter. Put it "
                    f"after a `*`: def {where.rpartition(' ')[2]}(..., *, {name}={parameter.default!r}).",
                    code="operator.misplaced-parameter",
                    where=where,
                    parameter=name,
                )
        elif name not in hints:
            raise DefinitionError(
                f"{at} is a parameter without an annotation. Write `{name}: float = ...`.",
                code="parameter.definition",
                where=where,
                parameter=name,
            )
        elif parameter.default is parameter.empty:
            raise DefinitionError(
                f"{at} is a parameter, since it is after the `*`, but has no default. Give it one, or put a port "
                f"before the `*`. To require a parameter, define a subclass of Operator.",
                code="operator.misplaced-parameter",
                where=where,
                parameter=name,
            )
