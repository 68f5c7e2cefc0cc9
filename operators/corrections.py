"""Rollout correction: importance weights for the mismatch between the rollout engine and the trainer.

Engines use other kernels, another precision or older weights than the trainer, so their rows are off-policy even if
they have the trainer's version (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"). `Mismatch` measures this, and `RolloutCorrection` multiplies the advantages by bounded importance ratios

    ratio = p(trainer) / p(rollout) = exp(old_log_probs - rollout_log_probs).

PPO's own ratio, of the current to the old policy, is a separate factor and does not change. Most losses are
proportional to the advantages for nonnegative weights, so weighting the advantages weights the loss. Rule FR019 refuses
a correction for the others: `KLCov`, `ClipCov`, `PPOClipNLL` and `DRO`, and token weights for `GMPO`. Tokens or rows
with weight 0 have no gradient but stay on the mask, and so in the counts by which the loss is divided.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, LogitNorms, OldLogProbs, ResponseMask, RolloutLogProbs
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.session import State
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError, offer
from flowrl.operators.advantages.per_token import MAX_EXPONENT, kl_penalty, select
from flowrl.operators.explains import exact, tokens_on

logger = logging.getLogger(__name__)

Level = Literal["token", "sequence", "geometric", "minimum", "maximum", "k2", "k3"]
Mode = Literal["truncate", "clip", "mask", "reject"]

NEAR_ONE = (0.9, 1.1)
"""``rollout/ratio_outside`` counts the ratios outside these bounds."""

ROUNDING = 1e-5
"""Smallest alarm threshold in nats per token: two float32 forward passes differed by 1e-7 on average, and by 3e-5 on
single tokens, which dominate a step with few tokens."""


@torch.no_grad()
def importance_ratios(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """Importance ratios of the trainer to the engine that sampled.

    With ``d = old_log_probs - rollout_log_probs`` on the mask, the logarithm of the ratio is

    - ``token``: d of each token;
    - ``sequence``: the sum of d over the row, the ratio of complete responses; of an episode, of all its segments;
    - ``geometric``: the mean of d over the row, as in GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 7);
    - ``minimum``: the smallest d of the row, of the token that the trainer finds least plausible;
    - ``maximum``: the largest ``|d|`` of the row, of the token with the largest difference in either direction;
    - ``k2``, ``k3``: not a ratio but a divergence, KL(engine || trainer) per token: the mean over the row of
      ``d**2 / 2`` or ``exp(d) - 1 - d`` (see `per_token`).

    The logarithm is clamped to ±20, as in verl, to prevent overflow.

    Args:
        old_log_probs: float ``[batch response]``, log-probs under the trainer.
        rollout_log_probs: float ``[batch response]``, log-probs under the engine.
        response_mask: bool ``[batch response]``.
        level: see above.

    Returns:
        float32, ``[batch response]`` for ``token`` and ``[batch 1]`` otherwise; 1 off the mask and in fully masked rows
        (0 for k2 and k3).
    """
    d = select(old_log_probs, response_mask) - select(rollout_log_probs, response_mask)
    if d.isnan().any():
        row, token = (int(i) for i in d.isnan().nonzero()[0])
        raise DataError(
            f"The importance ratio of row {row}, token {token} is NaN: the trainer's log-prob is "
            f"{float(old_log_probs[row, token]):g} and the engine's {float(rollout_log_probs[row, token]):g}, expected "
            f"finite numbers on the mask. Look for an overflow in the model whose log-prob is not finite.",
            code="correction.nan-ratio",
            row=row,
            token=token,
        )
    if level in ("k2", "k3"):
        divergence = kl_penalty(-d, torch.zeros_like(d), level)
        return divergence.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp(min=1)
    if level == "sequence":
        d = d.sum(-1, keepdim=True)
    elif level == "geometric":
        d = d.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp(min=1)
    elif level == "minimum":
        least = _padded(d.masked_fill(~response_mask, torch.inf), torch.inf).amin(-1, keepdim=True)
        d = least.masked_fill(~response_mask.any(-1, keepdim=True), 0.0)
    elif level == "maximum":
        d = _padded(d.abs(), 0.0).amax(-1, keepdim=True)
    return d.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _padded(d: Tensor, value: float) -> Tensor:
    """`d` with one more column of `value`, since rows may have no tokens."""
    return torch.nn.functional.pad(d, (0, 1), value=value)


def bound_ratios(ratios: Tensor, mode: Mode, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Weights from ratios; both bounds are inclusive.

    - ``truncate``: ``min(ratio, high)``, truncated importance sampling (TIS: Yao et al. 2025; Espeholt et al. 2018,
      arXiv:1802.01561, eq. 1);
    - ``clip``: the ratio, raised to `low` or lowered to `high`;
    - ``mask``: the ratio within the bounds and 0 outside, masked importance sampling (MIS, as in verl);
    - ``reject``: 1 within the bounds and 0 outside, rejection sampling.

    Args:
        ratios: float32, any shape.
        mode: see above.
        low: smallest ratio within the bounds; None is no bound.
        high: largest ratio within the bounds; None is no bound.

    Returns:
        float32 weights, and a bool tensor that is True where the ratio is out of bounds; both of the shape of `ratios`.
    """
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if low is not None:
        outside |= ratios < low
    if high is not None:
        outside |= ratios > high
    if mode in ("truncate", "clip"):
        return ratios.clamp(low if mode == "clip" else None, high), outside
    within = ratios if mode == "mask" else torch.ones_like(ratios)
    return within.masked_fill(outside, 0.0), outside


