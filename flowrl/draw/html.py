"""A graph or a diff as one HTML file that needs no network: the drawing, and its Mermaid source to copy."""

from __future__ import annotations

from html import escape

from flowrl.core.graphs.graph import Graph
from flowrl.draw import mermaid
from flowrl.draw.picture import Change
from flowrl.draw.svg import svg

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 2rem; font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #f6f8fa; }}
figure {{ margin: 0; overflow-x: auto; background: #fff; border: 1px solid #d0d7de; border-radius: 8px; }}
svg {{ display: block; margin: auto; max-width: 100%; height: auto; }}
pre {{ overflow-x: auto; font-size: 13px; }}
details {{ margin-top: 1rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<figure>
{drawing}
</figure>
{text}<details><summary>Mermaid</summary><pre>{mermaid}</pre></details>
</body>
</html>
"""


def page(subject: Graph | Change) -> str:
    """A stand-alone HTML document; for a diff it also lists the changes as text."""
    if isinstance(subject, Graph):
        title, text = subject.name, ""
    else:
        title, text = f"{subject.before.name} → {subject.after.name}", f"<pre>{escape(str(subject))}</pre>\n"
    return _PAGE.format(title=escape(title), drawing=svg(subject), text=text, mermaid=escape(mermaid.draw(subject)))
