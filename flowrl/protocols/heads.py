"""The distribution of a model over its whole vocabulary, in two parts that can travel: its last hidden states, a vector
a token, and its head, which makes logits of them and is the same for all tokens.

``[batch response vocabulary]`` is never there to be sent: whoever has both parts makes distributions of some tokens at
a time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.protocols.protocols import Scorer
from flowrl.records import Sequences


@runtime_checkable
class Head(Protocol):
    """The head of a model whose weights stay. What travels says where the weights are to be had; an engine that
    computes with it opens it once, and keeps it."""

    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """Log-probs of the whole vocabulary: float32 ``[tokens vocabulary]``.

        Args:
            states: last hidden states, float32 ``[tokens hidden]``.
            temperature: ``[tokens]``.

        Raises:
            DataError: the weights that are found are not those of the model that gave `states`.
        """
        ...

    def opened(self, device: torch.device) -> Head:
        """The same with its weights at hand on `device`; an `nn.Module`, if it is to move when an engine sleeps."""
        ...


class HiddenStates(NamedTuple):
    """What a model says of the tokens of a response, of which `head` makes distributions.

    Args:
        states: float32 ``[batch response hidden]``, those that each token was predicted from; 0 off the mask.
        head: makes logits of them.
    """

    states: Tensor
    head: Head


@runtime_checkable
class HiddenStateScorer(Scorer, Protocol):
    """A frozen scorer that says all that could have stood in a token's place."""

    def last_states(self, batch: Sequences) -> HiddenStates:
        """The last hidden states that the response tokens are predicted from, and the head."""
        ...
