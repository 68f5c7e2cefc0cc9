"""A custom reward: a function with verl's signature in a file, which flowrl loads by its path.

grpo("examples/reward.py:score")
"""

import re
from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> Any:
    """1 if the last number is right, 0.1 if it is wrong, 0 if there is none.

    It may also return a plain number. The other numbers of a dict are logged as metrics: reward/right, reward/numbers.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    return {"score": 1.0 if right else 0.1 if numbers else 0.0, "right": right, "numbers": len(numbers)}


if __name__ == "__main__":  # try it without a model
    for answer in ("59+36 is 95", "I guess 94", "no idea"):
        print(f"{answer!r}: {score('addition', answer, '95')}")
