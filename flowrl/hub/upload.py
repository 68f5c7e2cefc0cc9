"""Uploads of folders to the Hub, with the token of `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

from flowrl.hub.failures import asking

README = "README.md"


def upload(folder: Path, card: str, repository: str, private: bool | None = None) -> str:
    """Upload a model's folder and its card in one commit, to a repository that is created if there is none; returns the
    address of the commit.

    Args:
        card: the ``README.md``.
        private: whether a repository that is created is private; None is the default of the account.

    Raises:
        HubError: there is no token, it may not write there, or the Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="flowrl")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / README]
    with asking(repository):
        created = api.create_repo(repository, private=private, exist_ok=True, token=True)
        operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        operations.append(CommitOperationAdd(README, card.encode()))
        commit = api.create_commit(created.repo_id, operations, commit_message="Upload with flowrl", token=True)
    return commit.commit_url
