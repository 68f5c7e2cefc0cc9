"""`EnvironmentSource`: what can be told of an environment from how it is written, as far as that is certain."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from flowrl.rules.source_code import Function, Written, bound, dotted, inside, written

_BLOCKING = frozenset(
    {
        "time.sleep",
        "os.system",
        "urllib.request.urlopen",
        *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")),
        *(f"{package}.{verb}" for package in ("requests", "httpx") for verb in ("get", "post", "put", "request")),
    }
)
_CHANGES = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}) | frozenset(
    {"pop", "popitem", "remove", "discard", "clear"}
)
_MUTABLE = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})


class EnvironmentSource:
    """An environment as it is written.

    Args:
        parts: the class with those that it derives from, or the agent; empty where its source cannot be read.
        whole: whether that is all of it.
        tools: those whose source can be read.
        apart: whether environments and plain tools are in processes of their own.
    """

    def __init__(self, parts: Sequence[Written], whole: bool, tools: Sequence[Written], apart: bool) -> None:
        self.parts, self._whole, self._tools, self._apart = parts, whole, tools, apart

    @classmethod
    def of(cls, environment: Any, tools: Sequence[Callable[..., Any]], apart: bool = False) -> EnvironmentSource:
        """Of an environment class, an agent, a reference to one, or None, which pays nothing."""
        made = [one for one in map(written, tools) if one is not None]
        if isinstance(environment, type):
            own = [
                base for base in environment.__mro__ if base is not object and not base.__module__.startswith("flowrl.")
            ]
            found = [written(base) for base in own]
        else:
            found = [] if environment is None else [written(environment)]
        parts = [one for one in found if one is not None]
        others = isinstance(environment, str) and any(_derives_from_others(part) for part in parts)
        return cls(parts, len(parts) == len(found) and not others, made, apart)

    @property
    def together(self) -> Sequence[Written]:
        """What of it all episodes have in one process."""
        return () if self._apart and self.agent is None else self.parts

    @cached_property
    def functions(self) -> list[tuple[Written, Function]]:
        """The functions that run in one process for all episodes, its tools included."""
        tools = [one for one in self._tools if not self._apart or isinstance(one.tree, ast.AsyncFunctionDef)]
        return [(part, function) for part in (*self.together, *tools) for function in part.functions]

    @property
    def agent(self) -> Function | None:
        """The agent, where it is one."""
        tree = self.parts[0].tree if self.parts else None
        return None if isinstance(tree, ast.ClassDef) else tree

    @property
    def used_of_chat(self) -> set[str] | None:
        """What an agent uses of its chat; None where it hands that on, so that nobody knows, and where it is none."""
        if self.agent is None or not (chat := _chat(self.agent)):
            return None
        uses = [n for n in ast.walk(self.agent) if isinstance(n, ast.Name) and n.id == chat]
        used = [n.attr for n in ast.walk(self.agent) if isinstance(n, ast.Attribute) and dotted(n.value) == [chat]]
        return set(used) if len(used) == len(uses) else None

    @property
    def pays(self) -> bool:
        """Whether it plainly gives rewards."""
        if (agent := self.agent) is not None:
            calls = (dotted(node.func) for node in inside(agent) if isinstance(node, ast.Call))
            return bool(_returned(agent)) or [_chat(agent), "reward"] in calls
        methods = ((part, function) for part in self.parts for function in part.functions)
        calls_of = ((part, n) for part, function in methods for n in inside(function) if isinstance(n, ast.Call))
        return any(_is_reply(part, call) and _reward_of(call) is not None for part, call in calls_of)

    @property
    def never_pays(self) -> bool:
        """Whether it plainly gives none."""
        if not self._whole or not self.parts:
            return self._whole
        if (agent := self.agent) is not None:
            return self.used_of_chat is not None and "reward" not in self.used_of_chat and not _returned(agent)
        part, step = next(((p, f) for p in self.parts for f in p.functions if f.name == "step"), (None, None))
        said = [] if step is None else _returned(step)
        return bool(said) and part is not None and all(_is_unpaid(part, value) for value in said)


def blocks(environment: EnvironmentSource) -> Iterator[tuple[str, str, str]]:
    """The coroutines of an environment that hold up their thread, by what call, and where."""
    for part, function in environment.functions:
        if isinstance(function, ast.AsyncFunctionDef):
            calls = part.called(function)
            yield from ((function.name, name, part.at(call)) for name, call in calls if name in _BLOCKING)


def changed_by_all(environment: EnvironmentSource) -> Iterator[tuple[str, str]]:
    """The attributes of classes that methods change in place and never make anew, and where."""
    nodes = [(part, node) for part in environment.together for f in part.functions for node in ast.walk(f)]
    added = {id(node.target) for _, node in nodes if isinstance(node, ast.AugAssign)}
    stored = [n for _, n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    anew = {node.attr for node in stored if id(node) not in added and dotted(node.value) == ["self"]}
    for part in environment.together:
        for name in dict.fromkeys(_mutable_attributes(part.tree)):
            changes = [
                by.at(node) for by, node in nodes if isinstance(node, ast.stmt | ast.expr) and _changes(node, name)
            ]
            if changes and name not in anew:
                yield f"{part.tree.name}.{name}", changes[0]


def played_by_all(environment: EnvironmentSource) -> Iterator[tuple[str, str]]:
    """The objects from outside that a function of an environment both resets and steps, and where."""
    for part, function in environment.functions:
        calls = [(dotted(node.func), node) for node in inside(function) if isinstance(node, ast.Call)]
        methods = {(said[0], said[1]): node for said, node in calls if len(said) == 2}
        made = {name for node in ast.walk(part.module) for name in _made(node)} - bound(function)
        for name in sorted(made):
            if (name, "reset") in methods and (name, "step") in methods:
                yield name, part.at(methods[name, "step"])


def _derives_from_others(part: Written) -> bool:
    """Whether a class has bases besides flowrl's own."""
    bases = part.tree.bases if isinstance(part.tree, ast.ClassDef) else []
    return any(not _is_flowrls(part, base, "Environment") for base in bases)


