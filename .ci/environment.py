"""Record what a virtual environment is installed from, so that make installs again only when that changes.

    python .ci/environment.py packages .venv/.packages constraints.txt [FILE or package ...]
    python .ci/environment.py metadata .venv/.metadata

Each writes its file only when the content changes, because make compares times:

- ``packages`` is what pip resolves: Python's version, the requirements of pyproject.toml, and the arguments; of a file
  the lines without comments.
- ``metadata`` is the rest of what an editable install copies from pyproject.toml, such as entry points.

Another version of Python needs a new environment, so ``packages`` then removes the old one.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = ("requires-python", "dependencies", "optional-dependencies")


def packages(project: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """What pip resolves, by the content of pyproject.toml."""
    return {
        "python": "{}.{}".format(*sys.version_info),
        "build": project["build-system"],
        **{name: project["project"].get(name) for name in REQUIREMENTS},
        "arguments": {name: lines(Path(name)) if Path(name).is_file() else None for name in arguments},
    }


def lines(path: Path) -> list[str]:
    """The lines of a file, without comments and empty lines."""
    found = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in found if line]


def metadata(project: dict[str, Any]) -> dict[str, Any]:
    """What else an editable install copies."""
    rest = {name: value for name, value in project["project"].items() if name not in REQUIREMENTS}
    return {"project": rest, "setuptools": project["tool"]["setuptools"]}


def main(what: str, target: str, *arguments: str) -> None:
    import tomllib

    path = Path(target)
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    content = packages(project, [*arguments]) if what == "packages" else metadata(project)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if before == content:
        return
    if before and before.get("python") != content.get("python"):
        shutil.rmtree(path.parent)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - make may call any Python
        sys.exit(
            f"flowrl needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=/path/to/python3.11 ..."
        )
    main(*sys.argv[1:])
