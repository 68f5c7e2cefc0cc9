"""Whether the models of a job have one vocabulary: ids that one samples and another scores must be the same tokens.

This reads what stands in their folders, and loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import BindError


class Vocabulary(NamedTuple):
    """What a folder says of its tokens.

    Args:
        size: ids that the model has embeddings of, from 0; None where its configuration does not say.
        tokens: the text of each id that its ``tokenizer.json`` knows; None where there is no such file.
    """

    size: int | None
    tokens: Mapping[int, str] | None


def refuse_other_vocabularies(folders: Mapping[str, str]) -> None:
    """Refuse models of one job that have another vocabulary than its first.

    A model may have more embeddings than there are tokens, and lack tokens that others have added, if it has embeddings
    for them. A folder that is not on this machine, or cannot be read, is passed over: whoever loads it says so.

    Args:
        folders: Hugging Face folders by role, the one whose tokens the others get first.

    Raises:
        BindError: naming both roles and an id that differs.
    """
    if len(set(folders.values())) < 2:  # which takes tenths of a second each to read
        return
    read = {folder: vocabulary_of(Path(folder)) for folder in set(folders.values())}
    known = [(role, folder, found) for role, folder in folders.items() if (found := read[folder]) is not None]
    for role, folder, found in known[1:]:
        first, base, expected = known[0]
        if folder != base and (fault := _difference(expected, found)):
            raise BindError(
                f"the roles {first!r} and {role!r} have models of two vocabularies: {fault} ({base!r} and {folder!r}); "
                f"expected the same tokens under the same ids: bind {role}= to a model that was trained with the "
                f"tokeniser of {first!r}."
            )


def _difference(one: Vocabulary, other: Vocabulary) -> str | None:
    if one.tokens is not None and other.tokens is not None:
        changed = sorted(i for i in one.tokens.keys() & other.tokens.keys() if one.tokens[i] != other.tokens[i])
        if changed:
            i = changed[0]
            return f"{len(changed)} ids differ, such as {i}, which is {one.tokens[i]!r} and {other.tokens[i]!r}"
        if other.size is not None and (last := max(one.tokens, default=0)) >= other.size:
            return f"one has a token {last}, and the other has embeddings of {other.size} ids"
    elif one.size != other.size:
        return f"one has {one.size} ids, the other {other.size}"
    return None


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """What `folder` says of its tokens; None where it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        size = stated(config, "vocab_size")
        file = folder / "tokenizer.json"
        return Vocabulary(size, _tokens(json.loads(file.read_bytes())) if file.is_file() else None)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None


def stated(config: Any, key: str) -> Any:
    """What a ``config.json`` of Hugging Face says under a key; of a model with other parts, its text model's."""
    return config.get(key, (config.get("text_config") or {}).get(key))


def _tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens of a ``tokenizer.json``, by id."""
    vocab = tokenizer["model"]["vocab"]  # by text, or, of a unigram model, pairs of text and score
    named = (
        {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {i: t for i, (t, _) in enumerate(vocab)}
    )
    return named | {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or ()}