def _is_flowrls(part: Written, name: ast.expr, what: str) -> bool:
    return part.meant(name) in (f"flowrl.episodes.{what}", f"flowrl.episodes.environment.{what}")


def _is_reply(part: Written, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _is_flowrls(part, node.func, "Reply")


def _is_unpaid(part: Written, value: ast.expr) -> bool:
    """Whether it is a ``Reply(...)`` whose arguments are all there to be seen, and none of them a reward."""
    if not isinstance(value, ast.Call) or not _is_reply(part, value):
        return False
    hidden = [arg for arg in value.args if isinstance(arg, ast.Starred)] + [k for k in value.keywords if not k.arg]
    return not hidden and _reward_of(value) is None


def _reward_of(reply: ast.Call) -> ast.expr | None:
    """What a ``Reply(...)`` gives as its reward; None of one that gives none."""
    named = next((k.value for k in reply.keywords if k.arg == "reward"), None)
    given = reply.args[1] if len(reply.args) > 1 else named
    return None if isinstance(given, ast.Constant) and given.value is None else given


def _returned(function: Function) -> list[ast.expr]:
    """What a function returns, where that is not None."""
    values = [node.value for node in inside(function) if isinstance(node, ast.Return)]
    return [v for v in values if v is not None and not (isinstance(v, ast.Constant) and v.value is None)]


def _chat(agent: Function) -> str:
    """What an agent calls its chat."""
    return agent.args.args[0].arg if agent.args.args else ""


def _mutable_attributes(tree: ast.AST) -> Iterator[str]:
    """The lists, dicts and sets of a class, but for those whose annotation says that all share them."""
    for node in tree.body if isinstance(tree, ast.ClassDef) else ():
        if isinstance(node, ast.Assign) and _is_mutable(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and _is_mutable(node.value):
            meant = "ClassVar" in ast.unparse(node.annotation)
            yield from () if meant or not isinstance(node.target, ast.Name) else (node.target.id,)


def _is_mutable(value: ast.expr | None) -> bool:
    literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    return literal or (isinstance(value, ast.Call) and dotted(value.func)[-1] in _MUTABLE)


def _changes(node: ast.AST, name: str) -> bool:
    """Whether it changes ``self.name`` in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGES and dotted(node.func.value) == ["self", name]
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and dotted(node.value) == ["self", name]
    return isinstance(node, ast.AugAssign) and dotted(node.target) == ["self", name]


def _made(node: ast.AST) -> Iterator[str]:
    """The names to which a statement assigns what a call returns."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
