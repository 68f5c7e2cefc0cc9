"""Write ``data`` and ``test`` in the forms of DAPO-Math-17k-Processed and MATH-500, and ``model``, to a folder:
``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from recipe import ASK
from tiny import write_data, write_model

BEGIN, MIDDLE = "Compute $", "+"
WORDS = (BEGIN, f"$. {ASK}", "\\boxed{")


def problem(numbers: random.Random) -> dict[str, Any]:
    """A problem with its answer, in the columns of DAPO-Math-17k-Processed."""
    a, b = numbers.randint(1, 9), numbers.randint(1, 9)
    prompt, answer = f"{BEGIN}{a}{MIDDLE}{b}$.", str(a + b)
    return {
        "prompt": prompt,
        "solution": answer,
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": prompt}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(numbers.random())},
    }


def held_out(numbers: random.Random) -> dict[str, Any]:
    """A problem in the columns of MATH-500."""
    row = problem(numbers)
    answer = row["solution"]
    columns = {"problem": row["prompt"], "solution": f"It is $\\boxed{{{answer}}}$.", "answer": answer}
    return {**columns, "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A problem with its answer in a box."""
    row = problem(numbers)
    question = {"role": "user", "content": f"{row['prompt']} {ASK}"}
    return [question, {"role": "assistant", "content": f"\\boxed{{{row['solution']}}}"}]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", problem, {"train": 64}, name="en")
    write_data(folder / "test", held_out, {"test": 16})
    write_model(folder / "model", demonstration, WORDS)
