"""Errors of `huggingface_hub` as `HubError`, each with the situation's own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.errors import FlowrlError, HubError


@contextmanager
def asking(
    repository: str, revision: str | None = None, kind: str = "model", *, uploads: bool = False
) -> Iterator[None]:
    """Re-raise errors of `huggingface_hub` in the block as `HubError`, naming the repository.

    Args:
        uploads: whether the block writes, so that a cache does not help.
    """
    try:
        yield
    except FlowrlError:
        raise
    except Exception as error:
        found = _refused(error, repository, revision, kind) or _not_reached(error, repository, kind, uploads)
        if found is None:
            raise
        raise found from error


def _refused(error: Exception, repository: str, revision: str | None, kind: str) -> HubError | None:
    """The reply of the Hub as an error by situation; None if it did not reply."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"The {kind} {repository!r}"
    causes = list(_causes(error))
    http = next((one for one in causes if isinstance(one, HfHubHTTPError)), None)
    if isinstance(http, GatedRepoError) and get_token() is not None:
        url = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{repository}"
        text = f"is gated, and your token's account has no access to it. Accept its terms at {url}, and try again."
        return HubError(f"{what} {text}", code="hub.gated", repository=repository)
    if isinstance(http, GatedRepoError) or any(isinstance(one, LocalTokenNotFoundError) for one in causes):
        text = "needs a token of the Hub, and this machine has none. Run `hf auth login`, or set HF_TOKEN."
        return HubError(f"{what} {text}", code="hub.no-token", repository=repository)
    if isinstance(http, RevisionNotFoundError):
        text = f"has no revision {revision or 'main'!r}. Pass a branch, a tag or a commit that it has."
        return HubError(f"{what} {text}", code="hub.unknown-revision", repository=repository, revision=revision)
    if isinstance(http, RepositoryNotFoundError) or any(isinstance(one, HFValidationError) for one in causes):
        private = "" if get_token() is not None else " (a private one needs `hf auth login`)"
        text = f"with this name does not exist, or you may not read it{private}. Correct the name, or the path."
        return HubError(
            f"{repository!r} is no path here, and the {kind} of the Hub {text}",
            code="hub.unknown-repository",
            repository=repository,
        )
    if http is None:
        return None
    said = http.server_message or str(http).strip().splitlines()[0].rstrip(".")
    status = http.response.status_code
    text = (
        f"cannot be read or written: the Hub replies {status} ({said}). Check the permissions of the token "
        f"(`hf auth whoami`), or try again later."
    )
    return HubError(f"{what} {text}", code="hub.refused", repository=repository, status=status)


def _not_reached(error: Exception, repository: str, kind: str, uploads: bool) -> HubError | None:
    """An error without a reply of the Hub, by situation; None for one that has nothing to do with the Hub."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = list(_causes(error))
    if uploads:
        what, fix = f"The {kind} {repository!r} was not uploaded", ""
    else:
        what = f"{repository!r} is no path here, and the {kind} of the Hub with this name is not complete in the cache"
        fix = ", or correct the path"
    if any(isinstance(one, OfflineModeIsEnabled) for one in causes):
        text = f"while HF_HUB_OFFLINE=1 forbids to ask the Hub. Unset it to use the network{fix}."
        return HubError(f"{what}, {text}", code="hub.offline", repository=repository)
    if any(map(_is_of_network, causes)):
        reason = f"{type(causes[-1]).__name__}: {causes[-1]}".splitlines()[0]
        text = f"while the Hub cannot be reached ({reason}). Check the network and HF_ENDPOINT{fix}."
        return HubError(f"{what}, {text}", code="hub.unreachable", repository=repository, reason=reason)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        text = (
            f"The {kind} {repository!r} cannot be stored in the cache of huggingface_hub ({reason}: {error.filename}). "
            f"Free disk space, or set HF_HOME to another folder."
        )
        return HubError(text, code="hub.unwritable-cache", repository=repository, reason=reason)
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
