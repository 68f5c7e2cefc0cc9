"""Micro-batches by length and packed rows: results do not change, and padding is not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flowrl.backends import SGD, TorchScorer
from flowrl.backends.torch.score.rows import Budget, TokenInputs, from_first_tokens, micro_batches, packed
from flowrl.errors import DataError
from flowrl.protocols.protocols import MiniBatch
from tests.backends.torch.train.trainers import CONTEXT, Folder, Pull, seen_by, trainer
from tests.nightly import nightly_except
from tests.support.architectures import SETTINGS, architecture
from tests.support.models import KINDS, Ragged, ragged, tiny_folder, unpadded
from tests.support.rows.cut_rows import cut

PLAIN = [*KINDS, "granite", "cohere", "phi"]
OTHERS = sorted(SETTINGS.keys() - {"recurrent_gemma", "rwkv", "xlstm"})
"""Other architectures that can be trained; see `test_probes.py`."""
ON_EVERY_COMMIT = ["gpt2", "gemma2", "granite", "gpt_oss", "jamba", "deepseek_v3"]
"""Learned positions, windows, a scale of attention, sinks and experts, states, and latent attention."""


def mask_of(lengths: list[tuple[int, int]], prompt: int = 6, response: int = 8) -> Tensor:
    """A mask of rows with these numbers of prompt and response tokens."""
    columns = torch.arange(prompt + response)
    return torch.stack([(columns >= prompt - p) & (columns < prompt + r) for p, r in lengths])


# --- micro-batches ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=12),
    st.integers(1, 60),
    st.booleans(),
)
def test_micro_batches_contain_each_row_once_within_the_token_budget(
    lengths: list[tuple[int, int]], positions: int, pack: bool
) -> None:
    runs, spans = micro_batches(mask_of(lengths), Budget(positions, pack)), [sum(length) for length in lengths]

    def computed(rows: list[int]) -> int:
        of_rows = [spans[row] for row in rows]
        return sum(of_rows) if pack else len(rows) * max(of_rows)

    assert sorted(torch.cat(runs).tolist()) == list(range(len(lengths)))
    for run, after in zip(runs, [*runs[1:], None], strict=True):
        rows = run.tolist()
        assert run.dtype == torch.int64 and rows == sorted(rows)
        assert len(rows) == 1 or computed(rows) <= positions
        if after is not None:
            following = min(after.tolist(), key=lambda row: spans[row])
            assert max(spans[row] for row in rows) <= spans[following]
            assert computed([*rows, following]) > positions  # one more row would exceed the budget


def test_micro_batches_equal_a_worked_example() -> None:
    mask = mask_of([(6, 8), (1, 2), (6, 0), (0, 0), (2, 1), (1, 5), (3, 3)])  # spans 14, 3, 6, 0, 3, 6, 6
    assert [run.tolist() for run in micro_batches(mask, Budget(12, False))] == [[1, 3, 4], [2, 5], [6], [0]]
    assert [run.tolist() for run in micro_batches(mask, Budget(12, True))] == [[1, 2, 3, 4], [5, 6], [0]]
    assert [run.tolist() for run in micro_batches(mask, Budget(10**6, False))] == [list(range(7))]
    assert micro_batches(mask[:0], Budget(12, True)) == []


def test_rows_of_equal_length_stay_in_order() -> None:
    assert [run.tolist() for run in micro_batches(mask_of([(3, 4)] * 7), Budget(21, False))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]


def test_the_default_token_budget_is_smaller_on_a_cpu() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert (Budget.of(None, cpu, True), Budget.of(None, cuda, False)) == (Budget(2048, True), Budget(16384, False))
    assert Budget.of(7, cuda, True) == Budget(7, True)


# --- rows as they run ------------------------------------------------------------------------------------------------


def test_rows_are_shifted_to_their_first_token_and_common_padding_is_cut() -> None:
    batch = ragged()
    shortest = torch.tensor([1, 3, 4])
    part: Any = Ragged(*(c[shortest] if isinstance(c, Tensor) else None for c in batch))
    part = part._replace(attention_mask=part.attention_mask & torch.tensor([[True], [True], [False]]))
    moved, lengths = from_first_tokens(part), part.attention_mask.sum(1).tolist()
    assert moved.input_ids.shape[1] == max(lengths) < batch.input_ids.shape[1] and lengths[2] == 0
    for row, length in enumerate(lengths):
        assert torch.equal(moved.input_ids[row, :length], part.input_ids[row][part.attention_mask[row]])
        assert moved.input_ids[row, length:].eq(0).all() and moved.position_ids[row, length:].eq(0).all()
        assert moved.position_ids[row, :length].tolist() == list(range(length))
        assert moved.attention_mask[row].tolist() == [True] * length + [False] * (max(lengths) - length)
    assert (-moved.shifts[:2]).tolist() == part.attention_mask[:2].int().argmax(1).tolist()
    assert moved.lines.tolist() == [0, 1, 2] and moved.runs is None


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=8).filter(lambda x: any(map(sum, x)))
)
def test_packed_rows_are_concatenated_in_order_of_length(lengths: list[tuple[int, int]]) -> None:
    mask = mask_of(lengths)
    ids, nothing = torch.arange(mask.numel()).view_as(mask), torch.zeros(len(mask), 8, dtype=torch.bool)
    moved = packed(TokenInputs(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), nothing))
    order = sorted(range(len(mask)), key=lambda row: (sum(lengths[row]), row))
    assert moved.input_ids.tolist() == [[int(x) for row in order for x in ids[row][mask[row]]]]
    assert moved.position_ids.tolist() == [[place for row in order for place in range(sum(lengths[row]))]]
    assert moved.attention_mask.all() and moved.attention_mask.shape == moved.input_ids.shape
    assert moved.runs is not None
    expanded = [tokens for rows, tokens in moved.runs for _ in range(rows)]
    assert expanded == [sum(lengths[row]) for row in order if any(lengths[row])]
    assert len({tokens for _, tokens in moved.runs}) == len(moved.runs)  # rows of equal length form one rectangle
    rows, columns = mask.nonzero(as_tuple=True)
    assert torch.equal(moved.input_ids[moved.lines[rows], columns + moved.shifts[rows]], ids[rows, columns])


def test_rows_with_masked_inner_tokens_are_not_packed() -> None:
    batch = ragged()
    mask = batch.attention_mask.clone()
    mask[0, 3] = False
    moved = packed(batch._replace(attention_mask=mask))  # such rows are not packed
    assert moved.runs is None and torch.equal(moved.attention_mask[0], mask[0]) and moved.input_ids[0, 3] == 0
    assert torch.equal(moved.position_ids[0][mask[0]], batch.position_ids[0][mask[0]])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_forward_passes_are_no_larger_than_their_micro_batch(kind: str, folder: Folder) -> None:
    """Checked by the input shapes of the model; padded rows would have more than twice the tokens."""
    batch, shapes = ragged(rows=24, prompt=12, response=24), []
    engine = trainer(folder(kind), max_tokens=60)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    engine.model.model.register_forward_pre_hook(note, with_kwargs=True)
    engine.log_probs(batch)
    lengths, pack = batch.attention_mask.sum(1), kind == "llama"
    runs = micro_batches(batch.attention_mask, Budget(60, pack))
    needed = [(1, int(lengths[run].sum())) if pack else (len(run), int(lengths[run].max())) for run in runs]
    assert shapes == needed
    computed = sum(rows * width for rows, width in shapes)
    assert computed == lengths.sum() if pack else computed < 1.15 * int(lengths.sum())
    assert batch.input_ids.numel() > 1.5 * computed
    shapes.clear()
    engine.update(batch, [MiniBatch(torch.arange(24), batch.response_mask.float())], Pull())
    assert shapes == needed  # scoring and training use the same shapes


def test_only_needed_logits_are_computed(tmp_path: Path) -> None:
    """For a model without a separate head: logits from the first scored position on."""
    batch, outputs = ragged(), []
    engine = TorchScorer(tiny_folder(tmp_path, "granite"), device="cpu").build(CONTEXT)
    scorer = engine._scorer
    scorer._run, scorer._output, scorer._head = engine.model, "logits", type(scorer._head)()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outputs.append(out.logits.shape[1])

    expected = TorchScorer(engine.folder, device="cpu").build(CONTEXT).log_probs(batch)
    engine.model.register_forward_hook(note, with_kwargs=True)
    part = Ragged(*(c[2:] if c is not None else None for c in batch))
    torch.testing.assert_close(engine.log_probs(part), expected[2:], atol=1e-5, rtol=0)
    lengths = part.attention_mask.sum(1)
    before = int(part.attention_mask[lengths.argmin(), :7].sum()) - 1
    assert outputs == [int(lengths.sum()) - before]


# --- equal results -------------------------------------------------------------------------------------------------


def reference_pass(lm: Any, batch: Ragged, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of `lm`, one unpadded row at a time, and the gradient of `Pull`."""
    rows = torch.zeros(batch.response_mask.shape, dtype=lm.dtype)
    for row, ids, counted in unpadded(batch):
        log_p = torch.log_softmax(lm(ids).logits[0] / batch.temperature[row].to(lm.dtype), dim=-1)[counted - 1]
        rows[row, batch.response_mask[row]] = log_p.gather(1, ids[0, counted, None]).squeeze(1)
    (-(weights * batch.pull * rows).sum()).backward()
    return rows.detach(), {name: parameter.grad for name, parameter in lm.named_parameters()}


