"""Training on rows of a frozen engine (`update.py`, `retokenize.py`, `lineage.py`): sequence-level distillation,
rejection sampling, and ratios to a frozen behavior policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl import PromptBatch, Role, algorithm
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.core.operators.loss import Loss
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import NodeError
from flowrl.graph import Graph
from flowrl.operators import (
    NLL,
    Filter,
    Generate,
    GroupAdvantage,
    OldLogProb,
    PPOClip,
    Ranked,
    Reinforce,
    Repeat,
    Retokenize,
    Reward,
    UpdateActor,
)
from flowrl.records import FROZEN
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.engine.result import StepResult
from flowrl.run.training.job import Job
from flowrl.sync.digest import named_weights, weights_digest
from tests.run.engine.collecting import stream_of
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.rewards import digits

TEACHER = Generate(max_new_tokens=6, rollout=Role("teacher"))


@algorithm
def seq_kd(batch: PromptBatch) -> Any:
    """Sequence-level distillation (Kim & Rush 2016, arXiv:1606.07947): SFT on the teacher's samples."""
    return UpdateActor(NLL())(TEACHER(batch))


@algorithm
def off_policy(batch: PromptBatch, *, loss: Loss = PPOClip(ratio_to="rollout")) -> Any:  # noqa: B008 -- frozen
    """The advantages of a frozen behavior policy's responses."""
    prompts = Repeat(3)(batch)
    rows = TEACHER(prompts)
    advantages = GroupAdvantage()(Reward(digits)(rows, prompts), rows.response_mask, prompts.uid)
    columns = {"advantages": advantages}
    if "old_log_probs" in loss.signature.ports:
        of_engine = getattr(loss, "ratio_to", "old") == "rollout"
        columns["old_log_probs"] = rows.rollout_log_probs if of_engine else OldLogProb()(rows)
    return UpdateActor(loss)(rows, **columns)


def teacher(folder: Path) -> str:
    return tiny_folder(folder / "teacher", seed=1)


def bound(graph: Graph, student: str, teacher: str) -> Job:
    engine = TorchRollout(teacher, device="cpu", frozen=True)
    return graph.bind(actor=TorchTrainer(student, SGD(lr=0.5), device="cpu"), teacher=engine)


def results(job: Job, student: str, prompts_file: str, steps: int = 3) -> list[StepResult]:
    with job.open() as executor:
        executor.sync()
        stream = stream_of(student, prompts_file)
        names = [name for name in ("generate", "retokenize") if name in job.graph]
        return list(executor.run(lambda step: stream.next(4), range(steps), return_nodes=names))


@torch.no_grad()
def nll(model: Any, rows: Any) -> float:
    """The mean negative log-likelihood of all response tokens, by transformers, each row alone."""
    width, total, tokens = rows["response_mask"].shape[1], 0.0, 0
    for row in range(len(rows)):
        ids = rows["input_ids"][row][rows["attention_mask"][row]]
        count = int(rows["response_mask"][row, :width].sum())
        logits = model(ids[None]).logits[0].double()
        total -= float(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[-count:].sum())
        tokens += count
    return total / tokens


def test_a_frozen_engine_has_a_frozen_receipt_with_the_digest_of_its_folder(tmp_path: Path) -> None:
    folder = teacher(tmp_path)
    engine = TorchRollout(folder, device="cpu", frozen=True).build(EngineBuilder({}, seed=0))
    assert engine.receipt is not None and engine.receipt.frozen and engine.receipt.version == FROZEN
    assert engine.receipt.digest == weights_digest(named_weights(AutoModelForCausalLM.from_pretrained(folder)))


