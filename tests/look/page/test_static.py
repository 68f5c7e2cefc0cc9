"""The assets of the page: what is vendored, how large they are, and colors for light and dark."""

from __future__ import annotations

import hashlib
import json
import re

from flowrl.draw.colors import INK, STROKES, colors
from flowrl.look.page.server import STATIC, files

VENDOR = STATIC / "vendor"
LARGEST = 250_000


def test_vendored_files_are_those_of_their_packages_with_their_licenses() -> None:
    listed = json.loads((VENDOR / "vendored.json").read_text())
    known = {"vendored.json"}
    for package in listed.values():
        assert package["npm"].startswith("sha512-") and re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        for name, file in package["files"].items():
            assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"]
        for name in package["licenses"]:
            assert "icense" in (VENDOR / name).read_text() or "MIT" in (VENDOR / name).read_text()
        known |= {*package["files"], *package["licenses"]}
    assert {path.name for path in VENDOR.iterdir()} == known


def test_assets_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) <= LARGEST


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_text() -> None:
    for name, path in files().items():
        text = path.read_text()
        if not name.startswith("vendor/"):
            assert not re.search(r"https?://(?!www\.w3\.org/)", text), name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|dangerously", text), (
                name
            )
            assert not re.search(r"@import|@font-face|url\((?!#)", text.replace("url(#${id})", "")), name
    assert "script>" not in re.sub(r'<script [^>]*src="[\w/.]+"></script>', "", (STATIC / "index.html").read_text())


def test_every_color_of_the_drawing_has_one_on_a_dark_page() -> None:
    dark = (STATIC / "style.css").read_text().partition("/* the drawing of the graph, dark")[2]
    boxes = [colors(role, mark) for role in (None, *range(6)) for mark in ("", "added", "removed", "changed")]
    drawn = {(kind, color) for fill, line in boxes for kind, color in (("fill", fill), ("stroke", line))}
    drawn |= {("fill", INK), ("fill", "#ffffff")}
    drawn |= {(kind, STROKES[arrow]) for kind in ("fill", "stroke") for arrow in STROKES}
    assert [color for color in sorted(drawn) if f'[{color[0]}="{color[1]}"]' not in dark] == []


def test_roles_have_the_colors_of_the_drawing() -> None:
    light = (STATIC / "style.css").read_text().partition("@media")[0]
    assert [colors(i)[1] for i in range(6)] == re.findall(r"--role-\d: (#\w{6})", light)
