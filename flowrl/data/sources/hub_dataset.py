"""`HubDataset`: a data set on the Hugging Face Hub, at one commit; its files are in the cache of `huggingface_hub`.

Only the files of the configuration and split that are read are downloaded, once a machine. Their list and the card are
enough to check that they exist.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Generator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from flowrl.data.sources.dataset_files import CARD, library, refuse_script, rows_of, split_files
from flowrl.data.sources.origin import Origin
from flowrl.hub.repositories import Commits, cached, download, files_of, is_commit, is_repository, resolve

_FILES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zip")
"""Suffixes of files; a name that ends so is not one of a data set."""


class HubDataset(Origin):
    """A data set on the Hub.

    Args:
        repo: its name, such as ``"openai/gsm8k"``.
        revision: a branch, tag or commit; None is the main branch.
        name: of the configuration; None is the only one.
        split: to read; None is the only one.
    """

    def __init__(self, repo: str, revision: str | None, name: str | None, split: str | None) -> None:
        self.data_source = self.repo = repo
        self.revision, self._name, self._split = revision, name, split

    @cached_property
    def commit(self) -> str:
        """The commit of its revision; see `flowrl.hub.repositories.resolve`."""
        library()
        return str(self.revision) if is_commit(self.revision) else resolve(self.repo, self.revision, "dataset")

    def pinned(self, commits: Commits) -> str:
        """Its commit among those of a run."""
        return str(self.revision) if is_commit(self.revision) else commits.resolve(self.repo, self.revision, "dataset")

    def is_here(self) -> bool:
        """Whether the cache of this machine has it; asks no network."""
        try:
            self._download(local_only=True)
        except LookupError:
            return False
        return True

    def refuse_missing(self, source: str) -> None:
        from huggingface_hub import is_offline_mode

        if not is_offline_mode() or self.is_here():  # otherwise reading it raises; `flowrl check` cannot tell
            self._paths()

    def digests(self) -> list[str]:
        return [f"{self.repo}@{self.commit}/{path}" for paths in self._paths().values() for path in paths]

    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        yield from rows_of(self._download(), self.repo, self._split, columns)

    def _folder(self, patterns: Sequence[str], local_only: bool = False) -> Path:
        """The folder of the cache with the files that match, from the Hub only if the cache lacks any."""
        revision = self.revision if local_only else self.commit
        found = cached(self.repo, revision, patterns, "dataset")
        if found is None and local_only:
            raise LookupError(f"{self.repo} is not in the cache")
        return found or download(self.repo, self.commit, patterns, "dataset")

    def _paths(self, local_only: bool = False) -> dict[str, list[str]]:
        """The files of each split that is read, from the list of all files and the card alone."""
        library()
        folder = self._folder([CARD], local_only)
        names = files_of(self.repo, folder.name, "dataset")
        if names is None:  # another program has filled the cache
            names = frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        refuse_script(names, self.repo)
        with TemporaryDirectory() as skeleton:
            base = Path(skeleton).resolve()
            for name in names:  # patterns match names, so empty files do
                path = base / name
                if ".." not in PurePosixPath(name).parts and path.is_relative_to(base):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
            if (folder / CARD).is_file():
                (base / CARD).write_bytes((folder / CARD).read_bytes())
            found = split_files(base, self.repo, self._name, self._split)
            return {split: [path.relative_to(base).as_posix() for path in paths] for split, paths in found.items()}

    def _download(self, local_only: bool = False) -> dict[str, list[Path]]:
        """The files of each split that is read, in the cache."""
        paths = self._paths(local_only)
        folder = self._folder([CARD, *(glob.escape(path) for of in paths.values() for path in of)], local_only)
        return {split: [folder / path for path in of] for split, of in paths.items()}


def hub_dataset(path: str, revision: str | None, name: str | None, split: str | None) -> HubDataset | None:
    """The data set on the Hub that a path names, such as ``"openai/gsm8k"``; None for one that exists here, or the name
    of a file."""
    repo, _, given = path.partition("@")
    if not is_repository(repo) or "/" not in repo or Path(path).exists() or Path(path).suffix.lower() in _FILES:
        return None
    return HubDataset(repo, given or revision, name, split)
