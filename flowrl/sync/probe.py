"""The probe: after a sync, the engine and the trainer must compute the same log-probs for the same responses.

A digest proves that tensors arrived; only log-probs show what an engine made of them (fused, transposed, quantized or
silently dropped). The tokens are the model's own responses to some questions: a rounded model is nearly as certain of
them as an exact one, while other weights would have produced other responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.data.text.tokenizer import ChatTokenizer, assemble
from flowrl.errors import DataError, SyncError
from flowrl.protocols.protocols import HasComputeDtype, Sampling, Scorer

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fisherman.",
    "Compute 17 + 25, step by step.",
    "Write a Python function that reverses a list.",
)
RESPONSE_TOKENS = 16
"""Maximum tokens of a response; all of them are scored."""
RESERVED_TOKENS = 5
"""Tokens of a sequence that engines reserve when they score a prompt: vLLM one, SGLang five."""

CONCURRENCY_NOISE = 0.1
"""Fraction of the change of a trainer's scores below which the change of an engine that computes other responses
concurrently is rounding; with the new weights it changes by about as much as the trainer."""


class ProbeBatch(NamedTuple):
    """A probe as `Scorer.log_probs` reads it: ``[rows sequence]``, the response the last columns."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


@dataclass(frozen=True)
class Probe:
    """Prompts of at least one token and a response to each, as token ids; all responses are of one length."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]

    @property
    def rows(self) -> list[list[int]]:
        """Each prompt with its response."""
        return [[*prompt, *response] for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def width(self) -> int:
        """Tokens of a response."""
        return len(self.responses[0])

    def batch(self) -> ProbeBatch:
        """The probe at temperature 1, prompts padded on the left."""
        longest = max(map(len, self.prompts))
        prompts = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in self.prompts])
        mask = torch.tensor([[i >= longest - len(prompt) for i in range(longest)] for prompt in self.prompts])
        responses = torch.tensor(self.responses)
        counted = torch.ones_like(responses, dtype=torch.bool)
        return ProbeBatch(*assemble(prompts, mask, responses, counted), counted, torch.ones(len(prompts)))

    def score(self, source: Scorer) -> tuple[float, ...]:
        """The log-probs of all responses by a trainer, row by row; a collective if it has ranks."""
        return tuple(source.log_probs(self.batch()).float().flatten().tolist())


def questions(tokenizer: ChatTokenizer, longest: int) -> tuple[list[list[int]], Sampling]:
    """The prompts from `QUESTIONS` (their ends) and the sampling settings, to build an engine's probe.

    A prompt with its response and `RESERVED_TOKENS` more tokens is no longer than `longest` tokens (at least 12).
    """
    width = min(RESPONSE_TOKENS, longest // 2)
    prompts = [_prompt(tokenizer, question)[-(longest - width - RESERVED_TOKENS) :] for question in QUESTIONS]
    return prompts, Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=width, ignore_eos=True)


def _prompt(tokenizer: ChatTokenizer, question: str) -> list[int]:
    try:
        return tokenizer.prompt_ids([{"role": "user", "content": question}])
    except DataError:  # a model without a template, or with one for other roles: it continues any text
        return tokenizer.encode(question) or [tokenizer.eos_id]


class Scores(NamedTuple):
    """Log-probs of a probe's responses, natural, at temperature 1, row by row.

    Args:
        engine: the engine's, after a sync.
        trainer: those of the trainer whose weights it received.
        concurrent: whether the engine computed other responses concurrently, so that its scores may differ by rounding.
    """

    engine: tuple[float, ...]
    trainer: tuple[float, ...]
    concurrent: bool = False


def compute_dtype(scorer: object) -> torch.dtype:
    """A trainer's compute dtype; float32 unless it declares another."""
    return scorer.compute_dtype if isinstance(scorer, HasComputeDtype) else torch.float32


def default_tolerance(engine: torch.dtype, trainer: torch.dtype) -> float:
    """The default tolerance of `refuse_other_weights`: 1e-3 if both sides compute in float32, else 0.05."""
    return 1e-3 if {engine, trainer} == {torch.float32} else 0.05


