"""The numbers of verl 0.9.1 and TRL 1.16.0 on the same tokens; tests `kl.py`, `corrections.py`, losses and advantages.

`benchmarks/peer_numbers.py` recorded them in ``peers/``, with the peers' own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import After, load
from flowrl.data.metrics import Metrics
from flowrl.files.graph_io import save
from flowrl.graphs import dppo, otb
from flowrl.operators import (
    DPPO,
    CorrectLogitNorms,
    GDPOAdvantage,
    KLLoss,
    OptimalTokenBaseline,
    PPOClip,
    Reinforce,
    RolloutCorrection,
    UpdateActor,
)
from flowrl.operators.advantages.per_token import Estimator, kl_penalty
from flowrl.operators.losses.objective import TokenObjective, token_weights

GROUPS = np.array(["a"] * 3 + ["b"] * 3, dtype=object)


def peer(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and the numbers of a peer."""
    found = json.loads((Path(__file__).parent / "peers" / f"{name}.json").read_text(encoding="utf-8"))
    given, numbers = ({key: torch.tensor(value) for key, value in found[part].items()} for part in ("in", "out"))
    return given, numbers


GIVEN, VERL = peer("verl")
SAME, TRL = peer("trl")


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return float(solution_str == ground_truth)


def gradient(objective: TokenObjective, **changed: Any) -> Tensor:
    """The gradient of an objective in the log-probs, over all rows."""
    names = ("old_log_probs", "ref_log_prob", "advantages")
    batch = SimpleNamespace(**{**{name: GIVEN[name] for name in names}, "response_mask": GIVEN["mask"], **changed})
    leaf = GIVEN["log_probs"].clone().requires_grad_()
    loss = objective(leaf, None, batch, objective.weights(GIVEN["mask"]), Metrics())
    return torch.autograd.grad(loss, leaf)[0]


def close(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    on = torch.ones_like(found, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(found[on], expected[on], rtol=2e-5, atol=2e-6)


def test_both_peers_had_the_same_inputs() -> None:
    assert all(torch.equal(GIVEN[name], SAME[name]) for name in GIVEN)


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "abs", "k1", "k2", "k3"])
def test_estimators_of_kl_are_verls_in_value_and_gradient(estimator: Estimator) -> None:
    leaf = GIVEN["log_probs"].clone().requires_grad_()
    kl = kl_penalty(leaf, GIVEN["ref_log_prob"], estimator)
    close(kl.detach(), VERL[f"kl {estimator}"])
    close(torch.autograd.grad(kl.sum(), leaf)[0], VERL[f"gradient of kl {estimator}"])


@pytest.mark.parametrize(("ratio", "name"), [(False, "kl"), (True, "kl with the ratio")])
def test_kl_with_the_ratio_is_trls(ratio: bool, name: str) -> None:
    close(gradient(TokenObjective(PPOClip(0.2), kl=KLLoss("k3", 0.3, ratio=ratio))), TRL[name])
    assert not torch.allclose(TRL["kl"], TRL["kl with the ratio"], atol=1e-3)


def test_kl_with_the_ratio_of_a_loss_without_one_is_at_ratio_1() -> None:
    objective = TokenObjective(Reinforce(), kl=KLLoss("k3", 0.3, ratio=True))
    on_policy = gradient(objective, old_log_probs=GIVEN["log_probs"])
    without = SimpleNamespace(advantages=GIVEN["advantages"], ref_log_prob=GIVEN["ref_log_prob"])
    leaf = GIVEN["log_probs"].clone().requires_grad_()
    objective(leaf, None, without, objective.weights(GIVEN["mask"]), Metrics()).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, on_policy)


def test_only_k1_without_a_ratio_has_no_gradient() -> None:
    kinds = {
        (e, r): UpdateActor(kl=KLLoss(e, ratio=r)).effects for e in ("k1", "k1+", "k2", "k3") for r in (False, True)
    }  # type: ignore[arg-type]
    assert [kind for kind, effects in kinds.items() if "kl without a gradient" in effects] == [("k1", False)]


