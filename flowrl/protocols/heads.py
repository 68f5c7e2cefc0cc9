"""A model's distribution over its vocabulary in two parts that can be sent: last hidden states, one vector per token,
and the head, which turns them into logits and is the same for all tokens.

``[batch response vocabulary]`` is never materialized: the receiver computes distributions for some tokens at a time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.protocols.protocols import Scorer
from flowrl.records import Sequences


@runtime_checkable
class Head(Protocol):
    """The head of a model with constant weights. What is sent names the source of the weights; the receiving engine
    opens it once and reuses it."""

    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """Log-probs of the whole vocabulary, float32 ``[tokens vocabulary]``, of states ``[tokens hidden]``."""
        ...

    def load(self, device: torch.device) -> Head:
        """The same with its weights loaded on `device`; an `nn.Module` if it must move when the engine sleeps."""
        ...


class HiddenStates(NamedTuple):
    """Last hidden states of response tokens, which `head` turns into distributions.

    Args:
        states: float32 ``[batch response hidden]``, the state that predicts each token; 0 off the mask.
        head: turns them into logits.
    """

    states: Tensor
    head: Head


@runtime_checkable
class HiddenStateScorer(Scorer, Protocol):
    """A frozen scorer that gives the full next-token distribution."""

    def last_states(self, batch: Sequences) -> HiddenStates:
        """The last hidden states that predict the response tokens, and the head."""
        ...
