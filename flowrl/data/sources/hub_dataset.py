"""`HubDataset`: a data set on the Hugging Face Hub, at one commit; its files are in the cache of `huggingface_hub`.

Only the files of the configuration and split that are read are downloaded, once a machine. Their list and the card are
enough to check that they exist.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from flowrl.data.sources.dataset_files import CARD, library, refuse_script, rows_of, split_files
from flowrl.data.sources.origin import Origin
from flowrl.errors import DataError

_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FILES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zip")
"""Suffixes of files; a name that ends so is not one of a data set."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubDataset(Origin):
    """A data set on the Hub.

    Args:
        repo: its name, such as ``"openai/gsm8k"``.
        revision: a branch, tag or commit; None is the main branch.
        name: of the configuration; None is the only one.
        split: to read; None is the only one.
    """

    def __init__(self, repo: str, revision: str | None, name: str | None, split: str | None) -> None:
        self.data_source = self._repo = repo
        self._revision, self._name, self._split = revision, name, split

    @cached_property
    def commit(self) -> str:
        """The commit of its revision, as the Hub has it now; without a network, as the cache has it.

        Raises:
            DataError: it is not on the Hub, or not accessible.
        """
        library()
        from huggingface_hub import HfApi, is_offline_mode

        if self._revision is not None and _COMMIT.fullmatch(self._revision):
            return self._revision
        with self._reached():
            given: dict[str, Any] = {"repo_type": "dataset", "local_files_only": is_offline_mode()}
            return HfApi().resolve_revision(self._repo, revision=self._revision, **given).resolved

    def asked(self) -> str:
        """Its name, with the revision that was asked for."""
        return self._repo if self._revision is None else f"{self._repo}@{self._revision}"

    def is_here(self) -> bool:
        """Whether the cache of this machine has it."""
        try:
            self._download(local_only=True)
        except DataError as error:
            if error.code != "prompts.not-on-hub":
                raise
            return False
        return True

    def refuse_missing(self, source: str) -> None:
        from huggingface_hub import is_offline_mode

        if not is_offline_mode() or self.is_here():  # otherwise reading it raises; `flowrl check` cannot tell
            self._paths()

    def digests(self) -> list[str]:
        return [f"{self._repo}@{self.commit}/{path}" for paths in self._paths().values() for path in paths]

    def rows(self, columns: Collection[str] | None) -> Generator[tuple[str, Any], None, None]:
        yield from rows_of(self._download(), self._repo, self._split, columns)

    def _snapshot(self, patterns: list[str], local_only: bool = False) -> Path:
        """The folder of the cache with the files that match, from the Hub only if the cache lacks any."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import IncompleteSnapshotError

        revision = self._revision if local_only else self.commit
        given: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "allow_patterns": patterns}
        with self._reached():
            if local_only or self._listed(self.commit):
                try:
                    return Path(snapshot_download(self._repo, local_files_only=True, **given))
                except IncompleteSnapshotError:
                    if local_only:
                        raise
            return Path(snapshot_download(self._repo, **given))

    def _listed(self, commit: str) -> list[str]:
        """The names of all files of a commit, as the cache lists them; none if it does not."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return [file.path for file in get_cached_repo_tree(self._repo, repo_type="dataset", revision=commit)]
        except CachedRepoTreeNotFoundError:
            return []

    def _paths(self, local_only: bool = False) -> dict[str, list[str]]:
        """The files of each split that is read, from the list of all files and the card alone."""
        snapshot = self._snapshot([CARD], local_only)
        names = self._listed(snapshot.name)
        if not names:  # another program has filled the cache
            names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        refuse_script(names, self._repo)
        with TemporaryDirectory() as folder:
            base = Path(folder).resolve()
            for name in names:  # patterns match names, so empty files do
                path = base / name
                if ".." not in PurePosixPath(name).parts and path.is_relative_to(base):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
            if (snapshot / CARD).is_file():
                (base / CARD).write_bytes((snapshot / CARD).read_bytes())
            found = split_files(base, self._repo, self._name, self._split)
            return {split: [path.relative_to(base).as_posix() for path in paths] for split, paths in found.items()}

    def _download(self, local_only: bool = False) -> dict[str, list[Path]]:
        """The files of each split that is read, in the cache."""
        paths = self._paths(local_only)
        snapshot = self._snapshot([CARD, *(glob.escape(path) for of in paths.values() for path in of)], local_only)
        return {split: [snapshot / path for path in of] for split, of in paths.items()}

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Re-raise what `huggingface_hub` raises in the block."""
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError as error:
            self._refuse("is gated", "Accept its conditions on its page, and log in: hf auth login.", error)
        except errors.RevisionNotFoundError as error:
            self._refuse(f"has no revision {self._revision!r}", "Correct revision=.", error)
        except errors.RepositoryNotFoundError as error:
            what = "is neither here nor a data set on the Hub that you may read"
            fix = f"Correct the name (working directory: {Path.cwd()}), or log in: hf auth login."
            self._refuse(what, fix, error)
        except (errors.HfHubHTTPError, errors.RevisionResolutionError, OSError) as error:
            self._refuse(
                "is not complete in the cache of this machine, and the Hub cannot be reached",
                f"Where it can be, run: hf download {self._repo} --repo-type dataset.",
                error,
            )

    def _refuse(self, what: str, fix: str, error: Exception) -> None:
        raise DataError(
            f"{self.asked()!r} {what}. {fix}",
            code="prompts.not-on-hub",
            dataset=self._repo,
            revision=self._revision,
            reason=type(error).__name__,
        ) from error


def hub_dataset(path: str, revision: str | None, name: str | None, split: str | None) -> HubDataset | None:
    """The data set on the Hub that a path names, such as ``"openai/gsm8k"``; None for one that exists here, or the name
    of a file."""
    found = _ID.fullmatch(path)
    if found is None or Path(path).exists() or Path(path).suffix.lower() in _FILES:
        return None
    return HubDataset(found["repo"], found["revision"] or revision, name, split)