def in_float64(folder: str, batch: Ragged, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`reference_pass` of a folder; in float32 where layers do not support float64 (experts, state spaces)."""

    def of(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        return reference_pass(lm, batch, weights)

    try:
        return of(torch.float64)
    except RuntimeError:
        return of(torch.float32)


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize(
    ("kind", "max_tokens"),
    nightly_except(
        [("llama", 10**6), ("llama", 40), ("llama", 1), *((kind, 40) for kind in ON_EVERY_COMMIT)],
        [(kind, budget) for kind in PLAIN for budget in (10**6, 40, 1)] + [(kind, 40) for kind in OTHERS],
    ),
)
def test_log_probs_and_gradients_equal_those_of_each_row_alone(kind: str, max_tokens: int, tmp_path: Path) -> None:
    """Compared with transformers, in float64 where supported; sliding windows are narrower than the rows."""
    batch, loss = ragged(rows=8), Pull()
    weights = batch.response_mask * torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(0))
    changed = {"sliding_window": 4} if kind == "gemma2" else {}
    folder = tiny_folder(tmp_path, kind, **changed) if kind in PLAIN else architecture(tmp_path, kind)
    truth, gradients = in_float64(folder, batch, weights)
    engine = trainer(folder, max_tokens=max_tokens, optimizer=SGD(lr=0.1, momentum=0.9))
    old = engine.log_probs(batch)
    assert relative_error(old, truth) < 1e-6
    engine.update(batch, [MiniBatch(torch.arange(8), weights)], loss)
    assert torch.equal(seen_by(loss, batch), old)
    state = engine.state_dict()
    buffers = state["optimizer"]["state"]
    names = [name for name, gradient in gradients.items() if gradient is not None]
    found = {name: buffers[i]["momentum_buffer"] for i, name in enumerate(state["weights"])}
    assert not any(found[name].any() for name in found.keys() - set(names))
    slope, expected = (torch.cat([of[name].double().flatten() for name in names]) for of in (found, gradients))
    # Float32 rounding of a single row; larger for Granite, whose attention scores are not scaled.
    assert relative_error(slope, expected) < (2e-5 if kind == "granite" else 3e-6)


# --- segments --------------------------------------------------------------------------------------------------------


def cuts_of(batch: Any) -> list[list[int]]:
    """Up to two places in each row before a sampled token."""
    sampled = [mask.nonzero().flatten().tolist() for mask in batch.response_mask]
    return [[places[i] for i in (len(places) // 3, 2 * len(places) // 3) if len(places) > 4] for places in sampled]


@pytest.mark.parametrize("pack", [True, False])
def test_segments_are_rows_of_the_model(pack: bool) -> None:
    """Each segment has its tokens from position 0, and every column is found in its line."""
    batch: Any = ragged(rows=12)
    rows: Any = cut(batch, places := cuts_of(batch))
    assert (number := sum(map(len, places))) > 4
    moved = (packed if pack else from_first_tokens)(rows)
    assert len(moved.lines) == 12 + number
    row, column = rows.attention_mask.nonzero(as_tuple=True)
    line, place = moved.find(row, column)
    assert torch.equal(moved.input_ids[line, place], rows.input_ids[row, column])
    assert torch.equal(moved.position_ids[line, place], rows.position_ids[row, column])
    if pack:
        assert moved.runs is not None
        assert sum(n * tokens for n, tokens in moved.runs) == rows.attention_mask.sum()
        assert sum(n for n, _ in moved.runs) == 12 + number
    else:
        assert torch.equal(place, rows.position_ids[row, column]) and len(moved.input_ids) == 12 + number


@pytest.mark.parametrize("kind", nightly_except(["llama", *ON_EVERY_COMMIT], [*PLAIN, *OTHERS]))
def test_a_cut_row_has_the_log_probs_and_the_gradient_of_the_whole_one(kind: str, tmp_path: Path) -> None:
    batch: Any = ragged(rows=6)
    rows: Any = cut(batch, cuts_of(batch))
    folder = tiny_folder(tmp_path, kind) if kind in PLAIN else architecture(tmp_path, kind)
    found = []
    for one in (batch, rows):
        engine = trainer(folder, max_tokens=60, optimizer=SGD(lr=0.1, momentum=0.9))
        log_probs = engine.log_probs(one)[one.response_mask]
        weights = torch.zeros(one.response_mask.shape).masked_scatter(one.response_mask, log_probs.detach().exp())
        engine.update(one, [MiniBatch(torch.arange(6), weights)], Pull())
        buffers = engine.state_dict()["optimizer"]["state"].values()
        found.append((log_probs, torch.cat([state["momentum_buffer"].flatten() for state in buffers])))
    assert rows.attention_mask.sum() > 1.5 * batch.attention_mask.sum()
    assert relative_error(found[1][0], found[0][0]) < 1e-6
    assert relative_error(found[1][1], found[0][1]) < (2e-5 if kind == "granite" else 3e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_beyond_the_budget_is_computed_by_segments(kind: str, folder: Folder) -> None:
    """In forward passes within the budget, unless one segment exceeds it: packed, or padded to the longest."""
    batch: Any = ragged(rows=12)
    rows: Any = cut(batch, cuts_of(batch))
    shapes: list[int] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(int(kwargs["input_ids"].numel()))

    engine = trainer(folder(kind), max_tokens=20)
    engine.model.model.register_forward_pre_hook(note, with_kwargs=True)
    found = engine.log_probs(rows)
    assert rows.attention_mask.sum(1).max() > 30 and max(shapes) <= 20 * (1 if kind == "llama" else 2)
    torch.testing.assert_close(found, trainer(folder(kind)).log_probs(rows), atol=1e-5, rtol=0)
    forward, shapes[:] = list(shapes), []
    engine.update(rows, [MiniBatch(torch.arange(12), rows.response_mask.float())], Pull())
    assert shapes == forward


def test_a_token_before_which_a_segment_begins_has_no_log_prob(folder: Folder) -> None:
    batch: Any = ragged(rows=2)
    place = int(batch.response_mask[0].nonzero()[2])
    broken = batch.position_ids.clone()
    broken[0, 7 + place :] -= int(broken[0, 7 + place])
    with pytest.raises(DataError, match=f"Row 0 counts response token {place}") as error:
        trainer(folder("llama")).log_probs(batch._replace(position_ids=broken))
    assert error.value.code == "model.invalid-rows"
