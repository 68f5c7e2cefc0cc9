"""`EnvironmentSource`: what the source code of an environment reveals about rewards and tool calls; nothing is run.

Every result is certain, or there is none: a name refers to a module, or a member of one, only by an import.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from flowrl import references

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """The source code of a function or class."""

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
        """The names that imports anywhere in the file bind: ``{"sleep": "time.sleep"}``."""
        found = {}
        for node in ast.walk(self.module):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def is_flowrls(self, name: ast.expr, what: str) -> bool:
        """Whether a dotted name is `what` of `flowrl.episodes`, by the imports of the file."""
        root, *rest = _dotted(name)
        resolved = ".".join([self.imported.get(root, ""), *rest])
        return resolved in (f"flowrl.episodes.{what}", f"flowrl.episodes.environment.{what}")


class EnvironmentSource:
    """The source code of an environment: the class and its bases, or the agent; empty if unreadable."""

    def __init__(self, parts: Sequence[Source], complete: bool) -> None:
        self.parts, self._complete = parts, complete

    @classmethod
    def of(cls, environment: Any) -> EnvironmentSource:
        """Of an environment class, an agent, a reference to one, or None, which gives no reward."""
        if isinstance(environment, type):
            own = [
                base for base in environment.__mro__ if base is not object and not base.__module__.startswith("flowrl.")
            ]
            found = [source_of(base) for base in own]
        else:
            found = [] if environment is None else [source_of(environment)]
        parts = [one for one in found if one is not None]
        others = isinstance(environment, str) and any(_has_other_bases(part) for part in parts)
        return cls(parts, len(parts) == len(found) and not others)

    @property
    def agent(self) -> Function | None:
        """The agent; None for a class."""
        tree = self.parts[0].tree if self.parts else None
        return None if isinstance(tree, ast.ClassDef) else tree

    @property
    def used_of_chat(self) -> set[str] | None:
        """The members of its chat that an agent uses; None if it passes the chat on, or is no agent."""
        if self.agent is None or not (chat := _chat(self.agent)):
            return None
        uses = [n for n in ast.walk(self.agent) if isinstance(n, ast.Name) and n.id == chat]
        used = [n.attr for n in ast.walk(self.agent) if isinstance(n, ast.Attribute) and _dotted(n.value) == [chat]]
        return set(used) if len(used) == len(uses) else None

    @property
    def gives_rewards(self) -> bool:
        """Whether it certainly gives rewards."""
        if (agent := self.agent) is not None:
            calls = (_dotted(node.func) for node in _inside(agent) if isinstance(node, ast.Call))
            return bool(_returned(agent)) or [_chat(agent), "reward"] in calls
        methods = ((part, function) for part in self.parts for function in part.functions)
        calls_of = ((part, n) for part, function in methods for n in _inside(function) if isinstance(n, ast.Call))
        return any(part.is_flowrls(call.func, "Reply") and _reward_of(call) is not None for part, call in calls_of)

    @property
    def gives_none(self) -> bool:
        """Whether it certainly gives no reward."""
        if not self._complete or not self.parts:
            return self._complete
        if (agent := self.agent) is not None:
            return self.used_of_chat is not None and "reward" not in self.used_of_chat and not _returned(agent)
        part, step = next(((p, f) for p in self.parts for f in p.functions if f.name == "step"), (None, None))
        returned = [] if step is None else _returned(step)
        return bool(returned) and part is not None and all(_gives_no_reward(part, value) for value in returned)


def source_of(thing: Callable[..., Any] | str) -> Source | None:
    """The source of a function or class, or of a reference to one; None if it cannot be found."""
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
    if module is None:
        return None
    found = _definitions(module, path.split("."))
    if line is not None:
        found = [one for one in found if line in (one.lineno, *(d.lineno for d in one.decorator_list))]
    return Source(module, found[0]) if len(found) == 1 else None


def _has_other_bases(part: Source) -> bool:
    """Whether a class has bases other than flowrl's own."""
    bases = part.tree.bases if isinstance(part.tree, ast.ClassDef) else []
    return any(not part.is_flowrls(base, "Environment") for base in bases)


def _gives_no_reward(part: Source, value: ast.expr) -> bool:
    """Whether it is a ``Reply(...)`` with explicit arguments, none of them a reward."""
    if not isinstance(value, ast.Call) or not part.is_flowrls(value.func, "Reply"):
        return False
    hidden = [arg for arg in value.args if isinstance(arg, ast.Starred)] + [k for k in value.keywords if not k.arg]
    return not hidden and _reward_of(value) is None


def _reward_of(reply: ast.Call) -> ast.expr | None:
    """The reward of a ``Reply(...)``; None if it has none."""
    named = next((k.value for k in reply.keywords if k.arg == "reward"), None)
    given = reply.args[1] if len(reply.args) > 1 else named
    return None if isinstance(given, ast.Constant) and given.value is None else given


def _returned(function: Function) -> list[ast.expr]:
    """The values other than None that a function returns."""
    values = [node.value for node in _inside(function) if isinstance(node, ast.Return)]
    return [v for v in values if v is not None and not (isinstance(v, ast.Constant) and v.value is None)]


def _chat(agent: Function) -> str:
    """The name of an agent's chat."""
    return agent.args.args[0].arg if agent.args.args else ""


def _inside(function: Function) -> Iterator[ast.AST]:
    """The nodes in the body of a function, without those of nested functions and classes."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Definition | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def _dotted(node: ast.expr) -> list[str]:
    """The parts of a dotted name: ``["time", "sleep"]``; ``[""]`` for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) != [""]:
        return [*before, node.attr]
    return [""]


def _definitions(scope: ast.AST, path: list[str]) -> list[Definition]:
    """The definitions of a dotted name in a scope."""
    found: list[Definition] = []
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, Definition):
            waiting.extend(ast.iter_child_nodes(node))
        elif node.name == path[0]:
            found += _definitions(node, path[1:]) if path[1:] else [node]
    return found


def _text(file: str) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))  # also cells of a notebook


@lru_cache(maxsize=8)
def _parsed(file: str, text: str) -> ast.Module | None:
    try:
        return ast.parse(text, file) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
