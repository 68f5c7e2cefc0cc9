"""Preference optimization with other losses than DPO's, and KTO on responses with a label each."""

from __future__ import annotations

from typing import Unpack

from flowrl.graph import Graph, algorithm
from flowrl.graphs.dpo import dpo
from flowrl.graphs.variants import DPOSettings, edit_of
from flowrl.operators import IPO, KTO, ORPO, KTOBaseline, MismatchResponses, OldLogProb, RefLogProb, SimPO, UpdateActor
from flowrl.records import UnpairedBatch, Updated


@edit_of(dpo, without=("beta", "label_smoothing"))
def ipo(*, tau: float = 0.1, per_token: bool = False, **settings: Unpack[DPOSettings]) -> Graph:
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, eq. 17), on ``data=PreferenceData(...)``.

    The margin of a pair approaches ``1 / (2 tau)`` and no more, so pairs that all agree are not overfitted.

    Args:
        tau: coefficient of KL to the reference.
        per_token: average log-probs over the tokens of a row, as TRL does, instead of summing them.
        settings: settings of `dpo`, except ``beta`` and ``label_smoothing``.
    """
    return dpo(**settings).edit(set={"update_actor.loss": IPO(tau, per_token)}, name="ipo")


@edit_of(dpo, without=("label_smoothing",), beta=2.0)
def simpo(*, gamma: float = 1.0, **settings: Unpack[DPOSettings]) -> Graph:
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, eq. 6): DPO without a reference.

    Args:
        gamma: the margin by which the chosen response should lead.
        settings: settings of `dpo`, except ``label_smoothing``; `beta` is the scale of the mean log-prob of a response.
    """
    return dpo(**settings).edit(set={"update_actor.loss": SimPO(settings["beta"], gamma)}, name="simpo")


@edit_of(dpo, without=("beta", "label_smoothing"))
def orpo(*, coef: float = 0.1, **settings: Unpack[DPOSettings]) -> Graph:
    """Odds-ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, eq. 6): SFT and preferences in one loss.

    It needs neither a reference nor supervised fine-tuning before it.

    Args:
        coef: coefficient of the odds ratio.
        settings: settings of `dpo`, except ``beta`` and ``label_smoothing``.
    """
    return dpo(**settings).edit(set={"update_actor.loss": ORPO(coef)}, name="orpo")


@algorithm
def kto(
    rows: UnpairedBatch,
    *,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    mini_batch: int | None = None,
) -> Updated:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8), on ``data=UnpairedData(...)``.

    A response has a label, not a counterpart. What it gains over the reference is compared with the mean gain of
    responses that are paired with other prompts, an estimate of KL.

    Args:
        rows: responses, each with a label.
        beta: how fast the value of a gain saturates.
        desirable, undesirable: weights of the rows of each label.
        mini_batch: rows per optimizer step; None for all.
    """
    ref = RefLogProb()(rows)
    mismatched = MismatchResponses()(rows)
    moved = OldLogProb().named("mismatched_log_prob")(mismatched)
    unmoved = RefLogProb().named("mismatched_ref_log_prob")(mismatched)
    baseline = KTOBaseline()(moved, unmoved, mismatched.response_mask)
    update = UpdateActor(KTO(beta, desirable, undesirable), mini_batch=mini_batch, aggregation="seq-mean-token-mean")
    return update(rows, ref_log_prob=ref, token_level_scores=rows.token_level_scores, kl_baseline=baseline)
