"""Write ``data`` in the form of GSM8K and ``model`` to a folder: ``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from recipe import ASK
from tiny import write_data, write_model

BEGIN, MIDDLE, END = "Tom has ", " apples and buys ", " more. How many apples does he have?"
WORDS = (BEGIN, MIDDLE, END, f" {ASK}", " apples.\n", "<<", ">>", "#### ")


def problem(numbers: random.Random) -> dict[str, Any]:
    """A question, and its solution with the annotations of a calculator."""
    a, b = numbers.randint(1, 9), numbers.randint(1, 5)
    solution = f"{BEGIN}{a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"
    return {"question": f"{BEGIN}{a}{MIDDLE}{b}{END}", "answer": solution}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A question with its solution."""
    row = problem(numbers)
    question = {"role": "user", "content": f"{row['question']} {ASK}"}
    return [question, {"role": "assistant", "content": row["answer"]}]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", problem, {"train": 64, "test": 16}, name="main")
    write_model(folder / "model", demonstration, WORDS)
