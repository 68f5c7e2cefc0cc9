"""Vocabularies of the models of a job: which differences are accepted, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.data.text.vocabulary import refuse_other_vocabularies
from tests.support.errors import raises

WORDS = {"a": 0, "b": 1, "c": 2}


def model(path: Path, size: int | None = 4, vocab: Any = WORDS, added: dict[str, int] | None = None) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": size}))
    if vocab is not None:
        extra = [{"id": i, "content": text} for text, i in (added or {}).items()]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": extra}))
    return str(path)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, None),
        ({"size": 9}, None),  # padded to another size
        ({"vocab": {"c": 2, "b": 1, "a": 0}}, None),
        ({"vocab": [["a", 0.1], ["b", 0.2], ["c", 0.3]]}, None),  # a unigram model
        ({"added": {"<x>": 3}}, None),
        ({"size": 3, "vocab": {"a": 0, "b": 1}}, None),
        ({"vocab": None}, None),  # a reference needs no tokenizer
        ({"vocab": {"a": 0, "c": 1, "b": 2}}, "2 ids differ, such as 1, which is 'b' and 'c'"),
        ({"added": {"<x>": 0}}, "1 ids differ, such as 0, which is 'a' and '<x>'"),
        ({"size": 2, "vocab": {"a": 0, "b": 1}}, "one has a token 2, the other has embeddings of 2 ids"),
        ({"vocab": None, "size": 5}, "one has 4 ids, the other 5"),
        ({"vocab": None, "size": None}, "one has 4 ids, the other None"),
    ],
)
def test_a_model_with_another_vocabulary_is_refused(tmp_path: Path, other: dict[str, Any], reason: str | None) -> None:
    folders = {
        "actor": model(tmp_path / "one"),
        "ref": model(tmp_path / "two", **other),
        "critic": str(tmp_path / "one"),
    }
    if reason is None:
        refuse_other_vocabularies(folders)
    else:
        with raises("tokenizer.vocabulary-mismatch", role="ref", other="actor", reason=reason):
            refuse_other_vocabularies(folders)


def test_a_single_model_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.data.text.vocabulary.vocabulary_of", None)
    one = model(tmp_path / "one")
    refuse_other_vocabularies({"actor": one, "ref": one})
    refuse_other_vocabularies({})


@pytest.mark.parametrize("content", [None, "{", "[]", "3", '{"text_config": 3}'])
def test_unreadable_folders_are_skipped(tmp_path: Path, content: str | None) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    if content is not None:
        (broken / "config.json").write_text(content)
    refuse_other_vocabularies({"ref": str(broken), "actor": model(tmp_path / "one"), "critic": str(tmp_path / "none")})
    (broken / "config.json").write_text('{"vocab_size": 4}')
    (broken / "tokenizer.json").write_text('{"model": {}}')
    refuse_other_vocabularies({"ref": str(broken), "actor": str(tmp_path / "one")})
