"""Files of verl, TRL and OpenRLHF as trainings of flowrl."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import ImporterError
from flowrl.importers import hydra, shell
from flowrl.importers.plan import Imported
from flowrl.importers.settings import Table
from flowrl.importers.versions import warnings_of
from flowrl.importers.words import Word

FRAMEWORKS = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl"}
_READERS = {".yaml": "of_file", ".yml": "of_file", ".py": "of_python"}
"""By suffix, the function of an importer that reads such files, if it does; other files are shell scripts."""


@dataclass
class Source:
    """A file that is imported."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    def text(self) -> str:
        """Its text.

        Raises:
            ImporterError: it cannot be read.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImporterError(
                f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}. Pass a file.",
                code="import.unreadable-file",
                file=self.path,
            ) from error


def import_file(framework: str, source: Source) -> tuple[Imported, list[str]]:
    """The training of a file, and notes on what a script decides only when it runs.

    Raises:
        ImporterError: the file cannot be read, or starts no training of this framework.
    """
    found, notes = _read(framework, source)
    found.warnings = warnings_of(framework, source.text(), source.path, found.settings)
    return found, [*notes, *found.notes]


def _read(framework: str, source: Source) -> tuple[Imported, list[str]]:
    """The training of a file, and notes of the shell."""
    module: Any = importlib.import_module(f"flowrl.importers.{framework}")
    version = Table.version_of(framework)
    title = f"From {source.path.name}, a configuration of {FRAMEWORKS[framework]} {version}."
    reader = _READERS.get(source.path.suffix)
    if reader is not None and not hasattr(module, reader):
        raise ImporterError(
            f"{source.path} is not a shell script, and flowrl reads no {source.path.suffix} file of "
            f"{FRAMEWORKS[framework]}. Pass a script that starts {module.STARTS}.",
            code="import.no-training",
            file=source.path,
        )
    if reader == "of_file":
        part, settings = module.of_file(source.path)
        of_arguments = getattr(module, "of_arguments", hydra.overrides)
        settings |= of_arguments([Word(word) for word in source.arguments])
        return module.imported(part, settings, title, {}), []
    if reader == "of_python":
        return module.of_python(source.text(), source.path, title, source.arguments), []
    script = shell.read(source.text(), str(source.path), source.environment, source.arguments)
    started = [one for one in map(module.from_words, script.commands) if one is not None]
    if not started:
        others = [name for name in FRAMEWORKS if name != framework and _starts(name, script)]
        fix = f"Read it by flowrl from-{others[0]}" if others else f"Pass a script that starts {module.STARTS}"
        raise ImporterError(
            f"{source.path} starts no training of {FRAMEWORKS[framework]}: {_commands(script)}. {fix}.",
            code="import.no-training",
            file=source.path,
        )
    notes = [*script.notes]
    if len(started) > 1:
        notes.append(f"{len(started)} trainings are started; the last one is imported")
    part, settings, launcher = started[-1]
    return module.imported(part, settings, title, launcher), notes


def _starts(framework: str, script: shell.Script) -> bool:
    """Whether a script starts a training of a framework."""
    module: Any = importlib.import_module(f"flowrl.importers.{framework}")
    return any(module.from_words(words) is not None for words in script.commands)


def _commands(script: shell.Script) -> str:
    names = list(dict.fromkeys(words[0].text for words in script.commands))
    return f"its commands are {', '.join(names[:5])}" if names else "it has no commands"
