"""A row that is cut into segments has the gradient of the whole one, in every aggregation.

Tests `update.py`, `mini_batches.py` and `objective.py` in `operators/`, with `flowrl/data/segments.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flowrl import Key
from flowrl.backends import SGD, TorchTrainer
from flowrl.data.balance import Shard
from flowrl.data.metrics import Metrics
from flowrl.operators import GSPO, PPOClip, UpdateActor
from flowrl.operators.losses.objective import Aggregation, TokenObjective
from flowrl.operators.updates.mini_batches import mini_batch_rows, rank_parts, record
from flowrl.operators.updates.update import ScoringUpdate
from tests.support.jobs import prompt_batch, rollout_batch
from tests.support.rows.cut_rows import cut

KEY = Key.of(3)
ROWS = 8


def whole_and_cut() -> tuple[Any, Any]:
    """Rows of one to three turns, with a reply off the mask before each but the first, and the same rows cut there."""
    draw = torch.Generator().manual_seed(5)
    responses = [torch.randint(5, 60, (4 + 3 * (row % 3),), generator=draw).tolist() for row in range(ROWS)]
    rollout: Any = rollout_batch(prompt_batch([[1 + row, 2, 3][: 1 + row % 3] for row in range(ROWS)]), responses)
    mask = rollout.response_mask.clone()
    mask[:, 3::3] = False
    shape = mask.shape
    columns = {
        **rollout._replace(response_mask=mask)._asdict(),
        "advantages": torch.randn(shape, generator=draw),
        "old_log_probs": -4 + 0.3 * torch.randn(shape, generator=draw),
    }
    rows = record(columns)
    places = [[turn for turn in range(4, shape[1], 3) if mask[row, turn]] for row in range(ROWS)]
    assert sum(map(len, places)) > ROWS / 2
    return rows, cut(rows, places)


def engine(tiny: str, max_tokens: int) -> Any:
    """With smaller weights: with the original ones, micro-batches change gradients by 1.4e-6, too."""
    spec = TorchTrainer(tiny, optimizer=SGD(lr=0.5, momentum=0.9), device="cpu", max_tokens=max_tokens, grad_clip=None)
    actor = spec.build(SimpleNamespace(seed=0))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.mul_(0.5 if parameter.ndim > 1 else 1.0)
    return actor


def gradient(actor: Any) -> Tensor:
    return torch.cat([s["momentum_buffer"].flatten() for s in actor.state_dict()["optimizer"]["state"].values()])


@pytest.mark.parametrize("loss", [PPOClip(), GSPO(clip_low=0.5, clip_high=0.5)])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_every_aggregation_counts_episodes(tiny: str, aggregation: Aggregation, loss: Any) -> None:
    """Over micro-batches, mini-batches and the parts of two ranks; GSPO's ratio is that of the episode."""
    norm = 7.0 if aggregation == "seq-mean-token-sum-norm" else None
    found, reported, of_rows = [], [], []
    for rows, max_tokens in zip(whole_and_cut(), (10**6, 30), strict=True):
        actor, metrics = engine(tiny, max_tokens), Metrics()
        columns = {name: getattr(rows, name) for name in ("advantages", "old_log_probs")}
        update = UpdateActor(loss, aggregation=aggregation, norm=norm, mini_batch=4, actor=actor)
        update(rows, key=KEY, metrics=metrics, **columns)
        found.append(gradient(actor))
        reported.append(metrics.compute())
        of_rows.append({name: dict(rows) for name, rows in metrics.rows.items()})
    assert of_rows[1].keys() == of_rows[0].keys() == {"update_actor/entropy", "update_actor/clipped"}
    assert all(of_rows[1][name] == pytest.approx(of_rows[0][name], rel=1e-5, abs=1e-6) for name in of_rows[0])
    assert relative(found[1], found[0]) < 1e-6
    assert reported[1] == pytest.approx(reported[0], rel=1e-5, abs=1e-6)
    objective, first = TokenObjective(loss, aggregation, norm, key=KEY), mini_batch_rows(ROWS, None, 1, KEY)
    ranked = []
    for rows, ranks in zip(whole_and_cut(), (1, 2), strict=True):
        parts = []
        for rank in range(ranks):
            actor, shard = engine(tiny, 30), Shard(rank, ranks, None, None)
            minis = rank_parts(first, objective.weights, rows.response_mask, rows.attention_mask, shard)
            actor.update(rows, minis, objective)
            parts.append(gradient(actor))
        ranked.append(torch.stack(parts).sum(0))
    assert relative(ranked[1], ranked[0]) < 1e-6


def test_a_fused_update_scores_all_segments(tiny: str) -> None:
    """Rows of more tokens than a micro-batch are computed by segments; they have the log-probs and entropies of all."""
    scored = []
    for rows, max_tokens in zip(whole_and_cut(), (10**6, 15), strict=True):
        actor, metrics = engine(tiny, max_tokens), Metrics()
        old = ScoringUpdate(PPOClip(), actor=actor)(rows, key=KEY, metrics=metrics, advantages=rows.advantages)[1]
        numbers, entropies = metrics.columns["scoring_update/entropies"]
        assert numbers.tolist() == list(range(ROWS)) and not old[~rows.response_mask].any()
        scored.append((old[rows.response_mask], entropies[rows.response_mask]))
        if max_tokens == 15:
            torch.testing.assert_close(engine(tiny, max_tokens).log_probs(rows), old, rtol=0, atol=0)
    torch.testing.assert_close(scored[1], scored[0], rtol=1e-5, atol=1e-5)


def relative(found: Tensor, truth: Tensor) -> float:
    assert truth.norm() > 0
    return float((found.double() - truth.double()).norm() / truth.double().norm())
