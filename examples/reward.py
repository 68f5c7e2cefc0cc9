"""A reward of your own: a function with verl's signature in a file of its own, which flowrl finds by its path.

grpo("examples/reward.py:score")
"""

import re
from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> Any:
    """1 for the right number at the end, a tenth for a wrong one, 0 for none.

    A plain number would do. In a dict, the other numbers are logged beside the reward: reward/right, reward/numbers.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    return {"score": 1.0 if right else 0.1 if numbers else 0.0, "right": right, "numbers": len(numbers)}


if __name__ == "__main__":  # an ordinary function: try it without a model
    for answer in ("59+36 is 95", "I guess 94", "no idea"):
        print(f"{answer!r}: {score('addition', answer, '95')}")
