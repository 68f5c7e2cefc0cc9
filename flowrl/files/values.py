"""Parameters as JSON-able data and back.

A spec is written as its class and parameters, a callable as its import path and the hash of its source, a role as its
name. Nothing is pickled. Importing the classes and functions that the data names runs their files, as any Python import
does, so `imports` decides:

- None: use those of flowrl, of installed operators, and those that the program has already imported; refuse others.
- True: import all.
- False: use only those of flowrl and of installed operators; other functions remain names, other classes are refused.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.core.graphs.after import After
from flowrl.core.operators import entry_points
from flowrl.core.operators.function import OfFunction, function_of, plain_of
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import RoleRef
from flowrl.data.sources.held_rows import HeldRows
from flowrl.errors import FlowrlError, GraphError, ParameterError, offer, type_of
from flowrl.files.names import named, public
from flowrl.references import (
    imported,
    named_source_hash,
    parse_reference,
    reference,
    resolve,
    source_hash,
)
from flowrl.spec import Spec, parameters


@dataclass(frozen=True)
class NotImported:
    """A function named by data (``"$function"``, or ``"$named"`` if it is a string in Python) that was not imported: it
    can be shown and compared, but not called."""

    path: str
    source: str | None
    key: Literal["$function", "$named"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"{self.path} cannot be called: its graph was loaded without imports. Load the graph with "
            f"flowrl.load(..., imports=True).",
            code="file.not-imported",
            path=self.path,
        )

    @property
    def __name__(self) -> str:
        """The name in pictures: that of a function, or the whole string."""
        return self.path.rpartition(":")[2] if self.key == "$function" else self.path

    def __repr__(self) -> str:
        return self.path


def encode(value: Any, where: str, portable: bool = True) -> Any:
    """A parameter as JSON-able data; `where` is ``node.field``, for messages.

    With ``portable=False`` also values that cannot be read back (a lambda), for fingerprints and diffs.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode(item, f"{where}[{i}]", portable) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {k: encode(v, f"{where}[{k!r}]", portable) for k, v in value.items()}
    if isinstance(value, RoleRef):
        return {"$role": value.name}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, After):
        return {"after": value.node, "operator": encode(value.operator, where, portable)}
    if isinstance(value, Spec):
        fields = {
            k: _reference(v) if isinstance(v, str) and k in value.references else encode(v, f"{where}.{k}", portable)
            for k, v in parameters(value).items()
        }
        return {**_type(value, where, portable), **fields}
    if isinstance(value, HeldRows):
        return _rows(value, where, portable)
    if isinstance(value, NotImported):
        return {value.key: value.path, "source": value.source}
    if isinstance(value, type):
        return {"$class": _path(value, where, portable)}
    if callable(value):
        return {"$function": _path(value, where, portable), "source": source_hash(value)}
    raise GraphError(
        f"{where} is {value!r}, {type_of(value)}, which cannot be written to a file. Use plain values or specs.",
        code="file.unwritable-value",
        where=where,
        found=value,
    )


def _rows(rows: HeldRows, where: str, portable: bool) -> dict[str, Any]:
    """The digest of rows in memory, which cannot be read back."""
    if portable:
        raise GraphError(
            f"{where} is {len(rows)} rows in memory, which a file cannot hold. Write them to a file, "
            f"{rows.how_to_write}, and pass that: path='rows.parquet'.",
            code="file.rows-in-memory",
            where=where,
            found=len(rows),
        )
    return {"$rows": rows.digest, "count": len(rows)}


def _type(spec: Spec, where: str, portable: bool) -> dict[str, str]:
    """The class of a spec: its path; for an operator that is a function, also the hash of its source."""
    if isinstance(spec, OfFunction):
        return {"$type": _path(plain_of(spec), where, portable), "$source": source_hash(function_of(spec))}
    return {"$type": _path(type(spec), where, portable)}


def _reference(ref: str) -> dict[str, str]:
    """A function named by a string, which is read back as a string."""
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        relative = os.path.relpath(source)
        source = os.path.abspath(source) if relative.startswith(os.pardir) else relative
    return {"$named": f"{source}:{name}", "source": named_source_hash(ref)}


