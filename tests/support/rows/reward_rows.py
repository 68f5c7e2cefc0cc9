"""Rows for `Reward`, and the functions that score them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from flowrl.operators.reward.operator import Reward

# Functions that worker processes call, in a file that imports fast, as a user's reward file does.
SCORES = """
import os, re, sys, time

class Marker:
    @staticmethod
    def length(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str)

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def verdict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

def from_extra(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(extra_info.get("wait", 0.0))
    return extra_info["score"]

def echo(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info == {"a": [1, 2.5], "b": {"c": None, "d": True}, "e": "\\u00fc\\ud800\\n"})

def raising(data_source, solution_str, ground_truth, extra_info=None):
    return deeper(solution_str)

def deeper(solution_str):
    if solution_str == "bad":
        raise ValueError("no number in it")
    return 1.0

def looping(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "bad":
        pass
    return 1.0

def backtracking(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.match(r"(a+)+$", solution_str) is None)

def dying(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        os._exit(3)
    return 1.0

def exiting(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit("enough")

def talking(data_source, solution_str, ground_truth, extra_info=None):
    print('{"score": 7.0, "extras": {}}', flush=True)
    os.write(1, b'{"score": 8.0, "extras": {}}\\n')
    return float(sys.stdin.read() == "")

def pid(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    pass

number = 3.0
"""


class Rollout(NamedTuple):
    response_text: np.ndarray
    response_mask: torch.Tensor


class Prompts(NamedTuple):
    data_source: np.ndarray
    ground_truth: np.ndarray
    extra_info: np.ndarray
    row_id: np.ndarray


def objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def rows(
    texts: list[str],
    truths: list[Any] | None = None,
    extra: list[Any] | None = None,
    mask: list[list[int]] | None = None,
) -> tuple[Rollout, Prompts]:
    n = len(texts)
    response_mask = torch.tensor(mask if mask is not None else [[1]] * n, dtype=torch.bool)
    prompts = Prompts(
        objects(["demo"] * n),
        objects(truths or ["1"] * n),
        objects(extra or [{}] * n),
        objects([f"row-{i}" for i in range(n)]),
    )
    return Rollout(objects(texts), response_mask), prompts


def values(reward: Reward, *batch: Any) -> list[float]:
    """The scores of rows of one token each."""
    return reward(*batch).squeeze(1).tolist()
