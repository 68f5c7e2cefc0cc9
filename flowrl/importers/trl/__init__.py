"""Trainings of TRL: command lines, scripts and configurations in YAML."""

from __future__ import annotations

from flowrl.importers.trl.commands import STARTS, from_words, of_arguments, of_file
from flowrl.importers.trl.trainings import imported, of_python

__all__ = ["STARTS", "from_words", "imported", "of_arguments", "of_file", "of_python"]
