"""Single backticks in docstrings: each holds a name of Python, a parameter, a column, a file or a command, or fails.

A name is looked up where it stands: among the parameters and members of what the docstring describes, in its module, in
the public modules, and as a path that can be imported. What the reference or an inventory has becomes a link.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext import intersphinx
from sphinx.roles import XRefRole
from sphinx.util.nodes import make_refnode

from flowrl import columns
from flowrl.app.cli import app as commands

DOCS = Path(__file__).resolve().parents[1]
MODULES = tuple(
    re.findall(
        r"automodule:: (\S+)", "".join(page.read_text() for page in sorted((DOCS / "reference" / "api").glob("*.rst")))
    )
)
"""The public modules: those with a page."""

_NOTHING = object()


@cache
def public_names() -> dict[int, str]:
    """By the identity of a class, a function or a module, its name in the reference."""
    names: dict[int, str] = {}
    for module in map(importlib.import_module, MODULES):
        names[id(module)] = module.__name__
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if isinstance(value, type | types.FunctionType):
                names.setdefault(id(value), f"{module.__name__}.{name}")
    return names


class Role(XRefRole):
    """A name in single backticks; remembers the module that it stands in."""

    def process_link(
        self, env: BuildEnvironment, refnode: nodes.Element, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        refnode["py:module"] = env.ref_context.get("py:module")
        return title, target


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """A link for a name that Sphinx does not know; its text if the name has no page, None if there is no such name."""
    if node.get("reftype") != "name" and node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if node.get("refdomain") == "py":
        target = re.sub(r"\[.*\]$", "", target)  # a type of jaxtyping with its axes
    found = look_up(target, *place(node))
    if found is None:
        return None
    for name in found:
        if name in (objects := env.domains.python_domain.objects):
            entry = objects[name]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)
        outside = node.copy()
        outside.update_all_atts({"refdomain": "py", "reftype": "obj", "reftarget": name}, replace=True)
        if link := intersphinx.missing_reference(app, env, outside, content):
            return link
    return content


def place(node: nodes.Node) -> tuple[str, str]:
    """The module and the path in it of what the docstring or the signature around a node describes."""
    module = node.get("py:module") or ""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, addnodes.desc):
            return node[0]["module"], node[0]["fullname"]
    return module, ""


def look_up(text: str, module: str, path: str) -> list[str] | None:
    """The full names that `text` may have where it stands, none for one without; None if nothing has this name."""
    name = re.sub(r"\(.*\)$", "", text)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return [] if _is_file(text) or _is_command(text) else None
    head, _, rest = name.partition(".")
    for owner, value in _owners(module, path):
        if name in _parameters(value):
            return []
        if (member := _member(value, name)) is not _NOTHING:
            return [*_names_of(member), f"{owner}.{name}"]
    owners = [kind for _, value in _owners(module, path) for kind in getattr(value, "__mro__", (value,))]
    homes = [getattr(owner, "__module__", module) for owner in owners]
    for home in dict.fromkeys([*homes, module, *MODULES, "builtins"]):
        if home and (value := _global(home, head)) is not _NOTHING:
            found = _member(value, rest) if rest else value
            if found is not _NOTHING:
                return _names_of(value, rest)
    if (value := _imported(name)) is not _NOTHING:
        return [*value, name]
    return [] if columns.lookup(name) or _is_file(text) else None


def value_at(module: str, path: str) -> Any:
    """What a path names in a module; None if it names nothing."""
    value: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        value = getattr(value, part, None)
    return value


def _owners(module: str, path: str) -> Iterator[tuple[str, Any]]:
    """What `path` names in a module, then what holds it."""
    parts = path.split(".") if path else []
    for end in range(len(parts), 0, -1):
        yield ".".join([module, *parts[:end]]), value_at(module, ".".join(parts[:end]))


def _parameters(value: Any) -> set[str]:
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set()


def _member(value: Any, path: str) -> Any:
    """The attribute of a class or a module at a path, its name if only its type is declared, or `_NOTHING`."""
    for part in path.split("."):
        annotated = isinstance(value, type) and any(part in inspect.get_annotations(c) for c in value.__mro__)
        value = getattr(value, part, part if annotated else _NOTHING)
        if value is _NOTHING:
            return _NOTHING
    return value


def _names_of(value: Any, rest: str = "") -> list[str]:
    """The name of a class, a function or a module in the reference, and where it is defined."""
    names = [public_names().get(id(value), "")]
    names.append(
        value.__name__
        if isinstance(value, types.ModuleType)
        else f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    )
    return [f"{name}.{rest}".rstrip(".") for name in names if name.strip(".")]


def _global(module: str, name: str) -> Any:
    """A global of a module, also one that it imports for type checkers alone."""
    home = importlib.import_module(module)
    value = getattr(home, name, _NOTHING)
    if value is _NOTHING and name in _typing_imports(module):
        source, original = _typing_imports(module)[name]
        found = importlib.import_module(source)
        return getattr(found, original) if original else found
    return value


@cache
def _typing_imports(module: str) -> dict[str, tuple[str, str]]:
    """By name, what imports anywhere in a module read: a module, and the name in it or ``""``."""
    file = sys.modules[module].__dict__.get("__file__") or ""
    if "flowrl" not in module or not file:
        return {}
    found = {}
    for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname: (alias.name, "") for alias in node.names if alias.asname})
    return found


def _imported(path: str) -> Any:
    """The names of what a dotted path imports, or `_NOTHING`."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        rest = parts[end:]
        if rest and _member(module, ".".join(rest)) is _NOTHING:
            return _NOTHING
        for split in range(len(rest), -1, -1):
            value = _member(module, ".".join(rest[:split])) if split else module
            if id(value) in public_names():
                return _names_of(value, ".".join(rest[split:]))
        return []
    return _NOTHING


def _is_file(text: str) -> bool:
    return "/" in text and (DOCS.parent / text).exists()


def _is_command(text: str) -> bool:
    program, _, rest = text.partition(" ")
    names = {c.name or c.callback.__name__.replace("_", "-") for c in commands.registered_commands if c.callback}
    return program == "flowrl" and rest.split(" ")[0] in names


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("name", Role(warn_dangling=True))
    app.connect("missing-reference", resolve, priority=900)  # after intersphinx
    return {"parallel_read_safe": True, "parallel_write_safe": True}
