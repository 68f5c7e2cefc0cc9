"""Names in inline code of pages become links to the Python API, and names of a run's files to the page of formats.

A name links if exactly one public object has it: `UpdateActor`, `Graph.check`, `grpo(...)`. Lower-case names link only
with their arguments, since nodes and roles have such names, too. Each name links once in a section, and never in a
heading.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from docutils import nodes
from names import MODULES
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

FILES = "reference/files"
"""The page of formats: each of its headings that is a name of a file."""

_NAME = re.compile(r"([A-Z]\w*(?:\.\w+)*)(\(.*\))?|([a-z]\w*)\(.*\)|(flowrl(?:\.\w+)+)")


def public(env: BuildEnvironment) -> dict[str, str]:
    """By name in its module and by full name, the full name of the only object of the reference that has it."""
    found: dict[str, set[str]] = defaultdict(set)
    for full in env.domains.python_domain.objects:
        module = max((one for one in MODULES if full.startswith(f"{one}.")), key=len, default="")
        found[full].add(full)
        found[full.removeprefix(f"{module}.")].add(full)
    return {name: full for name, [full, *others] in ((n, sorted(f)) for n, f in found.items()) if not others}


def name_of(code: str) -> str | None:
    """The name that inline code may link by, None if it has none."""
    match = _NAME.fullmatch(code)
    return match and (match[1] or match[3] or match[4])


def linkable(document: nodes.document) -> Iterator[nodes.literal]:
    """Inline code outside of headings and links, the first of each text in its section."""
    seen: dict[int, set[str]] = defaultdict(set)
    for literal in list(document.findall(nodes.literal)):
        parents = list(_parents(literal))
        if any(isinstance(parent, nodes.title | nodes.reference) for parent in parents):
            continue
        section = next((id(parent) for parent in parents if isinstance(parent, nodes.section)), 0)
        name = name_of(literal.astext()) or literal.astext()
        if name not in seen[section]:
            seen[section].add(name)
            yield literal


def _parents(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _files(env: BuildEnvironment) -> Mapping[str, str]:
    """The anchors of the headings of the page of formats, by their text."""
    if FILES not in env.found_docs:
        return {}
    sections = env.get_doctree(FILES).findall(nodes.section)
    return {section[0].astext(): section["ids"][0] for section in sections}


def link(app: Sphinx, document: nodes.document, page: str) -> None:
    """Add the links of a page in Markdown."""
    if app.builder.format != "html" or app.env.doc2path(page).suffix != ".md":
        return
    objects, names, files = app.env.domains.python_domain.objects, public(app.env), _files(app.env)
    for literal in linkable(document):
        full = names.get(name_of(literal.astext()) or "")
        content = literal.deepcopy()
        if full is not None:
            entry = objects[full]
            literal.replace_self(make_refnode(app.builder, page, entry.docname, entry.node_id, content, full))
        elif literal.astext() in files and page != FILES:
            literal.replace_self(make_refnode(app.builder, page, FILES, files[literal.astext()], content))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
