"""What a browser makes of Mermaid text: Mermaid itself in a headless Chromium, as ``make pictures`` sets them up."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests import ROOT

SET_UP = ROOT / ".pictures"
BUNDLES = ("mermaid", "mermaid-11")
WIDTH = 900
"""Width of the pictures in pixels, about that of a README."""

PAGE = """<!doctype html>
<meta charset="utf-8">
<style>body { margin: 8px; background: #fff; font-family: sans-serif }</style>
<script src="%(bundle)s"></script>
<main></main>
<div id="found" hidden></div>
<script>
const texts = %(texts)s, found = {}, main = document.querySelector("main");
const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const look = (element) => {
  const shape = element.matches("g") ? element.querySelector("path, rect, polygon") : element;
  const style = getComputedStyle(shape);
  return { fill: style.fill, stroke: style.stroke };
};
const words = (element) => element.innerText.trim();

async function draw(name, text) {
  const { svg } = await mermaid.render(`drawn-${Object.keys(found).length}`, text);
  const figure = main.appendChild(document.createElement("figure"));
  figure.innerHTML = svg;
  const nodes = [...figure.querySelectorAll("g.node")].map((node) => {
    const shape = node.querySelector(".label-container");
    return { text: words(node.querySelector(".nodeLabel")), box: box(shape), ...look(shape) };
  });
  const labels = [...figure.querySelectorAll(".edgeLabels foreignObject")]
    .filter((label) => label.textContent.trim())
    .map((label) => ({ text: words(label.querySelector("span")), box: box(label) }));
  return { box: box(figure.querySelector("svg")), nodes, labels };
}

async function parse(text) {
  const { db } = await mermaid.mermaidAPI.getDiagramFromText(text);
  return {
    nodes: [...db.getVertices()].map(([id, node]) => [id, node.text]),
    links: db.getEdges().map((edge) => [edge.start, edge.stroke, edge.text, edge.end]),
  };
}

(async () => {
  mermaid.initialize({ startOnLoad: false });
  for (const [name, text] of Object.entries(texts)) {
    try {
      found[name] = await (%(drawn)s ? draw(name, text) : parse(text));
    } catch (error) {
      found[name] = { error: String(error) };
    }
  }
  document.querySelector("#found").textContent = encodeURIComponent(JSON.stringify(found));
})();
</script>
"""


@dataclass(frozen=True)
class Place:
    """A text of a picture, with its box (left, top, right, bottom in pixels) and what CSS gives it."""

    text: str
    box: tuple[float, float, float, float]
    fill: str = ""
    stroke: str = ""

    @property
    def name(self) -> str:
        return self.text.partition("\n")[0]

    def overlaps(self, other: Place) -> bool:
        (a, b, c, d), (e, f, g, h) = self.box, other.box
        return min(c, g) - max(a, e) > 0.5 and min(d, h) - max(b, f) > 0.5


def missing() -> str:
    """Why this machine cannot draw pictures; empty if it can."""
    if shutil.which("chromium") is None:
        return "Chromium is not installed; make pictures installs it"
    if not all((SET_UP / f"{bundle}.js").is_file() for bundle in BUNDLES):
        return "Mermaid is not here; make pictures fetches it"
    return ""


def drawn(bundle: str, texts: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """What Mermaid draws: by name its error, or the places of its nodes and labels; leaves a picture of all."""
    found = _found(bundle, texts, folder, drawn=True)
    height = sum(one["box"][3] - one["box"][1] + 40 for one in found.values() if "box" in one)
    picture = SET_UP / f"{bundle}.png"
    _chromium(folder, f"--window-size={WIDTH},{height + 40:.0f}", f"--screenshot={picture}", str(folder / "page.html"))
    return found


def parsed(bundle: str, texts: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """What Mermaid reads: by name its error, or the nodes and links."""
    return _found(bundle, texts, folder, drawn=False)


def _found(bundle: str, texts: Mapping[str, str], folder: Path, drawn: bool) -> dict[str, Any]:
    shown = json.dumps(texts).replace("<", "\\u003c")  # or a text could end the script
    source = (SET_UP / f"{bundle}.js").as_uri()
    page = PAGE % {"bundle": source, "texts": shown, "drawn": json.dumps(drawn)}
    (folder / "page.html").write_text(page, encoding="utf-8")
    dom = _chromium(folder, f"--window-size={WIDTH},800", "--dump-dom", str(folder / "page.html"))
    answer = re.search(r'<div id="found" hidden="">(.+?)</div>', dom)
    assert answer, dom[-2000:]
    found: dict[str, Any] = json.loads(unquote(answer[1]))
    return found


def _chromium(folder: Path, *arguments: str) -> str:
    """What Chromium prints. Time is virtual: it waits for the page's own work, and no longer."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
