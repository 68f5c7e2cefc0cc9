"""Inventories for intersphinx from ``docs/inventories.toml``, without a network."""

from __future__ import annotations

import tomllib
import zlib
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "inventories.toml"


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each project into `folder`; returns the value of ``intersphinx_mapping``."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, pages in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        url = pages.pop("url")
        lines = "".join(f"{name} py:class 1 {page} -\n" for name, page in pages.items())
        head = (
            "Sphinx inventory version 2",
            f"Project: {project}",
            "Version: ",
            "The remainder is compressed using zlib.",
        )
        (folder / f"{project}.inv").write_bytes(
            "".join(f"# {line}\n" for line in head).encode() + zlib.compress(lines.encode())
        )
        mapping[project] = (url, str(folder / f"{project}.inv"))
    return mapping
