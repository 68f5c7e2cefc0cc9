"""Check that the models of a job share one vocabulary, from the files in their folders, before any model loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import BindError


class Vocabulary(NamedTuple):
    """The vocabulary of a folder.

    Args:
        size: number of embeddings of the model; None if its configuration does not specify it.
        tokens: the text of each id in its ``tokenizer.json``; None without this file.
    """

    size: int | None
    tokens: Mapping[int, str] | None


def refuse_other_vocabularies(folders: Mapping[str, str]) -> None:
    """Refuse models of a job whose vocabulary differs from the first one's.

    A model may have more embeddings than tokens, and may lack added tokens of others if it has embeddings for them.
    Missing and unreadable folders are skipped: loading them raises.
    The first of the `folders`, by role, is that of the role that samples.
    """
    if len(set(folders.values())) < 2:  # reading a folder takes tenths of a second
        return
    read = {folder: vocabulary_of(Path(folder)) for folder in set(folders.values())}
    known = [(role, folder, found) for role, folder in folders.items() if (found := read[folder]) is not None]
    for role, folder, found in known[1:]:
        first, base, expected = known[0]
        if folder != base and (fault := _difference(expected, found)):
            raise BindError(
                f"The models of roles {first!r} and {role!r} have different vocabularies: {fault} ({base!r} and "
                f"{folder!r}). Bind {role}= to a model that uses the tokenizer of {first!r}.",
                code="tokenizer.vocabulary-mismatch",
                role=role,
                other=first,
                path=folder,
                reason=fault,
            )


def _difference(one: Vocabulary, other: Vocabulary) -> str | None:
    if one.tokens is not None and other.tokens is not None:
        changed = sorted(i for i in one.tokens.keys() & other.tokens.keys() if one.tokens[i] != other.tokens[i])
        if changed:
            i = changed[0]
            return f"{len(changed)} ids differ, such as {i}, which is {one.tokens[i]!r} and {other.tokens[i]!r}"
        if other.size is not None and (last := max(one.tokens, default=0)) >= other.size:
            return f"one has a token {last}, the other has embeddings of {other.size} ids"
    elif one.size != other.size:
        return f"one has {one.size} ids, the other {other.size}"
    return None


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """The vocabulary of `folder`; None if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        size = stated(config, "vocab_size")
        file = folder / "tokenizer.json"
        return Vocabulary(size, _tokens(json.loads(file.read_bytes())) if file.is_file() else None)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None


def stated(config: Any, key: str) -> Any:
    """A value of a Hugging Face ``config.json``, from its ``text_config`` if the top level lacks it."""
    return config.get(key, (config.get("text_config") or {}).get(key))


def _tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens of a ``tokenizer.json``, by id."""
    vocab = tokenizer["model"]["vocab"]  # ids by text; for a unigram model, pairs of text and score
    named = (
        {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {i: t for i, (t, _) in enumerate(vocab)}
    )
    return named | {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or ()}
