"""Rollout correction against loops in float64, hand cases, an exact expectation, and inserted into PPO and GRPO."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl import PromptData, Training, Validation
from flowrl.core.graphs.after import After
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Session
from flowrl.data.metrics import Metrics
from flowrl.data.proto.formats import check_json
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import Mismatch, PPOClip, RolloutCorrection, Whiten
from flowrl.operators.corrections import Level, Mismatched, Mode, bound_ratios, importance_ratios
from flowrl.operators.losses.objective import TokenObjective
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import exact

LEVELS: list[Level] = ["token", "sequence", "geometric", "minimum"]
NAN = float("nan")

# Ratios of 2, 1/2, 4 | 1, 1 (and one token off the mask) | nothing.
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
ROLLOUT = torch.tensor([[-2.0, -1.0, -3.0], [-0.5, -0.25, NAN], [NAN, NAN, NAN]])
OLD = ROLLOUT + torch.tensor([[2.0, 0.5, 4.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()
ADVANTAGES = torch.tensor([[1.0, -1.0, 2.0], [3.0, -3.0, NAN], [NAN, NAN, NAN]])


def run(operator: RolloutCorrection, **columns: Tensor) -> tuple[Tensor, dict[str, float]]:
    given = {"advantages": ADVANTAGES, "old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    metrics = Metrics()
    return operator(**{**given, **columns}, metrics=metrics), metrics.compute()


def ratio_by_loop(old: list[float], rollout: list[float], level: Level) -> list[float]:
    """The ratio of every token of one row without padding."""
    d = [o - r for o, r in zip(old, rollout, strict=True)]
    match level:
        case "token":
            logs = d
        case "sequence":
            logs = [sum(d)] * len(d)
        case "geometric":
            logs = [sum(d) / len(d)] * len(d)
        case "minimum":
            logs = [min(d)] * len(d)
    return [math.exp(min(max(x, -20.0), 20.0)) for x in logs]


def weight_by_loop(ratio: float, mode: Mode, low: float | None, high: float | None) -> float:
    if mode in ("truncate", "clip"):
        return min(max(ratio, low or 0.0), math.inf if high is None else high)
    within = (low is None or ratio >= low) and (high is None or ratio <= high)
    return (ratio if mode == "mask" else 1.0) if within else 0.0


class TestFormulas:
    @examples(60)
    @given(data=st.data())
    @pytest.mark.parametrize("level", LEVELS)
    def test_correction_weights_equal_loops_over_ragged_masks(self, level: Level, data: st.DataObject) -> None:
        rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        row = st.lists(st.booleans(), min_size=width, max_size=width)
        mask = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
        low = data.draw(st.none() | st.floats(0.1, 0.9))
        high = data.draw(st.floats(1.1, 5.0))
        modes: list[Mode] = ["reject"]
        if level != "minimum":
            modes += ["mask", "clip" if low else "truncate"]
        mode = data.draw(st.sampled_from(modes))
        draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        scale = data.draw(st.sampled_from([0.01, 1.0, 30.0]))
        old, rollout, advantages = (
            (scale * torch.randn(mask.shape, generator=draw)).masked_fill(~mask, off) for off in (NAN, math.inf, NAN)
        )
        found, metrics = run(
            RolloutCorrection(level, mode, low, high),
            advantages=advantages,
            old_log_probs=old,
            rollout_log_probs=rollout,
            response_mask=mask,
        )
        assert found.dtype == torch.float32
        assert (found[~mask] == 0).all()
        units: list[float] = []
        for i in range(rows):
            on = mask[i]
            if not on.any():
                continue
            ratios = ratio_by_loop(old[i][on].tolist(), rollout[i][on].tolist(), level)
            weights = [weight_by_loop(r, mode, low, high) for r in ratios]
            near = [any(b and math.isclose(r, b, rel_tol=1e-4) for b in (low, high)) for r in ratios]
            for a, w, x, edge in zip(advantages[i][on].tolist(), weights, found[i][on].tolist(), near, strict=True):
                assert edge or x == pytest.approx(a * w, rel=2e-4, abs=1e-6)
            units += ratios if level == "token" else ratios[:1]
        if units:
            assert metrics["rollout_corr/ratio_mean"] == pytest.approx(sum(units) / len(units), rel=2e-4)
            assert metrics["rollout_corr/ratio_max"] == pytest.approx(max(units), rel=2e-4)
            assert metrics["rollout_corr/ratio_min"] == pytest.approx(min(units), rel=2e-4)
        else:
            assert metrics == {}

    def test_token_level_worked_example(self) -> None:
        found, metrics = run(RolloutCorrection("token", "truncate", high=3.0))
        assert found.tolist() == [pytest.approx(row) for row in ([2.0, -0.5, 6.0], [3.0, -3.0, 0.0], [0.0, 0.0, 0.0])]
        weights = [2.0, 0.5, 3.0, 1.0, 1.0]
        assert metrics == pytest.approx(
            {
                "rollout_corr/ratio_mean": 8.5 / 5,
                "rollout_corr/ratio_min": 0.5,
                "rollout_corr/ratio_max": 4.0,
                "rollout_corr/weight_mean": 7.5 / 5,
                "rollout_corr/bounded": 1 / 5,
                "rollout_corr/ess": sum(weights) ** 2 / (5 * sum(w * w for w in weights)),
            }
        )

    def test_sequence_level_worked_example(self) -> None:
        found, metrics = run(RolloutCorrection("sequence", "mask", high=3.0))  # the first row's ratio is 4
        assert found.tolist() == [[0.0, 0.0, 0.0], [3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]
        assert {metrics[f"rollout_corr/{key}"] for key in ("bounded", "ess", "weight_mean")} == {0.5}
        found, _ = run(RolloutCorrection("geometric", "truncate", high=9.0))
        assert found[0].tolist() == pytest.approx([4 ** (1 / 3), -(4 ** (1 / 3)), 2 * 4 ** (1 / 3)])
        found, _ = run(RolloutCorrection("minimum", "reject", low=0.6, high=None))
        assert found.tolist() == [[0.0, 0.0, 0.0], [3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]

    def test_the_bounds_of_a_correction_are_inclusive(self) -> None:
        ratios = torch.tensor([0.5, 1.0, 2.0, 2.5])
        weights, outside = bound_ratios(ratios, "mask", 0.5, 2.0)
        assert (weights.tolist(), outside.tolist()) == ([0.5, 1.0, 2.0, 0.0], [False, False, False, True])
        assert bound_ratios(ratios, "truncate", 1.0, 2.0)[0].tolist() == [0.5, 1.0, 2.0, 2.0]

    @pytest.mark.parametrize("mode", ["mask", "truncate"])
    def test_the_effective_sample_size_without_tokens_is_zero(self, mode: Mode) -> None:
        found, metrics = run(RolloutCorrection("token", mode, high=1e-9))
        if mode == "mask":
            assert not found.any()
            assert metrics["rollout_corr/ess"] == 0
        else:  # all weights are equal
            assert metrics["rollout_corr/ess"] == pytest.approx(1.0)
        assert metrics["rollout_corr/bounded"] == 1

    def test_log_ratios_are_clamped_to_20(self) -> None:
        ratios = importance_ratios(torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]]), MASK[:1, :2], "token")
        assert ratios.tolist() == [pytest.approx([math.exp(20), math.exp(-20)])]

    def test_sequence_weights_give_the_expectation_of_the_trainer(self) -> None:
        """Over all responses of two tokens, weighted by the engine's probabilities."""
        draw = torch.Generator().manual_seed(0)
        trainer, engine = (torch.randn(4, 4, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
        first = torch.arange(4).repeat_interleave(4)
        second = torch.arange(4).repeat(4)

        def log_probs(table: Tensor) -> Tensor:  # the second token depends on the first
            return torch.stack([table[0][first], table[first, second]], dim=1)

        value = torch.randn(16, 1, generator=draw).expand(16, 2)
        mask = torch.ones(16, 2, dtype=torch.bool)
        weighed = RolloutCorrection("sequence", "truncate", high=1e6)(
            value, log_probs(trainer).float(), log_probs(engine).float(), mask
        )
        sampled = (log_probs(engine).sum(1).exp() * weighed[:, 0]).sum()
        exact_mean = (log_probs(trainer).sum(1).exp() * value[:, 0]).sum()
        assert float(sampled) == pytest.approx(float(exact_mean), rel=1e-5)

    def test_weighing_advantages_equals_weighing_the_loss(self) -> None:
        draw = torch.Generator().manual_seed(1)
        old, new, advantages, rollout = (torch.randn(4, 5, generator=draw) for _ in range(4))
        mask = torch.ones(4, 5, dtype=torch.bool)
        weights = bound_ratios(importance_ratios(old, rollout, mask, "token"), "mask", 0.5, 2.0)[0]
        loss = TokenObjective(PPOClip(0.2, dual_clip=3.0))

        def value(advantages: Tensor, weights: Tensor) -> Tensor:
            class Batch:
                old_log_probs, ref_log_prob = old, None

            Batch.advantages = advantages  # type: ignore[attr-defined]
            return loss(new, torch.zeros(4, 5), Batch, weights, Metrics())  # type: ignore[arg-type]

        corrected = RolloutCorrection("token", "mask", 0.5, 2.0)(advantages, old, rollout, mask)
        uniform = loss.weights(mask)
        assert float(value(corrected, uniform)) == pytest.approx(float(value(advantages, uniform * weights)), rel=1e-5)

    def test_no_gradient_flows_through_a_correction(self) -> None:
        old = OLD.nan_to_num().requires_grad_()
        found = RolloutCorrection()(ADVANTAGES, old, ROLLOUT, MASK)
        assert not found.requires_grad

    def test_nan_ratios_are_refused(self) -> None:
        with raises("correction.nan-ratio", row=0, token=1):
            minus = torch.tensor([[0.0, -math.inf]])
            importance_ratios(minus, minus, torch.ones(1, 2, dtype=torch.bool), "token")

    @pytest.mark.parametrize(
        "parameters",
        [
            {"mode": "truncate", "low": 0.5},
            {"mode": "truncate", "high": None},
            {"mode": "clip"},
            {"mode": "mask", "low": None, "high": None},
            {"mode": "mask", "low": 3.0, "high": 2.0},
            {"mode": "mask", "low": -1.0},
            {"mode": "mask", "level": "minimum"},
            {"level": "row"},
        ],
    )
    def test_invalid_bounds_are_refused(self, parameters: dict[str, Any]) -> None:
        with pytest.raises(ParameterError, match="RolloutCorrection"):
            RolloutCorrection(**parameters)


def source(graph: Graph, end: str) -> str:
    node, _, field = end.partition(".")
    return str(graph[node].inputs[PortField.parse(field)])


class TestInGraphs:
    def test_a_correction_after_whiten_in_ppo_is_wired(self) -> None:
        graph = ppo(exact).edit(insert={"correction": After("whiten", RolloutCorrection())})
        assert source(graph, "update_actor.advantages") == "correction.advantages"
        assert source(graph, "correction.advantages") == "whiten.advantages"
        assert source(graph, "correction.old_log_probs") == "old_log_prob.old_log_probs"
        assert source(graph, "correction.rollout_log_probs") == "generate.rollout_log_probs"
        assert graph.check() == []

    def test_a_correction_before_whiten_in_ppo_is_wired(self) -> None:
        graph = ppo(exact).edit(insert={"correction": After("gae", RolloutCorrection())})
        assert source(graph, "whiten.advantages") == "correction.advantages"
        assert source(graph, "update_critic.returns") == "gae.returns"

    def test_a_correction_after_a_veto_in_grpo_is_wired(self) -> None:
        graph = grpo(exact).edit(
            insert={
                "veto": After("group_advantage", RolloutCorrection("minimum", "reject", low=1e-4, high=None)),
                "correction": After("group_advantage", RolloutCorrection("token", "mask", 0.5, 5.0)),
            },
        )
        assert source(graph, "update_actor.advantages") == "correction.advantages"
        assert source(graph, "correction.advantages") == "veto.advantages"
        assert source(graph, "veto.advantages") == "group_advantage.advantages"
        assert graph.check() == []

    def test_a_correction_allows_lag_and_a_rejection_does_not(self) -> None:
        def findings(operator: RolloutCorrection) -> list[str]:
            graph = ppo(exact).edit(lag=1, insert={"correction": After("whiten", operator)})
            return [finding.rule for finding in graph.check()]

        assert findings(RolloutCorrection()) == findings(RolloutCorrection("sequence", "mask")) == []
        assert findings(RolloutCorrection("geometric", "reject", 0.9, 1.1)) == ["FR006"]

    def test_mismatch_is_an_optional_sink_of_the_stock_graphs(self) -> None:
        for graph in (ppo(exact), grpo(exact)):
            assert "mismatch" in graph.sinks
            assert source(graph, "mismatch.rollout_log_probs") == "generate.rollout_log_probs"
            assert source(graph, "mismatch.old_log_probs") == "old_log_prob.old_log_probs"
            assert graph.check() == []
            without = graph.edit(drop=["mismatch"])
            assert set(graph.nodes) - set(without.nodes) == {"mismatch"}
            assert without.edit(insert={"mismatch": After("old_log_prob", Mismatch())}).fingerprint() == (
                graph.fingerprint()
            )
            assert "mismatch" not in Validation(PromptData("heldout.jsonl")).graph(graph)
        watching = ppo(exact).subgraph(until="mismatch")
        assert watching.check() == [], "what writes no weights is held to no rule"

    @pytest.mark.parametrize("name", ["ppo", "grpo"])
    def test_a_run_without_mismatch_has_correction_weights_of_one(
        self, name: str, tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        anchor = {"ppo": "whiten", "grpo": "group_advantage"}[name]
        job = job_of(name, tiny).edit(
            insert={"correction": After(anchor, RolloutCorrection())}, set={"mismatch.calibration": 1}
        )
        training = Training(
            job, PromptData(prompts_file), steps=4, prompts=4, folder=str(tmp_path / name), save_model=False
        )
        metrics = training.run().metrics
        for step in metrics:
            assert 0 <= step["rollout/logp_diff_mean"] < 1e-6
            assert step["rollout/logp_diff_max"] < 1e-5
            assert step["rollout/ratio_outside"] == step["rollout_corr/bounded"] == 0
            assert step["rollout_corr/ess"] == pytest.approx(1.0, abs=1e-6)
            assert step["rollout_corr/weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert "rollout/alarm_above" not in metrics[0]
        assert all(step["rollout/alarm_above"] == 1e-5 for step in metrics[1:])
        assert not [record for record in caplog.records if "alarm" in record.getMessage()]

    def test_a_rollout_ratio_changes_nothing_without_mismatch(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        job = job_of("grpo", tiny, mini_batch=4)
        settings: dict[str, Any] = {"steps": 2, "prompts": 4, "save_model": False}
        data = PromptData(prompts_file)
        plain = Training(job, data, folder=str(tmp_path / "plain"), **settings).run()
        bypass = job.edit(set={"update_actor.loss.ratio_to": "rollout"}, drop=["mismatch"])
        run = Training(bypass, data, folder=str(tmp_path / "bypass"), **settings).run()
        assert "timing/old_log_prob" in plain.metrics[0] and "timing/old_log_prob" not in run.metrics[0]
        for one, other in zip(plain.metrics, run.metrics, strict=True):
            for key in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/approx_kl", "kl/ref"):
                assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key

    def test_truncated_probability_is_reported_without_an_alarm(
        self, tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = job_of("grpo", tiny).edit(set={"mismatch.calibration": 1, "generate.top_k": 5})
        training = Training(job, PromptData(prompts_file), steps=3, prompts=4, folder=str(tmp_path), save_model=False)
        for step in training.run().metrics:
            assert step["rollout/logp_diff_mean"] > 0.1
            assert step["rollout/ratio_outside"] > 0.5
        assert not [record for record in caplog.records if "alarm" in record.getMessage()]

    def test_a_run_resumes_the_alarm_from_its_checkpoint(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        job = job_of("ppo", tiny).edit(set={"mismatch.calibration": 2, "generate.top_k": 5})
        whole = Training(
            job, PromptData(prompts_file), steps=4, prompts=4, folder=str(tmp_path / "whole"), save_model=False
        )
        parts = dataclasses.replace(whole, folder=str(tmp_path / "parts"), checkpoint_every=1)
        dataclasses.replace(parts, steps=1).run()
        resumed = dataclasses.replace(parts, resume=True).run().metrics
        expected = whole.run().metrics
        assert ["rollout/alarm_above" in step for step in resumed] == [False, False, True, True]
        for key in ("rollout/alarm_above", "rollout/logp_diff_mean"):
            assert [step.get(key) for step in resumed] == [step.get(key) for step in expected]


class TestMismatch:
    def test_mismatch_metrics_equal_a_worked_example(self) -> None:
        metrics = Metrics()
        found = Mismatch()(ROLLOUT, OLD, MASK, metrics=metrics)
        d = [math.log(2), math.log(0.5), math.log(4), 0.0, 0.0]  # old - rollout
        assert found == Mismatched(pytest.approx(sum(map(abs, d)) / 5), None)  # type: ignore[arg-type]
        assert metrics.compute() == pytest.approx(
            {
                "rollout/logp_diff_mean": sum(map(abs, d)) / 5,
                "rollout/logp_diff_max": math.log(4),
                "rollout/ratio_outside": 3 / 5,
                "rollout/kl": sum(math.exp(x) - 1 - x for x in d) / 5,
            },
            rel=1e-5,
        )

    def test_the_kl_estimate_matches_the_distributions(self) -> None:
        """In expectation over what the engine samples."""
        draw = torch.Generator().manual_seed(2)
        trainer, engine = (torch.randn(1, 6, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
        counts = (engine.exp() * 100_000).round().long().flatten()
        tokens = torch.arange(6).repeat_interleave(counts)
        metrics = Metrics()
        mask = torch.ones(1, len(tokens), dtype=torch.bool)
        Mismatch()(engine[:, tokens].float(), trainer[:, tokens].float(), mask, metrics=metrics)
        kl = float((engine.exp() * (engine - trainer)).sum())
        assert metrics.compute()["rollout/kl"] == pytest.approx(kl, rel=1e-3)

    def test_the_alarm_is_calibrated_on_the_first_steps(self, caplog: pytest.LogCaptureFixture) -> None:
        session = Session({}, seed=0)
        mismatch = Mismatch(calibration=2, margin=3.0)
        found = []
        with session.active(), caplog.at_level(logging.WARNING):
            for shift in (0.01, 0.02, 0.05, 0.07, 0.01):
                found.append(mismatch(torch.full((2, 3), -1.0 - shift), torch.full((2, 3), -1.0), MASK[:2]))
        assert [round(m.alarm_above or 0.0, 4) for m in found] == [0, 0, 0.06, 0.06, 0.06]
        assert len(caplog.messages) == 1
        assert "step 4" in caplog.messages[0] and "0.07 nats" in caplog.messages[0] and "0.06" in caplog.messages[0]
        seen = session.state["mismatch.seen"]
        assert seen == {"steps": 5, "largest": pytest.approx(0.02, rel=1e-4), "alarm": False}

    def test_the_alarm_warns_once_per_crossing_of_its_threshold(self, caplog: pytest.LogCaptureFixture) -> None:
        mismatch = Mismatch(calibration=1)
        with caplog.at_level(logging.WARNING):
            for shift in (0.01, 0.5, 0.6, 0.7, 0.01, 0.5):
                mismatch(torch.full((2, 3), -1.0 - shift), torch.full((2, 3), -1.0), MASK[:2])
        assert [message.split(":")[0] for message in caplog.messages] == ["mismatch, step 2", "mismatch, step 6"]

    def test_infinite_differences_raise_the_alarm(self, caplog: pytest.LogCaptureFixture) -> None:
        session = Session({}, seed=0)
        broken = torch.tensor([[-1.0, -math.inf]])
        with session.active(), caplog.at_level(logging.WARNING):
            Mismatch()(broken, torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool))
        assert "differ from the trainer's by inf nats" in caplog.messages[0]
        check_json(session.state, "the state")
        assert session.state["mismatch.seen"]["largest"] == 0

    def test_mismatch_includes_the_renormalization_by_the_engine(self) -> None:
        """Off by minus the log of the probability that top-k keeps, to the engine's favor."""
        draw = torch.Generator().manual_seed(3)
        trainer = torch.randn(7, 11, generator=draw, dtype=torch.float64).log_softmax(-1)
        top, tokens = trainer.topk(3, dim=-1)
        engine = top.log_softmax(-1)
        picked = torch.randint(3, (7, 1), generator=draw)
        columns = (engine.gather(1, picked).float(), trainer.gather(1, tokens.gather(1, picked)).float())
        metrics = Metrics()
        Mismatch()(*columns, torch.ones(7, 1, dtype=torch.bool), metrics=metrics)
        cut_off = -top.logsumexp(-1)
        assert metrics.compute()["rollout/logp_diff_mean"] == pytest.approx(float(cut_off.mean()), rel=1e-5)

    def test_padding_does_not_change_a_bit(self) -> None:
        def numbers(width: int) -> dict[str, float]:
            draw, metrics = torch.Generator().manual_seed(4), Metrics()
            old, rollout = torch.randn(2, 9, 40, generator=draw)
            mask = torch.arange(40) < torch.randint(1, 41, (9, 1), generator=draw)
            padding = (0, width - 40)
            Mismatch()(*(torch.nn.functional.pad(x, padding) for x in (rollout, old, mask)), metrics=metrics)
            return metrics.compute()

        assert numbers(40) == numbers(57)

    def test_the_alarm_state_is_restored(self, caplog: pytest.LogCaptureFixture) -> None:
        session = Session({}, seed=0, state={"mismatch.seen": {"steps": 10, "largest": 0.01, "alarm": False}})
        with session.active(), caplog.at_level(logging.WARNING):
            Mismatch()(torch.full((2, 3), -1.5), torch.full((2, 3), -1.0), MASK[:2])
        assert "step 11" in caplog.messages[0]

    def test_rounding_raises_no_alarm(self, caplog: pytest.LogCaptureFixture) -> None:
        mismatch = Mismatch(calibration=1)
        with caplog.at_level(logging.WARNING):
            mismatch(ROLLOUT[:2, :2], ROLLOUT[:2, :2], MASK[:2, :2])  # not apart at all
            mismatch(ROLLOUT[:2, :2], ROLLOUT[:2, :2] + 5e-6, MASK[:2, :2])
            assert caplog.messages == []
            mismatch(ROLLOUT[:2, :2], ROLLOUT[:2, :2] + 1e-4, MASK[:2, :2])
        assert len(caplog.messages) == 1

    def test_steps_without_tokens_neither_count_nor_fail(self) -> None:
        session, metrics = Session({}, seed=0), Metrics()
        with session.active():
            assert Mismatch()(ROLLOUT, OLD, torch.zeros_like(MASK), metrics=metrics) == Mismatched(0.0, None)
        assert metrics.compute() == {}
        assert session.state["mismatch.seen"]["steps"] == 0


def test_whiten_and_correction_do_not_commute() -> None:
    """The order matters: after whiten, the weights scale what the loss reads."""
    advantages = torch.tensor([[1.0, 2.0, 4.0]])
    columns = (OLD[:1], ROLLOUT[:1], MASK[:1])
    after = RolloutCorrection()(Whiten()(advantages, MASK[:1]), *columns)
    assert after.tolist() == [pytest.approx((Whiten()(advantages, MASK[:1]) * torch.tensor([2, 0.5, 2])).tolist()[0])]
