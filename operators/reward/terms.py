"""Several rewards, each a node of its own: weighed and added up, as scores or as advantages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from flowrl.columns import Advantages, ResponseMask, ResponseText, TokenLevelRewards, TokenLevelScores, Uid, parse
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED, FromParameters, Port, PortField, Signature
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.groups import Groups
from flowrl.operators.advantages.per_token import select, select_rewards
from flowrl.operators.reward.models import report
from flowrl.operators.reward.operator import place_scores

OWN = frozenset({"response_mask", "uid", "metrics"})


class _Terms:
    """What the operators below share: a port for each term, under the name that it has in `weights`."""

    weights: Mapping[str, float]
    takes: ClassVar[Any]

    @cached_property
    def more_ports(self) -> Signature:
        """A port for each term."""
        wanted = parse(self.takes)
        assert wanted is not None
        return Signature({name: Port(name, {PortField(name): wanted}) for name in self.weights}, {}, {})

    @field_validator("weights", mode="after")
    @classmethod
    def _refuse_misnamed(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        if not weights or (bad := [name for name in weights if not name.isidentifier() or name in OWN]):
            raise ValueError(
                f"{bad[0]!r} cannot be the name of a term; expected identifiers other than {', '.join(sorted(OWN))}"
                if weights
                else "there is no term; expected the weight of each by its name, such as {'accuracy': 1.0}"
            )
        return weights


class WeighRewards(_Terms, Operator):
    """Rewards added up by weights: ``sum_k w_k * score_k``, token by token; each is a port under its name.

    ``WeighRewards({"accuracy": 1.0, "format": 0.2}, gates={"format": "accuracy"})(response_mask=..., accuracy=...,
    format=...)``: a term with a gate counts in those rows alone that passed another term, whose weight may be 0.

    Reports ``reward/<term>``, the mean of each term over rows with a token on the mask, before weights and gates; and
    ``reward/mean``, ``reward/min`` and ``reward/max`` of what it writes. So a node that writes a term reports under
    another name: ``Reward(fn, log="reward/accuracy")``.

    Args:
        weights: of each term, by name.
        gates: by term, the term that a row must have passed.
        passed: a row passes a term where its score is above.

    Raises:
        ParameterError: a gate of or by a term that there is not, or names that ports cannot have.
        DataError: a score off the mask.
    """

    granularity: ClassVar[Granularity] = "row"
    takes: ClassVar[Any] = TokenLevelScores

    weights: Mapping[str, float]
    gates: Mapping[str, str] = Field(default_factory=dict)
    passed: float = 0.5

    def __post_init__(self) -> None:
        for term, gate in self.gates.items():
            if term == gate or not {term, gate} <= self.weights.keys():
                raise ParameterError(
                    f"gates={dict(self.gates)} lets {term!r} count where {gate!r} passed; expected two different terms "
                    f"out of {', '.join(self.weights)}; a term that only opens gates has the weight 0."
                )

    def __call__(
        self, response_mask: ResponseMask, metrics: Metrics = INJECTED, **terms: FromParameters
    ) -> TokenLevelScores:
        live = response_mask.any(-1)
        scores = {name: select_rewards(terms[name], response_mask, name) for name in self.weights}
        total = torch.zeros(response_mask.shape, device=response_mask.device)
        for name, score in scores.items():
            metrics.mean(f"reward/{name}", score.sum(dtype=torch.float64), live.sum())
            if name in self.gates:
                score = torch.where((scores[self.gates[name]].sum(-1) > self.passed)[:, None], score, 0.0)
            total = total + self.weights[name] * score
        report("reward", total.sum(-1)[live], metrics)
        return total


@torch.no_grad()
def gdpo_advantage(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    response_mask: Tensor,
    uid: np.ndarray,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages of several rewards, each normalised by itself (GDPO: Liu et al. 2026, arXiv:2601.05242).

    With the score s_k of a row by term k, ``a_k = (s_k - mean(s_k)) / (std(s_k) + eps)`` over the rows of its group,
    ``a = sum_k w_k a_k``, and the advantage is ``(a - mean(a)) / (std(a) + eps)`` over all rows of the batch: so two
    rows whose terms add up alike may differ, and the size does not grow with the number of terms. Standard deviations
    are those of samples (``n - 1``).

    Args:
        terms: by name, float ``[batch response]``; zero off the mask.
        weights: by name.
        response_mask, uid: see `Groups`.
        eps: added to each standard deviation.

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 where no group has scores that differ.

    Raises:
        DataError: as `Groups`.
    """
    total = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    live = response_mask.any(-1).double()
    for name, weight in weights.items():
        group = Groups(terms[name], response_mask, uid)
        centred = live * (group.scores - group.mean(group.scores))
        variance = group.sum(centred.square()) / (group.size - 1).clamp(min=1)
        total += weight * centred / (variance.sqrt() + eps)
    rows = live.sum()
    centred = live * (total - total.sum() / rows.clamp(min=1))
    std = (centred.square().sum() / (rows - 1).clamp(min=1)).sqrt()
    return select((centred / (std + eps)).unsqueeze(-1).expand(response_mask.shape), response_mask)


class GDPOAdvantage(_Terms, Operator):
    """Advantages of several rewards, each normalised in its group by itself, as in GDPO; see `gdpo_advantage`.

    Each term is a port under its name: ``GDPOAdvantage({"accuracy": 1.0, "format": 0.5})``.

    Args:
        weights: of each term, by name.
        eps: added to each standard deviation.
    """

    granularity: ClassVar[Granularity] = "batch"
    takes: ClassVar[Any] = TokenLevelRewards

    weights: Mapping[str, float]
    eps: float = Field(default=1e-6, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline", "scaled"}``: it needs several rows per prompt, and divides by standard deviations."""
        return frozenset({Effect.GROUP_BASELINE, Effect.SCALED})

    def __call__(self, response_mask: ResponseMask, uid: Uid, **terms: FromParameters) -> Advantages:
        return gdpo_advantage(terms, self.weights, response_mask, uid, self.eps)


class Matches(Operator):
    """1 where the text of the response matches a pattern as a whole, else 0: a reward for a format.

    Args:
        pattern: a regular expression (`re.fullmatch`, where ``.`` is any character).

    Raises:
        ParameterError: it is none.
    """

    granularity: ClassVar[Granularity] = "row"
    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ParameterError(f"the pattern {self.pattern!r} is no regular expression ({error}).") from None

    def __call__(self, response_text: ResponseText, response_mask: ResponseMask) -> TokenLevelScores:
        compiled = re.compile(self.pattern, re.DOTALL)
        scores = [float(compiled.fullmatch(text) is not None) for text in response_text]
        return place_scores(torch.tensor(scores, device=response_mask.device), response_mask)
