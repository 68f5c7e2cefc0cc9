"""Direct preference optimization on pairs from a file."""

from __future__ import annotations

from flowrl.graph import algorithm
from flowrl.operators import DPO, RefLogProb, UpdateActor
from flowrl.records import PreferenceBatch, Updated


@algorithm
def dpo(
    pairs: PreferenceBatch, *, beta: float = 0.1, label_smoothing: float = 0.0, mini_batch: int | None = None
) -> Updated:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), on ``data=PreferenceData(...)``.

    ``-log sigmoid(beta log(pi(y_w) / ref(y_w)) - beta log(pi(y_l) / ref(y_l)))`` for chosen y_w and rejected y_l.
    `online_dpo` samples its pairs.

    Args:
        pairs: two rows per pair, chosen and rejected.
        beta: coefficient of KL to the reference.
        label_smoothing: probability that a preference is wrong.
        mini_batch: rows per optimizer step, two per pair; None for all.
    """
    ref = RefLogProb()(pairs)
    update = UpdateActor(DPO(beta, label_smoothing), mini_batch=mini_batch, aggregation="seq-mean-token-mean")
    return update(pairs, ref_log_prob=ref, token_level_scores=pairs.token_level_scores, uid=pairs.uid)
