"""The tiny form of a recipe: data in the layout that the recipe reads on the Hub, and a model of 115,000 parameters."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the examples
from imitation import Conversation, imitate


def write_data(
    folder: Path, row: Callable[[random.Random], dict[str, Any]], splits: Mapping[str, int], name: str = "default"
) -> None:
    """Write a data set.

    Args:
        folder: output folder.
        row: samples a row.
        splits: the number of rows of each split.
        name: of its configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = ""
    for split, count in splits.items():
        numbers = random.Random(split)
        lines = (json.dumps(row(numbers)) + "\n" for _ in range(count))
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    readme = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(readme, encoding="utf-8")


def write_model(folder: Path, demonstration: Callable[[random.Random], Conversation], words: Sequence[str]) -> None:
    """Write a model that has begun to imitate demonstrations, so that some of its responses are right. A few seconds.

    Args:
        folder: output folder.
        demonstration: samples a conversation.
        words: the tokens of several characters.
    """
    imitate(folder, words, demonstration, seed=0, steps=60, rows=16)
