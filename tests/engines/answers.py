"""Prompts for a rollout engine, and what others answer to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.backends import TorchRollout
from flowrl.engines import Rollout, Sampled, Sampling
from flowrl.job import Engines
from flowrl.keys import Key
from flowrl.text import assemble
from tests.engines.sources import Batch
from tests.models import SPECIALS, VOCAB

CONTEXT = Engines({}, seed=0)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=24)
KEY = Key.of(3)


def ragged(engine: Rollout, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left, with their mask."""
    numbers = np.random.default_rng(seed)
    return engine.tokenizer.pad_left([numbers.integers(len(SPECIALS), VOCAB, n).tolist() for n in lengths])


def names(count: int) -> list[str]:
    """Row ids."""
    return [f"row-{i}" for i in range(count)]


def rows(sampled: Sampled) -> list[list[int]]:
    """The responses, without padding."""
    return [ids[mask].tolist() for ids, mask in zip(sampled.responses, sampled.response_mask, strict=True)]


def by_torch(source: Any, folder: str, prompts: Tensor, mask: Tensor, sampling: Sampling = GREEDY) -> list[list[int]]:
    """What a fresh `TorchRollout` answers with the weights of `source`."""
    engine = TorchRollout(folder, device="cpu").build(CONTEXT)
    engine.sync(source)
    return rows(engine.generate(prompts, mask, names(len(prompts)), sampling, KEY))


def to_score(prompts: Tensor, mask: Tensor, sampled: Sampled, temperature: float) -> Batch:
    """Prompts with responses, as `Scorer.log_probs` reads them."""
    ids, attention, positions = assemble(prompts, mask, sampled.responses, sampled.response_mask)
    return Batch(ids, attention, positions, sampled.response_mask, torch.full((len(ids),), temperature))


def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """float64 ``[response vocab]`` by one forward pass, without cache or padding."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].double()
