"""Python source of a training, as a person would write it: imports, a graph, a `Training` with its bindings."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MODULES = ("flowrl", "flowrl.backends", "flowrl.graphs", "flowrl.operators", "flowrl.schedules", "flowrl.rewards")
_WIDTH = 120


@dataclass
class Call:
    """A call of a public name of flowrl; arguments that equal the defaults are left out."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: Call | None = None
    """What is called on the result, such as ``when(every=8)``."""

    @property
    def target(self) -> Any:
        return getattr(importlib.import_module(module_of(self.name)), self.name)

    def arguments(self) -> list[tuple[str | None, Any]]:
        """Arguments with their names; None for positional ones."""
        known = _defaults(self.target) if is_public(self.name) else {}
        kept = [(name, value) for name, value in self.kwargs.items() if not (name in known and _is(known[name], value))]
        return [*((None, value) for value in self.args), *kept]


def _is(default: Any, expression: Any) -> bool:
    """Whether an expression stands for a default; one of files that are not here is no default."""
    return expression is None if default is None else bool(default == value_of(expression))


@dataclass
class Name:
    """A name of flowrl that is not called, or any expression."""

    text: str


@dataclass
class Function:
    """A function of the user's, as an expression; while a graph is planned, a stand-in takes its place."""

    expression: Any
    is_agent: bool = False


def _stand_in(**columns: Any) -> float:
    """A function with any arguments by name, which no plan calls."""
    return 0.0


async def _agent_stand_in(chat: Any, row: Any) -> float:
    """An agent, which no plan calls."""
    return 0.0


def value_of(expression: Any) -> Any:
    """The object that an expression stands for."""
    if isinstance(expression, Function):
        return _agent_stand_in if expression.is_agent else _stand_in
    if isinstance(expression, Call):
        kwargs = {name: value_of(item) for name, item in expression.kwargs.items()}
        made = expression.target(*map(value_of, expression.args), **kwargs)
        return made if (then := expression.method) is None else getattr(made, then.name)(*then.args, **then.kwargs)
    if isinstance(expression, Name):
        return getattr(importlib.import_module(module_of(expression.text)), expression.text)
    if isinstance(expression, Mapping):
        return {key: value_of(item) for key, item in expression.items()}
    if isinstance(expression, list | tuple):
        return type(expression)(map(value_of, expression))
    return expression


def call(name: str, /, *args: Any, **kwargs: Any) -> Call:
    """A call of `name`."""
    return Call(name, args, kwargs)


def without_functions(value: Any) -> Any:
    """An expression with None in place of each `Function`, and of what needs one."""
    if isinstance(value, Function):
        return value if value.is_agent else None
    if isinstance(value, Call):
        kwargs = {name: without_functions(item) for name, item in value.kwargs.items()}
        return Call(value.name, tuple(map(without_functions, value.args)), kwargs, value.method)
    if isinstance(value, Mapping):
        return {name: without_functions(item) for name, item in value.items()}
    return value


def module_of(name: str) -> str:
    """The module that a public name is imported from."""
    for module in _MODULES:
        if name in getattr(importlib.import_module(module), "__all__", ()):
            return module
    raise LookupError(name)


def _defaults(target: Any) -> Mapping[str, Any]:
    parameters = getattr(target, "parameters", None) or inspect.signature(target)
    return {name: one.default for name, one in parameters.parameters.items()}


