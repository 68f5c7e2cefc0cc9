"""`AuditTask`: a task so small that every response to every prompt can be enumerated.

It has a few tokens and one that ends a response, a few prompts, and tables: a logit for every token in every state (a
prompt and the tokens so far), a reward for every response. So expectations are sums, and the gradient of an objective
is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl.data.keys import Key
from flowrl.data.proto.dataproto import DataProto
from flowrl.spec import Spec

END = 0
"""The token that ends a response, where there is one."""

_NEVER = -1e4
"""The logit of an impossible token: its probability is 0, and so is 0 times its log-prob."""


class AuditTask(Spec):
    """The tabular task of an audit.

    Args:
        tokens: their number, without the one that ends a response.
        steps: the longest response, in tokens.
        prompts: per step, each once; they share no state.
        ends: whether a token ends a response. Without it all responses have length `steps`.
        even: forced tokens extend ended responses, so that all have length `steps`; all else is unchanged.
        right_or_wrong: rewards are 0 or 1; otherwise any number between them.
        reference: the distance between the logits of frozen policies, such as a reference, and the trainer's (standard
            deviation).
        mismatch: the distance between the logits of the rollout engine and the trainer's (standard deviation).
        age: how far the policy has moved since the rows were sampled and their old log-probs computed (standard
            deviation of its logits), as in the later mini-batches of a step.
        seed: of all tables.
    """

    schedulable = False

    tokens: int = Field(default=1, ge=1, le=8)
    steps: int = Field(default=3, ge=1, le=8)
    prompts: int = Field(default=2, ge=1, le=8)
    ends: bool = True
    even: bool = False
    right_or_wrong: bool = False
    reference: float = Field(default=1.0, ge=0)
    mismatch: float = Field(default=0.0, ge=0)
    age: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)

    def table(self, what: str, *shape: int) -> Tensor:
        """Standard normal numbers for the name `what`: float64."""
        generator = Key.of(self.seed).derive("audit", what).generator()
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def noise(self, what: str) -> Tensor:
        """Such numbers for logits, ``[prompts states tokens]``; 0 in the state after the end."""
        ended = int(self.even and self.ends)
        noise = self.table(what, self.prompts, self.responses.number - ended, self.vocabulary)
        return torch.cat([noise, torch.zeros(self.prompts, ended, self.vocabulary, dtype=torch.float64)], 1)

    @cached_property
    def policy(self) -> Policy:
        """The policy that samples; after the end its tokens are forced."""
        logits = self.noise("policy")
        if self.even and self.ends:
            logits[:, -1, 1:] = _NEVER
        return Policy(logits, self.responses)

    def near(self, what: str, far: float = 1.0) -> Policy:
        """Another policy, whose logits differ from those of `policy` by this standard deviation."""
        return Policy(self.policy.logits + far * self.noise(what), self.responses)

    @property
    def vocabulary(self) -> int:
        """The number of tokens, with the one that ends a response."""
        return self.tokens + self.ends

    def batch(self, rows: int | None = None, draw: int = 0, start: int = 0) -> DataProto:
        """Prompts: each once, or `rows` of them in turn. A prompt is one token, numbered after those of responses.

        `draw` is the number of the draw in the step; the groups of each draw have separate ids. `start` is the position
        in the stream of prompts, which repeats all prompts in order.
        """
        rows = self.prompts if rows is None else rows
        tokens = torch.arange(start, start + rows)[:, None] % self.prompts + self.vocabulary

        def column(values: Iterable[object]) -> np.ndarray:
            array = np.empty(rows, dtype=object)
            array[:] = list(values)
            return array

        return DataProto(
            {
                "prompts": tokens,
                "prompt_mask": torch.ones_like(tokens, dtype=torch.bool),
                "uid": column(f"prompt{row}.{draw}" for row in range(rows)),
                "row_id": column(f"prompt{row}.{draw}" for row in range(rows)),
                "data_source": column("audit" for _ in range(rows)),
                "ground_truth": column("" for _ in range(rows)),
                "extra_info": column({} for _ in range(rows)),
                "raw_prompt": column([] for _ in range(rows)),
            }
        )

    def number_of(self, prompts: Tensor) -> Tensor:
        """The number of each row's prompt, given its left-padded tokens."""
        return prompts[:, -1] - self.vocabulary

    @cached_property
    def responses(self) -> Responses:
        """All responses."""
        return Responses.of(self)


@dataclass(frozen=True, eq=False)
class Responses:
    """All responses to a prompt, right-padded.

    Args:
        tokens: int64 ``[responses, steps]``.
        mask: bool ``[responses, steps]``.
        states: int64 ``[responses, steps]``, the state in which each token was sampled.
    """

    tokens: Tensor
    mask: Tensor
    states: Tensor
    number: int
    index: dict[tuple[int, ...], int]

    @staticmethod
    def of(task: AuditTask) -> Responses:
        """The responses of a task."""
        continuing = range(task.vocabulary)[task.ends :]
        full: list[tuple[int, ...]] = list(itertools.product(continuing, repeat=task.steps))
        stopped = [
            (*start, END)
            for length in (range(task.steps) if task.ends else ())
            for start in itertools.product(continuing, repeat=length)
        ]
        found = [*stopped, *full]
        prefixes = sorted({response[:t] for response in found for t in range(len(response))})
        states = {prefix: number for number, prefix in enumerate(prefixes)}
        tokens, at = torch.zeros(2, len(found), task.steps, dtype=torch.int64)
        mask = torch.zeros(len(found), task.steps, dtype=torch.bool)
        ended = task.even and task.ends
        for row, response in enumerate(found):
            mask[row, : task.steps if ended else len(response)] = True
            at[row] = len(states) if ended else 0
            for t, token in enumerate(response):
                tokens[row, t], at[row, t] = token, states[response[:t]]
        whole = [tuple(itertools.compress(*row)) for row in zip(tokens.tolist(), mask.tolist(), strict=True)]
        index = {response: y for y, response in enumerate(whole)}
        return Responses(tokens, mask, at, len(states) + ended, index)

    def number_of(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The number of each row's response: int64 ``[rows]``.

        `tokens` are int64 ``[rows response]``; `mask` marks the sampled tokens.
        """
        rows = zip(tokens.tolist(), mask.tolist(), strict=True)
        return torch.tensor([self.index[tuple(itertools.compress(*row))] for row in rows], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Policy:
    """A table of logits: float64 ``[prompts, states, tokens]``."""

    logits: Tensor
    responses: Responses

    def by_state(self, temperature: float = 1.0) -> Tensor:
        """Log-probs of all tokens in all states: ``[prompts, states, tokens]``."""
        return torch.log_softmax(self.logits / temperature, -1)

    def by_token(self, temperature: float = 1.0) -> Tensor:
        """Log-probs of the tokens of all responses: ``[prompts, responses, steps]``, 0 off the mask."""
        found = self.by_state(temperature)[:, self.responses.states, self.responses.tokens]
        return torch.where(self.responses.mask, found, 0.0)

    def by_response(self, temperature: float = 1.0) -> Tensor:
        """Log-probs of all responses: ``[prompts, responses]``."""
        return self.by_token(temperature).sum(-1)
