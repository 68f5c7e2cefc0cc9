"""The engines of an audit: tables in place of networks, which serve the protocols that operators need.

The trainer takes no step. It records the gradient of every mini-batch, which the audit evaluates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.auditing.draws import Draws
from flowrl.auditing.task import AuditTask, Policy
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import AuditError, SyncError
from flowrl.operators.losses.objective import TokenObjective
from flowrl.protocols.protocols import MiniBatch, Sampled, Sampling, Trainer
from flowrl.records import Receipt, Sequences, Tokens


class _Rows:
    """The prompt and response of each row of a batch (`flowrl.records.Tokens`), and the state of each token."""

    def __init__(self, task: AuditTask, batch: Any) -> None:
        prompt = batch.input_ids.shape[1] - batch.response_mask.shape[1]
        self.tokens, self.sampled = batch.input_ids[:, prompt:], batch.attention_mask[:, prompt:]
        self.prompt = task.number_of(batch.input_ids[:, :prompt])
        self.response = task.responses.number_of(self.tokens, self.sampled)
        self.state = torch.zeros_like(self.tokens)
        self.state[self.sampled] = task.responses.states[self.response][task.responses.mask[self.response]]

    def of(self, by_state: Tensor) -> Tensor:
        """The value of a table ``[prompts states ...]`` in the state of each token."""
        return by_state[self.prompt[:, None], self.state]

    def sampled_log_probs(self, of_all_tokens: Tensor) -> Tensor:
        """The log-probs of the sampled tokens, of those of all tokens: ``[rows response]``, 0 off the mask."""
        return torch.where(self.sampled, of_all_tokens.gather(-1, self.tokens[..., None])[..., 0], 0.0)


def _log_softmax(logits: Tensor, batch: Any) -> Tensor:
    """Log-softmax at the temperature of each row."""
    return torch.log_softmax(logits / batch.temperature.double()[:, None, None], -1)


class TabularScorer:
    """A frozen policy that scores."""

    def __init__(self, task: AuditTask, policy: Policy) -> None:
        self.task, self.policy = task, policy

    def log_probs(self, batch: Sequences) -> Tensor:
        """Float32 ``[batch response]``, 0 off the mask."""
        rows = _Rows(self.task, batch)
        log_probs = rows.sampled_log_probs(_log_softmax(rows.of(self.policy.logits), batch))
        return torch.where(batch.response_mask, log_probs, 0.0).float()

    def logit_norms(self, batch: Sequences) -> Tensor:
        """Squared norms of the gradients of these log-probs in the logits: float32 ``[batch response]``, 0 off the
        mask."""
        rows = _Rows(self.task, batch)
        log_probs = _log_softmax(rows.of(self.policy.logits), batch)
        norms = 1.0 - 2.0 * rows.sampled_log_probs(log_probs).exp() + log_probs.exp().square().sum(-1)
        return torch.where(batch.response_mask, norms, 0.0).float()


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """The gradient of a mini-batch.

    Args:
        whole: float64 ``[prompts states tokens]``, the gradient of what the update maximizes (not of its loss).
        parts: the same for each part of it: ``"loss"``, and if present ``"kl"`` and ``"entropy"``.
        prompt, response: int64 ``[rows]``, the numbers of each row's prompt and response.
        offered: the number of rows of the update, of which a mini-batch has a part.
    """

    whole: Tensor
    parts: dict[str, Tensor]
    prompt: Tensor
    response: Tensor
    offered: int


class TabularTrainer(TabularScorer):
    """A trained policy: it scores with `policy`, as it was when rows were sampled, and updates as `now`."""

    def __init__(self, task: AuditTask, policy: Policy, now: Policy) -> None:
        super().__init__(task, policy)
        self.now, self.version = now, 0
        self.taken: list[RecordedUpdate] = []

    def update(self, batch: Any, mini_batches: Sequence[MiniBatch], objective: Any) -> Metrics:
        """Record the gradient of each mini-batch at the current policy; only the version changes."""
        for mini_batch in mini_batches:
            rows = _Rows(self.task, _rows_of(batch, mini_batch.rows))
            whole = self._gradient(batch, mini_batch, rows, objective)
            parts = {name: self._gradient(batch, mini_batch, rows, part) for name, part in _parts(objective).items()}
            alone = parts.pop("loss", whole)
            others = {name: gradient - alone for name, gradient in parts.items()}
            offered = len(batch.response_mask)
            self.taken.append(RecordedUpdate(whole, {"loss": alone, **others}, rows.prompt, rows.response, offered))
        self.version += 1
        return Metrics()

    def _gradient(self, batch: Any, mini_batch: MiniBatch, rows: _Rows, objective: Any) -> Tensor:
        part = _rows_of(batch, mini_batch.rows)
        logits = self.now.logits.clone().requires_grad_()
        log_probs = _log_softmax(rows.of(logits), part)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        seen = part if mini_batch.replicated is None else mini_batch.replicated.batch
        loss = objective(rows.sampled_log_probs(log_probs), entropy, seen, mini_batch.weights, Metrics())
        return -torch.autograd.grad(loss, logits)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The table."""
        yield "logits", self.policy.logits

    def save_pretrained(self, folder: str) -> None:
        """Refuse: an audit has no model to save."""
        raise AuditError(
            f"An audit trains a table, not a model, so nothing can be saved to {folder}. Save the trainer of a job.",
            code="audit.unsupported-graph",
            path=folder,
        )


