"""Write ``data`` in the form of Countdown-Tasks-3to4 and ``model`` to a folder: ``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from recipe import ASK
from tiny import write_data, write_model

WORDS = (*(part for part in ASK.replace("{target}", "{nums}").split("{nums}")), "<answer>", "</answer>", ", ", " + ")


def task(numbers: random.Random) -> dict[str, Any]:
    """Three numbers, and the sum of all."""
    nums = [numbers.randint(1, 3) for _ in range(3)]
    return {"target": sum(nums), "nums": nums}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A task with its sum."""
    row = task(numbers)
    answer = " + ".join(map(str, sorted(row["nums"])))
    return [
        {"role": "user", "content": ASK.format(**row)},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", task, {"train": 64})
    write_model(folder / "model", demonstration, WORDS)
