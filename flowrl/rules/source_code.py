"""`Written`: functions and classes of users as they are written, for rules that look into them; nothing is run.

What is found is certain, or it is not found: a name means a module, or something of one, where an import says so. Where
the source cannot be read, there is nothing to look at.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from flowrl.core.operators import references

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Written:
    """A function or a class as it is written.

    Args:
        file: where.
        module: all of the file.
        tree: the function or class.
    """

    file: str
    module: ast.Module
    tree: Definition

    @property
    def functions(self) -> list[Function]:
        """The function; or the methods of the class."""
        if not isinstance(self.tree, ast.ClassDef):
            return [self.tree]
        return [node for node in self.tree.body if isinstance(node, Function)]

    @cached_property
    def imported(self) -> Mapping[str, str]:
        """What imports anywhere in the file bind, by name: ``{"sleep": "time.sleep"}``."""
        found = {}
        for node in ast.walk(self.module):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def called(self, function: Function) -> Iterator[tuple[str, ast.Call]]:
        """The calls in a function, by the dotted names that imports give them; a function in it is another one."""
        own = bound(function)
        for node in inside(function):
            if isinstance(node, ast.Call) and dotted(node.func)[0] not in own:
                yield self.meant(node.func), node

    def meant(self, name: ast.expr) -> str:
        """A dotted name as imports give it: ``"time.sleep"`` for ``sleep``; empty for anything else."""
        root, *rest = dotted(name)
        return ".".join([self.imported[root], *rest]) if root in self.imported else ""

    def at(self, node: ast.expr | ast.stmt) -> str:
        """Where that stands."""
        return f"{self.file}:{node.lineno}"


def written(thing: Callable[..., Any] | str) -> Written | None:
    """How a function or a class is written; None where that cannot be told.

    Args:
        thing: it, or a reference to it, whose file is read and not run.
    """
    if isinstance(thing, str):
        file, path = references.source_file(thing), references.parse_reference(thing)[1]
        line = None
    else:
        own = inspect.unwrap(thing)
        try:
            file = inspect.getsourcefile(own)
        except TypeError:
            return None
        path = getattr(own, "__qualname__", "").replace(".<locals>", "")
        line = getattr(getattr(own, "__code__", None), "co_firstlineno", None)
    module = None if file is None else _parsed(file, _text(file))
    if file is None or module is None:
        return None
    found = _named(module, path.split("."))
    if line is not None:
        found = [one for one in found if line in (one.lineno, *(d.lineno for d in one.decorator_list))]
    return Written(file, module, found[0]) if len(found) == 1 else None


def inside(function: Function) -> Iterator[ast.AST]:
    """What stands in the body of a function, but for what stands in functions and classes in it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Definition | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def bound(function: Function) -> set[str]:
    """The names that are a function's own: its parameters, and what it assigns."""
    own = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    return own | {n.id for n in inside(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def dotted(node: ast.expr) -> list[str]:
    """The parts of a dotted name: ``["time", "sleep"]``; ``[""]`` for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) != [""]:
        return [*before, node.attr]
    return [""]


def _named(scope: ast.AST, path: list[str]) -> list[Definition]:
    """The definitions of a dotted name below a scope."""
    found: list[Definition] = []
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, Definition):
            waiting.extend(ast.iter_child_nodes(node))
        elif node.name == path[0]:
            found += _named(node, path[1:]) if path[1:] else [node]
    return found


def _text(file: str) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))  # cells of a notebook, too


@lru_cache(maxsize=8)
def _parsed(file: str, text: str) -> ast.Module | None:
    try:
        return ast.parse(text, file) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
