"""Live weight updates: a run in one process, refusals, and per-token corrections."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl import Colocate, Lag, Metrics, PromptData, Split
from flowrl.backends import TorchRollout
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.episodes import Endpoint
from flowrl.operators import Generate, Interact, RolloutCorrection
from flowrl.run.training.identity import identity_of
from flowrl.run.training.job import Job
from tests.backends.torch.generate.rollouts import KEY
from tests.backends.torch.generate.test_swap import actors, engine_of
from tests.engines.contract.requests import speaks
from tests.operators.engines.test_interact import Echo, prompts_of, rewrites
from tests.run.engine.test_lag import job_with_lag, log_probs
from tests.run.training.interrupted import assert_same, cut_off, run
from tests.support.errors import raises


def spanned(folder: str) -> Job:
    return job_with_lag("grpo", folder, 2).edit(lag=Lag(2, spans=True))


def test_spans_in_one_process_equal_lag_and_resume_with_and_without_spans(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """In one process no request is in flight during a sync. A run with spans resumes without."""
    uninterrupted = run(job_with_lag("grpo", tiny, 2), prompts_file, tmp_path / "uninterrupted", checkpoint_every=1)
    cut_off(spanned(tiny), prompts_file, tmp_path / "cut", 4, "update_actor", checkpoint_every=1)
    found = run(job_with_lag("grpo", tiny, 2), prompts_file, tmp_path / "cut", resume=True, checkpoint_every=1)
    assert_same(found, uninterrupted)
    data = {"batch": PromptData(prompts_file)}
    one, other = (identity_of(job.graph, data, 0, 5) for job in (spanned(tiny), job_with_lag("grpo", tiny, 0)))
    assert one == other


class NoLiveUpdate(TorchRollout):
    """An engine without live weight updates."""

    serves = TorchRollout.serves[:2]


class MultiRankGeneration(TorchRollout):
    """An engine whose ranks compute responses together."""

    collective = True


class TestRefused:
    def test_spans_without_live_weight_updates_are_refused(self, tiny: str) -> None:
        job = spanned(tiny).edit(bind={"rollout": NoLiveUpdate(tiny, device="cpu")})
        with raises("backend.missing-protocol", role="rollout", node="sync", expected="LiveWeightUpdate"):
            job.refuse_unready()
        job.edit(lag=2).refuse_unready()

    def test_spans_with_multi_rank_generation_are_refused(self, tiny: str) -> None:
        together = spanned(tiny).edit(bind={"rollout": MultiRankGeneration(tiny, device="cpu", ranks=2)})
        job = replace(together, place=Split(train=1, rollout=2))
        with raises("lag.unsupported", role="rollout") as caught:
            job.refuse_unready()
        assert "edit(lag=2)" in caught.value.message
        job.edit(bind={"rollout": TorchRollout(tiny, device="cpu", ranks=2)}).refuse_unready()

    def test_the_plan_explains_useless_spans(self, tiny: str) -> None:
        assert "lag=2 gains nothing in one process" in spanned(tiny).plan()
        assert "gains nothing with Colocate" in replace(spanned(tiny), place=Colocate(gpus=1)).plan()


@pytest.mark.parametrize("environment", [None, Echo, rewrites, Endpoint(speaks)])
def test_each_token_is_corrected_for_the_version_that_sampled_it(
    environment: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0 samples the first three tokens, then version 1, the trainer's. A token's weight is the trainer's
    probability over that of the version that sampled it."""
    old, new = actors(tiny, 2)
    new.model.save_pretrained(tmp_path / "new")
    engine, following, steps = engine_of(tiny, old), TorchRolloutEngine._next, itertools.count(1)

    def then_swap(self: TorchRolloutEngine) -> list[str]:
        ended = following(self)
        if next(steps) == 4:
            self.swap(new, "recompute")
        return ended

    monkeypatch.setattr(TorchRolloutEngine, "_next", then_swap)
    settings: dict[str, Any] = {"max_turns": 5, "context": 200, "max_new_tokens": 6, "rewrites": "segment"}
    plain = environment is None
    operator: Any = Generate(max_new_tokens=9) if plain else Interact(environment, **settings)
    operator = replace(operator, rollout=engine)
    rollout = operator(prompts_of(engine.tokenizer), key=KEY, metrics=Metrics())
    mask, versions = rollout.response_mask, rollout.token_version
    assert set(versions[mask].tolist()) == {0, 1} and not versions[~mask].add(1).any()
    assert rollout.policy_version.tolist() == [int(row[of].min()) for row, of in zip(versions, mask, strict=True)]
    by_old, by_new = (log_probs(Path(folder), rollout._asdict()) for folder in (tiny, tmp_path / "new"))
    sampled = torch.where(versions == 1, by_new, by_old)
    assert torch.allclose(rollout.rollout_log_probs[mask], sampled[mask], atol=3e-5)
    correction = RolloutCorrection("token", "truncate", high=1e6)
    weights = correction(torch.ones(mask.shape), by_new, rollout.rollout_log_probs, mask, metrics=Metrics())
    assert torch.allclose(weights[mask], (by_new - sampled).exp()[mask], rtol=1e-3)
    assert torch.allclose(weights[versions == 1], torch.ones(()), atol=1e-4)
    assert not torch.allclose(weights[versions == 0], torch.ones(()), atol=1e-1)
