"""What flowrl computes for the numbers of peers that `benchmarks/peer_numbers.py` names."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import (
    DPO,
    DPPO,
    IPO,
    KTO,
    ORPO,
    CorrectLogitNorms,
    GDPOAdvantage,
    KLLoss,
    KTOBaseline,
    OptimalTokenBaseline,
    PPOClip,
    RolloutCorrection,
    SimPO,
)
from flowrl.operators.advantages.per_token import Estimator, kl_penalty
from flowrl.operators.losses.objective import Aggregation, TokenObjective, token_weights

BY_ROW: Aggregation = "seq-mean-token-mean"
ESTIMATORS: tuple[Estimator, ...] = ("k1+", "k3+", "abs", "k1", "k2", "k3")
ROWS_OF_A_GROUP = 3

Columns = Mapping[str, Tensor]


def groups(x: Columns) -> np.ndarray[Any, Any]:
    """The group of each row."""
    return np.array([f"p{row // ROWS_OF_A_GROUP}" for row in range(len(x["mask"]))], dtype=object)


def gradient(objective: TokenObjective, x: Columns, **changed: Any) -> Tensor:
    """The gradient of an objective in the log-probs, over all rows."""
    columns = {name: x[name] for name in ("old_log_probs", "ref_log_prob", "advantages")}
    batch = SimpleNamespace(**columns | {"response_mask": x["mask"]} | changed)
    leaf = x["log_probs"].clone().requires_grad_()
    loss = objective(leaf, None, batch, objective.weights(x["mask"]), Metrics())
    return torch.autograd.grad(loss, leaf)[0]


def baseline(x: Columns, mask: str, weighted: bool, zero_tail: bool = True) -> Tensor:
    """Advantages against the optimal token baseline; verl computes the norms as ``1 - 2 p + sum p**2``."""
    old, on = x["old_log_probs"], x[mask]
    norms = 1.0 - 2.0 * old.exp() + x["sum_of_squares"]
    if weighted:  # with rollout log-probs whose ratios are the weights
        correct = CorrectLogitNorms(RolloutCorrection(high=10.0))
        norms = correct(norms, old, old - x["weights"].log(), on)
    return OptimalTokenBaseline(zero_tail=zero_tail)(x[f"rewards of {mask}"], norms, on, groups(x))


def verl_numbers(x: Columns) -> dict[str, Tensor]:
    """The numbers of verl, with 0 off the mask in advantages."""
    found = dict[str, Tensor]()
    for estimator in ESTIMATORS:
        leaf = x["log_probs"].clone().requires_grad_()
        kl = kl_penalty(leaf, x["ref_log_prob"], estimator)
        found[f"kl {estimator}"] = kl.detach()
        found[f"gradient of kl {estimator}"] = torch.autograd.grad(kl.sum(), leaf)[0]
    found["token-sum"] = (token_weights(x["mask"], "token-sum") * x["log_probs"]).sum()
    found["otb"] = baseline(x, "mask", weighted=False)
    found["otb with weights"] = baseline(x, "mask", weighted=True)
    found["otb of turns"] = baseline(x, "holes", weighted=True)
    for low, high in ((0.05, 0.2), (0.2, 0.05)):
        for divergence in ("tv", "kl"):
            loss = DPPO(divergence, low, within_high=high)
            found[f"dppo {divergence} {low} {high}"] = gradient(TokenObjective(loss), x)
    terms = {"first": x["rewards of mask"].sum(-1, keepdim=True), "second": x["weights"][:, :1]}
    one_token = torch.ones(len(x["mask"]), 1, dtype=torch.bool)
    for std in (True, False):
        operator = GDPOAdvantage({"first": 1.0, "second": 0.5}, normalize_std=std)
        found[f"gdpo {'with' if std else 'without'} std"] = operator(one_token, groups(x), **terms)
    return found


def best_and_worst(x: Columns) -> tuple[Tensor, Tensor]:
    """The rows of each group with the highest and the lowest score."""
    scores = x["rewards of mask"].sum(-1).view(-1, ROWS_OF_A_GROUP)
    first = torch.arange(len(scores)) * ROWS_OF_A_GROUP
    return first + scores.argmax(1), first + scores.argmin(1)


def labels(x: Columns) -> Tensor:
    """Whether each row is desirable: every other row is."""
    return torch.arange(len(x["mask"])) % 2 == 0


def trl_numbers(x: Columns) -> dict[str, Tensor]:
    """The numbers of TRL; KTO's baseline is the mean log-ratio of the rows."""
    found = {
        name: gradient(TokenObjective(PPOClip(0.2), kl=KLLoss("k3", 0.3, ratio=ratio)), x)
        for name, ratio in (("kl", False), ("kl with the ratio", True))
    }
    pairs = {"token_level_scores": x["rewards of mask"], "uid": groups(x)}
    losses = {
        "dpo": DPO(0.3),
        "ipo": IPO(0.3, per_token=True),
        "simpo": SimPO(0.3, 0.6),
        "orpo": ORPO(0.3),
    }
    found |= {name: gradient(TokenObjective(loss, BY_ROW), x, **pairs) for name, loss in losses.items()}
    mask = x["mask"]
    scores = torch.where(mask.cumsum(1) == 1, labels(x)[:, None].float(), 0.0)
    baseline = KTOBaseline()(x["log_probs"], x["ref_log_prob"], mask, metrics=Metrics())
    return found | {
        "kto": gradient(
            TokenObjective(KTO(0.3, 1.3, 0.6), BY_ROW), x, token_level_scores=scores * mask, kl_baseline=baseline
        )
    }


def on_mask(name: str, number: Tensor, x: Columns) -> Tensor:
    """A number of a peer where it is defined: peers' advantages off the mask are arbitrary."""
    if not name.startswith("otb"):
        return number
    return number[x["holes" if name == "otb of turns" else "mask"]]
