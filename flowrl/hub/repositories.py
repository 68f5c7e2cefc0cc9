"""Repositories of the Hub: what is a name of one, its commit, and its files in the local cache.

A run resolves each name to a commit once, and every process downloads the files of that commit. `huggingface_hub`
locks each file, so the processes of a machine download it once; a complete snapshot needs no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import HubError
from flowrl.hub.failures import asking

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_repository(name: str) -> bool:
    """Whether `name` is that of a repository, ``org/name`` or ``name``: an existing file or folder comes first, and
    ``./name``, ``/a/b`` and ``a/b/c`` are paths."""
    return _NAME.fullmatch(name) is not None and not os.path.exists(name)


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which cannot move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def resolve(repository: str, revision: str | None = None, kind: Kind = "model") -> str:
    """The commit of a branch, tag or commit; None is the default branch.

    Asks the Hub; if it cannot be reached (or ``HF_HUB_OFFLINE=1`` is set), the commit that was last seen on this
    machine.

    Raises:
        HubError: the repository or revision does not exist or cannot be read, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with asking(repository, revision, kind):
        found = HfApi(library_name="flowrl").resolve_revision(repository, repo_type=kind, revision=revision)
    return found.resolved


def download(repository: str, commit: str, files: Sequence[str], kind: Kind = "model") -> Path:
    """The folder with the files of a commit in the cache of `huggingface_hub`; downloads those that it lacks.

    Args:
        files: glob patterns, such as ``("*.parquet",)``; others are not downloaded.

    Raises:
        HubError: as `resolve`; or the cache cannot be written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    get = partial(snapshot_download, repository, repo_type=kind, revision=commit, allow_patterns=list(files))
    if files_of(repository, commit, kind) is not None:  # else one that lacks files would pass for complete
        with suppress(LocalEntryNotFoundError):
            return Path(get(local_files_only=True))
    with asking(repository, commit, kind):
        return Path(get(library_name="flowrl"))


def cached(repository: str, revision: str | None, files: Sequence[str], kind: Kind = "model") -> Path | None:
    """The folder with the files of a revision, if the cache of this machine has all that match; asks no network.

    Without a list of the files of that commit, which `download` writes, what is there counts as all in an offline run.
    """
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(
            snapshot_download(
                repository, repo_type=kind, revision=revision, allow_patterns=list(files), local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        return None
    return found if is_offline_mode() or files_of(repository, found.name, kind) is not None else None


def files_of(repository: str, commit: str, kind: Kind = "model") -> frozenset[str] | None:
    """All files of a commit by path, as `download` has listed them; None if this machine has no list."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return frozenset(one.path for one in get_cached_repo_tree(repository, repo_type=kind, revision=commit))
    except CachedRepoTreeNotFoundError:
        return None


class Commits:
    """The commits of the repositories that a run uses: each name is resolved once.

    Args:
        recorded: what `record` returned in an earlier start of the run, whose commits are used again.
    """

    def __init__(self, recorded: Iterable[Mapping[str, Any]] = ()) -> None:
        self._found = {(one["kind"], one["repository"], one["revision"]): one["commit"] for one in recorded}

    def resolve(self, repository: str, revision: str | None = None, kind: Kind = "model") -> str:
        """`resolve`, once for each repository and revision.

        Raises:
            HubError: as `resolve`.
        """
        key = (kind, repository, revision)
        if key not in self._found:
            self._found[key] = resolve(repository, revision, kind)
        return str(self._found[key])

    def record(self) -> list[dict[str, Any]]:
        """All repositories as JSON-able data, with the revision that was named (None: the default branch)."""
        names = ("kind", "repository", "revision", "commit")
        return [dict(zip(names, (*key, commit), strict=True)) for key, commit in self._found.items()]


def refuse_revision(folder: str | None, revision: str | None) -> None:
    """Refuse a revision of something that is not a repository."""
    if revision is not None:
        raise HubError(
            f"revision={revision!r} is given for {folder!r}, which names no repository of the Hub, and only these have "
            f"revisions. Drop revision, or pass the name of a repository, such as 'Qwen/Qwen3-0.6B'.",
            code="hub.revision-of-folder",
            path=folder,
            revision=revision,
        )