def test_token_sum_is_verls() -> None:
    mask = GIVEN["mask"]
    weights = token_weights(mask, "token-sum")
    assert torch.equal(weights, mask.float())
    close((weights * GIVEN["log_probs"]).sum(), VERL["token-sum"])
    summed, mean = (gradient(TokenObjective(PPOClip(0.2), aggregation)) for aggregation in ("token-sum", "token-mean"))  # type: ignore[arg-type]
    torch.testing.assert_close(summed, mean * mask.sum())


def norms() -> Tensor:
    """``1 - 2 p + sum p**2``, as `LogitNorm` computes it."""
    return 1.0 - 2.0 * GIVEN["old_log_probs"].exp() + GIVEN["sum_of_squares"]


def weighted_norms(mask: Tensor) -> Tensor:
    """The norms, corrected by the weights that verl was given: rollout log-probs with these ratios."""
    rollout = GIVEN["old_log_probs"] - GIVEN["weights"].log()
    return CorrectLogitNorms(RolloutCorrection(high=10.0))(norms(), GIVEN["old_log_probs"], rollout, mask)


@pytest.mark.parametrize(
    ("name", "mask", "weighted"),
    [("otb", "mask", False), ("otb with weights", "mask", True), ("otb of turns", "holes", True)],
)
def test_the_optimal_token_baseline_with_a_zero_tail_and_squared_weights_is_verls(
    name: str, mask: str, weighted: bool
) -> None:
    on = GIVEN[mask]
    rewards, by = GIVEN[f"rewards of {mask}"], weighted_norms(on) if weighted else norms()
    found = OptimalTokenBaseline(zero_tail=True)(rewards, by, on, GROUPS)
    close(found, VERL[name], on)
    own = OptimalTokenBaseline()(rewards, by, on, GROUPS)
    alone = on.sum(-1) > on.sum(-1).reshape(2, 3).topk(2).values[:, 1:].repeat_interleave(3)
    differs = (found != own).any(-1)
    assert differs.any() and not (differs & ~alone).any()  # only the longest row of a group has a tail


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize(("low", "high"), [(0.05, 0.2), (0.2, 0.05)])
def test_dppos_two_bounds_are_verls(divergence: Any, low: float, high: float) -> None:
    found = gradient(TokenObjective(DPPO(divergence, low, within_high=high)))
    close(found, VERL[f"dppo {divergence} {low} {high}"])
    assert not torch.equal(found, gradient(TokenObjective(DPPO(divergence, low))))
    assert torch.equal(
        gradient(TokenObjective(DPPO(divergence, low, within_high=low))),
        gradient(TokenObjective(DPPO(divergence, low))),
    )


@pytest.mark.parametrize(("std", "name"), [(True, "gdpo with std"), (False, "gdpo without std")])
def test_gdpo_without_std_is_verls_for_rows_of_one_token(std: bool, name: str) -> None:
    """verl normalizes the sum over tokens, and flowrl over rows."""
    terms = {"first": GIVEN["rewards of mask"].sum(-1, keepdim=True), "second": GIVEN["weights"][:, :1]}
    operator = GDPOAdvantage({"first": 1.0, "second": 0.5}, normalize_std=std)
    mask = torch.ones(len(GROUPS), 1, dtype=torch.bool)
    close(operator(mask, GROUPS, **terms), VERL[name])


def test_the_variants_are_parameters_of_graphs(tmp_path: Path) -> None:
    corrected = otb(exact, kl_coef=0.1).edit(
        insert={"norms": After("logit_norm", CorrectLogitNorms(RolloutCorrection("token", "truncate", high=3.0)))},
        set={
            "optimal_token_baseline.zero_tail": True,
            "update_actor.kl": KLLoss("k1", 0.1, ratio=True),
            "update_actor.aggregation": "token-sum",
        },
    )
    assert corrected.check() == []
    assert "norms" in {edge.node for edge in corrected["optimal_token_baseline"].inputs.values()}
    save(corrected, tmp_path / "graph.yaml")
    assert load(tmp_path / "graph.yaml", imports=True) == corrected
    assert dppo(exact, within_high=0.3)["update_actor"].operator.loss == DPPO("tv", 0.2, within_high=0.3)  # type: ignore[attr-defined]