class RolloutCorrection(Operator):
    """Weight advantages by bounded importance ratios of the trainer to the engine; see `importance_ratios`.

    Insert it after the node that writes the advantages:
    ``edit(insert={"correction": After("whiten", RolloutCorrection())})``. At most one correction that truncates, clips
    or masks may precede an update, and none if the ratio of the loss is to the rollout, or the ratio would count twice
    (rule FR011). Any number of others may reject, such as verl's veto of implausible rows:
    ``RolloutCorrection("minimum", "reject", low=1e-4, high=None)``. `preset` has the methods with a name:
    ``RolloutCorrection.preset("icepop")``.

    Truncation per token is biased and has low variance. Per sequence the correction is unbiased except for its bound,
    and its variance grows with the length. If the engine renormalizes by top-p or top-k, its log-probs are of that
    narrower distribution, and the weights correct for it on the tokens that it could sample.

    Reports, over tokens for level ``token`` and over rows otherwise: ``rollout_corr/ratio_mean``, ``_min`` and ``_max``
    before bounding, ``rollout_corr/weight_mean``, ``rollout_corr/bounded`` (the share out of bounds), and
    ``rollout_corr/ess``, the effective sample size of the weights as a share, ``(sum w)**2 / (n * sum w**2)`` (Kish
    1965). For k2 and k3 the first three are ``rollout_corr/k3_mean`` (or ``k2_mean``), ``_min`` and ``_max``.

    Args:
        level: ``token`` for one weight per token; for one weight per row ``sequence``, ``geometric``, ``minimum``,
            ``maximum``, ``k2`` or ``k3``; see `importance_ratios`.
        mode: ``truncate``, ``clip``, ``mask`` or ``reject``; see `bound_ratios`.
        low: smallest ratio within the bounds; None is no bound, and ``truncate`` has none.
        high: largest ratio within the bounds; None is no bound.
        normalize: divide the weights by their mean over the tokens or rows of the batch (self-normalized importance
            sampling; ``rollout_is_batch_normalize`` of verl).

    Raises:
        ParameterError: bounds, mode, level and normalize contradict each other.
        DataError: a log-prob on the mask is NaN.
    """

    # The effective sample size needs all rows: it cannot be merged from parts of the batch.
    granularity: ClassVar[Granularity] = "batch"

    level: Level = "token"
    mode: Mode = "truncate"
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=2.0, gt=0)
    normalize: bool = False

    @classmethod
    def preset(cls, name: str) -> RolloutCorrection:
        """A correction with a name in the literature.

        - ``truncate``: token weights of at most 2 (TIS: Yao et al. 2025; verl's ``rollout_is=token``);
        - ``mask``: masks rows with a ratio above 3 (MIS: TRL's default, ``sequence_mask``);
        - ``icepop``: masks tokens outside 0.5 to 5 (IcePop: Ling Team 2025, arXiv:2510.18855);
        - ``geometric``: rejects rows with a geometric mean ratio outside 0.99 to 1.001 (verl's ``seq_mean_k1``);
        - ``k3``: rejects rows with k3 above 0.01 (verl's ``seq_mean_k3``);
        - ``veto``: rejects rows with a token ratio below 1e-4 (verl's ``rollout_token_veto``);
        - ``token_truncate``, ``token_mask``, ``sequence_truncate``, ``sequence_mask``: TRL's modes, with its cap of 3.

        Raises:
            ParameterError: no preset has this name.
        """
        if name not in list(PRESETS):
            raise ParameterError(
                f"Unknown preset {name!r}; {offer(name, PRESETS, 'there are')}",
                code="correction.invalid-settings",
                given=name,
            )
        return PRESETS[name]

    def __post_init__(self) -> None:
        if self.mode == "truncate" and (self.low is not None or self.high is None):
            raise self._invalid(
                f"mode='truncate' needs high and no low, given low={self.low!r}, high={self.high!r}. Pass high only, "
                f"or mode='clip' or 'mask'."
            )
        if self.mode == "clip" and None in (self.low, self.high):
            raise self._invalid(
                f"mode='clip' needs low and high, given low={self.low!r}, high={self.high!r}. Pass both, or "
                f"mode='truncate' for high only."
            )
        if self.mode != "reject" and self.level in ("minimum", "maximum", "k2", "k3"):
            raise self._invalid(
                f"level={self.level!r} can only reject rows, since {_NO_WEIGHT[self.level]} of a row is not its "
                f"importance weight, given mode={self.mode!r}. Pass mode='reject', or level='sequence'."
            )
        if self.mode == "reject" and self.normalize:
            raise self._invalid(
                "mode='reject' has weights of 0 and 1 only, which normalize=True would change. Leave normalize out, or "
                "pass mode='truncate' or mode='mask'."
            )
        if self.level in ("k2", "k3") and self.low is not None:
            raise self._invalid(
                f"low={self.low!r} would reject rows on which engine and trainer agree, since level={self.level!r} is "
                f"their divergence. Pass high only, and low=None."
            )
        if (self.low, self.high) == (None, None) or (self.low or 0.0) > (self.high or float("inf")):
            raise self._invalid(
                f"low={self.low!r}, high={self.high!r} is not a range. Set at least one of them, with low <= high."
            )

    def _invalid(self, message: str) -> ParameterError:
        given = {"level": self.level, "mode": self.mode, "low": self.low, "high": self.high}
        return ParameterError(message, code="correction.invalid-settings", **given)

    @property
    def effects(self) -> frozenset[str]:
        """``"importance correction"`` unless `mode` is ``reject``, and ``"token weights"`` for level ``token``."""
        weighs = {Effect.IMPORTANCE_CORRECTION} if self.mode != "reject" else set()
        return frozenset(weighs | ({Effect.TOKEN_WEIGHTS} if self.level == "token" else set()))

    def weights(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The ratios, the weights, and whether each ratio is out of bounds: ``[batch response]`` or ``[batch 1]``."""
        ratios = importance_ratios(old_log_probs, rollout_log_probs, response_mask, self.level)
        weights, outside = bound_ratios(ratios, self.mode, self.low, self.high)
        counted = self._counted(response_mask)
        if self.normalize and (mean := weights[counted].double().mean()) > 0:  # unless empty, or all weights are 0
            weights = weights / mean.float()
        return ratios, weights, outside

    def _counted(self, response_mask: Tensor) -> Tensor:
        """The tokens or rows that have a weight: bool, of its shape."""
        return response_mask if self.level == "token" else response_mask.any(-1, keepdim=True)

    def __call__(
        self,
        advantages: Advantages,
        old_log_probs: OldLogProbs,
        rollout_log_probs: RolloutLogProbs,
        response_mask: ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Advantages:
        ratios, weights, outside = self.weights(old_log_probs, rollout_log_probs, response_mask)
        counted = self._counted(response_mask)
        if counted.any():
            r, w, count = ratios[counted].double(), weights[counted].double(), int(counted.sum())
            quantity = self.level if self.level in ("k2", "k3") else "ratio"
            metrics.mean(f"rollout_corr/{quantity}_mean", r.sum(), count)
            metrics.min(f"rollout_corr/{quantity}_min", r.min())
            metrics.max(f"rollout_corr/{quantity}_max", r.max())
            metrics.mean("rollout_corr/weight_mean", w.sum(), count)
            metrics.mean("rollout_corr/bounded", outside[counted].sum(), count)
            squares = float(w.square().sum())
            metrics.mean("rollout_corr/ess", float(w.sum()) ** 2 / squares if squares else 0.0, count)
        return select(advantages, response_mask) * weights

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        mask, before = inputs["response_mask"], inputs["advantages"][row]
        if not (on := tokens_on(mask, row)):
            return ""
        found = self.weights(inputs["old_log_probs"], inputs["rollout_log_probs"], mask)
        ratios, weights, outside = (column[row].expand(mask.shape[1]) for column in found)
        token = max(on, key=lambda one: abs(float(weights[one]) - 1.0))
        product = f"{exact(before[token])} * {exact(weights[token])} = {exact(outputs['advantages'][row, token])}"
        bound = ", out of bounds" if outside[token] else ""
        of = self.level if self.level in ("k2", "k3") else "ratio"
        return f"token {token}, of the largest correction: A * weight = {product}; {of} {exact(ratios[token])}{bound}"


class CorrectLogitNorms(Operator):
    """Multiply logit norms by the squared weights of a correction, for an `OptimalTokenBaseline`.

    The variance of a weighted gradient grows with the square of its weights, so the minimum-variance baseline weights
    token t by ``sum_{j <= t} rho_j**2 w_j`` (verl's optimal token baseline with rollout correction). Insert it after
    the `LogitNorm`: ``edit(insert={"norms": After("logit_norm", CorrectLogitNorms())})``.

    Args:
        correction: the correction that weights the advantages.

    Raises:
        DataError: a log-prob on the mask is NaN.
    """

    granularity: ClassVar[Granularity] = "batch"

    correction: RolloutCorrection = RolloutCorrection()

    def __call__(
        self,
        logit_norms: LogitNorms,
        old_log_probs: OldLogProbs,
        rollout_log_probs: RolloutLogProbs,
        response_mask: ResponseMask,
    ) -> LogitNorms:
        _, weights, _ = self.correction.weights(old_log_probs, rollout_log_probs, response_mask)
        return select(logit_norms, response_mask) * weights.square()


_NO_WEIGHT = {
    "minimum": "the smallest ratio",
    "maximum": "the largest difference",
    "k2": "the divergence",
    "k3": "the divergence",
}

PRESETS: Mapping[str, RolloutCorrection] = {
    "truncate": RolloutCorrection("token", "truncate", high=2.0),
    "mask": RolloutCorrection("sequence", "mask", high=3.0),
    "icepop": RolloutCorrection("token", "mask", low=0.5, high=5.0),
    "geometric": RolloutCorrection("geometric", "reject", low=0.99, high=1.001),
    "k3": RolloutCorrection("k3", "reject", high=0.01),
    "veto": RolloutCorrection("minimum", "reject", low=1e-4, high=None),
    "token_truncate": RolloutCorrection("token", "truncate", high=3.0),
    "token_mask": RolloutCorrection("token", "mask", high=3.0),
    "sequence_truncate": RolloutCorrection("sequence", "truncate", high=3.0),
    "sequence_mask": RolloutCorrection("sequence", "mask", high=3.0),
}
"""The corrections of `RolloutCorrection.preset`."""


class Mismatched(NamedTuple):
    """The mean of ``|old - rollout|`` in a step, and its alarm threshold (None during calibration); nats per token."""

    logp_diff_mean: float
    alarm_above: float | None


class Mismatch(Operator):
    """Compare the log-probs of engine and trainer on sampled tokens, and warn when the difference grows.

    Reports, over the tokens on the mask: ``rollout/logp_diff_mean`` and ``_max`` of ``|old - rollout|`` in nats,
    ``rollout/ratio_outside``, the share of tokens whose ratio is not within [0.9, 1.1], and ``rollout/kl``, KL(rollout
    || trainer) per token by k3. Reports nothing if no token is on the mask.

    The normal difference depends on engine, precision and model, so the threshold is calibrated on the run: `margin`
    times the largest ``logp_diff_mean`` of the first `calibration` steps, and at least 1e-5 nats, the rounding of
    float32. After these steps ``rollout/alarm_above`` reports it. The operator warns each time the mean rises above the
    threshold. Checkpoints contain the calibration.

    If the engine renormalizes by top-p or top-k, its log-probs are of that narrower distribution and the trainer's of
    the full one, so the difference includes ``-log`` of the retained probability, and the calibration accounts for it.
    Greedy rows do not occur: rule FR007 forbids training on them, and trainers refuse to score them.

    Args:
        calibration: number of steps at the start of a run that define the normal difference.
        margin: threshold as a multiple of the largest of these differences.

    Raises:
        DataError: a log-prob on the mask is NaN.
    """

    granularity: ClassVar[Granularity] = "batch"

    calibration: int = Field(default=10, ge=1)
    margin: float = Field(default=4.0, gt=1)

    seen = State[dict[str, Any]](lambda self: {"steps": 0, "largest": 0.0, "alarm": False})

    def __call__(
        self,
        rollout_log_probs: RolloutLogProbs,
        old_log_probs: OldLogProbs,
        response_mask: ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Mismatched:
        # Select the tokens on the mask first, so that no sum depends on the padding.
        ratios = importance_ratios(old_log_probs, rollout_log_probs, response_mask, "token")[response_mask]
        old, rollout = old_log_probs[response_mask].double(), rollout_log_probs[response_mask].double()
        if not len(ratios):
            return Mismatched(0.0, None)
        difference, outside = (old - rollout).abs(), (ratios < NEAR_ONE[0]) | (ratios > NEAR_ONE[1])
        mean, worst, share = float(difference.mean()), float(difference.max()), float(outside.double().mean())
        metrics.mean("rollout/logp_diff_mean", difference.sum(), len(ratios))
        metrics.max("rollout/logp_diff_max", worst)
        metrics.mean("rollout/ratio_outside", outside.sum(), len(ratios))
        metrics.mean("rollout/kl", kl_penalty(rollout, old, "k3").sum(), len(ratios))

        seen = self.seen.value
        step, largest = seen["steps"] + 1, seen["largest"]
        if step <= self.calibration and math.isfinite(mean):
            self.seen.value = {"steps": step, "largest": max(largest, mean), "alarm": False}
            return Mismatched(mean, None)
        threshold = max(self.margin * largest, ROUNDING)
        metrics.max("rollout/alarm_above", threshold)
        self.seen.value = {"steps": step, "largest": largest, "alarm": mean > threshold}
        if mean > threshold and not seen["alarm"]:
            logger.warning(
                "%s, step %d: the engine's log-probs differ from the trainer's by %.3g nats per token on average and "
                "%.3g at most (%.2g of the ratios are outside [%g, %g]); the alarm threshold is %.3g, from the first "
                "%d steps. Check what changed in engine or trainer, or insert RolloutCorrection().",
                self.name,
                step,
                mean,
                worst,
                share,
                *NEAR_ONE,
                threshold,
                min(step - 1, self.calibration),
            )
        return Mismatched(mean, threshold)
