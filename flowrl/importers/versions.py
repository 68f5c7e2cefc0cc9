"""Whether a configuration is of another version than the one that its keys and defaults are read by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from flowrl.importers.settings import Settings

_NUMBER = r"v?(\d+(?:\.\d+)*)"
_SIGN = r"===?|[~!<>]=|[<>]"
_REQUIREMENT_FILES = ("requirements.txt", "pyproject.toml")
"""Files next to a script that may name versions."""


def warnings_of(framework: str, text: str, path: Path, settings: Settings) -> list[str]:
    """Signs of another version: what the file or one next to it names, the installed package, and unknown keys."""
    pinned = settings.table.version
    read = f"keys and defaults are read as those of {framework} {pinned}"
    found = [f"{where} names {framework} {version}: {read}" for where, version in _named(framework, text, path, pinned)]
    try:
        installed = metadata.version(framework)
    except metadata.PackageNotFoundError:
        installed = pinned
    if installed != pinned:
        found.append(f"{framework} {installed} is installed here: {read}")
    if unknown := [key for key in settings.given if settings.is_unknown(key)]:
        found.append(f"{', '.join(unknown[:5])}: no key of {framework} {pinned}; the file may be of another version")
    return found


def _named(framework: str, text: str, path: Path, pinned: str) -> Iterator[tuple[str, str]]:
    """Where another version is required, and how."""
    files = [path.parent / name for name in _REQUIREMENT_FILES]
    texts = {path.name: text} | {file.name: _text(file) for file in files if file.is_file()}
    for where, content in texts.items():
        for line, one in enumerate(content.splitlines(), 1):
            for sign, version in _requirements(framework, one):
                if not _allows(sign, version, pinned):
                    yield f"{where}, line {line}", f"{sign}{version}"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _requirements(framework: str, line: str) -> Iterator[tuple[str, str]]:
    """The versions that a line asks for: ``trl[vllm]>=1.0,<2``, or in a comment ``# trl 1.12.0``."""
    name = rf"(?<![\w./-]){framework}"
    for match in re.finditer(rf"{name}(?:\[[\w,\s-]*\])?((?:\s*,?\s*(?:{_SIGN})\s*{_NUMBER})+)", line, re.I):
        yield from re.findall(rf"({_SIGN})\s*{_NUMBER}", match[1])
    if said := re.search(rf"#.*{name} (?:version )?v?(\d+\.\d+(?:\.\d+)*)\b", line, re.I):
        yield "", said[1]


def _allows(sign: str, version: str, pinned: str) -> bool:
    """Whether a requirement includes the pinned version; ``1.2``, without a sign, any 1.2.x."""
    if sign in ("", "==", "==="):
        return SpecifierSet(f"=={version}.*").contains(pinned)
    whole = sign == "~=" and "." not in version  # packaging refuses ~=1
    return SpecifierSet(f"{sign}{version}{'.0' * whole}").contains(pinned)
