"""Functions of a script: by reference if an import of the script starts no training, else copied with what they read.

A copy is a definition alone: its imports are inside it, so that loading the written file runs nothing of the script.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import symtable
import tokenize
from dataclasses import dataclass, field

from flowrl.importers.trl.script import Script
from flowrl.importers.trl.values import Local, Named, Unknown, is_plain
from flowrl.importers.writer import written


class NotCopied(Exception):
    """A function that cannot be copied, and why."""


def reference(script: Script, function: Local) -> str | None:
    """``"script.py:name"`` of a function that an import of the script gives, without a training; else None."""
    top = function.name and script.scope.values.get(function.name) is function
    return f"{script.path}:{function.name}" if top and script.is_guarded else None


@dataclass
class Copies:
    """Copied functions, and the constants that they read, in the order in which the file defines them."""

    script: Script
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, function: Local) -> str:
        """Copy a function; its name, or the expression if it is a lambda.

        Raises:
            NotCopied: it has a decorator, or reads what only a run of the script makes.
        """
        node = function.node
        if isinstance(node, ast.ClassDef):
            raise NotCopied(f"line {node.lineno}: the class {node.name} is not copied")
        imports = self._imports(function)
        if isinstance(node, ast.Lambda):
            if imports:
                raise NotCopied(f"line {node.lineno}: a lambda that reads {imports[0]}; define a function")
            return f"({ast.unparse(node)})"
        if self.sources.get(node.name) is not None:
            return node.name
        if node.decorator_list:
            raise NotCopied(f"line {node.lineno}: {node.name} has a decorator")
        if not all(map(_is_literal, [*node.args.defaults, *filter(None, node.args.kw_defaults)])):
            raise NotCopied(f"line {node.lineno}: a default of {node.name} is not a literal")
        self.sources[node.name] = self._source(node, imports)
        return node.name

    def _imports(self, function: Local) -> list[str]:
        """The import statements that a function needs; other names that it reads are copied."""
        imports: list[str] = []
        for name in _reads(function.node):
            value, given = function.scope.get(name), function.scope.node(name)
            if isinstance(value, Named) and value.statement:
                imports.append(value.statement)
            elif isinstance(value, Local):
                if value.node is not function.node:
                    self.add(value)
            elif not isinstance(value, Unknown) and is_plain(value):
                self.sources.setdefault(name, f"{name} = {self._constant(value, given)}")
            elif not hasattr(builtins, name):
                line = getattr(function.node, "lineno", 0)
                raise NotCopied(f"line {line}: it reads `{name}`, which only a run of the script makes")
        return list(dict.fromkeys(imports))

    def _constant(self, value: object, node: ast.expr | None) -> str:
        """A constant, as the script writes it if it is a literal there; parentheses join strings side by side."""
        if node is None or not _is_literal(node):
            return written(value)
        first, *rest = _segment(self.script.text, node).splitlines()
        inside = _inside_strings(self.script.text)
        outside = [number not in inside for number, _ in enumerate(rest, start=node.lineno + 1)]
        if not isinstance(value, str) or not any(outside):
            return "\n".join([first, *rest])
        lines = [f"    {line}" if own else line for line, own in zip(rest, outside, strict=True)]
        return "\n".join(["(", f"    {first}", *lines, ")"])

    def _source(self, node: ast.FunctionDef | ast.AsyncFunctionDef, imports: list[str]) -> str:
        """The definition without annotations that are more than builtins, and with its imports at its start."""
        lines = _segment(self.script.text, node).splitlines()
        if not imports and _is_plain_signature(node) and node.body[0].lineno > node.lineno:
            return "\n".join(lines)
        if _is_plain_signature(node) and node.body[0].lineno > node.lineno:
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            at = first.lineno - node.lineno
            indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
            return "\n".join([*lines[:at], *(f"{indent}{one}" for one in imports), *lines[at:]])
        bare = ast.parse(ast.unparse(node)).body[0]
        assert isinstance(bare, ast.FunctionDef | ast.AsyncFunctionDef)
        bare.returns = None
        for argument in ast.walk(bare.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        at = 1 if ast.get_docstring(bare) is not None else 0
        bare.body[at:at] = [statement for one in imports for statement in ast.parse(one).body]
        return ast.unparse(ast.fix_missing_locations(bare))


def _reads(node: ast.AST) -> list[str]:
    """The names that a function reads and does not define."""
    text = ast.unparse(node)
    names: dict[str, None] = {}

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.is_global():
                names[symbol.get_name()] = None
        for child in table.get_children():
            visit(child)

    top = symtable.symtable(text, "<function>", "exec")
    for child in top.get_children():
        visit(child)
    return list(names)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _segment(text: str, node: ast.AST) -> str:
    """The source of a node, without the indentation of its block; lines inside strings stay."""
    found = ast.get_source_segment(text, node) or ast.unparse(node)
    first = getattr(node, "lineno", 1)
    line = text.splitlines()[first - 1]
    margin, inside = line[: len(line) - len(line.lstrip())], _inside_strings(text)
    lines = found.splitlines()
    rest = [one if at in inside else one.removeprefix(margin) for at, one in enumerate(lines[1:], start=first + 1)]
    return "\n".join([*lines[:1], *rest])


@functools.cache
def _inside_strings(text: str) -> frozenset[int]:
    """The lines that start inside a string."""
    found: set[int] = set()
    opened = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            opened = token.start[0]
        elif name in ("STRING", "FSTRING_END"):
            found |= set(range((opened if name == "FSTRING_END" else token.start[0]) + 1, token.end[0] + 1))
    return frozenset(found)


def _is_plain_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether annotations and defaults are builtins and literals, which a definition may evaluate."""
    annotations = [one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg)] + [node.returns]
    names = [part for one in annotations if one is not None for part in ast.walk(one)]
    allowed = (ast.Name, ast.Subscript, ast.Tuple, ast.BinOp, ast.BitOr, ast.Constant, ast.Load, ast.List)
    return all(isinstance(part, allowed) for part in names) and all(
        part.id in dir(builtins) for part in names if isinstance(part, ast.Name)
    )


def columns_of(node: ast.AST) -> list[str]:
    """The columns that a reward function reads: its parameters, and what it takes from ``**kwargs``."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return []
    given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    rest = node.args.kwarg.arg if node.args.kwarg else ""
    for part in ast.walk(node):
        key: ast.expr | None = None
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == rest:
            key = part.slice
        elif isinstance(part, ast.Call) and ast.unparse(part.func) == f"{rest}.get" and part.args:
            key = part.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            given.append(key.value)
    return [name for name in dict.fromkeys(given) if name not in _OF_TRAINER]


_OF_TRAINER = frozenset(
    {"completion_ids", "completions", "environments", "log_extra", "log_metric", "prompt", "prompts", "trainer_state"}
)
"""What TRL passes besides the columns of the data."""
