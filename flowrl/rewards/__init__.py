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
    from flowrl.rewards.programs import code
    from flowrl.rewards.question_answering import exact_match, f1
    from flowrl.rewards.reward_function import RewardFunction
    from flowrl.rewards.sandboxes.remote import E2B, SandboxFusion
    from flowrl.rewards.sandboxes.sandbox import Docker, Execution, Sandbox, UnsafeSubprocess
    from flowrl.rewards.sections import format
    from flowrl.rewards.sources import by_data_source, verl_sources

__all__ = [
    "E2B",
    "Docker",
    "Execution",
    "RewardFunction",
    "Sandbox",
    "SandboxFusion",
    "UnsafeSubprocess",
    "by_data_source",
    "choice",
    "code",
    "exact_match",
    "f1",
    "format",
    "from_openrlhf",
    "from_trl",
    "from_verl",
    "gsm8k",
    "math",
    "verl_sources",
]

__getattr__ = lazy(
    __name__,
    {
        "Docker": "sandboxes.sandbox",
        "E2B": "sandboxes.remote",
        "Execution": "sandboxes.sandbox",
        "RewardFunction": "reward_function",
        "Sandbox": "sandboxes.sandbox",
        "SandboxFusion": "sandboxes.remote",
        "UnsafeSubprocess": "sandboxes.sandbox",
        "by_data_source": "sources",
        "choice": "answers",
        "code": "programs",
        "exact_match": "question_answering",
        "f1": "question_answering",
        "format": "sections",
        "from_openrlhf": "adapters",
        "from_trl": "adapters",
        "from_verl": "adapters",
        "gsm8k": "answers",
        "math": "math_answers",
        "verl_sources": "sources",
    },
)
