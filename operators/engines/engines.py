"""Operators that call engines row by row: generation, log-probs and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.text.tokenizer import assemble
from flowrl.errors import SyncError
from flowrl.operators.engines.model_inputs import ModelInputs
from flowrl.protocols.protocols import CacheStats, Critic, Rollout, Sampling, Scorer
from flowrl.protocols.scorers import NormScorer
from flowrl.records import PromptBatch, RolloutBatch, Sequences, Tokens
from flowrl.spec import Spec


class Repeat(Operator):
    """Repeat every prompt `n` times; the copies share a `uid` (the group of GRPO), and each has its own `row_id`.

    ``[batch ...]`` becomes ``[batch * n ...]``; the copies of a prompt are adjacent.

    Args:
        n: responses per prompt.
    """

    granularity: ClassVar[Granularity] = "row"
    new_axes: ClassVar[tuple[str, ...]] = ("batch",)
    n: int = Field(default=1, ge=1)

    @property
    def rows_factor(self) -> int:
        """`n`."""
        return self.n

    def __call__(self, prompts: PromptBatch) -> PromptBatch:
        def repeated(column: Any) -> Any:
            return np.repeat(column, self.n) if isinstance(column, np.ndarray) else column.repeat_interleave(self.n, 0)

        row_id = np.array([f"{row}#{k}" for row in prompts.row_id for k in range(self.n)], dtype=object)
        return PromptBatch(*map(repeated, prompts))._replace(row_id=row_id)


class Prompted(Protocol):
    """The columns that generation reads."""

    @property
    def prompts(self) -> c.Prompts: ...
    @property
    def prompt_mask(self) -> c.PromptMask: ...
    @property
    def row_id(self) -> c.RowId: ...


class Sampler(Spec):
    """Sampling parameters of an operator that generates.

    Args:
        temperature: 0 is greedy.
        top_k: sample from the `top_k` most likely tokens; 0 is no limit.
        top_p: sample from the smallest set of tokens whose probability reaches `top_p`; 1 is no limit.
        max_new_tokens: maximum length of a response in tokens.
        stop_token_ids: tokens that end a response, in addition to the end-of-turn tokens of the model
            (``ChatTokenizer.ends``).
        stop: strings that end a response. The response ends with the token that completes the string, so its text may
            extend past the string. Special tokens have no text; put them into `stop_token_ids`.
        ignore_eos: do not end a response at end-of-turn tokens; stop tokens and strings still end it.
        min_p: sample from the tokens whose probability is at least `min_p` times the largest one (Nguyen et al. 2024,
            arXiv:2407.01082); 0 is no limit.
        repetition_penalty: above 1, tokens of the prompt and of the response so far become less likely: positive logits
            are divided by it, negative ones multiplied (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
        presence_penalty: subtracted from the logit of each token that the response already contains.
        frequency_penalty: subtracted from a token's logit once per occurrence in the response.
    """

    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ignore_eos: bool = False
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)

    @property
    def effects(self) -> frozenset[str]:
        """``"greedy"`` at temperature 0, with ``top_k=1`` or with ``min_p=1``; ``"truncated"`` with top-k, top-p or
        min-p; ``"penalized"`` with a penalty."""
        sampling = self.sampling
        found = {Effect.GREEDY} if self.temperature == 0 or self.top_k == 1 or self.min_p == 1 else set()
        found |= {Effect.TRUNCATED} if self.top_k > 0 or self.top_p < 1 or self.min_p > 0 else set()
        return frozenset(found | ({Effect.PENALIZED} if sampling.penalizes else set()))

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters as the engine takes them."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})


class Generate(Sampler, Operator):
    """Sample one response per row, with its log-probs and the version of the weights.

    Responses are never tokenized again: `input_ids` are the ids of the prompt and the sampled ids. Reports
    ``response_length/mean``, ``/max``, ``/total`` and ``/clip_ratio``, the share of responses of `max_new_tokens`.

    Args:
        temperature, top_k, top_p, max_new_tokens, stop_token_ids, stop, ignore_eos, min_p, repetition_penalty,
            presence_penalty, frequency_penalty: see `Sampler`.
        rollout: the engine.

    Raises:
        SyncError: the engine has no valid receipt for its weights.
    """

    granularity: ClassVar[Granularity] = "row"
    rollout: Reads[Rollout] = Role("rollout")

    def __call__(self, prompts: Prompted, key: Key = INJECTED, metrics: Metrics = INJECTED) -> RolloutBatch:
        engine = self.rollout
        receipt = engine.receipt
        if receipt is None:
            raise SyncError(
                "The rollout engine has no receipt for its weights, so the version of its responses is unknown. Sync "
                "first: Sync()(updated), or `with job.eager():`, which syncs when it starts.",
                code="engine.no-receipt",
                node=self.name,
            )
        with report_contexts(engine, metrics):
            sampled = engine.generate(prompts.prompts, prompts.prompt_mask, list(prompts.row_id), self.sampling, key)
        input_ids, attention_mask, position_ids = assemble(
            prompts.prompts, prompts.prompt_mask, sampled.responses, sampled.response_mask
        )
        rows, lengths = len(sampled.responses), sampled.response_mask.sum(-1)
        texts = [
            engine.tokenizer.decode(ids[mask].tolist(), self.stop_token_ids)
            for ids, mask in zip(*sampled[:2], strict=True)
        ]
        oldest = oldest_version(sampled.versions, sampled.response_mask, receipt.version)
        if rows:
            metrics.sum("response_length/total", lengths.sum())
            metrics.mean("response_length/mean", lengths.sum(), rows)
            metrics.max("response_length/max", lengths.max())
            metrics.mean("response_length/clip_ratio", (lengths >= self.max_new_tokens).sum(), rows)
        return RolloutBatch(
            prompts=prompts.prompts,
            responses=sampled.responses,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            response_mask=sampled.response_mask,
            rollout_log_probs=sampled.log_probs,
            response_text=np.array(texts, dtype=object),
            temperature=torch.full((rows,), self.temperature, device=sampled.responses.device),
            policy_version=oldest,
            token_version=sampled.versions,
        )


@contextmanager
def report_contexts(engine: Rollout, metrics: Metrics) -> Iterator[None]:
    """Report the context tokens of the responses generated in the block, and the cached share, if the engine counts."""
    if not isinstance(engine, CacheStats):
        yield
        return
    context, cached = engine.context_tokens, engine.cached_tokens
    yield
    if tokens := engine.context_tokens - context:
        metrics.sum("throughput/context_tokens", tokens)
        metrics.mean("throughput/cached_share", engine.cached_tokens - cached, tokens)


def oldest_version(versions: Tensor, mask: Tensor, default: int | Tensor) -> Tensor:
    """The oldest version of each row's tokens, `default` (one, or int64 ``[batch]``) for rows without one: int64
    ``[batch response]`` to ``[batch]``."""
    newest = torch.iinfo(versions.dtype).max
    oldest = versions.masked_fill(~mask, newest).amin(1) if mask.shape[1] else versions.new_full((len(mask),), newest)
    return oldest.where(mask.any(1), default)


class OldLogProb(ModelInputs, Operator):
    """Log-probs of the sampled tokens under the trainer's weights at the start of the step.

    PPO's ratio uses these rather than the engine's log-probs, since engines differ in kernels, precision and sampling
    masks. Float32 ``[batch response]`` at each row's temperature, 0 off the mask.

    Args:
        reads: record of the model's inputs; None for tokens. See `ModelInputs`.
        actor: the trainer.
    """

    granularity: ClassVar[Granularity] = "row"
    actor: Reads[Scorer] = Role("actor")

    def __call__(self, rollout: Sequences) -> c.OldLogProbs:
        return self.actor.log_probs(rollout)


class LogitNorm(Operator):
    """The squared logit-gradient norm of each sampled token, ``||d log p / d logits||**2``; see `OptimalTokenBaseline`.

    It is ``1 - 2 p + sum p**2`` under the trainer's weights at the start of the step, at each row's temperature:
    float32 ``[batch response]``, 0 off the mask. It costs one forward pass.
    """

    granularity: ClassVar[Granularity] = "row"
    actor: Reads[NormScorer] = Role("actor")

    def __call__(self, rollout: Sequences) -> c.LogitNorms:
        return self.actor.logit_norms(rollout)


class RefLogProb(ModelInputs, Operator):
    """Log-probs of the sampled tokens under the frozen reference model.

    Float32 ``[batch response]`` at each row's temperature, 0 off the mask.

    Args:
        reads: record of the model's inputs; None for tokens. See `ModelInputs`.
        ref: the reference.
    """

    granularity: ClassVar[Granularity] = "row"
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        return self.ref.log_probs(rollout)


class Value(ModelInputs, Operator):
    """State values, float32 ``[batch response]``: entry ``t`` is the value of the state before token ``t``.

    Args:
        reads: record of the model's inputs; None for tokens. See `ModelInputs`.
        critic: the critic.
    """

    granularity: ClassVar[Granularity] = "row"
    critic: Reads[Critic] = Role("critic")

    def __call__(self, rollout: Tokens) -> c.Values:
        return self.critic.values(rollout)