def test_a_student_trains_on_a_teachers_samples_in_every_step(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = bound(seq_kd(), tiny, teacher(tmp_path))
    job.refuse_unready(4)  # FR002 asks for no Sync
    found = results(job, tiny, prompts_file)
    student = AutoModelForCausalLM.from_pretrained(tiny)
    losses = [float(result.metrics["actor/pg_loss"].compute()) for result in found]
    assert losses[0] == pytest.approx(nll(student, found[0].columns["generate"]), rel=1e-5)
    assert losses[2] < losses[0]
    for result in found:
        rows = result.columns["generate"]
        assert set(rows["policy_version"].tolist()) == {FROZEN}
        assert set(rows["token_version"][rows["response_mask"]].tolist()) == {FROZEN}


@pytest.mark.parametrize("loss", [Reinforce(), PPOClip(ratio_to="rollout")], ids=["reinforce", "ppo"])
def test_losses_without_a_ratio_to_the_policy_itself_accept_frozen_rows(
    loss: Loss, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    job = bound(off_policy(loss=loss), tiny, teacher(tmp_path))
    job.refuse_unready(4)
    assert all(result.metrics["actor/grad_norm"].compute() > 0 for result in results(job, tiny, prompts_file))


def test_a_ratio_to_the_policy_itself_refuses_frozen_rows(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = bound(off_policy(loss=PPOClip()), tiny, teacher(tmp_path))
    [finding] = job.graph.check(prompts=4)
    assert finding.rule == "FR002" and "ratio_to='rollout'" in finding.message and "Insert" not in finding.message
    with pytest.raises(NodeError) as caught:
        results(job.edit(allow={"FR002": "the refusal of the update is tested"}), tiny, prompts_file)
    assert caught.value.code == "update.frozen-rows"
    assert caught.value.facts["row"] == 0 and caught.value.facts["loss"] == "PPOClip"


def test_rejection_sampling_from_a_frozen_policy(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """ReST and STaR: the best of several samples of a frozen policy are demonstrations."""

    @algorithm
    def rest(batch: PromptBatch) -> Any:
        prompts = Repeat(3)(batch)
        rows = TEACHER(prompts)
        scores = Reward(digits)(rows, prompts)
        best, _, _ = Filter(Ranked(best=1))(rows, token_level_scores=scores, uid=prompts.uid)
        return UpdateActor(NLL())(best)

    job = bound(rest(), tiny, teacher(tmp_path))
    job.refuse_unready(4)
    assert [result.metrics["filter/kept"].value for result in results(job, tiny, prompts_file)] == [4.0] * 3


def swapped(folder: str, to: Path) -> str:
    """The same model, with the tokens ``a`` and ``b`` swapped."""
    shutil.copytree(folder, to)
    file = to / "tokenizer.json"
    text = file.read_text().replace('"a":', '"?":', 1).replace('"b":', '"a":', 1)
    file.write_text(text.replace('"?":', '"b":', 1))
    return str(to)


def test_another_tokenizer_is_refused_unless_rows_go_by_text(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    other = swapped(teacher(tmp_path), tmp_path / "other")
    with raises("tokenizer.vocabulary-mismatch", role="teacher", other="actor"):
        bound(seq_kd(), tiny, other).refuse_unready(4)

    @algorithm
    def by_text(batch: PromptBatch) -> Any:
        rows = TEACHER(batch)
        again = Retokenize(tiny, max_new_tokens=6)(
            batch.raw_prompt, rows.response_text, rows.response_mask, rows.policy_version
        )
        return UpdateActor(NLL())(again)

    job = bound(by_text(), tiny, other)
    job.refuse_unready(4)
    ours, theirs = ChatTokenizer(tiny), ChatTokenizer(other)
    for result in results(job, other, prompts_file):
        old, new = result.columns["generate"], result.columns["retokenize"]
        for row in range(len(new)):
            ids = old["responses"][row][old["response_mask"][row]].tolist()
            end = [] if len(ids) == 6 else [ours.turn_end]
            expected = [*ours.encode(theirs.decode(ids)), *end]
            assert new["responses"][row][new["response_mask"][row]].tolist() == expected
        assert torch.equal(new["policy_version"], old["policy_version"])
    wrong = by_text().edit(set={"retokenize.model": other})
    with raises("tokenizer.vocabulary-mismatch", role="actor", other="retokenize"):
        bound(wrong, tiny, other).refuse_unready(4)
