"""An independent enumeration of a task: responses by recursion, gradients of log-probs by their formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from flowrl import Graph, Operator
from flowrl.auditing.rewards import Tables
from flowrl.auditing.task import END, AuditTask
from flowrl.graphs import rloo

Array = np.ndarray
ONE = AuditTask(prompts=1)
"""The smallest task: three tokens at most, one prompt."""


def unread(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """No audit reads texts."""
    raise AssertionError("an audit has called a reward function")


def with_advantage(operator: Operator, **settings: object) -> Graph:
    """RLOO with another advantage."""
    return rloo(unread, **settings).edit(replace={"rloo_advantage": operator})


class Listed:
    """The responses of a task to one prompt, with their log-probs and gradients.

    Args:
        task: which.
        logits: float64 ``[states tokens]``, of this prompt.
        rewards: of each response, by its tokens.
    """

    def __init__(self, task: AuditTask, logits: Tensor, rewards: Callable[[tuple[int, ...]], float]) -> None:
        self.task = task
        weights = np.exp(logits.numpy() - logits.numpy().max(-1, keepdims=True))
        self.policy = weights / weights.sum(-1, keepdims=True)
        self.responses = list(self._grown(()))
        self.rewards = [rewards(response) for response in self.responses]
        self.probability = [float(np.exp(sum(self.log_probs(response)))) for response in self.responses]

    def _grown(self, start: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for token in range(self.task.vocabulary):
            grown = (*start, token)
            if len(grown) == self.task.steps or (self.task.ends and token == END):
                yield grown
            else:
                yield from self._grown(grown)

    def state(self, prefix: tuple[int, ...]) -> int:
        """The number of a state in the task's table."""
        found = self.task.responses
        row = next(
            y
            for response, y in found.index.items()
            if response[: len(prefix)] == prefix and len(response) > len(prefix)
        )
        return int(found.states[row, len(prefix)])

    def log_probs(self, response: tuple[int, ...]) -> list[float]:
        """The log-prob of each token."""
        return [float(np.log(self.policy[self.state(response[:t]), token])) for t, token in enumerate(response)]

    def pulls(self, response: tuple[int, ...]) -> list[Array]:
        """The gradient of each token's log-prob in the logits: one at the token, less the policy, in its state."""
        found = []
        for t, token in enumerate(response):
            pull, state = np.zeros_like(self.policy), self.state(response[:t])
            pull[state] = np.eye(self.task.vocabulary)[token] - self.policy[state]
            found.append(pull)
        return found

    def pull(self, response: tuple[int, ...]) -> Array:
        """That of the whole response."""
        return np.sum(self.pulls(response), axis=0)

    def of(self, number: Callable[[tuple[int, ...]], float]) -> Array:
        """The gradient of the expectation of a number that does not depend on the policy."""
        rows = zip(self.responses, self.probability, strict=True)
        return np.sum([p * number(response) * self.pull(response) for response, p in rows], axis=0)

    def reward(self) -> Array:
        """The gradient of the expected reward."""
        by_response = dict(zip(self.responses, self.rewards, strict=True))
        return self.of(by_response.__getitem__)


def rewards_of(task: AuditTask, prompt: int, table: str = "0") -> Callable[[tuple[int, ...]], float]:
    """The rewards that `Tables` has for a prompt."""
    import torch

    tables, found = Tables(task), task.responses
    prompts = torch.full((len(found), 1), task.vocabulary + prompt)
    scores = tables.scores(table, prompts, found.tokens, found.mask).tolist()
    return lambda response: scores[found.index[response]]


def listed(task: AuditTask, prompt: int = 0) -> Listed:
    """The policy of an audit, for one prompt."""
    return Listed(task, task.policy.logits[prompt], rewards_of(task, prompt))
