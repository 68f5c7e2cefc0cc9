"""What a configuration says, key by key, and what becomes of it: taken, pointless here, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Self

import yaml

from flowrl.errors import offer


class Setting(NamedTuple):
    """A key with its value, where it is, and why the value is unknown."""

    key: str
    value: Any
    line: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"line {self.line}: " if self.line else ""


class Remark(NamedTuple):
    """A key of the report."""

    key: str
    value: Any
    line: int
    text: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        value = "" if self.value is None else f"={_shown(self.value)}"
        return f"{where}{self.key}{value}{f' ({self.text})' if self.text else ''}"


@dataclass(frozen=True)
class Table:
    """Keys of a framework's pinned version with their defaults, and what flowrl has for each."""

    framework: str
    version: str
    defaults: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]

    @classmethod
    @cache
    def of(cls, framework: str, part: str) -> Self:
        """The table of one trainer, such as ``main_ppo`` of verl."""
        folder = files("flowrl.importers") / "tables"
        keys = json.loads((folder / f"{framework}.json").read_text(encoding="utf-8"))
        return cls(framework, keys["version"], keys["parts"][part], groups_of(framework))

    @staticmethod
    def version_of(framework: str) -> str:
        """The version that the tables of a framework are of."""
        text = (files("flowrl.importers") / "tables" / f"{framework}.json").read_text(encoding="utf-8")
        return str(json.loads(text)["version"])

    def group(self, key: str) -> Mapping[str, Any] | None:
        """The first group of keys that a key is in."""
        fits = (one for one in self.groups if any(key == name or fnmatchcase(key, name) for name in one["keys"]))
        return next(fits, None)

    def here(self, key: str) -> tuple[str, str]:
        """Status of a key (Y, P, N or 0) and what flowrl has in its place; N for unknown ones."""
        if (group := self.group(key)) is not None:
            return group["status"], group["here"]
        if key in self.defaults:
            return "N", ""
        return "N", f"no key of {self.framework} {self.version}; {offer(key, _near(key, self.defaults), 'near it are')}"


@cache
def groups_of(framework: str) -> Sequence[Mapping[str, Any]]:
    """Groups of keys by status, each with what flowrl has in their place; the first that fits a key holds."""
    import tomllib

    text = (files("flowrl.importers") / "tables" / f"{framework}.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["group"])


def is_file(name: str) -> bool:
    """Whether the name of a data set is a path of a file."""
    return name.endswith((".csv", ".json", ".jsonl", ".parquet")) or name.startswith((".", "/", "~"))


def _near(key: str, known: Iterable[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(key, list(known), n=2)


@dataclass
class Settings:
    """Settings of a configuration over the defaults of their framework. What is read counts as taken."""

    given: Mapping[str, Setting]
    table: Table
    read: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.given

    def is_unknown(self, key: str) -> bool:
        """Whether the framework has no such key, nor one of which it is a part."""
        whole = key.partition(".")[0]
        return not {key, whole} & (self.read | self.table.defaults.keys()) and not self.table.group(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: given, else the framework's default. What a script alone knows is refused."""
        self.read.add(key)
        if (setting := self.given.get(key)) is None:
            return self._resolved(self.table.defaults.get(key, default))
        if setting.unknown:
            self.refuse(key, f"cannot be resolved: {'; '.join(setting.unknown)}")
            return self._resolved(self.table.defaults.get(key, default))
        return self._resolved(setting.value)

    def entries(self, key: str) -> dict[str, Any]:
        """The entries of a key whose value is a dict, which may have keys of their own: ``key.name``."""
        given = [name for name in self.given if name.startswith(f"{key}.")]
        return {name.removeprefix(f"{key}."): self.get(name) for name in given} or self.get(key) or {}

    def name(self, key: str) -> str | None:
        """A name or path, in which unknown parts are left out."""
        self.read.add(key)
        if (setting := self.given.get(key)) is None:
            value = self._resolved(self.table.defaults.get(key))
            return None if value is None else str(value)
        if setting.unknown:
            self.differ(key, f"without what only a run of the script knows: {'; '.join(setting.unknown)}")
        text = str(setting.value or "").strip("-_ /" if setting.unknown else " ")
        return text or None

    def known_name(self, key: str) -> str | None:
        """A name or path, which is refused if nothing of it is known."""
        found = self.name(key)
        if found is None and key in self.given and (why := self.given[key].unknown):
            self.refuse(key, f"cannot be resolved: {'; '.join(why)}")
        return found

    def gpus(self, launcher: Mapping[str, str], fix: str) -> int:
        """The processes of a launcher, each with a GPU; 1 if it does not say how many."""
        given = launcher.get("processes", "1")
        if not given.isdigit():
            self.differ("num_processes", f"its launcher does not say how many: one GPU; {fix}")
            return 1
        return max(1, int(given))

    def _resolved(self, value: Any) -> Any:
        """A value without OmegaConf's references to other keys."""
        if not isinstance(value, str) or not value.startswith("${"):
            return value
        found = re.fullmatch(r"\$\{(?:oc\.select:)?\.?([\w.]+)(?:,(.*))?\}", value)
        if found is None:
            return None
        if found[1] in self.given or found[1] in self.table.defaults:
            setting = self.given.get(found[1])
            return self._resolved(self.table.defaults.get(found[1]) if setting is None else setting.value)
        return yaml.safe_load(found[2]) if found[2] and not found[2].startswith("${") else None

    def refuse(self, key: str, why: str) -> None:
        """A setting that flowrl cannot express."""
        self.read.add(key)
        self.refused.setdefault(key, why)

    def differ(self, key: str, how: str) -> None:
        """A setting that flowrl expresses in another way; shown with the taken ones, or as a default that differs."""
        self.read.add(key)
        self.differs.setdefault(key, how)

    def report(self, allowed: Sequence[str]) -> Report:
        """What became of each given setting, and of each default that differs."""
        report = Report()
        for key in dict.fromkeys([*self.given, *self.refused, *self.differs]):
            setting = self.given.get(key) or Setting(key, self.table.defaults.get(key))
            status, here = self.table.here(key)
            default = self._resolved(self.table.defaults.get(key))
            if key in self.refused:
                bucket, text = report.refused, self.refused[key]
            elif key not in self.given:
                bucket, text = report.differing, self.differs[key]
            elif key in self.read:
                bucket, text = report.taken, self.differs.get(key, "")
            elif status == "0" or (key in self.table.defaults and self._resolved(setting.value) == default):
                bucket, text = report.pointless, here or "the default"
            else:
                bucket, text = report.refused, here
            if bucket is report.refused and any(fnmatchcase(key, pattern) for pattern in allowed):
                bucket = report.allowed
            bucket.append(Remark(key, setting.value, setting.line, text))
        return report


@dataclass
class Report:
    """Settings by what became of them."""

    taken: list[Remark] = field(default_factory=list)
    differing: list[Remark] = field(default_factory=list)
    """Defaults of the framework, for keys that were not given, which flowrl expresses in another way."""
    pointless: list[Remark] = field(default_factory=list)
    refused: list[Remark] = field(default_factory=list)
    allowed: list[Remark] = field(default_factory=list)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:59]}…"
