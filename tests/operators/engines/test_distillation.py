"""Distillation: divergences and their gradients against float64, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from flowrl import INJECTED, Loss, Metrics
from flowrl import columns as c
from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
from flowrl.errors import BindError, DefinitionError, ParameterError
from flowrl.graphs import distill_full
from flowrl.operators import (
    GKD,
    FullGKD,
    KLLoss,
    ReverseKL,
    TeacherHiddenStates,
    TeacherTopK,
    UpdateActor,
    UpdateCritic,
)
from flowrl.operators.engines.distillation import divergence
from flowrl.operators.losses.objective import TokenObjective
from flowrl.protocols.protocols import MiniBatch
from tests.backends.torch.train.trainers import CONTEXT, trainer
from tests.support.errors import raises
from tests.support.models import VOCAB, char_tokenizer, ragged, tiny_config, tiny_folder, unpadded

BETAS = [0.0, 0.3, 0.5, 1.0]


def plain(p: list[float], q: list[float], beta: float) -> float:
    """The paper's words, over Python numbers; at the ends the KL that TRL takes there."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True))

    if beta == 0.0:
        return kl(p, q)
    if beta == 1.0:
        return kl(q, p)
    mixed = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from(BETAS))
def test_divergences_match_the_paper(seed: int, outcomes: int, beta: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    p, q = (3 * torch.randn(2, 4, outcomes, generator=draw, dtype=torch.float64)).log_softmax(-1)
    expected = [plain(one.exp().tolist(), other.exp().tolist(), beta) for one, other in zip(p, q, strict=True)]
    assert divergence(p, q, beta).tolist() == pytest.approx(expected, abs=1e-10)
    assert divergence(p, p, beta).abs().max() < 1e-12
    assert (divergence(p, q, beta) > -1e-12).all()


def test_the_divergence_with_beta_one_half_is_symmetric() -> None:
    p, q = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    torch.testing.assert_close(divergence(p, q, 0.5), divergence(q, p, 0.5))
    assert not torch.allclose(divergence(p, q, 0.3), divergence(q, p, 0.3))


class Marked(NamedTuple):
    """Rows with the top-k log-probs of a teacher."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor
    teacher_ids: Tensor
    teacher_log_probs: Tensor
    teacher_rest: Tensor


def marked(folder: str, k: int, **settings: Any) -> Marked:
    scorer = TorchScorer(folder, device="cpu", **settings).build(CONTEXT)
    return Marked(*ragged()[:5], *TeacherTopK(k, teacher=scorer)(ragged()))


def distributions(folder: str) -> Iterator[tuple[int, Tensor, Any]]:
    """Row, float64 log-probs ``[tokens vocabulary]`` of its tokens on the mask by transformers, and the model."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    batch = ragged()
    for row, ids, places in unpadded(batch):
        logits = model(input_ids=ids).logits[0, places - 1]
        yield row, (logits / batch.temperature[row].double()).log_softmax(-1), model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student and its teacher."""
    path = tmp_path_factory.mktemp("pair")
    return tiny_folder(path), tiny_folder(path, seed=1)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_teacher_top_k_equals_that_of_each_row_alone(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    batch = marked(folder, 7, max_tokens=30, logprob_chunk=3)
    for row, log_p, _ in distributions(folder):
        on = batch.response_mask[row]
        top, ids = log_p.topk(7)
        assert torch.equal(batch.teacher_ids[row][on], ids)
        torch.testing.assert_close(batch.teacher_log_probs[row][on].double(), top.detach(), atol=1e-5, rtol=0)
        rest = (1.0 - top.exp().sum(-1)).log()
        torch.testing.assert_close(batch.teacher_rest[row][on].double(), rest.detach(), atol=1e-4, rtol=0)
        for column in batch[5:]:
            assert column[row][~on].eq(0).all()


def lumped(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of `ids`, and of all others together."""
    others = torch.ones_like(log_p, dtype=torch.bool).scatter(1, ids, False)
    return torch.cat([log_p.gather(1, ids), log_p.exp().where(others, 0.0).sum(1, keepdim=True).log()], 1)


def expected(
    student: str, teacher: Mapping[int, Tensor], beta: float, ids: Mapping[int, Tensor] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The mean divergence over all tokens in float64, and its gradient.

    Args:
        student: the folder of the model.
        teacher: log-probs ``[tokens outcomes]`` by row.
        beta: as in `divergence`.
        ids: the tokens that are outcomes, by row, all others being one; None is that all are.
    """
    total, count, model = 0.0, sum(len(log_p) for log_p in teacher.values()), None
    for row, log_p, model in distributions(student):  # noqa: B007
        p, q = teacher[row].detach().exp(), (log_p if ids is None else lumped(log_p, ids[row])).exp()
        mixed = beta * p + (1 - beta) * q
        forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
        between = beta * (p * (p / mixed).log()).sum(-1) + (1 - beta) * (q * (q / mixed).log()).sum(-1)
        loss = {0.0: forward, 1.0: reverse}.get(beta, between).sum() / count
        loss.backward()
        total += float(loss.detach())
    assert model is not None
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def updated(student: str, batch: Any, loss: Loss, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss that an update reports, and the gradient by which it moved the weights."""
    engine = trainer(student, **settings)
    before = {name: tensor.detach().clone() for name, tensor in engine.weights()}
    objective = TokenObjective(loss)
    weights = objective.weights(batch.response_mask)
    metrics = engine.update(batch, [MiniBatch(torch.arange(len(weights)), weights)], objective)
    return metrics["actor/divergence"].compute(), {name: before[name] - t.detach() for name, t in engine.weights()}


def assert_it_follows(
    truth: tuple[float, dict[str, Tensor]], student: str, batch: Any, loss: Loss, closely: float = 1e-4
) -> None:
    """In one forward pass, and in micro-batches and chunks; the learning rate is 1."""
    value, gradient = truth
    for settings in ({}, {"max_tokens": 20, "logprob_chunk": 2}, {"gradient_checkpointing": True}):
        found, moved = updated(student, batch, loss, **settings)
        assert found == pytest.approx(value, abs=1e-6)
        size = torch.cat([g.flatten() for g in gradient.values()]).norm()
        difference = torch.cat([(moved[name].double() - g).flatten() for name, g in gradient.items()]).norm()
        assert difference / size < closely


@pytest.mark.parametrize("beta", BETAS)
def test_the_top_k_gradient_matches_the_formula(beta: float, pair: tuple[str, str]) -> None:
    batch = marked(pair[1], 9)
    rows = {row: batch.response_mask[row] for row in range(len(batch.response_mask))}
    teacher = torch.cat([batch.teacher_log_probs, batch.teacher_rest[..., None]], -1).double()
    truth = expected(
        pair[0],
        {row: teacher[row][on] for row, on in rows.items()},
        beta,
        {row: batch.teacher_ids[row][on] for row, on in rows.items()},
    )
    assert_it_follows(truth, pair[0], batch, GKD(beta))


class Stated(NamedTuple):
    """Rows with the hidden states and the head of a teacher."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor
    teacher_states: Tensor
    teacher_head: Any


def stated(folder: str, rows: Any = None, **settings: Any) -> Stated:
    scorer = TorchScorer(folder, device="cpu", **settings).build(CONTEXT)
    rows = ragged() if rows is None else rows
    return Stated(*rows[:5], *TeacherHiddenStates(teacher=scorer)(rows))


@pytest.mark.parametrize(("kind", "changed"), [("llama", {"hidden_size": 32}), ("gemma2", {}), ("granite", {})])
def test_the_full_vocabulary_gradient_matches_the_formula(
    kind: str, changed: dict[str, Any], pair: tuple[str, str], tmp_path: Path
) -> None:
    """Of teachers of another size, with capped and with scaled logits, tied and not."""
    folder = tiny_folder(tmp_path, kind, 5, **changed)
    teacher = {row: log_p for row, log_p, _ in distributions(folder)}
    batch = stated(folder, max_tokens=30)
    for beta in BETAS if kind == "llama" else [0.3]:
        assert_it_follows(expected(pair[0], teacher, beta), pair[0], batch, FullGKD(beta))


def test_a_student_with_capped_logits_gets_the_gradient_of_the_formula(pair: tuple[str, str], tmp_path: Path) -> None:
    student = tiny_folder(tmp_path, "gemma2", 2)
    teacher = {row: log_p for row, log_p, _ in distributions(pair[1])}
    assert_it_follows(expected(student, teacher, 0.3), student, stated(pair[1]), FullGKD(0.3))


def test_a_teacher_with_a_wider_vocabulary_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    wider = stated(tiny_folder(tmp_path, vocab_size=VOCAB + 3))
    with raises("objective.teacher-vocabulary", expected=VOCAB, found=VOCAB + 3):
        updated(pair[0], wider, FullGKD())


def test_a_trainable_model_is_refused_as_hidden_state_teacher(pair: tuple[str, str]) -> None:
    with pytest.raises(BindError, match=r"teacher.*StateScorer"):
        distill_full().bind(
            actor=TorchTrainer(pair[0]), rollout=TorchRollout(), teacher=TorchTrainer(pair[1])
        ).refuse_unready()
    with pytest.raises(ParameterError, match="StateScorer"):
        TeacherHiddenStates(teacher=trainer(pair[1]))


def test_larger_top_k_approaches_the_full_divergence(pair: tuple[str, str]) -> None:
    few, many, all_but_one = (updated(pair[0], marked(pair[1], k), GKD(0.0))[0] for k in (1, 20, VOCAB - 1))
    teacher, student = ({row: p.detach() for row, p, _ in distributions(folder)} for folder in (pair[1], pair[0]))
    whole = torch.cat([(teacher[row].exp() * (teacher[row] - student[row])).sum(-1) for row in teacher]).mean()
    assert 0 < few < many < all_but_one == pytest.approx(float(whole), abs=1e-5)
    assert updated(pair[0], stated(pair[1]), FullGKD(0.0))[0] == pytest.approx(float(whole), abs=1e-6)


class Largest(TorchDispatchMode):
    """The most bytes that any tensor has which is made within."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.most = max([self.most, *(x.numel() * x.element_size() for x in made)])
        return out


def wide_folder(path: Path, vocabulary: int) -> str:
    """A tiny model with many tokens."""
    config = tiny_config("llama")
    config.vocab_size = vocabulary
    folder = str(path / "wide")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loss", [GKD(0.5), FullGKD(0.5)])
def test_full_vocabulary_memory_is_bounded_by_the_chunk(loss: Loss, tmp_path: Path) -> None:
    """In teacher and student, forward and backward: nothing is larger than the weights of the head; and with one chunk
    for all tokens the same measure finds what is."""
    vocabulary, hidden = 3000, 64
    folder, rows = wide_folder(tmp_path, vocabulary), ragged(rows=24, prompt=4, response=32, seed=3)
    whole, head = (4 * rows * vocabulary for rows in (int(rows.response_mask.sum()), hidden))
    assert whole > 4 * head

    def most(chunk: int) -> int:
        scorer = TorchScorer(folder, device="cpu", logprob_chunk=chunk).build(CONTEXT)
        engine, objective = trainer(folder, logprob_chunk=chunk), TokenObjective(loss)
        with Largest() as seen:
            if isinstance(loss, FullGKD):
                batch: Any = Stated(*rows[:5], *TeacherHiddenStates(teacher=scorer)(rows))
            else:
                batch = Marked(*rows[:5], *TeacherTopK(4, teacher=scorer)(rows))
            weights = objective.weights(batch.response_mask)
            engine.update(batch, [MiniBatch(torch.arange(len(weights)), weights)], objective)
        return seen.most

    assert most(8) <= head
    assert most(10**6) >= whole


def test_reverse_kl_is_the_masked_log_prob_difference() -> None:
    nan = float("nan")
    mask = torch.tensor([[True, False, True], [False, False, False]])
    teacher, old = torch.tensor([[-1.0, nan, -3.0], [nan] * 3]), torch.tensor([[-2.0, nan, -0.5], [nan] * 3])
    metrics = Metrics()
    assert ReverseKL()(teacher, old, mask, metrics=metrics).tolist() == [[1.0, 0.0, -2.5], [0.0] * 3]
    assert metrics.compute() == {"distill/reverse_kl": 0.75}


def test_invalid_uses_of_distribution_losses_are_refused(pair: tuple[str, str]) -> None:
    with raises("update.wrong-loss", loss="GKD"):
        UpdateActor(GKD(), kl=KLLoss())
    with raises("update.wrong-loss", loss="GKD", expected=("values",), found=("distributions",)):
        UpdateCritic(GKD())
    with raises("model.top-k"):
        marked(pair[1], VOCAB)
    with raises("loss.unit", unit="row"):

        class ByRow(Loss):
            unit: ClassVar[Any] = "row"

            def __call__(self, distributions: c.Distributions) -> Tensor: ...

    with pytest.raises(DefinitionError, match="cannot have metrics"):

        class Telling(Loss):
            def __call__(self, distributions: c.Distributions, metrics: Metrics = INJECTED) -> Tensor: ...

    with pytest.raises(DefinitionError, match="cannot have uid"):

        class Named(Loss):
            def __call__(self, distributions: c.Distributions, uid: c.Uid) -> Tensor: ...

    with raises("loss.ports", found=("log_probs", "distributions")):

        class Both(Loss):
            def __call__(self, log_probs: c.LogProbs, distributions: c.Distributions) -> Tensor: ...


class Peaked(Loss):
    """The probability of the likeliest token, weighed by what each row's temperature is: a user's own."""

    def __call__(self, distributions: c.Distributions, temperature: c.Temperature) -> Tensor:
        return temperature * distributions.amax(-1).exp()


def test_a_custom_distribution_loss_gets_tokens_and_row_columns(pair: tuple[str, str]) -> None:
    batch, objective = ragged(), TokenObjective(Peaked())
    weights = objective.weights(batch.response_mask)
    engine = trainer(pair[0], logprob_chunk=4)
    found = engine.update(batch, [MiniBatch(torch.arange(len(weights)), weights)], objective)["actor/divergence"]
    each = [batch.temperature[row] * p.detach().amax(-1).exp() for row, p, _ in distributions(pair[0])]
    assert found.compute() == pytest.approx(float(torch.cat(each).mean()), abs=1e-6)
