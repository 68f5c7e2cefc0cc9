"""The pictures of the concepts, a module for each: its texts in English, and what draws them.

``docs/locales/LANGUAGE/pictures.toml`` translates the texts: a table for each picture, with a translation for each
English text. Sphinx shows ``NAME.LANGUAGE.svg`` on the pages of a language.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from drawings import columns, handshake, lag, roles, run_folder, step, versions

LOCALES = Path(__file__).resolve().parents[1] / "locales"
_MODULES = (handshake, columns, roles, step, lag, versions, run_folder)


def draw_all(locales: Path = LOCALES) -> Iterator[tuple[str, str, str]]:
    """The name of each picture, ``""`` or ``.LANGUAGE``, and its SVG for a light page.

    Raises:
        KeyError: a language has no translation of a text.
        ValueError: a text is too wide for its box.
    """
    languages = {file.parent.name: tomllib.loads(file.read_text("utf-8")) for file in locales.glob("*/pictures.toml")}
    for module in _MODULES:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        yield name, "", module.draw(module.TEXTS).svg()
        for language, translations in sorted(languages.items()):
            texts = {key: translations[name][english] for key, english in module.TEXTS.items()}
            yield name, f".{language}", module.draw(texts).svg()
