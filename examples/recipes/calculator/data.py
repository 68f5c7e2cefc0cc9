"""Write ``data`` in the form of GSM8K, and ``model``, which calls the tool, to a folder: ``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from recipe import ASK
from tiny import write_data, write_model

BEGIN, MIDDLE, END = "Tom has ", " apples and buys ", " more. How many apples does he have?"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
WORDS = (BEGIN, MIDDLE, END, f" {ASK}", *CALL, "#### ")


def problem(numbers: random.Random) -> dict[str, Any]:
    """A question with its solution."""
    a, b = numbers.randint(1, 30), numbers.randint(1, 9)
    return {"question": f"{BEGIN}{a}{MIDDLE}{b}{END}", "answer": f"<<{a}+{b}={a + b}>>\n#### {a + b}"}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A question, the call of the tool, its result, and the answer."""
    row = problem(numbers)
    expression, _, total = row["answer"].partition(">>")[0].removeprefix("<<").partition("=")
    return [
        {"role": "user", "content": f"{row['question']} {ASK}"},
        {"role": "assistant", "content": f"{CALL[0]}{expression}{CALL[1]}"},
        {"role": "tool", "content": total},
        {"role": "assistant", "content": f"#### {total}"},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", problem, {"train": 64, "test": 16}, name="main")
    write_model(folder / "model", demonstration, WORDS)
