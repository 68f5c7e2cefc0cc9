"""The site in Chinese: translated pages, the mark on those that are not, a link between the languages, and the search.

Translations are in docs/locales; `TRANSLATED` must be complete, or the build warns. A page elsewhere without a complete
translation says so at its top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jieba
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese
from sphinx.util import logging

TRANSLATED = ("index", "start/", "tutorial/", "concepts/")
"""The pages, by the beginning of their names, that are translated in full."""

GLOSSARY = Path(__file__).resolve().parents[1] / "locales" / "README.md"

CHINESE = "zh"
"""The folder of the Chinese site in that of the English one."""

_UNTRANSLATED = "本页尚未完全译成中文，未译部分显示英文原文。"  # noqa: RUF001
_SPLIT = """
var splitQuery = (query) => {
  const terms = { ...Search._index.terms, ...Search._index.titleterms };
  const words = (run) => {
    const found = [];
    for (let start = 0; start < run.length; ) {
      let end = run.length;
      while (end > start + 1 && !Object.hasOwn(terms, run.slice(start, end))) end -= 1;
      if (end > start + 1) found.push(run.slice(start, end));
      start = end;
    }
    return found.length ? found : [run];
  };
  return query
    .split(/(\\p{Script=Han}+)|[^\\p{Letter}\\p{Number}_]+/u)
    .filter((run) => run)
    .flatMap((run) => (/\\p{Script=Han}/u.test(run) ? words(run) : [run]));
};
"""


class Chinese(SearchChinese):
    """Chinese words are found by jieba; a query is split into the longest words that the index has."""

    language_name = "English"  # the name of the stemmer in JavaScript
    js_splitter_code = _SPLIT


def mark_untranslated(app: Sphinx, doctree: nodes.document) -> None:
    """Warn about a page that must be translated and is not; mark another one."""
    if app.config.language == "en":
        return
    name = app.env.current_document.docname
    progress = doctree["translation_progress"]
    if progress["translated"] == progress["total"]:
        return
    if name.startswith(TRANSLATED):
        missing = progress["total"] - progress["translated"]
        logging.getLogger(__name__).warning("%d texts are not translated; see docs/locales", missing, location=name)
    for section in doctree.findall(nodes.section):
        section.insert(1, nodes.note("", nodes.paragraph("", _UNTRANSLATED)))
        return


def link_other_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The address of this page in the other language, for the template."""
    up = "../" * page.count("/")
    target = f"{page}.html"
    english = app.config.language == "en"
    context["other_language"] = ("中文", f"{up}{CHINESE}/{target}") if english else ("English", f"{up}../{target}")


def setup(app: Sphinx) -> dict[str, bool]:
    jieba.setLogLevel("WARNING")
    for word in re.findall(r"[\u4e00-\u9fff]+", GLOSSARY.read_text(encoding="utf-8").partition("\n|")[2]):
        jieba.add_word(word)
    app.add_search_language(Chinese)
    app.connect("doctree-read", mark_untranslated, priority=900)
    app.connect("html-page-context", link_other_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
