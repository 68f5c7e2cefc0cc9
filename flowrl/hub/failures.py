"""Errors of `huggingface_hub` as `HubError`, each with the situation's own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.errors import FlowrlError, HubError


@contextmanager
def asking(repository: str, revision: str | None = None, kind: str = "model") -> Iterator[None]:
    """Re-raise errors of `huggingface_hub` in the block as `HubError`, naming the repository."""
    try:
        yield
    except FlowrlError:
        raise
    except Exception as error:
        found = _explained(error, repository, revision, kind)
        if found is None:
            raise
        raise found from error


def _explained(error: Exception, repository: str, revision: str | None, kind: str) -> HubError | None:
    """The error by situation; None for one that has nothing to do with the Hub."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what, no_path = f"The {kind} {repository!r}", f"{repository!r} is no path here, and the {kind} of the Hub"
    facts: dict[str, Any] = {"repository": repository}
    causes = list(_causes(error))
    http = next((one for one in causes if isinstance(one, HfHubHTTPError)), None)
    status = http.response.status_code if http is not None else None
    if isinstance(http, GatedRepoError) and get_token() is not None:
        url = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{repository}"
        text = f"is gated, and your token's account has no access to it. Accept its terms at {url}, and try again."
        return HubError(f"{what} {text}", code="hub.gated", **facts)
    if isinstance(http, GatedRepoError) or any(isinstance(one, LocalTokenNotFoundError) for one in causes):
        text = "needs a token of the Hub, and this machine has none. Run `hf auth login`, or set HF_TOKEN."
        return HubError(f"{what} {text}", code="hub.no-token", **facts)
    if isinstance(http, RevisionNotFoundError):
        text = f"has no revision {revision or 'main'!r}. Pass a branch, a tag or a commit that it has."
        return HubError(f"{what} {text}", code="hub.unknown-revision", revision=revision, **facts)
    if isinstance(http, RepositoryNotFoundError) or any(isinstance(one, HFValidationError) for one in causes):
        private = "" if get_token() is not None else " (a private one needs `hf auth login`)"
        text = f"with this name does not exist, or you may not read it{private}. Correct the name, or the path."
        return HubError(f"{no_path} {text}", code="hub.unknown-repository", **facts)
    if http is not None:
        said = http.server_message or str(http).strip().splitlines()[0].rstrip(".")
        text = (
            f"cannot be read or written: the Hub replies {status} ({said}). Check the permissions of the token "
            f"(`hf auth whoami`), or try again later."
        )
        return HubError(f"{what} {text}", code="hub.refused", status=status, **facts)
    if any(isinstance(one, OfflineModeIsEnabled) for one in causes):
        text = (
            f"with this name is not complete in the cache, while HF_HUB_OFFLINE=1 forbids a download. Run `hf download "
            f"{'--repo-type dataset ' * (kind == 'dataset')}{repository}` online, or correct the path."
        )
        return HubError(f"{no_path} {text}", code="hub.offline", **facts)
    if any(map(_is_of_network, causes)):
        reason = f"{type(causes[-1]).__name__}: {causes[-1]}"
        text = (
            f"with this name is not complete in the cache, while the Hub cannot be reached ({reason}). Check the "
            f"network and HF_ENDPOINT, or correct the path."
        )
        return HubError(f"{no_path} {text}", code="hub.unreachable", reason=reason, **facts)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        text = (
            f"cannot be stored in the cache of huggingface_hub ({reason}: {error.filename}). Free disk space, or set "
            f"HF_HOME to another folder."
        )
        return HubError(f"{what} {text}", code="hub.unwritable-cache", reason=reason, **facts)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_network(error: BaseException) -> bool:
    """Whether an error says that the Hub was not reached, or that files are missing without it."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError

    transport = any(cls.__name__ == "TransportError" for cls in type(error).__mro__)  # of httpx
    return transport or isinstance(error, ConnectionError | LocalEntryNotFoundError | RevisionResolutionError)
