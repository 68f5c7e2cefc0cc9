"""Command lines and YAML files of TRL: ``trl grpo``, and scripts with flags, started by a launcher or not."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from flowrl.importers import hydra
from flowrl.importers.settings import Setting, Table
from flowrl.importers.words import Word

PARTS = ("grpo", "rloo", "dpo", "sft")
STARTS = "trl grpo, rloo, dpo or sft, or a Python script with one of their trainers"
_LAUNCHER = ("num_processes", "nproc_per_node", "num_machines", "nnodes")
"""Flags of ``accelerate launch`` and ``torchrun``, which ``trl`` takes, too."""


def from_words(words: Sequence[Word]) -> tuple[str, dict[str, Setting], Mapping[str, str]] | None:
    """The trainer that a command line starts, its flags, and what its launcher says; None for other command lines."""
    at = next((index for index in range(len(words)) if _starts(words, index)), None)
    if at is None:
        return None
    given = of_arguments([*words[at + 1 :]])
    launcher = launched(words[:at], given)
    script = Path(words[at].text)
    part = script.name.removesuffix(".py")
    if script.suffix == ".py" and script.is_file():
        return "", given, {**launcher, "script": str(script)}
    return (part, given, launcher) if part in PARTS else None


def launched(words: Sequence[Word], given: MutableMapping[str, Setting]) -> dict[str, str]:
    """What a launcher says, or the flags that ``trl`` passes to one, which are taken from the given ones."""
    own = {name: found.value for name in _LAUNCHER if (found := given.pop(name, None)) is not None}
    return hydra.launched(words, own)


def _starts(words: Sequence[Word], index: int) -> bool:
    """Whether a word is the subcommand of ``trl``, or a script of TRL's own name, or of this machine."""
    path = Path(words[index].text)
    if path.suffix == ".py":
        return path.stem in PARTS or path.is_file()
    return path.name in PARTS and index > 0 and Path(words[index - 1].text).name == "trl"


def of_arguments(words: Sequence[Word]) -> dict[str, Setting]:
    """The settings of flags, over those of the file that ``--config`` names."""
    given = hydra.flags([word._replace(text=_underscored(word.text)) for word in words])
    config = given.pop("config", None)
    return {**(_of_yaml(Path(str(config.value))) if config is not None else {}), **given}


def _underscored(text: str) -> str:
    """A flag of ``HfArgumentParser``, which takes hyphens for underscores."""
    flag, equals, value = text.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}" if flag.startswith("--") else text


def of_file(path: Path) -> tuple[str, dict[str, Setting]]:
    """The settings of a YAML file, and the trainer whose table has most of their keys; among equals, the first."""
    settings = _of_yaml(path)
    keys = {key.partition(".")[0] for key in settings}
    known = {part: len(keys & Table.of("trl", part).defaults.keys()) for part in ("sft", "dpo", "grpo", "rloo")}
    return max(known, key=lambda part: known[part]), settings


def _of_yaml(path: Path) -> dict[str, Setting]:
    """The settings of a file, without the environment variables that it sets."""
    return {one.key: one for one in hydra.of_file(path) if not one.key.startswith("env.")}