def refuse_foreign(data: Any, source: object, call: str) -> None:
    """Refuse data whose code the program has not imported; `call` is the Python call that would import it."""
    if foreign := sorted(set(_foreign(data))):
        raise GraphError(
            f"{source} names code that flowrl would have to import, which runs its file, or a command: "
            f"{', '.join(foreign)}. "
            f"If you trust it, call {call}.",
            code="file.not-imported",
            path=source,
            references=foreign,
        )


def _foreign(data: Any) -> Iterator[str]:
    """The references in data whose code has not been imported; in the fields of a spec also those written as text."""
    if isinstance(data, list | tuple):
        for item in data:
            yield from _foreign(item)
    elif isinstance(data, Mapping):
        forms = [data[key] for key in ("$type", "$class", "$function", "$named") if key in data]
        named = [path for path in forms if isinstance(path, str)]
        if isinstance(kind := data.get("$type"), str) and not _is_foreign(kind):
            named += [
                path for key, path in data.items() if key in _fields(kind, "references") and isinstance(path, str)
            ]
            commands = (data[key] for key in _fields(kind, "commands") if isinstance(data.get(key), list | tuple))
            yield from (f"the command {shlex.join(map(str, command))!r}" for command in commands)
        yield from filter(_is_foreign, named)
        yield from _foreign(list(data.values()))


def _fields(kind: str, what: str) -> Collection[str]:
    """The fields of a spec that hold references or commands; none if it is not a spec, which `decode` refuses."""
    try:
        spec = named(kind) if kind.isidentifier() else _object(kind, kind, None)
    except FlowrlError:
        return ()
    return getattr(spec, what, ())


def _is_foreign(path: str) -> bool:
    """Whether code has to be imported for a reference that neither flowrl nor an installed operator is."""
    try:
        return not path.isidentifier() and not _comes_with_flowrl(path) and imported(path) is None
    except ParameterError:  # it is malformed, which `decode` refuses
        return False


def decode(data: Any, where: str, imports: bool | None) -> Any:
    """The inverse of `encode`; see the module's docstring for `imports`."""
    if isinstance(data, list | tuple):
        return tuple(decode(item, where, imports) for item in data)
    return _mapping(data, where, imports) if isinstance(data, Mapping) else data


def _mapping(data: Mapping[Any, Any], where: str, imports: bool | None) -> Any:
    """The value of a mapping: one with a ``$`` names what it is."""
    form = next((key for key in ("$type", *data) if key in data and key.startswith("$")), None)
    if form is None:
        found = {k: _item(v, f"{where}[{k!r}]", imports) for k, v in data.items()}
        is_after = found.keys() == {"after", "operator"} and isinstance(found["operator"], Operator)
        return After(found["after"], found["operator"]) if is_after else found
    if not isinstance(data[form], str):
        raise malformed(f"{where} has {type_of(data[form])} under {form!r}; expected a name.", where=where, key=form)
    if form == "$type":
        return _spec(data, where, imports)
    allowed = {"$role": (), "$class": (), "$function": ("source",), "$named": ("source",)}
    if form not in allowed:
        raise malformed(
            f"{where} has {form!r}; {offer(form, ('$type', *allowed), 'expected one of')}", where=where, key=form
        )
    refuse_other_keys(data, (form, *allowed[form]), where)
    if form == "$role":
        try:
            return RoleRef(data[form])
        except ParameterError as error:
            raise at_place(where, error) from error
    if form != "$class":
        return _function(data, form, where, imports)
    if not isinstance(found := _class(data[form], where, imports), type):
        raise GraphError(
            f"{where} names {data[form]}, which is not a class; expected a record.",
            code="file.wrong-object",
            where=where,
            path=data[form],
        )
    return found


def _item(data: Any, where: str, imports: bool | None) -> Any:
    """A value in a mapping without types, where a list remains a list."""
    if isinstance(data, list):
        return [_item(item, where, imports) for item in data]
    return decode(data, where, imports)


