"""The commits of data sets on the Hub: resolved once, recorded in ``run.json``, and the same when a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flowrl.data.files import parse_json
from flowrl.data.sources.source import Source
from flowrl.hub.repositories import Commits
from flowrl.run.training.sources import Data
from flowrl.run.validation.validation import Validation


def recorded_commits(folder: str | None) -> Commits:
    """Those of the run in a folder; none if it records none, or is damaged, which resuming it reports."""
    try:
        return Commits(parse_json(Path(folder or "", "run.json").expanduser().read_bytes())["commits"])
    except (OSError, ValueError, KeyError, TypeError):
        return Commits()


def pinned(data: Data, commits: Commits) -> Data:
    """The data at these commits; see `Source.pinned`."""
    if isinstance(data, Source):
        return data.pinned(commits)
    return {name: source.pinned(commits) for name, source in data.items()}


def pinned_validations(validations: tuple[Validation, ...], commits: Commits) -> tuple[Validation, ...]:
    """The validations with their data at these commits."""
    return tuple(replace(one, data=pinned(one.data, commits)) for one in validations)


def missing_here(data: Data) -> list[str]:
    """The data sets that would be downloaded."""
    sources = data.values() if isinstance(data, Mapping) else [data]
    return list(dict.fromkeys(name for source in sources for name in source.missing_here()))