@dataclass
class Program:
    """The parts of a file."""

    title: str
    graph: Call
    edit: dict[str, Any]
    """Arguments of `Graph.edit`, if any."""
    bind: dict[str, Any]
    training: dict[str, Any]
    """Arguments of `Training`, without the job."""
    functions: list[str] = field(default_factory=list)
    """Sources of operators that the graph inserts."""
    imports: dict[str, set[str]] = field(default_factory=dict)
    """Further imports, by module."""

    def source(self) -> str:
        """The file."""
        job = _laid_out("graph.bind", [(name, value) for name, value in self.bind.items()], 4)
        training = [(None, Name(job)), *self.training.items()]
        defaults = _defaults(call("Training").target)
        kept = [(n, v) for n, v in training if n is None or n in ("data", "prompts") or defaults[n] != value_of(v)]
        kept = [(None if n == "data" else n, v) for n, v in kept]
        lines = [f"graph = {written(self.graph)}"]
        if self.edit:
            lines.append(f"graph = {_laid_out('graph.edit', list(self.edit.items()), 0)}")
        lines.append(f"training = {_laid_out('Training', kept, 0, broken=True)}")
        names: dict[str, set[str]] = {module: set(found) for module, found in self.imports.items()}
        for name in ["Training", *_named(self.graph), *_named(self.edit), *_named(self.bind), *_named(self.training)]:
            names.setdefault(module_of(name), set()).add(name)
        heads = [
            f"from {module} import {', '.join(sorted(found, key=_order))}" for module, found in sorted(names.items())
        ]
        parts = [_docstring(self.title), "\n".join(heads), *self.functions, "\n".join(lines)]
        return "".join(f"{part.rstrip()}\n{gap}" for part, gap in zip(parts, _gaps(parts), strict=True))


def _gaps(parts: list[str]) -> list[str]:
    """The blank lines after each part: two around definitions, else one."""
    defines = [part.startswith(("def ", "async def ", "class ", "@")) for part in parts]
    around = [one or other for one, other in itertools.pairwise(defines)]
    return [*("\n\n" if two else "\n" for two in around), ""]


def _docstring(text: str) -> str:
    """A docstring on one line, which holds any text: a name of a file may have quotes and line breaks."""
    escaped = repr(text)[1:-1].replace('"', '\\"')
    return f'"""{escaped}"""'


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as import sorters do."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _named(value: Any) -> list[str]:
    if isinstance(value, Call):
        return [*([value.name] * is_public(value.name)), *(n for _, item in value.arguments() for n in _named(item))]
    if isinstance(value, Mapping):
        return [name for item in value.values() for name in _named(item)]
    if isinstance(value, list | tuple):
        return [name for item in value for name in _named(item)]
    if isinstance(value, Function):
        return _named(value.expression)
    return [value.text] if isinstance(value, Name) and is_public(value.text) else []


def is_public(text: str) -> bool:
    """Whether flowrl has this public name."""
    try:
        return text.isidentifier() and bool(module_of(text))
    except LookupError:
        return False


def written(value: Any, indent: int = 0) -> str:
    """An expression; long ones are broken over lines that start at `indent`."""
    if isinstance(value, Name):
        return value.text
    if isinstance(value, Function):
        return written(value.expression, indent)
    if isinstance(value, Call):
        return _called(value, indent)
    if isinstance(value, Mapping):
        items = [_entry(f"{written(k)}: ", v, indent + 4) for k, v in value.items()]
        return _wrapped("{", items, "}", indent)
    if isinstance(value, list | tuple):
        items = [written(item, indent) for item in value]
        ends = "[]" if isinstance(value, list) else "()"
        comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
        return _wrapped(ends[0], items, comma + ends[1], indent)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # double quotes, and every escape is Python's, too
    return repr(value)


def _entry(head: str, value: Any, indent: int) -> str:
    """An entry of a dict, or an argument; a call is broken if its line is too long."""
    text = f"{head}{written(value, indent)}"
    inner = value.expression if isinstance(value, Function) else value
    if "\n" in text or indent + len(text) < _WIDTH or not isinstance(inner, Call):
        return text
    return f"{head}{_called(inner, indent, broken=True)}"


def _called(value: Call, indent: int, broken: bool = False) -> str:
    text = _laid_out(value.name, value.arguments(), indent, broken)
    return text if value.method is None else f"{text}.{_called(value.method, indent)}"


def _laid_out(name: str, arguments: Any, indent: int, broken: bool = False) -> str:
    items = [_entry(f"{key}=" if key else "", item, indent + 4) for key, item in arguments]
    return _wrapped(f"{name}(", items, ")", indent, broken)


def _wrapped(start: str, items: list[str], end: str, indent: int, broken: bool = False) -> str:
    line = f"{start}{', '.join(items)}{end}"
    if not broken and "\n" not in line and len(line) + indent <= _WIDTH - 8:
        return line
    inner = " " * (indent + 4)
    return start + "\n" + "".join(f"{inner}{item},\n" for item in items) + " " * indent + end.lstrip(",")
