"""The objective of an update: a per-token loss with KL and entropy terms, aggregated over a mini-batch.

Aggregation is a matrix of weights over the tokens of a *mini-batch*; its loss is ``(weights * per_token_loss).sum()``.
Only the weights depend on counts, so micro-batches and ranks sum their own rows, and neither their number nor padding
changes a gradient.

Metrics merge in the same way: losses are reported over the share of the mini-batch that the rows are, and the shares of
a mini-batch sum to 1. The logged value is the loss of the mini-batch, averaged over mini-batches; with ``token-sum`` it
is the mean over tokens.
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
from flowrl.operators.advantages.per_token import MAX_EXPONENT, Estimator, kl_penalty, select
from flowrl.operators.losses.row_means import ROW, RowMeans
from flowrl.operators.updates.mini_batches import record
from flowrl.protocols.protocols import OfDistribution
from flowrl.spec import Spec

_REPORTED: dict[ModelQuantity, str] = {
    "log-probs": "actor/pg_loss",
    "distributions": "actor/divergence",
    "values": "critic/vf_loss",
    "scores": "reward_model/loss",
}

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(response_mask: Tensor, aggregation: Aggregation, norm: float | None = None) -> Tensor:
    """The weight of each token of a mini-batch in its loss.

    With N tokens on the mask, S rows that have any, and n of them in this row, the weight of a token is

    - ``token-mean``: 1 / N (DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 8);
    - ``token-sum``: 1, as in verl; the gradient grows with the mini-batch;
    - ``seq-mean-token-sum``: 1 / S;
    - ``seq-mean-token-mean``: 1 / (S * n) (GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum-norm``: 1 / (S * norm) (Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, §3.2), where `norm` is a
      constant such as the maximum response length, never a padded width.

    Args:
        response_mask: bool ``[rows response]``, all rows of the mini-batch.
        aggregation: see above.
        norm: the constant of ``seq-mean-token-sum-norm``.

    Returns:
        float32 ``[rows response]``, 0 off the mask; all 0 for an empty mask.
    """
    check_norm(aggregation, norm)
    lengths = response_mask.sum(-1, keepdim=True, dtype=torch.float32)
    sequences = (lengths > 0).sum().float()
    if aggregation == "token-mean":
        count = lengths.sum()
    elif aggregation == "seq-mean-token-mean":
        count = sequences * lengths
    elif aggregation == "token-sum":
        count = torch.ones_like(lengths)
    else:
        count = sequences * (1.0 if norm is None else norm)
    return select((1.0 / count).expand(response_mask.shape), response_mask)


def check_norm(aggregation: Aggregation, norm: float | None) -> None:
    """Refuse a norm that is missing, not positive, or given for another aggregation."""
    if (aggregation == "seq-mean-token-sum-norm") != (norm is not None) or (norm is not None and norm <= 0):
        raise ParameterError(
            f"aggregation={aggregation!r} was given norm={norm!r}; the aggregation 'seq-mean-token-sum-norm', and no "
            f"other, divides by a positive norm. Pass aggregation='seq-mean-token-sum-norm', norm=<maximum response "
            f"length in tokens>.",
            code="objective.invalid-settings",
            aggregation=aggregation,
            given=norm,
        )


class KLLoss(Spec):
    """KL to the reference as a term of the objective: ``coef * KL`` per token, aggregated like the loss.

    The estimator uses the policy's own samples, so its gradient is not the gradient of the KL that it estimates (Tang &
    Munos 2025, arXiv:2506.09477). On-policy and in expectation, the gradient of k2 is that of KL(policy || reference);
    of k3, GRPO's choice, that of KL(reference || policy); of k1, zero: it is noise. ``k1+`` and ``k3+`` have the
    gradient of k2. With `ratio`, every unbiased estimator (k1, k3) has the gradient of KL(policy || reference).

    Args:
        estimator: see `flowrl.operators.advantages.per_token`.
        coef: coefficient of the KL term, beta; at 0, which a schedule may reach, the term has no gradient.
        ratio: multiply the estimate of each token by its ratio ``exp(log_prob - old_log_prob)``, which has a gradient
            (DeepSeek-V3.2: DeepSeek-AI 2025, arXiv:2512.02556; TRL's ``use_bias_correction_kl``). It also corrects for
            rows of the old policy. The old log-probs are those of the loss; without any, the ratio is 1.
        bound: bound on the absolute estimate of a token in nats, beyond which it has no gradient; None is none. verl
            bounds k3 by 10, OpenRLHF every estimate.
    """

    estimator: Estimator = "k3"
    coef: float = Field(default=0.001, ge=0)
    ratio: bool = False
    bound: float | None = Field(default=None, gt=0)

    def of_tokens(self, log_probs: Tensor, ref_log_prob: Tensor, old_log_probs: Tensor) -> Tensor:
        """The estimate of each token, before its coefficient: float32, the shape of `log_probs`."""
        kl = kl_penalty(log_probs, ref_log_prob, self.estimator, self.bound)
        if not self.ratio:
            return kl
        return kl * (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


@dataclass(frozen=True)
class TokenObjective:
    """The function that a trainer or critic minimizes over a mini-batch.

    Args:
        loss: the loss of each token, or of each row.
        aggregation, norm: see `token_weights`.
        kl: a KL term, or None.
        entropy: coefficient of the entropy bonus.
        key: random key of a loss that samples.
        rows: collects what is reported of tokens by row, and needs the column `ROW`; None does not.
    """

    loss: Loss
    aggregation: Aggregation = "token-mean"
    norm: float | None = None
    kl: KLLoss | None = None
    entropy: float = 0.0
    key: Key | None = None
    rows: RowMeans | None = None

    @property
    def wants_entropy(self) -> bool:
        """Whether the objective needs the gradient of the entropy; entropy without need is still reported."""
        return self.entropy > 0 or "entropies" in self.loss.model_ports

    @property
    def of_distribution(self) -> OfDistribution | None:
        """A loss of full distributions, which the model evaluates; None for other losses."""
        if "distributions" not in self.loss.model_ports:
            return None
        return OfDistribution(tuple(self.loss.signature.ports), self._of_tokens)

    def _of_tokens(self, log_probs: Tensor, **columns: Tensor) -> Tensor:
        """The loss of some tokens, given their distributions: `log_probs` ``[tokens vocabulary]``."""
        loss: Tensor = self.loss.of({self.loss.model_ports["distributions"]: log_probs, **columns}, Metrics(), self.key)
        self._refuse_shape(loss, [tuple(log_probs.shape[:1])], f"{len(log_probs)} tokens")
        if log_probs.requires_grad:
            self._refuse_no_gradient(loss)
        return loss

    @property
    def of_tokens(self) -> bool:
        """Whether the loss of each token needs no other."""
        return self.loss.unit == "token"

    def weights(self, response_mask: Tensor) -> Tensor:
        """`token_weights` of a mini-batch: float32 ``[rows response]``."""
        return token_weights(response_mask, self.aggregation, self.norm)

    def __call__(self, output: Tensor, entropy: Tensor | None, batch: Any, weights: Tensor, metrics: Metrics) -> Tensor:
        """The objective over some rows of a mini-batch: a float32 scalar.

        Reports the loss as ``actor/pg_loss``, ``actor/divergence`` (a loss of distributions), ``critic/vf_loss`` or
        ``reward_model/loss``, and if available ``actor/entropy`` (mean per token, in nats) and ``actor/kl_loss``
        (before its coefficient).

        Args:
            output: float ``[rows response]``, log-probs, values or scores under the current weights; or the result of
                `of_distribution`.
            entropy: float ``[rows response]``, or None.
            batch: the columns of these rows that the loss reads, by name.
            weights: float32 ``[rows response]``, from `weights`; tokens with weight 0 are ignored.
            metrics: the collector.
        """
        metrics.of_tokens.clear()
        on = weights != 0
        new = select(output, on)
        per_token = new if self.of_distribution else self._per_token(new, entropy, batch, on, metrics)
        loss, share = (weights * per_token).sum(), self._share(weights)
        metrics.mean(
            next(_REPORTED[quantity] for quantity in self.loss.model_ports if quantity in _REPORTED),
            loss.detach(),
            share,
        )
        if entropy is not None and "values" not in self.loss.model_ports:
            of_tokens = select(entropy.detach(), on)
            metrics.tokens("actor/entropy", of_tokens, on)
            if self.rows is not None:
                self.rows.add_entropies(getattr(batch, ROW), of_tokens, on)
        if self.rows is not None:
            self.rows.add(getattr(batch, ROW), metrics.of_tokens, on)
        if self.entropy > 0:
            bonus = select(_needed(entropy, "entropy", "an entropy bonus"), on)
            loss = loss - self.entropy * (weights * bonus).sum()
        if self.kl is not None:
            ref = select(_needed(batch.ref_log_prob, "ref_log_prob", "a KL term"), on)
            old = getattr(batch, "old_log_probs", None)
            old = new.detach() if old is None else select(old, on)
            kl = (weights * self.kl.of_tokens(new, ref, old)).sum()
            metrics.mean("actor/kl_loss", kl.detach(), share)
            loss = loss + self.kl.coef * kl if self.kl.coef else loss
        return loss

    def _per_token(self, new: Tensor, entropy: Tensor | None, batch: Any, on: Tensor, metrics: Metrics) -> Tensor:
        """The loss of each token: float ``[rows response]``, 0 off the mask."""
        outputs = {"log-probs": new, "values": new, "scores": new, "entropies": entropy}
        columns = {parameter: outputs[quantity] for quantity, parameter in self.loss.model_ports.items()}
        if "entropies" in self.loss.model_ports:
            columns[self.loss.model_ports["entropies"]] = select(
                _needed(entropy, "entropy", "a loss that reads it"), on
            )
        for name in self.loss.signature.ports:
            column = on if name == "response_mask" else getattr(batch, name)
            per_token = isinstance(column, Tensor) and column.ndim == 2 and column.is_floating_point()
            columns[name] = select(column, on) if per_token else column
        loss = self.loss.of(columns, metrics, self.key)
        of_rows = [] if self.loss.unit == "token" else [tuple(new.shape[:1])]
        self._refuse_shape(loss, [tuple(new.shape), *of_rows], f"{len(new)} rows")
        if new.requires_grad:
            self._refuse_no_gradient(loss)
        return select(loss if loss.ndim == 2 else loss[:, None].expand(new.shape), on)

    def _refuse_shape(self, loss: Any, expected: list[tuple[int, ...]], given: str) -> None:
        """Refuse what is not one loss per token, or per row."""
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type_of(loss)
        if shape not in expected or not loss.is_floating_point():
            or_row = f", or of each row, float {expected[1]}" if len(expected) > 1 else ""
            if not or_row and shape == expected[0][:1]:
                or_row = " (set unit = 'row' in the class for a loss of each row)"
            raise DataError(
                f"{type(self.loss).__name__} returned {shape} for {given}, expected the loss of each token, "
                f"float {expected[0]}{or_row}. Do not sum or average it: the update does, by "
                f"aggregation={self.aggregation!r}.",
                code="objective.loss-shape",
                loss=type(self.loss).__name__,
                expected=expected[0],
                found=shape,
            )

    def _refuse_no_gradient(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise DataError(
                f"{type(self.loss).__name__} returned a loss without a gradient, expected one that depends on "
                f"{' and '.join(self.loss.model_ports.values())}. Remove .detach(), .item() or no_grad() from it.",
                code="objective.no-gradient",
                loss=type(self.loss).__name__,
            )

    def _share(self, weights: Tensor) -> Tensor:
        """The share of these rows in the tokens or sequences of the mini-batch; for ``token-sum`` their tokens."""
        if self.aggregation in ("token-mean", "token-sum", "seq-mean-token-mean"):
            return weights.sum()  # sums to 1 over the mini-batch, or to its tokens
        per_row = weights.sum(-1) / (weights != 0).sum(-1).clamp(min=1)  # 1 / (S * norm) in each row with tokens
        return per_row.sum() * (1.0 if self.norm is None else self.norm)


@dataclass(frozen=True)
class FirstPass(TokenObjective):
    """A `TokenObjective` whose `old_log_probs` are the current log-probs: for an update of one pass, before any weight
    changes. It writes those of all rows into `old_log_probs`, float32 ``[rows response]``."""

    old_log_probs: Tensor = field(kw_only=True)

    def __call__(self, output: Tensor, entropy: Tensor | None, batch: Any, weights: Tensor, metrics: Metrics) -> Tensor:
        current = output.detach()
        rows, on = (x.to(self.old_log_probs.device) for x in (getattr(batch, ROW), weights != 0))
        self.old_log_probs[rows] = torch.where(on, current.to(on.device), self.old_log_probs[rows])
        columns = record({**batch._asdict(), "old_log_probs": current})
        return super().__call__(output, entropy, columns, weights, metrics)


def _needed(x: Tensor | None, name: str, reason: str) -> Tensor:
    if x is None:
        raise DataError(
            f"The objective has {reason}, which needs {name}, and got None. Pass {name}, or remove {reason}.",
            code="objective.missing-column",
            column=name,
        )
    return x
