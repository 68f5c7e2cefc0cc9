"""Rollout correction: for when the engine that sampled and the trainer disagree on a token's probability.

An engine computes with other kernels, another precision or older weights than the trainer, so its rows are off-policy
even where their version is the trainer's own (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"). `Mismatch` measures this, and `RolloutCorrection` weighs the advantages by

    ratio = p(trainer) / p(rollout) = exp(old_log_probs - rollout_log_probs),

bounded. PPO's own ratio, the policy's to the old one, is another factor and stays as it is. The loss is linear in the
advantages for weights that are not negative, so weighing these is weighing the loss. What is bounded away gets the
weight 0 and no gradient; it stays on the mask, and so in the counts that the loss divides by.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl.columns import Advantages, OldLogProbs, ResponseMask, RolloutLogProbs
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.session import State
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError, offer
from flowrl.operators.advantages.per_token import MAX_EXPONENT, kl_penalty, select

logger = logging.getLogger(__name__)

Level = Literal["token", "sequence", "geometric", "minimum", "maximum", "k2", "k3"]
Mode = Literal["truncate", "mask", "reject"]

NEAR_ONE = (0.9, 1.1)
"""Ratios within these bounds count as agreement in ``rollout/ratio_outside``."""

ROUNDING = 1e-5
"""No alarm below this many nats per token: two float32 forward passes were seen to differ by 1e-7 on average, and by
3e-5 on single tokens, which dominate a step that has few."""


@torch.no_grad()
def importance_ratios(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """How much likelier what was sampled is under the trainer than under the engine that sampled it.

    With ``d = old_log_probs - rollout_log_probs`` on the mask, the logarithm of the ratio is

    - ``token``: d, for each token alone;
    - ``sequence``: the sum of d over the row, which is the ratio of the whole responses;
    - ``geometric``: the mean of d over the row, as GSPO takes it (Zheng et al. 2025, arXiv:2507.18071, eq. 7);
    - ``minimum``: the smallest d of the row, of the token that the trainer finds the least plausible;
    - ``maximum``: the largest ``|d|`` of the row, of the token on which they differ most, in either direction;
    - ``k2``, ``k3``: no ratio, but how far apart the two are: KL(engine || trainer) a token, the mean over the row of
      ``d**2 / 2`` or ``exp(d) - 1 - d`` (see `per_token`).

    The logarithm is clamped to ±20, as in verl, so that nothing overflows.

    Args:
        old_log_probs: float ``[batch response]``, the trainer's.
        rollout_log_probs: float ``[batch response]``, the engine's.
        response_mask: bool ``[batch response]``.
        level: see above.

    Returns:
        float32, ``[batch response]`` at the level of tokens and ``[batch 1]`` otherwise; 1 off the mask and in rows
        that are masked entirely (0 by k2 and k3).

    Raises:
        DataError: a log-prob on the mask is NaN, or shapes differ.
    """
    d = select(old_log_probs, response_mask) - select(rollout_log_probs, response_mask)
    if d.isnan().any():
        row, token = (int(i) for i in d.isnan().nonzero()[0])
        raise DataError(
            f"the ratio of row {row}, token {token} is not a number: the trainer's log-prob is "
            f"{float(old_log_probs[row, token]):g} and the engine's {float(rollout_log_probs[row, token]):g}; expected "
            f"finite log-probs on the mask: look for an overflow in the one that is not."
        )
    if level in ("k2", "k3"):
        apart = kl_penalty(-d, torch.zeros_like(d), level)
        return apart.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp(min=1)
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
    """`d` and a column of `value`, for rows that may have no tokens at all."""
    return torch.nn.functional.pad(d, (0, 1), value=value)


def bound_ratios(ratios: Tensor, mode: Mode, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Weights from ratios, with low and high both inclusive.

    - ``truncate``: ``min(ratio, high)``, truncated importance sampling (TIS: Yao et al. 2025; Espeholt et al. 2018,
      arXiv:1802.01561, eq. 1);
    - ``mask``: the ratio within the bounds and 0 outside, masked importance sampling (MIS, as in verl);
    - ``reject``: 1 within the bounds and 0 outside, which takes rows or tokens as they are or not at all.

    Args:
        ratios: float32 of any shape.
        mode: see above.
        low: the smallest ratio that counts; None is no bound.
        high: the largest; None is no bound.

    Returns:
        float32 weights, and a bool that is True where the ratio was out of bounds; both of the shape of `ratios`.
    """
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if low is not None:
        outside |= ratios < low
    if high is not None:
        outside |= ratios > high
    if mode == "truncate":
        return ratios.clamp(max=high), outside
    within = ratios if mode == "mask" else torch.ones_like(ratios)
    return within.masked_fill(outside, 0.0), outside


