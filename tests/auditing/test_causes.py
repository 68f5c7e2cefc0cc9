"""Causes of a bias: an audit lists those that explain it, and notes what it cannot show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowrl import After, AuditTask, Loss, Role, audit
from flowrl.auditing.gradient_error import EXACT
from flowrl.auditing.record import Audit
from flowrl.columns import Advantages, LogProbs, OldLogProbs
from flowrl.graphs import grpo, rloo
from flowrl.operators import Collect, Filter, Length, RolloutCorrection
from tests.auditing.listed import ONE, unread
from tests.auditing.test_defects import advantages, with_kl, with_loss

pytestmark = pytest.mark.runs


class Clip(Loss):
    """The clipped surrogate; the wrong one has min in place of max."""

    wrong: bool = False

    def __call__(self, log_probs: LogProbs, old_log_probs: OldLogProbs, advantages: Advantages) -> Tensor:
        ratio = (log_probs - old_log_probs).exp()
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
        return torch.minimum(plain, clipped) if self.wrong else torch.maximum(plain, clipped)


def removed_by(found: Audit) -> list[str]:
    """The causes without which no bias remains."""
    return [cause.name for cause in found.causes if cause.bias.high < EXACT]


def test_a_gate_that_selects_by_length_is_explained_although_the_audit_without_lengths_cannot_run() -> None:
    gate = {"collect": After("reward", Collect(Length(most=2), groups=8))}
    found = audit(rloo(unread, kl_coef=0.0).edit(insert=gate), ONE, n=2, samples=40)
    assert found.biased
    assert [(cause.name, cause.bias.value < EXACT) for cause in found.causes] == [("selection", True)]
    assert any("Whether length is a cause is unknown" in note and "collect" in note for note in found.notes)


def test_a_filter_that_drops_no_row_is_not_a_cause() -> None:
    gated = grpo(unread, kl_coef=0.0).edit(insert={"filter": After("reward", Filter(Length(least=1)))})
    assert [cause.name for cause in audit(gated, ONE, n=2).causes] == [
        cause.name for cause in audit(grpo(unread, kl_coef=0.0), ONE, n=2).causes
    ]


def test_kl_counted_twice_is_a_cause_with_its_coefficient() -> None:
    found = audit(advantages(with_kl, wrong=True), ONE, n=1)
    assert "unstated 0.5 · KL(actor || ref)" in removed_by(found)  # its code is - 0.5 * KL, and 0.2 is stated
    assert "0 % without unstated 0.5 · KL(actor || ref)" in " ".join(str(found).split())


def test_a_ratio_to_the_reference_instead_of_the_old_policy_is_a_cause() -> None:
    found = audit(rloo(unread, kl_coef=0.0).edit(set={"old_log_prob.actor": Role("ref")}), ONE, n=2)
    assert found.biased
    assert removed_by(found) == ["distance to the reference"]


def test_causes_that_explain_nothing_are_not_listed() -> None:
    found = audit(with_loss(Clip()), AuditTask(prompts=1, age=0.5), n=2)
    assert removed_by(found) == ["off-policy age"]
    assert [cause.name for cause in found.causes] == ["off-policy age"]  # neither length nor group spread
    wrong = audit(advantages(with_kl, wrong=True), AuditTask(prompts=1, reference=0.0), n=1)
    assert not wrong.biased  # KL to an equal policy is 0


def test_a_clip_with_min_instead_of_max_is_found_only_off_policy() -> None:
    """The report notes this on-policy; off-policy it warns against ranking by bias."""
    right, wrong = (audit(with_loss(Clip(wrong=wrong)), ONE, n=2, explain=False) for wrong in (False, True))
    assert torch.equal(right.expected, wrong.expected)
    assert any("a wrong clip or ratio does not show" in note for note in wrong.notes)
    biases = {}
    for seed in (0, 3):
        task = AuditTask(prompts=1, age=0.5, seed=seed)
        found = [audit(with_loss(Clip(wrong=wrong)), task, n=2, explain=False) for wrong in (False, True)]
        assert all(any("Do not rank by bias" in note for note in one.notes) for one in found)
        biases[seed] = [one.whole.bias.value for one in found]
    assert biases[0][0] < biases[0][1]
    assert biases[3][0] > 5 * biases[3][1]


def test_a_correction_that_has_nothing_to_correct_is_noted() -> None:
    corrected = rloo(unread).edit(insert={"correction": After("rloo_advantage", RolloutCorrection())})
    noted = "All ratios to the engine are 1"
    assert any(noted in note for note in audit(corrected, ONE, n=2, explain=False).notes)
    off = audit(corrected, AuditTask(prompts=1, mismatch=0.5), n=2, explain=False)
    assert not any(noted in note for note in off.notes)
