"""Check a built site: no page loads anything from another host, and the search finds what readers look for.

``python docs/extensions/check.py FOLDER``, which ``make docs`` runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SEARCHED = ("UpdateActor", "FR011", "kl/ref", "clip")
_LOADED = {"src", "srcset", "poster", "data", "action"}
_OTHER_HOST = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
_IN_STYLES = re.compile(r"(?:url\(\s*|@import\s*)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collects what a page loads from another host; links to follow are not loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if (name in _LOADED or (tag == "link" and name == "href")) and value and _OTHER_HOST.match(value):
                self.found.append(value)
            elif name == "style" and value:
                self.found += _IN_STYLES.findall(value)


def requests(site: Path) -> Iterator[str]:
    """What pages and styles of a site load from another host."""
    for file in sorted(site.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        page = _Loads()
        page.feed(text)
        for style in re.findall(r"<style\b.*?</style>", text, re.DOTALL):
            page.found += _IN_STYLES.findall(style)
        yield from (f"{file.relative_to(site)} loads {url}" for url in page.found)
    for file in sorted(site.rglob("*.css")):
        for url in _IN_STYLES.findall(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)} loads {url}"


def not_found(site: Path) -> Iterator[str]:
    """Texts of `SEARCHED` without a page in the index of the search."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for text in SEARCHED:
        if not all(re.search(rf'[{{,"]{word}"?:', index) for word in re.findall(r"\w+", text.lower())):
            yield f"the search does not find {text}"


def main() -> None:
    site = Path(sys.argv[1])
    if failures := [*requests(site), *not_found(site)]:
        sys.exit("\n".join(failures))
    print(f"The site is in {site}/index.html.")


if __name__ == "__main__":
    main()
