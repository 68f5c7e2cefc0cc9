"""The numbers of verl 0.9.1 and TRL 1.16.0 on the same tokens; tests `kl.py`, `corrections.py`, losses and advantages.

`benchmarks/peer_numbers.py` recorded them in ``peers/``, with the peers' own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import After, load
from flowrl.data.metrics import Metrics
from flowrl.files.graph_io import save
from flowrl.graphs import dppo, otb
from flowrl.operators import DPPO, CorrectLogitNorms, KLLoss, PPOClip, Reinforce, RolloutCorrection, UpdateActor
from flowrl.operators.losses.objective import TokenObjective, token_weights
from tests.support.kernel import exact
from tests.support.rows.peer_rows import baseline, gradient, on_mask, trl_numbers, verl_numbers


def peer(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and the numbers of a peer."""
    found = json.loads((Path(__file__).parent / "peers" / f"{name}.json").read_text(encoding="utf-8"))
    given, numbers = ({key: torch.tensor(value) for key, value in found[part].items()} for part in ("in", "out"))
    return given, numbers


GIVEN, VERL = peer("verl")
SAME, TRL = peer("trl")


def test_both_peers_had_the_same_inputs() -> None:
    assert all(torch.equal(GIVEN[name], SAME[name]) for name in GIVEN)


@pytest.mark.parametrize(("peers", "own"), [(VERL, verl_numbers), (TRL, trl_numbers)], ids=["verl", "trl"])
def test_numbers_are_the_peers(peers: dict[str, Tensor], own: Any) -> None:
    """GDPO for rows of one token: verl normalizes the sum over tokens, and flowrl over rows."""
    found = own(GIVEN)
    assert found.keys() == peers.keys()
    for name, expected in peers.items():
        a, b = on_mask(name, found[name], GIVEN), on_mask(name, expected, GIVEN)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(TRL["kl"], TRL["kl with the ratio"], atol=1e-3)


def test_kl_with_the_ratio_of_a_loss_without_one_is_at_ratio_1() -> None:
    objective = TokenObjective(Reinforce(), kl=KLLoss("k3", 0.3, ratio=True))
    on_policy = gradient(objective, GIVEN, old_log_probs=GIVEN["log_probs"])
    without = SimpleNamespace(advantages=GIVEN["advantages"], ref_log_prob=GIVEN["ref_log_prob"])
    leaf = GIVEN["log_probs"].clone().requires_grad_()
    objective(leaf, None, without, objective.weights(GIVEN["mask"]), Metrics()).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, on_policy)


def test_only_k1_without_a_ratio_has_no_gradient() -> None:
    kinds = {
        (e, r): UpdateActor(kl=KLLoss(e, ratio=r)).effects for e in ("k1", "k1+", "k2", "k3") for r in (False, True)
    }  # type: ignore[arg-type]
    assert [kind for kind, effects in kinds.items() if "kl without a gradient" in effects] == [("k1", False)]


def test_token_sum_is_the_mean_times_the_tokens() -> None:
    mask = GIVEN["mask"]
    assert torch.equal(token_weights(mask, "token-sum"), mask.float())
    summed, mean = (
        gradient(TokenObjective(PPOClip(0.2), aggregation), GIVEN)  # type: ignore[arg-type]
        for aggregation in ("token-sum", "token-mean")
    )
    torch.testing.assert_close(summed, mean * mask.sum())


@pytest.mark.parametrize(("mask", "weighted"), [("mask", False), ("mask", True), ("holes", True)])
def test_a_zero_tail_changes_only_the_longest_row_of_a_group(mask: str, weighted: bool) -> None:
    on = GIVEN[mask]
    found, own = (baseline(GIVEN, mask, weighted, zero_tail) for zero_tail in (True, False))
    alone = on.sum(-1) > on.sum(-1).reshape(2, 3).topk(2).values[:, 1:].repeat_interleave(3)
    differs = (found != own).any(-1)
    assert differs.any() and not (differs & ~alone).any()


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppos_upper_bound_is_the_lower_one_by_default(divergence: Any) -> None:
    for low, high in ((0.05, 0.2), (0.2, 0.05)):
        two, equal, one = (
            gradient(TokenObjective(DPPO(divergence, low, within_high=upper)), GIVEN) for upper in (high, low, None)
        )
        assert torch.equal(equal, one) and not torch.equal(two, one)


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