def _spec(data: Mapping[str, Any], where: str, imports: bool | None) -> Spec:
    """The spec from its class and parameters."""
    name = data["$type"]
    cls = named(name) if name.isidentifier() else _class(name, where, imports)
    if isinstance(cls, OfFunction):
        _refuse_changed(function_of(cls), data, "$source", name, where)
        data, cls = {k: v for k, v in data.items() if k != "$source"}, type(cls)
    if not isinstance(cls, type) or not issubclass(cls, Spec):
        raise GraphError(
            f"{where} names {name}, which is not a Spec; expected an operator, loss or backend.",
            code="file.wrong-object",
            where=where,
            path=name,
        )
    given = {k: decode(v, f"{where}.{k}", imports) for k, v in data.items() if k != "$type"}
    if imports is False:  # checking a function named by a string may import its package
        given |= {k: NotImported(v, None, "$named") for k, v in given.items() if k in cls.references and type(v) is str}
    try:
        return cls(**given)
    except ParameterError as error:
        raise at_place(where, error) from error


def _function(data: Mapping[str, Any], form: Literal["$function", "$named"], where: str, imports: bool | None) -> Any:
    """The function of this path, checked against its source; or the path, if it is a string in Python."""
    path, source = data[form], data.get("source")
    if imports is False and not _comes_with_flowrl(path):
        return NotImported(path, source, form)
    found = _object(path, where, imports)
    _refuse_changed(found, data, "source", path, where)
    if form == "$function":
        return found
    return NotImported(path, source, form) if imports is False else path


def _refuse_changed(function: Callable[..., Any], data: Mapping[str, Any], key: str, path: str, where: str) -> None:
    """Refuse a function whose source does not match the hash in the data; files that people edit have none."""
    if key in data and source_hash(function) != data[key]:
        raise GraphError(
            f"{where} names {path}, whose source has changed since the graph was saved, so it would not be the same "
            f"graph. Save the graph again from its Python file, or restore the function.",
            code="file.source-changed",
            where=where,
            path=path,
        )


def _class(path: str, where: str, imports: bool | None) -> Any:
    """The object at this path: a class, or an operator that is a function."""
    if path.isidentifier() and (found := public(path)) is not None:
        return found
    if imports is False and not _comes_with_flowrl(path):
        raise GraphError(
            f"{where} is of the class {path}, which flowrl would have to import, and an import runs its file. If you "
            f"trust that file, pass imports=True, or --import on the command line.",
            code="file.not-imported",
            where=where,
            path=path,
        )
    return _object(path, where, imports)


def _comes_with_flowrl(path: str) -> bool:
    """Whether a path names an object of flowrl, or an operator of an installed package."""
    module, _, name = path.rpartition(":")
    if module.startswith("flowrl.") and not module.endswith(".py") and name.isidentifier():
        return True
    return any(path == point.value for point in entry_points.names().values())


def refuse_other_keys(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse unknown keys: they may be misspelled."""
    if other := [key for key in data if key not in known]:
        raise malformed(
            f"{where} has the unknown key {other[0]!r}; {offer(other[0], known, 'expected')}", where=where, key=other[0]
        )


def _path(value: Callable[..., Any], where: str, portable: bool) -> str:
    """The import path of a class or function."""
    if (path := reference(value)) is not None:
        return path
    if portable:
        raise GraphError(
            f"{where} is {value!r}, which has no import path, so the graph can run but not be saved. Move it to the "
            f"top level of a module or file, where it is 'package.module:name' or 'path/to/file.py:name'.",
            code="file.no-import-path",
            where=where,
            found=value,
        )
    return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"


def _object(path: str, where: str, imports: bool | None) -> Any:
    """The object at this path."""
    try:
        return (imported(path) if imports is None else None) or resolve(path)
    except ParameterError as error:
        raise at_place(where, error) from error


def at_place(where: str, error: ParameterError) -> GraphError:
    """The error with its place in the data."""
    return GraphError(f"{where}: {error.message}", code=error.code, **error.facts)


def malformed(message: str, **facts: object) -> GraphError:
    return GraphError(message, code="file.malformed", **facts)
