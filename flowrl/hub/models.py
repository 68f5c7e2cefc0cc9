"""Which files of a model's repository a run needs: what transformers reads, and neither code nor pickled weights."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.errors import HubError
from flowrl.hub.repositories import download, files_of, is_commit, is_repository

METADATA = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
)
"""Configuration, tokenizer, chat template, and the list of weight files."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "value_head.safetensors"
"""The head of a critic that flowrl trained."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The files of an adapter in PEFT's format."""


def metadata(repository: str, commit: str) -> Path:
    """The folder of a model with its configuration and tokenizer, without weights.

    Raises:
        HubError: the repository has no safetensors or lacks some, or as `flowrl.hub.repositories.download`.
    """
    folder = download(repository, commit, METADATA)
    listed = files_of(repository, commit)
    if listed is not None:
        _refuse_missing(repository, commit, _weights(folder) - listed, sorted(listed))
    return folder


def model(repository: str, commit: str) -> Path:
    """The folder of a model with all its files.

    Raises:
        HubError: as `metadata`.
    """
    weights = _weights(metadata(repository, commit))
    folder = download(repository, commit, (*METADATA, *sorted(weights), HEAD))
    missing = {name for name in weights if not (folder / name).is_file()}
    _refuse_missing(repository, commit, missing, sorted(path.name for path in folder.iterdir()))
    return folder


def adapter_metadata(repository: str, commit: str) -> Path:
    """The folder of an adapter with its configuration, without weights.

    Raises:
        HubError: the repository lacks a file of PEFT's format, or as `flowrl.hub.repositories.download`.
    """
    folder = download(repository, commit, (ADAPTER_CONFIG,))
    listed = files_of(repository, commit)
    if listed is not None:
        _refuse_missing(repository, commit, {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - listed, sorted(listed))
    return folder


def adapter(repository: str, commit: str) -> Path:
    """The folder of an adapter with both its files.

    Raises:
        HubError: as `adapter_metadata`.
    """
    adapter_metadata(repository, commit)
    folder = download(repository, commit, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    missing = {name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()}
    _refuse_missing(repository, commit, missing, sorted(path.name for path in folder.iterdir()))
    return folder


def name_of(folder: str) -> str:
    """The name of the repository whose files a folder of the cache has, such as ``org/name``; other paths as they
    are."""
    parts = Path(folder).parts
    names = [part.removeprefix("models--") for part in parts if part.startswith("models--")]
    return names[-1].replace("--", "/", 1) if names and "snapshots" in parts else folder


def cached(repository: str, commit: str) -> Path | None:
    """The folder of `metadata` or `model`, without asking the Hub; None if this machine has no files of the commit."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=commit)
    return Path(found).parent if isinstance(found, str) else None


def folder_of(name: str, revision: str | None) -> Path:
    """The folder of a model: of a resolved repository that of `cached`, else the path `name`."""
    found = cached(name, revision) if revision is not None and is_commit(revision) and is_repository(name) else None
    return Path(name) if found is None else found


def _weights(folder: Path) -> set[str]:
    """The safetensors files that transformers reads from a folder."""
    try:
        return {*json.loads((folder / INDEX).read_bytes())["weight_map"].values()}
    except FileNotFoundError:
        return {WEIGHTS}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {INDEX}  # transformers reports the damaged file


def _refuse_missing(repository: str, commit: str, missing: set[str], found: list[str]) -> None:
    """Refuse a repository without weights that flowrl loads."""
    if not missing:
        return
    raise HubError(
        f"The repository {repository!r} (commit {commit[:12]}) lacks {', '.join(sorted(missing)[:3])}; it has "
        f"{', '.join(found[:8]) or 'no file'}{', …' if len(found) > 8 else ''}. flowrl loads weights from safetensors "
        f"only: choose a repository or revision that has them, or convert the model with "
        f"model.save_pretrained(folder) and pass the folder.",
        code="hub.no-safetensors",
        repository=repository,
        commit=commit,
        missing=sorted(missing),
        found=found,
    )
