"""What is asked of engines, row by row: answers (`Generate`, of rows that `Repeat` makes), log-probs and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from flowrl.operators.engines.model_inputs import AsksModel
from flowrl.protocols.protocols import CacheStats, Critic, Rollout, Sampling, Scorer
from flowrl.protocols.scorers import NormScorer
from flowrl.records import PromptBatch, RolloutBatch, Sequences, Tokens
from flowrl.spec import Spec


class Repeat(Operator):
    """Every prompt `n` times in succession, under one `uid` (GRPO's group) and with a `row_id` of its own.

    ``[batch ...]`` becomes ``[batch * n ...]``; the copies of a prompt stand next to each other.

    Args:
        n: answers per prompt.
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
    """What generation reads."""

    @property
    def prompts(self) -> c.Prompts: ...
    @property
    def prompt_mask(self) -> c.PromptMask: ...
    @property
    def row_id(self) -> c.RowId: ...


class Sampler(Spec):
    """How tokens are drawn, of an operator that asks a rollout engine for some.

    Args:
        temperature: 0 is greedy.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens that reaches this probability; 1 keeps all.
        max_new_tokens: the longest a response may get.
        stop_token_ids: tokens that end a response, besides those that end a turn by the model's own folder
            (`ChatTokenizer.ends`).
        stop: strings that end a response, once its text contains one. The response ends with the token that completes
            the string, and all of that token is part of it, so that the text may go on past the string. Special tokens
            are no text; they go into `stop_token_ids`.
        ignore_eos: what ends a turn does not end a response; stop tokens and strings still do.
    """

    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ignore_eos: bool = False

    @property
    def effects(self) -> frozenset[str]:
        """``"greedy"`` at temperature 0, ``"truncated"`` where top-k or top-p leave tokens out."""
        greedy = {Effect.GREEDY} if self.temperature == 0 else set()
        return frozenset(greedy | ({Effect.TRUNCATED} if self.top_k > 0 or self.top_p < 1 else set()))

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.max_new_tokens,
            self.stop_token_ids,
            self.stop,
            self.ignore_eos,
        )


class Generate(Sampler, Operator):
    """One sampled response per row, with its log-probs and the version of the weights that sampled it.

    Nothing is tokenised again on the way: `input_ids` are the prompt's ids and the sampled ids.

    Args:
        temperature, top_k, top_p, max_new_tokens, stop_token_ids, stop, ignore_eos: see `Sampler`.
        rollout: the engine.

    Raises:
        SyncError: the engine holds no valid receipt for its weights.
    """

    granularity: ClassVar[Granularity] = "row"
    rollout: Reads[Rollout] = Role("rollout")

    def __call__(self, prompts: Prompted, key: Key = INJECTED, metrics: Metrics = INJECTED) -> RolloutBatch:
        engine = self.rollout
        receipt = engine.receipt
        if receipt is None:
            raise SyncError(
                "the rollout engine has no receipt for its weights, so it is not known which policy would answer; "
                "expected a sync first: Sync()(updated), or `with job.eager():`, which syncs at its start."
            )
        with contexts_told(engine, metrics):
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
def contexts_told(engine: Rollout, metrics: Metrics) -> Iterator[None]:
    """Report how many tokens stood before the answers that are given within, and which share of them the engine had
    already; nothing of an engine that does not count them."""
    if not isinstance(engine, CacheStats):
        yield
        return
    context, cached = engine.context_tokens, engine.cached_tokens
    yield
    if given := engine.context_tokens - context:
        metrics.sum("throughput/context_tokens", given)
        metrics.mean("throughput/cached_share", engine.cached_tokens - cached, given)


def oldest_version(versions: Tensor, mask: Tensor, none: int) -> Tensor:
    """The version of each row: int64 ``[batch]``.

    Args:
        versions: of its tokens, int64 ``[batch response]``.
        mask: bool ``[batch response]``.
        none: of rows that have no token.
    """
    newest = torch.iinfo(versions.dtype).max
    oldest = versions.masked_fill(~mask, newest).amin(1) if mask.shape[1] else versions.new_full((len(mask),), newest)
    return oldest.where(mask.any(1), none)


class OldLogProb(AsksModel, Operator):
    """The sampled tokens' log-probs, recomputed by the trainer with its weights at the start of the step.

    The ratio of PPO is taken against these and not against the rollout engine's own, since engines differ in kernels,
    precision and sampling masks. Float32 ``[batch response]`` at each row's temperature, 0 off the mask.

    Args:
        reads: what the policy is given of the rows; see `AsksModel`.
        actor: the trainer.
    """

    granularity: ClassVar[Granularity] = "row"
    actor: Reads[Scorer] = Role("actor")

    def __call__(self, rollout: Sequences) -> c.OldLogProbs:
        return self.actor.log_probs(rollout)


class LogitNorm(Operator):
    """How hard each sampled token pulls at the logits: ``||d log p / d logits||**2``, for `OptimalTokenBaseline`.

    It is ``1 - 2 p + sum p**2`` by the trainer's weights at the start of the step, at each row's temperature: float32
    ``[batch response]``, 0 off the mask. One forward pass.
    """

    granularity: ClassVar[Granularity] = "row"
    actor: Reads[NormScorer] = Role("actor")

    def __call__(self, rollout: Sequences) -> c.LogitNorms:
        return self.actor.logit_norms(rollout)


class RefLogProb(AsksModel, Operator):
    """The sampled tokens' log-probs under the frozen reference, the anchor of KL.

    Float32 ``[batch response]`` at each row's temperature, 0 off the mask.

    Args:
        reads: what the reference is given of the rows; see `AsksModel`.
        ref: the reference.
    """

    granularity: ClassVar[Granularity] = "row"
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        return self.ref.log_probs(rollout)


class Value(AsksModel, Operator):
    """State values, float32 ``[batch response]``: entry ``t`` is of the state in which token ``t`` was sampled.

    Args:
        reads: what the critic is given of the rows; see `AsksModel`.
        critic: the critic.
    """

    granularity: ClassVar[Granularity] = "row"
    critic: Reads[Critic] = Role("critic")

    def __call__(self, rollout: Tokens) -> c.Values:
        return self.critic.values(rollout)