def refuse_other_weights(
    engine: str, log_probs: Sequence[float], dtype: torch.dtype, probe: Probe, source: Scorer, tolerance: float | None
) -> Scores:
    """Compare an engine's log-probs of a probe with those of the trainer whose weights it received.

    The criterion is the mean of ``|engine - trainer| / max(1, |trainer|)``: nats, but relative for a token that the
    trainer finds less likely than 1/e, because rounding moves a log-prob in proportion to it.

    Args:
        log_probs: natural, at temperature 1, of all responses, row by row.
        dtype: the engine's compute dtype.
        tolerance: the largest accepted mean; None is `default_tolerance`.

    Returns:
        the scores of both, for `refuse_old_weights`.
    """
    scores = Scores(tuple(log_probs), probe.score(source))
    found, expected = torch.tensor(scores.engine), torch.tensor(scores.trainer)
    difference = (found - expected).abs()
    mean = float((difference / expected.abs().clamp(min=1)).mean())
    theirs = compute_dtype(source)
    tolerance = tolerance or default_tolerance(dtype, theirs)
    if not mean <= tolerance:  # NaN is refused too
        raise SyncError(
            f"After the sync, {engine} ({_dtype_name(dtype)}) and the trainer ({_dtype_name(theirs)}) score the same "
            f"{len(difference)} tokens differently: by {float(difference.mean()):.3g} nats per token on average, "
            f"{float(difference.max()):.3g} at most, {mean:.3g} relative to the log-probs; expected at most "
            f"{tolerance:g}. Either the engine does not use the weights that it received (quantization, an adapter, a "
            f"kernel with its own copy), or the two compute different models (soft-caps, rotary scaling, attention, "
            f"expert routing): compare both with transformers in float32. If the engine's arithmetic is coarse by "
            f"design, set its tolerance=...",
            code="sync.scores-differ",
            engine=engine,
            found=mean,
            expected=tolerance,
            mean=float(difference.mean()),
            maximum=float(difference.max()),
            dtypes=[_dtype_name(dtype), _dtype_name(theirs)],
        )
    return scores


def resolution(dtype: torch.dtype, trainer: torch.dtype, tolerance: float | None) -> float:
    """The mean change of a trainer's scores, in nats, that must change an engine's; for
    `refuse_old_weights`. Weights in float32 show any update; in bfloat16 a smaller change may round
    away."""
    tolerance = tolerance or default_tolerance(dtype, trainer)
    return max(1e-5, tolerance / 100) if {dtype, trainer} == {torch.float32} else max(0.02, tolerance / 5)


def refuse_old_weights(engine: str, scores: Scores, before: Scores | None, resolution: float) -> Scores:
    """Refuse an engine whose scores are bit for bit as before, although the trainer's have changed.

    An update may be smaller than the tolerance of `refuse_other_weights`, and than what weights in bfloat16 can
    represent. The trainer's change is counted from when the engine's scores last changed, so small updates add up. If
    the engine computed other responses concurrently, a change of less than a tenth of the trainer's is rounding.

    Args:
        before: what this returned after the last sync; None at first.
        resolution: in nats; a larger mean absolute change of the trainer's scores must change some of the engine's.

    Returns:
        the scores to compare the next ones with.
    """
    if before is None:
        return scores
    followed, moved = (
        float((torch.tensor(now, dtype=torch.float64) - torch.tensor(then, dtype=torch.float64)).abs().mean())
        for now, then in ((scores.engine, before.engine), (scores.trainer, before.trainer))
    )
    concurrent = scores.concurrent or before.concurrent
    if followed > (moved * CONCURRENCY_NOISE if concurrent else 0.0):
        return scores
    if moved > resolution:
        how = f"as before, within {followed:.3g}" if concurrent else "exactly as before, bit for bit"
        raise SyncError(
            f"After the sync, {engine} scores {len(scores.engine)} tokens {how}, but the trainer's scores have moved "
            f"by {moved:.3g} nats per token on average since then (more than {resolution:g} must show), so the engine "
            f"still uses old weights. Check what it caches, freezes, or merges at startup; the next "
            f"engine.sync(trainer) restarts it.",
            code="sync.old-weights",
            engine=engine,
            moved=moved,
            followed=followed,
            expected=resolution,
        )
    return before


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
