"""The objective of an update: a loss over the tokens of a mini-batch, with KL and entropy, aggregated.

A loss is per token; aggregation is a matrix of weights over the tokens of a *mini-batch*, whose loss is
``(weights * per_token_loss).sum()``. The weights alone know the counts, so micro-batches and ranks each sum their own
rows, and neither their number nor padding changes a gradient.

Metrics merge in the same way. A loss is reported over the share of the mini-batch that the rows at hand are (all shares
of a mini-batch sum to 1), so what is logged is the loss of the mini-batch, or its mean over mini-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.core.operators.loss import Loss, ModelQuantity
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError, type_of
from flowrl.operators.advantages.per_token import Estimator, kl_penalty, select
from flowrl.operators.updates.mini_batches import record
from flowrl.protocols.protocols import OfDistribution
from flowrl.spec import Spec

_REPORTED: dict[ModelQuantity, str] = {
    "log-probs": "actor/pg_loss",
    "distributions": "actor/divergence",
    "values": "critic/vf_loss",
}

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(response_mask: Tensor, aggregation: Aggregation, norm: float | None = None) -> Tensor:
    """The weight of every token of a mini-batch in its loss.

    With N tokens on the mask, S rows that have any, and n of them in this row, a token weighs

    - ``token-mean``: 1 / N (DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 8);
    - ``seq-mean-token-sum``: 1 / S;
    - ``seq-mean-token-mean``: 1 / (S * n) (GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum-norm``: 1 / (S * norm) (Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, §3.2), where `norm` is a
      constant such as the longest response allowed, never a padded width.

    Args:
        response_mask: bool ``[rows response]``, all rows of the mini-batch.
        aggregation: see above.
        norm: the constant of ``seq-mean-token-sum-norm``.

    Returns:
        float32 ``[rows response]``, 0 off the mask; all 0 where nothing is on the mask.

    Raises:
        ParameterError: `norm` is missing, or given for another aggregation.
    """
    check_norm(aggregation, norm)
    lengths = response_mask.sum(-1, keepdim=True, dtype=torch.float32)
    sequences = (lengths > 0).sum().float()
    if aggregation == "token-mean":
        count = lengths.sum()
    elif aggregation == "seq-mean-token-mean":
        count = sequences * lengths
    else:
        count = sequences * (1.0 if norm is None else norm)
    return select((1.0 / count).expand(response_mask.shape), response_mask)


def check_norm(aggregation: Aggregation, norm: float | None) -> None:
    """Refuse a norm that is missing, or given for another aggregation; raises `ParameterError`."""
    if (aggregation == "seq-mean-token-sum-norm") != (norm is not None) or (norm is not None and norm <= 0):
        raise ParameterError(
            f"aggregation={aggregation!r} was given norm={norm!r}; norm is the positive constant that "
            f"seq-mean-token-sum-norm divides by, and belongs to it alone: write "
            f"aggregation='seq-mean-token-sum-norm', norm=<the longest response allowed, in tokens>."
        )


class KLLoss(Spec):
    """KL to the reference as a term of the objective: ``coef * KL`` per token, aggregated as the loss is.

    The estimator sees the policy's own samples, so its gradient differs from the gradient of what it estimates (Tang &
    Munos 2025, arXiv:2506.09477). On-policy, in expectation: k2 follows KL(policy || reference); k3, GRPO's choice,
    follows KL(reference || policy); k1 follows nothing, its gradient is pure noise.

    Args:
        estimator: see `flowrl.operators.advantages.per_token`.
        coef: the weight of KL, beta.
    """

    estimator: Estimator = "k3"
    coef: float = Field(default=0.001, gt=0)


@dataclass(frozen=True)
class TokenObjective:
    """What a trainer or critic minimises over a mini-batch.

    Args:
        loss: per token, or per row.
        aggregation, norm: see `token_weights`.
        kl: a KL term, or None.
        entropy: the weight of the entropy bonus.
        key: what a loss draws from.
    """

    loss: Loss
    aggregation: Aggregation = "token-mean"
    norm: float | None = None
    kl: KLLoss | None = None
    entropy: float = 0.0
    key: Key | None = None

    @property
    def wants_entropy(self) -> bool:
        """Whether entropy is needed with its gradient; entropy that comes without need is still reported."""
        return self.entropy > 0 or "entropies" in self.loss.said

    @property
    def of_distribution(self) -> OfDistribution | None:
        """The loss itself, where it is of whole distributions; the model then says what it is."""
        if "distributions" not in self.loss.said:
            return None
        return OfDistribution(tuple(self.loss.signature.ports), self._of_tokens)

    def _of_tokens(self, log_probs: Tensor, **columns: Tensor) -> Tensor:
        """What the loss says of some tokens, of which `log_probs` ``[tokens vocabulary]`` are the distributions."""
        found: Tensor = self.loss.of({self.loss.said["distributions"]: log_probs, **columns}, Metrics(), self.key)
        self._refuse_shapeless(found, [tuple(log_probs.shape[:1])], f"{len(log_probs)} tokens")
        if log_probs.requires_grad:
            self._refuse_flat(found)
        return found

    def weights(self, response_mask: Tensor) -> Tensor:
        """`token_weights` of a mini-batch: float32 ``[rows response]``."""
        return token_weights(response_mask, self.aggregation, self.norm)

    def __call__(self, output: Tensor, entropy: Tensor | None, batch: Any, weights: Tensor, metrics: Metrics) -> Tensor:
        """The objective over some rows of a mini-batch: a float32 scalar.

        Reports the loss as ``actor/pg_loss``, ``actor/divergence`` (of a loss of distributions) or ``critic/vf_loss``,
        and where they are there ``actor/entropy`` (mean per token) and ``actor/kl_loss`` (before its coefficient).

        Args:
            output: float ``[rows response]``, log-probs or values under the weights as they are; or what
                `of_distribution` gave.
            entropy: float ``[rows response]``, or None.
            batch: the columns of these rows that the loss reads, by their names.
            weights: float32 ``[rows response]``, from `weights`; a token of weight 0 is not looked at.
            metrics: the collector.

        Raises:
            DataError: entropy or `ref_log_prob` is wanted but not there, shapes differ, or the loss returns something
                else than a loss a token or a row.
        """
        on = weights != 0
        new = select(output, on)
        per_token = new if self.of_distribution else self._per_token(new, entropy, batch, on, metrics)
        loss, share, tokens = (weights * per_token).sum(), self._share(weights), on.sum()
        metrics.mean(next(_REPORTED[said] for said in self.loss.said if said in _REPORTED), loss.detach(), share)
        if entropy is not None and "values" not in self.loss.said:
            metrics.mean("actor/entropy", select(entropy.detach(), on).sum(), tokens)
        if self.entropy > 0:
            wanted = _wanted(entropy, "entropy", "an entropy bonus")
            loss = loss - self.entropy * (weights * select(wanted, on)).sum()
        if self.kl is not None:
            ref = select(_wanted(batch.ref_log_prob, "ref_log_prob", "a KL term"), on)
            kl = (weights * kl_penalty(new, ref, self.kl.estimator)).sum()
            metrics.mean("actor/kl_loss", kl.detach(), share)
            loss = loss + self.kl.coef * kl
        return loss

    def _per_token(self, new: Tensor, entropy: Tensor | None, batch: Any, on: Tensor, metrics: Metrics) -> Tensor:
        """What the loss says of each token: float ``[rows response]``, 0 off the mask."""
        said = {"log-probs": new, "values": new, "entropies": entropy}
        columns = {parameter: said[what] for what, parameter in self.loss.said.items()}
        if "entropies" in self.loss.said:
            columns[self.loss.said["entropies"]] = select(_wanted(entropy, "entropy", "a loss that reads it"), on)
        for name in self.loss.signature.ports:
            column = on if name == "response_mask" else getattr(batch, name)
            per_token = isinstance(column, Tensor) and column.ndim == 2 and column.is_floating_point()
            columns[name] = select(column, on) if per_token else column
        found = self.loss.of(columns, metrics, self.key)
        of_rows = [] if self.loss.unit == "token" else [tuple(new.shape[:1])]
        self._refuse_shapeless(found, [tuple(new.shape), *of_rows], f"{len(new)} rows")
        if new.requires_grad:
            self._refuse_flat(found)
        return select(found if found.ndim == 2 else found[:, None].expand(new.shape), on)

    def _refuse_shapeless(self, found: Any, wanted: list[tuple[int, ...]], given: str) -> None:
        """Refuse what is no loss of each token, or of each row."""
        shape = tuple(found.shape) if isinstance(found, Tensor) else type_of(found)
        if shape not in wanted or not found.is_floating_point():
            or_row = f", or of each row, float {wanted[1]}" if len(wanted) > 1 else ""
            if not or_row and shape == wanted[0][:1]:
                or_row = " (a loss of whole rows says so in its class: unit = 'row')"
            raise DataError(
                f"{type(self.loss).__name__} returned {shape} for {given}; expected the loss of each token, "
                f"float {wanted[0]}{or_row}, not summed or averaged: the update does that "
                f"(aggregation={self.aggregation!r})."
            )

    def _refuse_flat(self, found: Tensor) -> None:
        if not found.requires_grad:
            raise DataError(
                f"{type(self.loss).__name__} returned a loss without a gradient; expected one that depends on "
                f"{' and '.join(self.loss.said.values())}: look for .detach(), .item() or torch.no_grad() on its way."
            )

    def _share(self, weights: Tensor) -> Tensor:
        """Which share of the mini-batch these rows are, of its tokens or of its sequences."""
        if self.aggregation in ("token-mean", "seq-mean-token-mean"):
            return weights.sum()  # sums to 1 over the mini-batch
        per_row = weights.sum(-1) / (weights != 0).sum(-1).clamp(min=1)  # 1 / (S * norm) in every row that counts
        return per_row.sum() * (1.0 if self.norm is None else self.norm)


ROW = "row_of_first_pass"
"""The column that says which row of an update one of a micro-batch is, where `FirstPass` is its objective."""


@dataclass(frozen=True)
class FirstPass(TokenObjective):
    """A `TokenObjective` whose loss reads as `old_log_probs` what the model says now: for the one pass of an update
    over all its rows, before any weight has changed.

    Args:
        loss, aggregation, norm, kl, entropy, key: see `TokenObjective`.
        old_log_probs: float32 ``[rows response]``, where what the model says of all rows is entered.
    """

    old_log_probs: Tensor = field(kw_only=True)

    def __call__(self, output: Tensor, entropy: Tensor | None, batch: Any, weights: Tensor, metrics: Metrics) -> Tensor:
        said = output.detach()
        self.old_log_probs[getattr(batch, ROW).to(self.old_log_probs.device)] = said.to(self.old_log_probs.device)
        seen = record({**batch._asdict(), "old_log_probs": said})
        return super().__call__(output, entropy, seen, weights, metrics)


def _wanted(x: Tensor | None, name: str, reason: str) -> Tensor:
    if x is None:
        raise DataError(f"the objective has {reason} and so needs {name}, but got None; pass {name}, or leave it out.")
    return x
