"""The settings that a sweep varies: choices (``lr=1e-6,3e-6``) and ranges (``lr=log:1e-7..1e-5``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.edits.parameters import annotation_at
from flowrl.errors import ParameterError
from flowrl.run.settings.changes import owner_of, with_settings
from flowrl.run.settings.typed import kinds_of
from flowrl.run.training.training import Training

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Choices:
    """The values of a setting, as text."""

    path: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """A range of numbers of a setting, both ends included.

    Args:
        log: sample the logarithm uniformly.
        integer: the setting takes integers.
    """

    path: str
    low: float
    high: float
    log: bool
    integer: bool

    @property
    def texts(self) -> tuple[str, str]:
        """The ends, as text."""
        return self.text(self.low), self.text(self.high)

    def text(self, number: float) -> str:
        """A number of the range as text."""
        return str(int(number)) if self.integer else repr(float(number))


Axis = Choices | Range


def axes_of(training: Training, settings: Mapping[str, str]) -> tuple[dict[str, str], list[Axis]]:
    """The settings with one value, and those that vary.

    Raises:
        ParameterError, GraphError: a path that the training does not have, a value that does not fit it, or a range
            without numbers.
    """
    fixed: dict[str, str] = {}
    axes: list[Axis] = []
    for path, text in settings.items():
        found = _RANGE.fullmatch(text)
        texts = tuple(_split(text))
        if found is None and len(texts) == 1:
            fixed[path] = text
        else:
            axes.append(Choices(path, texts) if found is None else _range(training, path, text, found))
    base = with_settings(training, fixed) if fixed else training
    for axis in axes:
        for text in axis.texts:
            with_settings(base, {axis.path: text})
        if len(set(axis.texts)) < len(axis.texts):
            raise _bad(f"{axis.path}={','.join(axis.texts)}", "has a value twice")
    return fixed, axes


def _range(training: Training, path: str, text: str, found: re.Match[str]) -> Range:
    """A range, in the numbers that its setting takes."""
    low, high, log = float(found[2]), float(found[3]), found[1] is not None
    with_settings(training, {path: found[2]})  # refuses an unknown path
    owner = owner_of(training, path)
    kinds = [] if owner is None else kinds_of(annotation_at(owner.value, path.partition(".")[2], owner.annotation))
    integer = int in kinds and float not in kinds
    if not low < high or not all(map(math.isfinite, (low, high))):
        raise _bad(f"{path}={text}", "is no range: its first number must be the smaller one")
    if log and low <= 0:
        raise _bad(f"{path}={text}", "has no logarithm at its lower end; expected a positive number")
    if integer and not (low.is_integer() and high.is_integer()):
        raise _bad(f"{path}={text}", "takes integers")
    return Range(path, low, high, log, integer)


def _split(text: str) -> list[str]:
    """The values between commas, except for those in brackets and quotes."""
    found, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        depth += 0 if quote else (character in _OPEN) - (character in _CLOSE)
        if character == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += character
    return [value.strip() for value in found]


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]] | None:
    """All combinations of choices; None if an axis is a range."""
    points: list[dict[str, Any]] = [{}]
    for axis in axes:
        if isinstance(axis, Range):
            return None
        points = [{**point, axis.path: text} for point in points for text in axis.texts]
    return points


def _bad(setting: str, what: str) -> ParameterError:
    return ParameterError(
        f"--set {setting} {what}. Pass values as lr=1e-6,3e-6, or a range as lr=log:1e-7..1e-5.",
        code="cli.bad-option",
        option="--set",
        found=setting,
    )
