"""Weighted sums of several rewards, each a separate node, as scores or as advantages."""

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
from flowrl.operators.advantages.groups import GroupAdvantage, Groups, group_advantage
from flowrl.operators.advantages.per_token import select, select_rewards
from flowrl.operators.explains import exact, tokens_on
from flowrl.operators.reward.models import report
from flowrl.operators.reward.operator import place_scores

OWN = frozenset({"response_mask", "uid", "metrics"})


class _Terms:
    """Mixin of operators with a port for each term in `weights`."""

    weights: Mapping[str, float]
    term_type: ClassVar[Any]

    @cached_property
    def more_ports(self) -> Signature:
        """A port for each term."""
        typed = parse(self.term_type)
        assert typed is not None
        return Signature({name: Port(name, {PortField(name): typed}) for name in self.weights}, {}, {})

    @field_validator("weights", mode="after")
    @classmethod
    def _refuse_misnamed(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        if not weights or (bad := [name for name in weights if not name.isidentifier() or name in OWN]):
            raise ValueError(
                f"invalid name of a term {bad[0]!r}; use an identifier other than {', '.join(sorted(OWN))}"
                if weights
                else "no terms; pass the weight of each by its name, such as {'accuracy': 1.0}"
            )
        return weights


class WeighRewards(_Terms, Operator):
    """The weighted sum of several rewards, ``sum_k w_k * score_k`` at each token; each term is a port.

    ``WeighRewards({"accuracy": 1.0, "format": 0.2}, gates={"format": "accuracy"})(response_mask=..., accuracy=...,
    format=...)``: a gated term counts only in rows that passed another term, whose weight may be 0.

    Reports ``reward/<term>``, the mean of each term over rows with a token on the mask, before weights and gates; and
    ``reward/mean``, ``reward/min`` and ``reward/max`` of the sum. Give the nodes of the terms other prefixes:
    ``Reward(fn, log="reward/accuracy")``.

    Args:
        weights: weight of each term, by name.
        gates: by gated term, the term that a row must pass.
        passed: a row passes a term if its score is above this value.

    Raises:
        ParameterError: a gate names an unknown term, or a name is not valid for a port.
        DataError: a score is off the mask.
    """

    granularity: ClassVar[Granularity] = "row"
    term_type: ClassVar[Any] = TokenLevelScores

    weights: Mapping[str, float]
    gates: Mapping[str, str] = Field(default_factory=dict)
    passed: float = 0.5

    def __post_init__(self) -> None:
        for term, gate in self.gates.items():
            if term == gate or not {term, gate} <= self.weights.keys():
                raise ParameterError(
                    f"gates={dict(self.gates)} gates {term!r} by {gate!r}, expected two different terms of "
                    f"{', '.join(self.weights)}. Add a term that is only a gate with weight 0.",
                    code="reward.invalid-settings",
                    term=term,
                    given=gate,
                )

    def __call__(
        self, response_mask: ResponseMask, metrics: Metrics = INJECTED, **terms: FromParameters
    ) -> TokenLevelScores:
        live = response_mask.any(-1)
        total = torch.zeros(response_mask.shape, device=response_mask.device)
        for name, weighted in self.weighted(response_mask, **terms).items():
            score = select(terms[name], response_mask)
            metrics.mean(f"reward/{name}", score.sum(dtype=torch.float64), live.sum())
            total = total + weighted
        report("reward", total.sum(-1)[live], metrics)
        return total

    def weighted(self, response_mask: Tensor, **terms: Tensor) -> dict[str, Tensor]:
        """What each term adds to the score at each token, float32 ``[batch response]``: its weight times its score, 0
        in rows that do not pass its gate."""
        scores = {name: select_rewards(terms[name], response_mask, name) for name in self.weights}
        passed = {gate: (scores[gate].sum(-1) > self.passed)[:, None] for gate in self.gates.values()}
        counted = {n: torch.where(passed[self.gates[n]], s, 0.0) if n in self.gates else s for n, s in scores.items()}
        return {name: self.weights[name] * score for name, score in counted.items()}

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not tokens_on(inputs["response_mask"], row):
            return ""
        scores = {name: inputs[name][row].sum() for name in self.weights}
        closed = {name: gate for name, gate in self.gates.items() if not scores[gate] > self.passed}
        terms = " + ".join(f"{weight} * {name}" for name, weight in self.weights.items())
        numbers = " + ".join(f"{w} * {0 if n in closed else exact(scores[n])}" for n, w in self.weights.items())
        gated = [
            f"; {name} ({exact(scores[name])}) does not count: {gate} is not above {self.passed}"
            for name, gate in closed.items()
        ]
        return f"{terms} = {numbers} = {exact(outputs['token_level_scores'][row].sum())}{''.join(gated)}"


@torch.no_grad()
def gdpo_advantage(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    response_mask: Tensor,
    uid: np.ndarray,
    eps: float = 1e-6,
    normalize_std: bool = True,
) -> Tensor:
    """Advantages of several rewards, each normalized separately (GDPO: Liu et al. 2026, arXiv:2601.05242).

    With s_k the score of a row by term k, ``a_k = (s_k - mean(s_k)) / (std(s_k) + eps)`` over the rows of its group,
    ``a = sum_k w_k a_k``, and the advantage is ``(a - mean(a)) / (std(a) + eps)`` over all rows of the batch. Rows with
    the same sum of terms may have different advantages, and the scale does not grow with the number of terms. Standard
    deviations are sample standard deviations (``n - 1``).

    Args:
        terms: rewards by name, float ``[batch response]``; zero off the mask.
        weights: weights by name.
        response_mask, uid: see `Groups`.
        eps: added to each standard deviation.
        normalize_std: divide each term by the standard deviation of its group; the sum is normalized in any case. False
            is verl's ``norm_adv_by_std_in_grpo=False``. (verl normalizes the sum over tokens, which differs if lengths
            do.)

    Returns:
        float32 ``[batch response]``, 0 off the mask; exactly 0 if the scores of every group are equal.
    """
    total = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    live = response_mask.any(-1).double()
    for name, weight in weights.items():
        group = Groups(terms[name], response_mask, uid)
        centered = live * (group.scores - group.mean(group.scores))
        variance = group.sum(centered.square()) / (group.size - 1).clamp(min=1)
        total += weight * centered / (variance.sqrt() + eps if normalize_std else 1.0)
    rows = live.sum()
    centered = live * (total - total.sum() / rows.clamp(min=1))
    std = (centered.square().sum() / (rows - 1).clamp(min=1)).sqrt()
    return select((centered / (std + eps)).unsqueeze(-1).expand(response_mask.shape), response_mask)


class GDPOAdvantage(_Terms, Operator):
    """Advantages of several rewards, each normalized separately in its group, as in GDPO; see `gdpo_advantage`.

    Each term is a port: ``GDPOAdvantage({"accuracy": 1.0, "format": 0.5})``.

    Args:
        weights: weight of each term, by name.
        eps: added to each standard deviation.
        normalize_std: divide each term by the standard deviation of its group.
    """

    granularity: ClassVar[Granularity] = "batch"
    term_type: ClassVar[Any] = TokenLevelRewards

    weights: Mapping[str, float]
    eps: float = Field(default=1e-6, gt=0)
    normalize_std: bool = True

    @property
    def effects(self) -> frozenset[str]:
        """``{"group baseline", "scaled"}``."""
        return frozenset({Effect.GROUP_BASELINE, Effect.SCALED})

    def __call__(self, response_mask: ResponseMask, uid: Uid, **terms: FromParameters) -> Advantages:
        return gdpo_advantage(terms, self.weights, response_mask, uid, self.eps, self.normalize_std)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        mask, uid = inputs["response_mask"], inputs["uid"]
        if not (on := tokens_on(mask, row)):
            return ""
        of_group = GroupAdvantage(self.normalize_std, self.eps)
        groups = {name: Groups(inputs[name], mask, uid) for name in self.weights}
        terms = {n: group_advantage(inputs[n], mask, uid, self.normalize_std, self.eps).sum(-1) for n in self.weights}
        terms = {name: term.double() / mask.sum(-1).clamp(min=1) for name, term in terms.items()}
        total = torch.stack([weight * terms[name] for name, weight in self.weights.items()]).sum(0)[mask.any(-1)]
        names = " + ".join(f"{weight} * {name}" for name, weight in self.weights.items())
        numbers = " + ".join(f"{weight} * {exact(terms[name][row])}" for name, weight in self.weights.items())
        scaled = f"({numbers} - {exact(total.mean())}) / ({exact(total.std())} + {self.eps})"
        each = "".join(f"; {name}: {of_group.formula(group, row)}" for name, group in groups.items())
        return f"({names} - mean) / (std + eps) = {scaled} = {exact(outputs['advantages'][row, on[0]])}{each}"


class Matches(Operator):
    """A format reward: 1 if the full text of the response matches a pattern, else 0, on the last token on the mask.

    Args:
        pattern: a regular expression for `re.fullmatch`, with `re.DOTALL`.

    Raises:
        ParameterError: `pattern` is not a regular expression.
    """

    granularity: ClassVar[Granularity] = "row"
    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ParameterError(
                f"The pattern {self.pattern!r} is not a regular expression: {error}. See Python's re module.",
                code="reward.invalid-settings",
                given=self.pattern,
            ) from None

    def __call__(self, response_text: ResponseText, response_mask: ResponseMask) -> TokenLevelScores:
        compiled = re.compile(self.pattern, re.DOTALL)
        scores = [float(compiled.fullmatch(text) is not None) for text in response_text]
        return place_scores(torch.tensor(scores, device=response_mask.device), response_mask)
