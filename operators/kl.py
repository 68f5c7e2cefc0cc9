"""KL penalty in the reward, with a fixed or an adaptive coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import OldLogProbs, RefLogProbs, ResponseMask, TokenLevelRewards, TokenLevelScores
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.session import State
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import Estimator, kl_penalty, select, select_rewards
from flowrl.operators.explains import exact, tokens_on
from flowrl.spec import Spec


@torch.no_grad()
def kl_shape(
    scores: Tensor,
    old: Tensor,
    ref: Tensor,
    mask: Tensor,
    coef: float,
    estimator: Estimator = "k1",
    bound: float | None = None,
) -> Tensor:
    """Rewards with a KL penalty (Ziegler et al. 2019, arXiv:1909.08593, eq. 2): ``score - coef * KL``.

    Args:
        scores: float ``[batch response]``; zero off the mask.
        old: float ``[batch response]``, log-probs of the policy.
        ref: float ``[batch response]``, log-probs of the reference.
        mask: bool ``[batch response]``.
        coef: coefficient of the KL penalty, beta.
        estimator: see `flowrl.operators.advantages.per_token`.
        bound: see `flowrl.operators.advantages.per_token.kl_penalty`.

    Returns:
        float32 ``[batch response]``, 0 off the mask.
    """
    kl = kl_penalty(select(old, mask), select(ref, mask), estimator, bound)
    return select_rewards(scores, mask, "token_level_scores") - coef * kl


class AdaptiveKL(Spec):
    """A KL coefficient controlled towards a target KL (Ziegler et al. 2019, arXiv:1909.08593, §2.2).

    Args:
        target: target KL in nats per token, the mean logged as ``kl/ref``. (Ziegler et al. count nats per response;
            multiply by the response length to compare.)
        horizon: rows over which the coefficient may change by at most 20 %; at least the rows of one step.
        coef: initial coefficient.
    """

    target: float = Field(gt=0)
    horizon: float = Field(default=10_000, gt=0)
    coef: float = Field(default=0.001, gt=0)


def adapt_kl_coef(coef: float, kl: float, rows: int, controller: AdaptiveKL) -> float:
    """The coefficient of the next step: ``coef * (1 + e * rows / horizon)`` with ``e = clip(kl / target - 1, ±0.2)``.

    The update of Ziegler et al. 2019 (§2.2, where ``rows / horizon`` is the constant K).

    Args:
        coef: coefficient of this step.
        kl: mean KL per token of this step, in nats.
        rows: number of rows in this step.
        controller: target and horizon.
    """
    if rows > controller.horizon:
        raise ParameterError(
            f"AdaptiveKL has a horizon of {controller.horizon:g} rows, and one step has {rows}. Set the horizon to "
            f"the rows of several steps, such as AdaptiveKL(horizon={20 * rows}).",
            code="reward.invalid-settings",
            given=controller.horizon,
            expected=rows,
        )
    error = min(max(kl / controller.target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * rows / controller.horizon)


class KLShape(Operator):
    """Subtract a KL penalty from the scores, with a fixed or an adaptive coefficient; see `kl_shape`.

    Reports ``kl/ref``, the mean KL per token in nats, and ``kl/coef``, the coefficient of this step.

    Args:
        coef: coefficient of the KL penalty, or an `AdaptiveKL`, which is updated once per call.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ...; see `flowrl.operators.advantages.per_token`.
        bound: bound on the absolute estimate of a token in nats; None is none. verl bounds k3 by 10, OpenRLHF every
            estimate.
    """

    coef: Annotated[float, Field(ge=0)] | AdaptiveKL = 0.001
    estimator: Estimator = "k1"
    bound: float | None = Field(default=None, gt=0)

    beta = State(lambda self: self.coef.coef if isinstance(self.coef, AdaptiveKL) else self.coef)

    @property
    def effects(self) -> frozenset[str]:
        """``{"kl"}``, unless the coefficient is 0."""
        return frozenset({Effect.KL} if self.coef != 0 else ())

    def __call__(
        self,
        token_level_scores: TokenLevelScores,
        old_log_probs: OldLogProbs,
        ref_log_prob: RefLogProbs,
        response_mask: ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> TokenLevelRewards:
        coef = self._coef
        given = old_log_probs, ref_log_prob, response_mask
        rewards = kl_shape(token_level_scores, *given, coef, self.estimator, self.bound)
        old, ref = (select(log_probs, response_mask) for log_probs in given[:2])
        kl = kl_penalty(old, ref, self.estimator, self.bound)
        total, tokens = float(kl.sum().detach()), int(response_mask.sum())
        metrics.mean("kl/ref", total, tokens)
        metrics.mean("kl/coef", coef)
        if isinstance(self.coef, AdaptiveKL) and tokens:
            self.beta.value = adapt_kl_coef(coef, total / tokens, len(response_mask), self.coef)
        return rewards

    @property
    def _coef(self) -> float:
        """The coefficient; a fixed one is from the field, since restored state must not override an edited graph."""
        return self.beta.value if isinstance(self.coef, AdaptiveKL) else self.coef

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not (on := tokens_on(inputs["response_mask"], row)):
            return ""
        score, old, ref = (inputs[name][row] for name in ("token_level_scores", "old_log_probs", "ref_log_prob"))
        kl = kl_penalty(old, ref, self.estimator, self.bound)
        token = max(on, key=lambda one: abs(float(kl[one])))
        after = exact(outputs["token_level_rewards"][row, token])
        penalty = f"{exact(score[token])} - {self._coef} * {exact(kl[token])}"
        logs = f"{exact(old[token])} and {exact(ref[token])}"
        return f"token {token}, of the largest KL: score - coef * KL = {penalty} = {after}; {self.estimator} of {logs}"
