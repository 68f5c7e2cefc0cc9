"""Rollout engines that share a tiny actor, prompts, and reference log-probs of responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.backends import TorchRollout
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.data.keys import Key
from flowrl.protocols.protocols import Sampled, Sampling
from flowrl.sync.digest import named_weights
from tests.support.models import EOS, VOCAB

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=12)
SAMPLED = Sampling(temperature=0.8, top_k=0, top_p=1.0, max_new_tokens=12)
KEY = Key.of(3)


class Actor:
    """The members of a trainer that a rollout uses: model, folder, version and weights."""

    sharded = False

    def __init__(self, folder: str, version: int = 0) -> None:
        self.folder = folder
        self.version = version
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()


class Context:
    """A build context with one actor."""

    seed = 0

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def engine(self, role: str) -> Any:
        assert role == "actor"
        return self.actor


def synced(actor: Actor, **options: Any) -> TorchRolloutEngine:
    engine = TorchRollout(**options).build(Context(actor))
    engine.sync(actor)  # type: ignore[arg-type]
    return engine


def ragged(engine: TorchRolloutEngine, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = np.random.default_rng(seed)
    return engine.tokenizer.pad_left([numbers.integers(EOS + 1, VOCAB, n).tolist() for n in lengths])


def names(count: int) -> list[str]:
    return [f"row-{i}" for i in range(count)]


def full_log_probs(model: Any, prompts: Tensor, mask: Tensor, sampled: Sampled, temperature: float) -> Tensor:
    """Log-probs of the responses by one forward pass without a cache, each row alone and without padding."""
    rows = []
    for i in range(len(prompts)):
        response = sampled.responses[i][sampled.response_mask[i]]
        ids = torch.cat([prompts[i][mask[i]], response])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -len(response) - 1 : -1].double() / temperature
        rows.append(logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1))
    return torch.cat(rows)


def as_lists(sampled: Sampled) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(sampled.responses, sampled.response_mask, strict=True)]
