"""Signatures as the source writes them, and forms of a docstring that napoleon reads as something else."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

from names import value_at
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import _parse_annotation


def signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, arguments: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Annotations as in the source; evaluated, those of jaxtyping and pydantic fill lines."""
    if what not in ("class", "function", "method", "exception"):
        return None
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    shown = [p.replace(annotation=_annotation(p.annotation), default=_default(p.default)) for p in parameters]
    text = str(inspect.Signature(shown))
    return text, None if what in ("class", "exception") else str(_annotation(found.return_annotation) or "") or None


class _Text(str):
    """A text whose `repr` is itself, so that `inspect.Signature` prints it as it is."""

    def __repr__(self) -> str:
        return str(self)


def _annotation(value: Any) -> Any:
    if value is inspect.Signature.empty:
        return value
    written = value if isinstance(value, str) else getattr(value, "__forward_arg__", None)
    return _Text(written or inspect.formatannotation(value))


def _default(value: Any) -> Any:
    if value is inspect.Signature.empty:
        return value
    text = value.__name__ if inspect.isroutine(value) else repr(value)
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return _Text("...")
    return _Text(text)


def type_of_attribute(app: Sphinx, domain: str, kind: str, content: addnodes.desc_content) -> None:
    """Write the declared type of an attribute behind its name."""
    if domain != "py" or kind != "attribute":
        return
    head = content.parent[0]
    owner, _, name = head["fullname"].rpartition(".")
    for cls in getattr(value_at(head["module"], owner), "__mro__", ()):
        if (declared := inspect.get_annotations(cls).get(name)) is not None:
            text = str(_annotation(declared))
            head += addnodes.desc_annotation("", ": ", *_parse_annotation(text, app.env))
            return


def bases(app: Sphinx, name: str, value: Any, options: Any, found: list[Any]) -> None:
    """Leave `object` out."""
    found[:] = [base for base in found if base is not object]


def without_bases(app: Sphinx, domain: str, kind: str, content: addnodes.desc_content) -> None:
    """Remove the line ``Bases:`` of a class whose only base was `object`."""
    if domain == "py" and kind in ("class", "exception") and content.children and content[0].astext() == "Bases:":
        content.pop(0)


def plain(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for napoleon, which reads types where this code has none.

    The text under ``Returns`` becomes a field. Names of parameters that share a line and fill more than one become one.
    """
    text = "\n".join(lines)
    text = re.sub(r"^( +[\w*, ]+,)\n +([\w*, ]+:)", r"\1 \2", text, flags=re.MULTILINE)
    text = re.sub(r"^(Returns|Yields):\n +(?=\S)", lambda m: f":{m[1].lower()}: ", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")
    if what in ("attribute", "data", "property"):
        lines[:1] = [line.replace(":", "\N{RATIO}") for line in lines[:1]]


def restored(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """After napoleon, which takes what stands before a colon in an attribute's docstring for its type."""
    lines[:] = [line.replace("\N{RATIO}", ":") for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-bases", bases)
    app.connect("object-description-transform", without_bases)
    app.connect("object-description-transform", type_of_attribute)
    app.connect("autodoc-process-docstring", plain, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restored, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