class RolloutCorrection(Operator):
    """Advantages weighed by bounded importance ratios of the trainer to the engine; see `importance_ratios`.

    Insert it behind what writes the advantages: ``edit(insert={"correction": After("whiten", RolloutCorrection())})``.
    Only one may weigh on the way to an update, and none where the loss's own ratio is to the rollout, or the ratio
    would count twice (rule FR011); any number of others may reject before or behind it, such as implausible rows:
    ``RolloutCorrection("minimum", "reject", low=1e-4, high=None)``, which is verl's veto. `preset` has what is known by
    name: ``RolloutCorrection.preset("icepop")``.

    Truncated per token it is biased but calm; per sequence it is the unbiased correction but for its bound, and its
    variance grows with the length. Where an engine renormalised by top-p or top-k, its log-probs are of that narrower
    distribution, which the weights then correct for on the tokens that it could sample.

    Reports, over tokens, or over rows at the other levels: ``rollout_corr/ratio_mean``, ``_min`` and ``_max`` before
    bounding, ``rollout_corr/weight_mean``, ``rollout_corr/bounded`` (the share out of bounds), and
    ``rollout_corr/ess``, the effective sample size of the weights as a share, ``(sum w)**2 / (n * sum w**2)`` (Kish
    1965). By k2 and k3, which are no ratios, ``rollout_corr/k3_mean``, ``_min`` and ``_max`` take the place of the
    first.

    Args:
        level: what has one weight: each token, or each row by its whole ratio, its geometric mean, its least token, or
            the one that differs most; or by how far engine and trainer are apart on it, by k2 or k3.
        mode: what happens to a ratio out of bounds: it is cut to `high`, or its weight is 0; see `bound_ratios`.
        low: the smallest ratio that counts; None is no bound, and truncation has none.
        high: the largest; None is no bound.
        normalize: divide the weights by their mean over the batch, of tokens or rows as `level` has it, so that they
            are 1 on average (self-normalised importance sampling; ``rollout_is_batch_normalize`` of verl).

    Raises:
        ParameterError: bounds, mode and level do not go together.
        DataError: a log-prob on the mask is NaN.
    """

    # The effective sample size is of all rows together, and no share of it merges into the whole one.
    granularity: ClassVar[Granularity] = "batch"

    level: Level = "token"
    mode: Mode = "truncate"
    low: float | None = Field(default=None, gt=0)
    high: float | None = Field(default=2.0, gt=0)
    normalize: bool = False

    @classmethod
    def preset(cls, name: str) -> RolloutCorrection:
        """A correction under the name by which it is known.

        - ``truncate``: tokens weigh at most 2 (TIS: Yao et al. 2025; verl's ``rollout_is=token``);
        - ``mask``: rows whose ratio is above 3 are left out (MIS: TRL's default, ``sequence_mask``);
        - ``icepop``: tokens outside 0.5 to 5 are left out (IcePop: Ling Team 2025, arXiv:2510.18855);
        - ``geometric``: rows whose mean ratio is outside 0.99 to 1.01 are left out (verl's ``seq_mean_k1``);
        - ``k3``: rows on which k3 is above 0.01 are left out (verl's ``seq_mean_k3``);
        - ``veto``: rows with a token below 1e-4 are left out (verl's ``rollout_token_veto``);
        - ``token_truncate``, ``token_mask``, ``sequence_truncate``, ``sequence_mask``: TRL's modes, at its cap of 3.

        Raises:
            ParameterError: no preset has this name.
        """
        if name not in list(PRESETS):
            raise ParameterError(f"no preset is called {name!r}; {offer(name, PRESETS, 'there are')}")
        return PRESETS[name]

    def __post_init__(self) -> None:
        if self.mode == "truncate" and (self.low is not None or self.high is None):
            raise ParameterError(
                f"truncation cuts ratios to high and nothing else, but was given low={self.low!r}, high={self.high!r}; "
                f"give it high alone, or take mode='mask'"
            )
        if self.mode != "reject" and self.level in ("minimum", "maximum", "k2", "k3"):
            raise ParameterError(
                f"{_NO_WEIGHT[self.level]} of a row is no weight for it, so level={self.level!r} cannot go with "
                f"mode={self.mode!r}; take mode='reject', or level='sequence'"
            )
        if self.mode == "reject" and self.normalize:
            raise ParameterError(
                "what is rejected weighs 0 and all else 1, so that normalize=True would weigh what is kept; expected "
                "it with mode='truncate' or mode='mask'"
            )
        if self.level in ("k2", "k3") and self.low is not None:
            raise ParameterError(
                f"low={self.low!r} would reject rows on which engine and trainer agree, since {self.level} is how far "
                f"they are apart; give it high alone"
            )
        if (self.low, self.high) == (None, None) or (self.low or 0.0) > (self.high or float("inf")):
            raise ParameterError(
                f"low={self.low!r}, high={self.high!r} exclude nothing; set at least one, with low <= high"
            )

    @property
    def effects(self) -> frozenset[str]:
        """``"importance correction"``, but where rows are only rejected: those that are kept weigh 1; and ``"weighs
        tokens"`` where each token of a row has a weight of its own."""
        weighs = {Effect.IMPORTANCE_CORRECTION} if self.mode != "reject" else set()
        return frozenset(weighs | ({Effect.WEIGHS_TOKENS} if self.level == "token" else set()))

    def __call__(
        self,
        advantages: Advantages,
        old_log_probs: OldLogProbs,
        rollout_log_probs: RolloutLogProbs,
        response_mask: ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Advantages:
        ratios = importance_ratios(old_log_probs, rollout_log_probs, response_mask, self.level)
        weights, outside = bound_ratios(ratios, self.mode, self.low, self.high)
        counted = response_mask if self.level == "token" else response_mask.any(-1, keepdim=True)
        if self.normalize and (mean := weights[counted].double().mean()) > 0:  # not where there is none, or all weigh 0
            weights = weights / mean.float()
        if counted.any():
            r, w, count = ratios[counted].double(), weights[counted].double(), int(counted.sum())
            what = self.level if self.level in ("k2", "k3") else "ratio"
            metrics.mean(f"rollout_corr/{what}_mean", r.sum(), count)
            metrics.min(f"rollout_corr/{what}_min", r.min())
            metrics.max(f"rollout_corr/{what}_max", r.max())
            metrics.mean("rollout_corr/weight_mean", w.sum(), count)
            metrics.mean("rollout_corr/bounded", outside[counted].sum(), count)
            squares = float(w.square().sum())
            metrics.mean("rollout_corr/ess", float(w.sum()) ** 2 / squares if squares else 0.0, count)
        return select(advantages, response_mask) * weights


_NO_WEIGHT = {
    "minimum": "the least ratio",
    "maximum": "the largest difference",
    "k2": "the distance",
    "k3": "the distance",
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
"""Of `RolloutCorrection.preset`."""


class Mismatched(NamedTuple):
    """How far engine and trainer differed in a step: the mean of ``|old - rollout|`` in nats per token, and above which
    value that raises an alarm (None during calibration)."""

    logp_diff_mean: float
    alarm_above: float | None


class Mismatch(Operator):
    """Whether the engine and the trainer agree on what was sampled; warns when they drift apart.

    It reports over the tokens on the mask: ``rollout/logp_diff_mean`` and ``_max`` of ``|old - rollout|`` in nats,
    ``rollout/ratio_outside``, the share of tokens whose ratio is not within [0.9, 1.1], and ``rollout/kl``, KL(rollout
    || trainer) per token by k3; nothing in a step that has no token on the mask.

    What is normal depends on engine, precision and model, so the alarm is calibrated on the run itself: it is raised
    where ``logp_diff_mean`` exceeds `margin` times the largest of the first `calibration` steps (and float32's own
    rounding). After these steps ``rollout/alarm_above`` is that threshold. It warns once each time the mean rises above
    it, and its calibration goes into checkpoints.

    Where the engine renormalises by top-p or top-k, its log-probs are of that narrower distribution and the trainer's
    are of the whole one, so the numbers also contain ``-log`` of the probability that was kept, and calibration takes
    that as normal. Greedy rows never get here: rule FR007 refuses to train on them, and a trainer to score them.

    Args:
        calibration: how many steps at the start of a run define what is normal.
        margin: the alarm is raised above `margin` times the largest of these.

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
        # From here on only tokens on the mask, so that no sum depends on how wide the rows are padded.
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
                "%d steps. Look at what changed in engine or trainer, or insert RolloutCorrection().",
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
