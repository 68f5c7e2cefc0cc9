"""Reward functions: mathematics, question answering, formats, code, and those of other frameworks.

Each is a reward function with verl's signature, which `flowrl.operators.Reward` calls. Called with parameters only, it
returns a changed copy: ``math(boxed=True)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.rewards.adapters import from_openrlhf, from_trl, from_verl
    from flowrl.rewards.answers import choice, gsm8k
    from flowrl.rewards.math_answers import math
    from flowrl.rewards.question_answering import exact_match, f1
    from flowrl.rewards.reward_function import RewardFunction
    from flowrl.rewards.sections import format
    from flowrl.rewards.sources import by_data_source

_MODULES = {
    "RewardFunction": "reward_function",
    "by_data_source": "sources",
    "choice": "answers",
    "exact_match": "question_answering",
    "f1": "question_answering",
    "format": "sections",
    "from_openrlhf": "adapters",
    "from_trl": "adapters",
    "from_verl": "adapters",
    "gsm8k": "answers",
    "math": "math_answers",
}

__all__ = [
    "RewardFunction",
    "by_data_source",
    "choice",
    "exact_match",
    "f1",
    "format",
    "from_openrlhf",
    "from_trl",
    "from_verl",
    "gsm8k",
    "math",
]

__getattr__ = lazy(__name__, _MODULES)
