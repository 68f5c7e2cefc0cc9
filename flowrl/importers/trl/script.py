"""Scripts with a trainer of TRL, read by their syntax tree: configuration, model, data, rewards. Nothing runs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.importers.settings import Setting
from flowrl.importers.trl.values import (
    Data,
    Flags,
    Local,
    Made,
    Named,
    Scope,
    Unknown,
    computed,
    first_unknown,
    plain_call,
    text_call,
    unknown,
)

_PARSES = frozenset({"parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args"})
_NOTHING = frozenset({"get_quantization_config", "get_kbit_device_map"})
"""Functions of TRL that return None unless the flags set quantization, which is refused."""
_DEPTH = 8


class _Returned(Exception):
    """A return statement was reached."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Script:
    """What a script has when it makes its trainer."""

    path: Path
    text: str
    tree: ast.Module
    flags: Flags
    trainers: list[Made] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scope: Scope = field(default_factory=Scope)
    depth: int = 0

    @property
    def is_guarded(self) -> bool:
        """Whether an import of the script starts no training: its trainer is made below a guard or in a function."""
        guards = [node for node in self.tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
        inside = [*guards, *(node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))]
        calls = {id(node) for part in inside for node in ast.walk(part)}
        heads = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and id(node) not in calls]
        names = {function.name for function in self.tree.body if isinstance(function, ast.FunctionDef)}
        return not any(
            ast.unparse(node.func).endswith(("Trainer", "parse_args", "parse_args_and_config", "load_dataset"))
            or ast.unparse(node.func) in names
            for node in heads
        )

    def read(self) -> None:
        """Go through the statements in their order."""
        self.scope.values["__name__"] = "__main__"
        self.body(self.tree.body, self.scope)

    def body(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in statements:
            self.statement(statement, scope)

    def statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope.values[node.name] = Local(node, scope)
                if isinstance(node, ast.ClassDef):
                    self._fields(node, scope)
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self._assign(target, value, node.value, scope)
            case ast.AnnAssign(value=ast.expr() as given):
                self._assign(node.target, self.value(given, scope), given, scope)
            case ast.Expr():
                self.value(node.value, scope)
            case ast.If():
                self._if(node, scope)
            case ast.With():
                self.body(node.body, scope)
            case ast.Try():
                self.body([*node.body, *node.orelse, *node.finalbody], scope)
            case ast.Return():
                raise _Returned(None if node.value is None else self.value(node.value, scope))
            case ast.For() | ast.While() | ast.AugAssign():
                for name in _changed(node):
                    scope.values[name] = unknown(node, "was not run")

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            one = (
                ast.Import([alias])
                if isinstance(node, ast.Import)
                else ast.ImportFrom(node.module, [alias], node.level)
            )
            name = alias.asname or alias.name.partition(".")[0]
            full = f"{module}{alias.name}" if alias.asname or module else name
            scope.values[name] = Named(full, ast.unparse(ast.fix_missing_locations(one)))

    def _fields(self, node: ast.ClassDef, scope: Scope) -> None:
        """Defaults of the fields of a dataclass, which a parser may read."""
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
                value = one.value
                if isinstance(value, ast.Call):  # field(default=...)
                    value = next((word.value for word in value.keywords if word.arg == "default"), ast.Constant(None))
                self.flags.own[one.target.id] = self.value(value, scope)

    def _if(self, node: ast.If, scope: Scope) -> None:
        test = self.value(node.test, scope)
        if isinstance(test, Unknown):
            self.notes.append(f"{test.why}: its condition counts as failed")
        self.body(node.body if not isinstance(test, Unknown) and test else node.orelse, scope)

    def _assign(self, target: ast.expr, value: Any, node: ast.expr, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.values[target.id], scope.nodes[target.id] = value, node
            case ast.Tuple() | ast.List():
                count = len(target.elts)
                if isinstance(value, Flags):
                    values: list[Any] = [value] * count
                else:
                    fits = isinstance(value, list | tuple) and len(value) == count
                    values = list(value) if fits else [unknown(node, "is not read")] * count
                for one, part in zip(target.elts, values, strict=True):
                    self._assign(one, part, node, scope)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Flags):
                    owner.given[target.attr] = setting(target.attr, value, target.lineno)
                elif isinstance(owner, Made):
                    owner.kwargs[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = value

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression."""
        match node:
            case ast.Name():
                found = scope.get(node.id)
                return (
                    unknown(node, "is not set") if isinstance(found, Unknown) and "is not set" in found.why else found
                )
            case ast.Lambda():
                return Local(node, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Subscript():
                return self._item(node, scope)
            case ast.Call():
                return self._call(node, scope)
        return computed(node, lambda part: self.value(part, scope))

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        match owner:
            case Flags():
                return owner.get(node.attr)
            case Named():
                return Named(f"{owner.name}.{node.attr}", owner.statement)
            case Made() if node.attr in owner.kwargs:
                return owner.kwargs[node.attr]
            case Unknown():
                return owner
        return unknown(node, "is not read")

    def _item(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, key = self.value(node.value, scope), self.value(node.slice, scope)
        if found := first_unknown([owner, key]):
            return found
        if isinstance(owner, Data):
            if isinstance(key, str) and owner.split is None:
                return Data(owner.name, owner.config, key, owner.steps)
            return unknown(node, "is not read")
        return _at(node, owner, key)

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        args = [self.value(arg, scope) for arg in node.args]
        kwargs: dict[str, Any] = {}
        for word in node.keywords:
            given = self.value(word.value, scope)
            if word.arg is not None:
                kwargs[word.arg] = given
            elif isinstance(given, dict):
                kwargs |= given
            else:
                return unknown(node, "has arguments that are not read")
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if not isinstance(owner, Named):
                return self._method(node, owner, node.func.attr, args, kwargs)
        function = self.value(node.func, scope)
        if isinstance(function, Named):
            return self._made(node, Made(function.name, args, kwargs, node.lineno))
        if isinstance(function, Local):
            return self._run(node, function, args, kwargs)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(args) >= 2:
            owner, name = args[0], args[1]
            return Named(f"{owner.name}.{name}") if isinstance(owner, Named) else unknown(node, "was not run")
        return plain_call(node, node.func, args, kwargs)

    def _method(self, node: ast.Call, owner: Any, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        match owner:
            case Data():
                return Data(owner.name, owner.config, owner.split, (*owner.steps, (method, args, kwargs, node.lineno)))
            case str():
                return text_call(node, owner, method, args, kwargs)
            case dict() if method in ("get", "update") and args:
                if method == "update":
                    return owner.update(args[0] if isinstance(args[0], dict) else {})
                return owner.get(args[0], *args[1:2])
            case list() if method in ("append", "extend") and len(args) == 1:
                more = args if method == "append" else args[0]
                return owner.extend(more) if isinstance(more, list | tuple) else unknown(node, "was not run")
            case Made() if method in _PARSES:
                return self.flags
            case Made() if method == "add_argument":
                name = next((arg.lstrip("-") for arg in args if isinstance(arg, str) and arg.startswith("--")), "")
                self.flags.own[name.replace("-", "_")] = kwargs.get("default")
                return None
            case Unknown():
                return owner
        return unknown(node, "was not run")

    def _made(self, node: ast.Call, made: Made) -> Any:
        """What a call of an imported name returns."""
        name, args, kwargs = made.kind, made.args, made.kwargs
        if name == "load_dataset":
            given = dict(zip(("path", "name", "data_dir", "data_files", "split"), args, strict=False)) | kwargs
            splits = given.get("split")
            data = Data(given.get("path"), given.get("name"), None if isinstance(splits, list) else splits)
            if given.get("data_files") is not None or given.get("data_dir") is not None:
                data = Data(given.get("data_files") or given.get("data_dir"))
            return [Data(data.name, data.config, split) for split in splits] if isinstance(splits, list) else data
        if name in _NOTHING:
            return None
        if name == "get_peft_config" and args:
            return self.flags if isinstance(args[0], Flags) else args[0]
        if name.endswith("Trainer"):
            self.trainers.append(made)
        if name.islower() and not name.startswith(("from_pretrained", "get_")):
            return unknown(node, "was not run")
        return made

    def _run(self, node: ast.Call, function: Local, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of the script returns."""
        called = function.node
        if not isinstance(called, ast.FunctionDef) or self.depth >= _DEPTH:
            return unknown(node, "was not run")
        names = [one.arg for one in (*called.args.posonlyargs, *called.args.args)]
        defaults = [self.value(one, function.scope) for one in called.args.defaults]
        bound = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        scope = Scope(bound | dict(zip(names, args, strict=False)) | kwargs, outer=function.scope)
        self.depth += 1
        try:
            self.body(called.body, scope)
        except _Returned as returned:
            return returned.value
        finally:
            self.depth -= 1
        return None


def _changed(node: ast.stmt) -> set[str]:
    """The names that a statement may change: those that it sets, and whose items or methods it uses."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        owner = one.func if isinstance(one, ast.Call) else one
        changes = isinstance(one, ast.Call) or isinstance(getattr(one, "ctx", None), ast.Store)
        if changes and isinstance(owner, ast.Attribute | ast.Subscript) and isinstance(owner.value, ast.Name):
            found.add(owner.value.id)
    return found


def setting(key: str, value: Any, line: int) -> Setting:
    """A value of a script as a setting; what is not a literal is its name."""
    if found := first_unknown(value):
        return Setting(key, None, line, (found.why,))
    return Setting(key, str(value) if isinstance(value, Named) else value, line)


def _at(node: ast.Subscript, owner: Any, key: Any) -> Any:
    try:
        return owner[key]
    except (LookupError, TypeError):
        return unknown(node, "is not read")


def read(path: Path, text: str, tree: ast.Module, given: Mapping[str, Setting], defaults: Mapping[str, Any]) -> Script:
    """A script that gets these flags."""
    script = Script(path, text, tree, Flags(dict(given), defaults))
    with suppress(_Returned):
        script.read()
    return script
