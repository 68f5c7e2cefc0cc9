"""The pages as GitHub shows them: links to files of the repository, and pictures in a light and a dark version."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
FILES = "files"
"""The folder of the site with copies of the files that pages link."""

_LINKS = (addnodes.pending_xref, addnodes.download_reference)


class Pictures(SphinxTransform):
    """A ``<picture>`` becomes an image for each version; the theme shows the one that fits."""

    default_priority = 200

    def apply(self) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            html = raw.astext()
            if not html.startswith("<picture>"):
                continue
            dark, alt, light = re.findall(r'(?:srcset|alt|src)="([^"]*)"', html)
            shown = {"only-light": light, "only-dark": dark}
            raw.replace_self([nodes.image(uri=uri, alt=alt, classes=[name]) for name, uri in shown.items()])


class Files(SphinxTransform):
    """Links to files outside the docs lead to copies of them, to a folder to a list of its files."""

    default_priority = 210

    def apply(self) -> None:
        source = Path(self.document["source"]).parent
        up = "../" * self.env.docname.count("/")
        for link in [node for kind in _LINKS for node in self.document.findall(kind)]:
            target = link["reftarget"]
            if link.get("reftype") != "myst" or not target.startswith(("../", "/")):
                continue
            path = (source / (f"{target}.md" if link.get("refdomain") == "doc" else target)).resolve()
            if path.exists() and path.is_relative_to(ROOT):
                uri = f"{up}{FILES}/{path.relative_to(ROOT)}"
                uri += "/index.html" if path.is_dir() else ""
                link.replace_self(nodes.reference("", "", *link.children, refuri=uri))
                self.env.metadata[self.env.docname].setdefault(FILES, []).append(path.relative_to(ROOT).as_posix())


def copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy what the pages link; a folder gets a list of its files."""
    if error or app.builder.format != "html":
        return
    linked = {ROOT / path for meta in app.env.metadata.values() for path in meta.get(FILES, ())}
    for path in sorted(linked):
        target = Path(app.outdir) / FILES / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            shutil.copyfile(path, target)
            continue
        shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        names = sorted(file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file())
        items = "".join(f'<li><a href="{name}">{name}</a></li>' for name in names if name != "index.html")
        title = path.relative_to(ROOT)
        (target / "index.html").write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<meta name='color-scheme' content='light dark'><title>{title}</title><h1>{title}</h1><ul>{items}</ul>\n",
            encoding="utf-8",
        )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Pictures)
    app.add_transform(Files)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
