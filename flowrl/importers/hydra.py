"""Overrides of Hydra, flags and configurations in YAML, as settings by key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import ImporterError
from flowrl.importers.settings import Setting
from flowrl.importers.words import Word


class _Loader(yaml.SafeLoader):
    """The safe loader; ``1e-6`` is a number, as in OmegaConf, and keys keep their lines."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.inf|\.nan)$"
    ),
    list("-+.0123456789"),
)

_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun", "torch.distributed.launch", "torch.distributed.run"})
_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w\-]*(?:[./@][\w\-@]+)*)(?:=(.*))?$", re.DOTALL)


def override(word: Word) -> Setting | None:
    """The setting of a word such as ``+actor.lr=1e-6``; None if it is none. ``~key`` is None as a value."""
    found = _OVERRIDE.match(word.text)
    if found is None or (found[3] is None and found[1] != "~"):
        return None
    return Setting(found[2], None if found[1] == "~" else parsed(found[3]), word.line, word.unknown)


def overrides(words: Sequence[Word]) -> dict[str, Setting]:
    """The settings of words such as ``actor.lr=1e-6``."""
    return {found.key: found for word in words if (found := override(word)) is not None}


def flags(words: Sequence[Word]) -> dict[str, Setting]:
    """The settings of flags such as ``--lr 1e-6``, ``--lr=1e-6`` and ``--fast``; several values are a list."""
    values: dict[str, list[Word]] = {}
    lines: dict[str, int] = {}
    key = ""
    for word in words:
        if word.text.startswith("--"):
            key, equals, text = word.text[2:].partition("=")
            values[key], lines[key] = [word._replace(text=text)] if equals else [], word.line
        elif key:
            values[key].append(word)
    found: dict[str, Setting] = {}
    for key, given in values.items():
        parts = [parsed(word.text) for word in given]
        value = True if not parts else parts[0] if len(parts) == 1 else parts
        found[key] = Setting(key, value, lines[key], tuple(unknown for word in given for unknown in word.unknown))
    return found


def launched(words: Sequence[Word], own: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The ``machines`` of a launcher, and the ``processes`` that it starts on all of them, "" if it does not say; none
    of both for words without a launcher. `own` are flags that the training takes for its launcher."""
    given = {**(own or {}), **{name.replace("-", "_"): setting.value for name, setting in flags(words).items()}}
    config = Path(str(given.get("config_file", "")))
    if config.is_file():  # of accelerate
        given = {**{setting.key: setting.value for setting in of_file(config)}, **given}
    machines = _number(given, "nnodes", "num_nodes", "num_machines") or 1
    count = _number(given, "num_processes") or machines * _number(given, "nproc_per_node", "num_gpus")
    if not count and not {Path(word.text).name for word in words} & _LAUNCHERS:
        return {}
    return {"processes": str(count or ""), "machines": str(machines)}


def _number(given: Mapping[str, Any], *names: str) -> int:
    """The first of some flags, which a word that is no flag may follow; 0 if none is a number."""
    values = [given[name] for name in names if name in given]
    firsts = [value[0] if isinstance(value, list) else value for value in values]
    return next((int(first) for first in firsts if str(first).isdigit()), 0)


def parsed(text: str) -> Any:
    """The value of an override: numbers, booleans, quoted text, lists and dicts; else the text itself."""
    try:
        value = yaml.load(re.sub(r"^\\|(?<=[\[,{])\s*\\(?=[\"'])", "", text), _Loader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, str) and not text.startswith(("'", '"')) else value


def of_file(path: Path) -> list[Setting]:
    """The settings of a YAML file, without the references of its ``defaults`` list.

    Raises:
        ImporterError: the file cannot be read, or is not a mapping in YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node, value = yaml.compose(text, _Loader), yaml.load(text, _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        raise ImporterError(
            f"{path} cannot be read as YAML: {reason}. Pass a configuration file.",
            code="import.unreadable-file",
            file=path,
        ) from error
    if not isinstance(value, dict):
        raise ImporterError(
            f"{path} is not a mapping of keys to values. Pass a configuration file.",
            code="import.unreadable-file",
            file=path,
        )
    return list(_leaves(value, node, ""))


def _leaves(value: Mapping[str, Any], node: Any, prefix: str) -> Iterator[Setting]:
    nodes = {key.value: (key, child) for key, child in node.value}
    for name, item in value.items():
        key, child = nodes.get(str(name), (node, None))
        if not prefix and name in ("defaults", "hydra"):
            continue
        if isinstance(item, dict) and item and child is not None:
            yield from _leaves(item, child, f"{prefix}{name}.")
        else:
            yield Setting(f"{prefix}{name}", item, key.start_mark.line + 1)
