"""Tests of `trainer.py`, `learner.py`, `backends/torch/meshes/passes.py`, `backends/torch/score/engine.py` and
`backends/torch/score/model.py`.

The reference for `TorchTrainer` and `TorchScorer` is plain transformers in float64, one unpadded row at a time.
"""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from flowrl.backends import SGD, AdamW, TorchScorer
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import MiniBatch, Scorer, Trainer
from flowrl.protocols.scorers import NormScorer
from tests.backends.torch.train.trainers import CONTEXT, Folder, Pull, all_rows, change, seen_by, trainer
from tests.support.errors import raises
from tests.support.models import KINDS, VOCAB, Ragged, ragged, unpadded


def rows_of(batch: Ragged, rows: Tensor) -> Ragged:
    return Ragged(*(None if c is None else c[rows] if isinstance(c, Tensor) else c[rows.numpy()] for c in batch))


def reference(lm: Any, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by `lm`'s own logits, row by row without padding, in the dtype of `lm`."""
    log_probs, entropy = (torch.zeros(batch.response_mask.shape, dtype=lm.dtype) for _ in range(2))
    for row, ids, counted in unpadded(batch):
        log_p = torch.log_softmax(lm(ids).logits[0] / batch.temperature[row].to(lm.dtype), dim=-1)[counted - 1]
        log_probs[row, batch.response_mask[row]] = log_p.gather(1, ids[0, counted, None]).squeeze(1)
        entropy[row, batch.response_mask[row]] = torch.distributions.Categorical(logits=log_p).entropy()
    return log_probs, entropy


def float64(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- log-probs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logit_norms_are_squared_norms_of_the_log_prob_gradient(kind: str, folder: Folder) -> None:
    """Compared with float64 autograd with respect to the logits over the temperature."""
    batch, lm = ragged(), float64(folder(kind))
    expected = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for row, ids, counted in unpadded(batch):
        with torch.no_grad():
            logits = (lm(ids).logits[0] / batch.temperature[row].to(lm.dtype))[counted - 1]
        logits.requires_grad_()
        torch.log_softmax(logits, dim=-1).gather(1, ids[0, counted, None]).sum().backward()
        assert logits.grad is not None
        expected[row, batch.response_mask[row]] = logits.grad.square().sum(1)
    for engine in (trainer(folder(kind), logprob_chunk=3), TorchScorer(folder(kind), device="cpu").build(CONTEXT)):
        assert isinstance(engine, NormScorer)
        found = engine.logit_norms(batch)
        assert found.dtype == torch.float32 and not found.requires_grad
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropy_match_an_unpadded_float64_forward(kind: str, folder: Folder) -> None:
    batch, engine, loss = ragged(), trainer(folder(kind)), Pull(entropy_coef=0.1)
    with torch.no_grad():
        log_probs, entropy = reference(float64(folder(kind)), batch)
    found = engine.log_probs(batch)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found[~batch.response_mask].eq(0).all()
    torch.testing.assert_close(found.double(), log_probs, atol=1e-5, rtol=0)
    engine.update(batch, [all_rows(batch)], loss)
    torch.testing.assert_close(loss.seen[0][0].double(), log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(loss.seen[0][1].double(), entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scorer_equals_an_untrained_trainer_bit_for_bit(dtype: str, folder: Folder) -> None:
    batch, path = ragged(), Path(folder("llama"))
    scorer = TorchScorer(path, dtype=dtype, device="cpu").build(CONTEXT)
    assert isinstance(scorer, Scorer) and not isinstance(scorer, Trainer)
    assert not any(parameter.requires_grad for parameter in scorer.model.parameters())
    assert torch.equal(scorer.log_probs(batch), trainer(folder("llama"), dtype=dtype).log_probs(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_its_contents_do_not_change_results(kind: str, folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder(kind))
    expected = engine.log_probs(batch)

    def wider(column: Tensor, filler: Any, left: int) -> Tensor:
        size = (len(column), 5)
        columns = [torch.full(size, filler)] * bool(left) + [column, torch.full(size, filler)]
        return torch.cat([c.to(column.dtype) for c in columns], dim=1)

    padded = batch._replace(
        input_ids=wider(batch.input_ids, -100, 1),
        attention_mask=wider(batch.attention_mask, False, 1),
        position_ids=wider(batch.position_ids, 10**6, 1),
        response_mask=wider(batch.response_mask, False, 0),
    )
    found = engine.log_probs(padded)
    assert found.shape == padded.response_mask.shape
    assert torch.equal(found[:, :-5], expected) and found[:, -5:].eq(0).all()


def test_a_row_has_the_same_log_probs_alone_and_in_a_batch(folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder("llama"))
    together = engine.log_probs(batch)
    for row in range(len(batch.input_ids)):
        alone = engine.log_probs(rows_of(batch, torch.tensor([row])))
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=0)


def test_rows_of_padding_score_zero_and_do_not_change_the_update(folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder("llama"))
    expected = engine.log_probs(batch)
    filler = rows_of(batch, torch.tensor([0, 1]))._replace(
        attention_mask=torch.zeros(2, 16, dtype=torch.bool), response_mask=torch.zeros(2, 9, dtype=torch.bool)
    )
    mixed = Ragged(
        *(torch.cat(pair) if isinstance(pair[0], Tensor) else None for pair in zip(batch, filler, strict=True))
    )
    torch.testing.assert_close(engine.log_probs(mixed)[:6], expected, atol=1e-5, rtol=0)
    assert engine.log_probs(filler).eq(0).all()
    plain = change(engine, lambda: engine.update(batch, [all_rows(batch)], Pull()))
    other = trainer(folder("llama"))
    assert relative_error(change(other, lambda: other.update(mixed, [all_rows(mixed)], Pull())), plain) < 1e-6


def test_a_non_positive_temperature_is_refused(folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder("llama"))
    cold = batch._replace(temperature=batch.temperature.index_fill(0, torch.tensor([2, 4]), 0.0))
    with raises("model.temperature", row=2, temperature=0.0):
        engine.log_probs(cold)
    with raises("model.temperature", row=2):
        engine.update(cold, [all_rows(cold)], Pull())


def test_response_tokens_without_attention_or_predecessor_are_refused(folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder("llama"))
    with raises("model.invalid-rows", row=1, token=1):
        mask = batch.response_mask.clone()
        mask[1, 1] = True
        engine.log_probs(batch._replace(response_mask=mask))
    with raises("model.invalid-rows"):
        engine.log_probs(rows_of(batch, torch.tensor([0]))._replace(response_mask=torch.ones(1, 16, dtype=torch.bool)))


# --- old log-probs and those of the update -----------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}, {"max_tokens": 40}])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_ratio_before_the_first_step_is_exactly_one(kind: str, settings: dict[str, Any], folder: Folder) -> None:
    batch, loss = ragged(), Pull(entropy_coef=0.1)
    engine = trainer(folder(kind), **settings)
    old = engine.log_probs(batch)
    engine.update(batch, [all_rows(batch)], loss)
    assert (len(loss.seen) > 1) == ("max_tokens" in settings)
    assert torch.equal(seen_by(loss, batch), old)


def test_other_micro_batches_change_the_ratio_by_rounding_only(folder: Folder) -> None:
    batch, loss, engine = ragged(rows=12), Pull(), trainer(folder("llama"), max_tokens=40)
    old = engine.log_probs(batch)
    rows = torch.randperm(12)
    engine.update(batch, [MiniBatch(rows, batch.response_mask[rows].float())], loss)
    assert len(loss.seen) > 2
    assert (seen_by(loss, batch) - old).abs().max() <= 1e-5


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_matches_float64_autograd(kind: str, folder: Folder) -> None:
    batch, reference_model = ragged(), float64(folder(kind))
    log_probs, entropy = reference(reference_model, batch)
    weights = batch.response_mask * torch.rand(batch.response_mask.shape)
    (weights.double() * (batch.pull.double() * log_probs + 0.1 * entropy)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference_model.named_parameters()}
    gradient = torch.cat([gradients[name].flatten() for name in sorted(gradients)])

    engine = trainer(folder(kind), max_tokens=50, logprob_chunk=4)
    metrics = Metrics()
    mini = MiniBatch(torch.arange(6), weights)
    found = change(engine, lambda: metrics.merge(engine.update(batch, [mini], Pull(entropy_coef=0.1))))
    assert relative_error(found, gradient) < 1e-5
    log, pull = metrics.compute(), float((weights * batch.pull).sum() / weights.sum())
    assert log["actor/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert log["actor/pull"] == pytest.approx(pull, rel=1e-5) and log["actor/lr"] == 1.0


def test_micro_batches_and_chunks_do_not_change_a_step(folder: Folder) -> None:
    batch, loss = ragged(rows=10), Pull(entropy_coef=0.1)
    changes = []
    for max_tokens, chunk in [(10**6, 10**6), (1, 10**6), (48, 10**6), (10**6, 1), (64, 7)]:
        engine = trainer(folder("llama"), max_tokens=max_tokens, logprob_chunk=chunk)
        changes.append(change(engine, lambda engine=engine: engine.update(batch, [all_rows(batch)], loss)))
    for other in changes[1:]:
        assert relative_error(other, changes[0]) < 1e-6


def test_each_mini_batch_is_one_optimizer_step_in_order(folder: Folder) -> None:
    batch, engine, metrics = ragged(), trainer(folder("llama"), optimizer=SGD(lr=0.01, momentum=0.9)), Metrics()
    rows = [torch.tensor([4, 0]), torch.tensor([1, 5, 3])]
    minis = [MiniBatch(r, batch.response_mask[r].float()) for r in rows]
    found = change(engine, lambda: metrics.merge(engine.update(batch, minis, Pull())))

    reference_model, norms = float64(folder("llama")), []
    before = {name: parameter.detach().clone() for name, parameter in reference_model.named_parameters()}
    torch_sgd = torch.optim.SGD(reference_model.parameters(), lr=0.01, momentum=0.9)
    for r in rows:
        part = rows_of(batch, r)
        torch_sgd.zero_grad()
        (-(part.pull * reference(reference_model, part)[0]).sum()).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in reference_model.parameters()])))
        torch_sgd.step()
    after = dict(reference_model.named_parameters())
    assert relative_error(found, torch.cat([(after[n] - before[n]).detach().flatten() for n in sorted(before)])) < 1e-5
    assert metrics.compute()["actor/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert engine.version == 1


def test_a_loss_gets_full_columns_of_its_rows(folder: Folder) -> None:
    batch, loss, engine = ragged(), Pull(), trainer(folder("llama"), max_tokens=1)
    rows = torch.tensor([3, 1])
    engine.update(batch, [MiniBatch(rows, batch.response_mask[rows].float())], loss)
    assert [seen[2].uid.tolist() for seen in loss.seen] == [["row 1"], ["row 3"]]  # in order of length
    for output, entropy, part, weights in loss.seen:
        assert output.shape == weights.shape == part.pull.shape == part.response_mask.shape == (1, 9)
        assert entropy is not None and not entropy.requires_grad and part.absent is None


def test_gradients_are_clipped_by_their_norm(folder: Folder) -> None:
    batch = ragged()
    for clip, scale in [(0.5, None), (1e6, 1.0)]:
        free, clipped = trainer(folder("llama")), trainer(folder("llama"), grad_clip=clip)
        full = change(free, lambda e=free: e.update(batch, [all_rows(batch)], Pull()))
        metrics = Metrics()
        found = change(clipped, lambda e=clipped, m=metrics: m.merge(e.update(batch, [all_rows(batch)], Pull())))
        assert relative_error(found, full * (scale or clip / float(full.norm()))) < 1e-5
        assert metrics.compute()["actor/grad_norm"] == pytest.approx(float(full.norm()), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_refused_without_a_change_of_weights(bad: float, folder: Folder) -> None:
    batch, engine = ragged(), trainer(folder("llama"), grad_clip=1.0)
    poisoned = batch._replace(pull=batch.pull.index_fill(0, torch.tensor([5]), bad))
    minis = [MiniBatch(rows, batch.response_mask[rows].float()) for rows in (torch.tensor([0, 1]), torch.tensor([5]))]
    with raises("trainer.not-finite-gradient", role="actor", where="mini-batch 1 of 2", lr=1.0):
        engine.update(poisoned, minis, Pull())
    first_only = trainer(folder("llama"), grad_clip=1.0)
    first_only.update(batch, minis[:1], Pull())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.weights(), first_only.weights(), strict=True))
    assert engine.version == 0


def test_a_mini_batch_of_weight_zero_still_takes_an_optimizer_step(folder: Folder) -> None:
    """AdamW with a zero gradient: momentum continues and weight decay applies (torch's optimizer is the reference)."""
    batch, loss = ragged(), Pull()
    spec = AdamW(lr=0.01, weight_decay=0.1)
    engine = trainer(folder("llama"), optimizer=spec)
    idle = MiniBatch(torch.tensor([2, 3]), torch.zeros(2, 9))
    engine.update(batch, [all_rows(batch)], loss)
    state = copy.deepcopy(engine.state_dict())
    metrics = engine.update(batch, [idle], loss).compute()
    assert len(loss.seen) == 1 and metrics["actor/grad_norm"] == 0 and engine.version == 2

    twins = [tensor.clone().requires_grad_() for tensor in state["weights"].values()]
    optimizer = torch.optim.AdamW(twins, lr=0.01, weight_decay=0.1)
    optimizer.load_state_dict(state["optimizer"])
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    optimizer.step()
    for name, twin in zip(state["weights"], twins, strict=True):
        assert torch.equal(engine.state_dict()["weights"][name], twin)


# --- memory ------------------------------------------------------------------------------------------------------


class WidestVocabulary(TorchDispatchMode):
    """Records the largest number of tokens in any ``[tokens, vocabulary]`` tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            # The transposed head itself is [hidden = 64, vocabulary].
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCAB,) and tensor.shape[0] != 64:
                self.tokens = max(self.tokens, tensor.numel() // VOCAB)
        return out


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_logits_are_computed_one_chunk_at_a_time(kind: str, folder: Folder) -> None:
    """Also for a model with a soft cap on its logits."""
    batch, engine, chunk = ragged(rows=24), trainer(folder(kind), logprob_chunk=5), 5
    assert batch.response_mask.sum() > 8 * chunk
    with WidestVocabulary() as watch:
        engine.log_probs(batch)
    assert watch.tokens == chunk
    saved: list[tuple[int, ...]] = []
    with (
        WidestVocabulary() as watch,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t),
    ):
        engine.update(batch, [all_rows(batch)], Pull(entropy_coef=0.1))
    assert watch.tokens == chunk
    assert saved and not [shape for shape in saved if shape[-1:] == (VOCAB,) and shape != (64, VOCAB)]


# --- precision, checkpointing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_result_and_leaves_dropout_disabled(kind: str, folder: Folder) -> None:
    batch = ragged()
    plain, checkpointed = trainer(folder(kind)), trainer(folder(kind), gradient_checkpointing=True)
    assert torch.equal(plain.log_probs(batch), checkpointed.log_probs(batch))
    expected = change(plain, lambda: plain.update(batch, [all_rows(batch)], Pull(0.1)))
    assert (
        relative_error(change(checkpointed, lambda: checkpointed.update(batch, [all_rows(batch)], Pull(0.1))), expected)
        < 1e-6
    )
    assert not checkpointed.model.training


def test_gradient_checkpointing_recomputes_layers(folder: Folder) -> None:
    batch, runs = ragged(), {}
    for checkpointing in (False, True):
        engine = trainer(folder("llama"), gradient_checkpointing=checkpointing)
        calls: list[int] = []
        engine.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        engine.update(batch, [all_rows(batch)], Pull())
        runs[checkpointing] = len(calls)
    assert runs == {False: 1, True: 2}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bfloat16_is_close_to_float32_with_float32_weights(kind: str, folder: Folder) -> None:
    batch = ragged()
    exact, in_bfloat16 = trainer(folder(kind)), trainer(folder(kind), dtype="bfloat16", gradient_checkpointing=True)
    a, b = exact.log_probs(batch), in_bfloat16.log_probs(batch)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    torch.testing.assert_close(a, b, atol=0.15, rtol=0)
    assert {tensor.dtype for _, tensor in in_bfloat16.weights()} == {torch.float32}
    full = change(exact, lambda: exact.update(batch, [all_rows(batch)], Pull(0.1)))
    near = change(in_bfloat16, lambda: in_bfloat16.update(batch, [all_rows(batch)], Pull(0.1)))
    assert torch.cosine_similarity(near, full, dim=0) > 0.995


def test_logit_soft_caps_are_detected_with_small_weights(folder: Folder, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder("gemma2"))
    with torch.no_grad():
        lm.model.embed_tokens.weight.mul_(1e-3)
    shutil.copytree(folder("gemma2"), tmp_path, dirs_exist_ok=True)
    lm.save_pretrained(tmp_path)
    engine = trainer(str(tmp_path))
    with torch.no_grad():  # as after training: large logits, which the cap changes
        engine.model.model.embed_tokens.weight.mul_(1e4)
    engine.save_pretrained(str(tmp_path / "grown"))
    with torch.no_grad():
        expected = reference(float64(str(tmp_path / "grown")), batch := ragged())[0]
    assert expected.min() < -20
    torch.testing.assert_close(engine.log_probs(batch).double(), expected, atol=1e-3, rtol=1e-4)