def _parts(objective: Any) -> dict[str, Any]:
    """The loss alone, and with each other term; empty if it has no other term."""
    if not isinstance(objective, TokenObjective) or not (objective.kl or objective.entropy):
        return {}
    alone = dataclasses.replace(objective, kl=None, entropy=0.0)
    found = {"loss": alone}
    if objective.kl is not None:
        found["kl"] = dataclasses.replace(alone, kl=objective.kl)
    if objective.entropy:
        found["entropy"] = dataclasses.replace(alone, entropy=objective.entropy)
    return found


def _rows_of(batch: Any, rows: Tensor) -> Any:
    """Some rows of a record."""
    return type(batch)(*(None if x is None else x[rows] if isinstance(x, Tensor) else x[rows.numpy()] for x in batch))


class TabularCritic:
    """Values from a fixed table: float64 ``[prompts states]``."""

    def __init__(self, task: AuditTask, values: Tensor) -> None:
        self.task, self.table, self.version = task, values, 0

    def values(self, batch: Tokens) -> Tensor:
        """Float32 ``[batch response]``, 0 off the mask."""
        return torch.where(batch.response_mask, _Rows(self.task, batch).of(self.table), 0.0).float()

    def update(self, batch: Any, mini_batches: Sequence[MiniBatch], objective: Any) -> Metrics:
        """Increment the version only."""
        self.version += 1
        return Metrics()


class _Alphabet:
    """A tokenizer with a letter for each token."""

    folder = "the task of an audit"
    ends: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """``"ab."``."""
        return "".join(".abcdefgh"[token] for token in ids)


class TabularRollout:
    """Samples from a table."""

    def __init__(self, task: AuditTask, policy: Policy, draws: Draws) -> None:
        self.task, self.policy, self.draws = task, policy, draws
        self.receipt: Receipt | None = None
        self._by_token: dict[Sampling, tuple[Tensor, list[list[float]]]] = {}

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Decodes tokens as letters."""
        return cast(ChatTokenizer, _Alphabet())

    def sync(self, source: Trainer) -> Receipt:
        """Copy the version only, so that the table of the engine retains its mismatch."""
        self.receipt = Receipt(source.version, "table", bytes=0, seconds=0.0, transport="table")
        return self.receipt

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """One response per row, as wide as the longest."""
        if self.receipt is None:
            raise SyncError(
                "The rollout engine of this audit was never synced. Add a Sync to the graph.",
                code="audit.unsupported-graph",
            )
        by_token, probabilities = self._distribution(sampling)
        prompt, found = self.task.number_of(prompts), self.task.responses
        sampled = torch.tensor([self.draws.one(probabilities[x]) for x in prompt.tolist()], dtype=torch.int64)
        width = int(found.mask[sampled].sum(-1).max())
        mask, log_probs = found.mask[sampled], by_token[prompt, sampled].float()
        versions = torch.where(mask, self.receipt.version, -1)
        columns = (found.tokens[sampled], mask, log_probs, versions)
        return Sampled(*(column[:, :width].contiguous() for column in columns))

    def _distribution(self, sampling: Sampling) -> tuple[Tensor, list[list[float]]]:
        """Log-probs of the tokens of each response to each prompt, and the probability of each response."""
        if sampling not in self._by_token:
            found = self.task.responses
            policy = _penalized(self.policy, sampling) if sampling.penalizes else self.policy
            narrowed = _narrowed(policy.by_state(sampling.temperature or 1.0), sampling)
            log_probs = torch.where(found.mask, narrowed[:, found.states, found.tokens], 0.0)
            probability = log_probs.sum(-1).exp()
            if sampling.temperature == 0:
                first = _narrowed(policy.by_state(), dataclasses.replace(sampling, top_k=1, top_p=1.0))
                probability = torch.where(found.mask, first[:, found.states, found.tokens], 0.0).sum(-1).exp()
            self._by_token[sampling] = log_probs, probability.tolist()
        return self._by_token[sampling]


def _penalized(policy: Policy, sampling: Sampling) -> Policy:
    """The policy with the penalties of `sampling` in each state; no prompt has a token of a response."""
    found = policy.responses
    tokens = torch.nn.functional.one_hot(found.tokens, policy.logits.shape[-1]) * found.mask[..., None]
    counts = torch.zeros(policy.logits.shape[1:], dtype=torch.int64)
    counts[found.states[found.mask]] = (tokens.cumsum(1) - tokens)[found.mask]
    there, factor = counts > 0, sampling.repetition_penalty
    logits = torch.where(there & (policy.logits > 0), policy.logits / factor, policy.logits)
    logits = torch.where(there & (policy.logits < 0), policy.logits * factor, logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * there
    return dataclasses.replace(policy, logits=logits)


def _narrowed(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Renormalized log-probs of the tokens within min-p, top-k and top-p; -inf for the others."""
    if sampling.min_p > 0:
        within = log_probs >= log_probs.amax(-1, keepdim=True) + math.log(sampling.min_p)
        log_probs = log_probs.masked_fill(~within, -torch.inf).log_softmax(-1)
    order = log_probs.argsort(-1, descending=True)
    ranked = log_probs.gather(-1, order)
    before = ranked.exp().cumsum(-1) - ranked.exp()
    out = before >= sampling.top_p if sampling.top_p < 1 else torch.zeros_like(before, dtype=torch.bool)
    if sampling.top_k:
        out = out | (torch.arange(out.shape[-1]) >= sampling.top_k)
    masked = torch.empty_like(log_probs).scatter_(-1, order, ranked.masked_fill(out, -torch.inf))
    return torch.log_softmax(masked, -1)
