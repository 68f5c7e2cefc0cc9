"""Packed rows: the architectures that support them, their independence, and warnings for other architectures.

`test_rows.py` compares log-probs and gradients with those of each row alone, for all architectures.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP

from flowrl.backends import LoRA, TorchCritic, TorchScorer
from flowrl.backends.torch.score.packed import ATTENTION, Window, attend_packed
from tests.backends.torch.train.trainers import CONTEXT, Folder, Pull, all_rows, change, trainer
from tests.support.architectures import SETTINGS, architecture
from tests.support.models import Ragged, ragged, tiny_folder

PACKED = ["llama", "qwen2", "gpt2", "granite", "cohere", "phi"]
PACKED += ["afmoe", "deepseek_v3", "gemma3_text", "mistral", "mixtral", "phimoe"]
EAGER = "its attention is 'eager'"
PADDED = {
    "gemma2": EAGER,
    "bloom": EAGER,
    "falcon": EAGER,
    "gpt_oss": EAGER,
    "jamba": "its outputs for packed rows differ",
    "minimax": "its outputs for packed rows differ",
    "qwen3_next": "its outputs for packed rows differ",
}


def folder_of(kind: str, path: Path) -> str:
    return architecture(path, kind) if kind in SETTINGS else tiny_folder(path, kind)


def scorer(folder: str, **settings: Any) -> Any:
    return TorchScorer(folder, device="cpu", **settings).build(CONTEXT)


def warnings_of(folder: str, caplog: pytest.LogCaptureFixture) -> str:
    """The warnings that flowrl logs while it loads a scorer."""
    with caplog.at_level(logging.WARNING, "flowrl"):
        scorer(folder)
    return "".join(record.getMessage() for record in caplog.records if record.name.startswith("flowrl"))


def rows_of_passes(engine: Any, batch: Ragged) -> set[int]:
    """The numbers of rows in forward passes over `batch`; 1 if rows are packed."""
    seen: set[int] = set()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.add(len(kwargs["input_ids"]))

    handle = engine.model.register_forward_pre_hook(note, with_kwargs=True)
    base = engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    engine.log_probs(batch)
    handle.remove()
    base.remove()
    return seen


# --- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
def test_supported_architectures_pack_rows(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flowrl"):
        engine = scorer(folder_of(kind, tmp_path))
    assert rows_of_passes(engine, ragged()) == {1} and not caplog.records


@pytest.mark.parametrize("kind", PADDED)
def test_architectures_that_cannot_pack_rows_pad_them_and_log_why(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(kind, tmp_path)
    with caplog.at_level(logging.WARNING, "flowrl"):
        engine = scorer(folder)
    assert rows_of_passes(engine, ragged()) == {6}
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("flowrl")]
    assert f"{type(engine.model).__name__} in {folder!r} computes padding, because {PADDED[kind]}" in warning
    assert engine.model.config._attn_implementation != ATTENTION


def test_plain_attention_pads_rows_without_a_warning(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = scorer(tiny, attention="eager")
    assert rows_of_passes(engine, ragged()) == {6} and not caplog.records


def test_rows_are_padded_if_attention_ignores_packing(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = LlamaAttention.forward

    def without_packing(self: Any, hidden_states: Tensor, packed: Any = None, **kwargs: Any) -> Any:
        return attend(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", without_packing)
    assert "its outputs for packed rows differ" in warnings_of(tiny, caplog)


def test_rows_are_padded_if_a_layer_mixes_the_tokens_of_rows(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The change is so small that packed rows are close to single rows."""
    apply = LlamaMLP.forward

    def mixing(self: Any, x: Tensor) -> Tensor:
        y = apply(self, x)
        return y + 1e-3 * nn.functional.pad(y, (0, 0, 1, -1))

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    assert "the tokens of one row change the outputs of others" in warnings_of(tiny, caplog)


def test_rows_are_padded_if_a_layer_rejects_the_packing_argument(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = LlamaAttention.forward

    def strict(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        use_cache: Any = None,
        position_ids: Any = None,
    ) -> Any:
        return attend(self, hidden_states, position_embeddings, attention_mask, past_key_values)

    monkeypatch.setattr(LlamaAttention, "forward", strict)
    assert "it raises TypeError" in warnings_of(tiny, caplog)


def test_rows_are_padded_if_the_model_takes_no_positions(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaForCausalLM.forward

    def without_positions(self: Any, input_ids: Any = None, attention_mask: Any = None, **settings: Any) -> Any:
        return forward(self, input_ids, attention_mask, **settings)

    monkeypatch.setattr(LlamaForCausalLM, "forward", without_positions)
    assert "it has no parameter position_ids" in warnings_of(tiny, caplog)


# --- independence of rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma3_text", "deepseek_v3"])
def test_packed_rows_do_not_affect_each_other(kind: str, tmp_path: Path) -> None:
    """Other tokens in all other rows leave a row bit-equal."""
    batch, engine = ragged(rows=8), scorer(folder_of(kind, tmp_path))
    before = engine.log_probs(batch)
    for row in range(8):
        ids = (batch.input_ids + 1).where(batch.attention_mask & (batch.input_ids < 20), batch.input_ids)
        ids[row] = batch.input_ids[row]
        after = engine.log_probs(batch._replace(input_ids=ids))
        assert torch.equal(after[row], before[row]) and not torch.equal(after, before)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sliding_windows_are_as_wide_in_packed_rows_as_alone(kind: str, tmp_path: Path) -> None:
    """Layers look back 8 tokens, in rows of up to 40; with wider windows the results differ."""
    batch, folder = ragged(rows=6, prompt=12, response=28), architecture(tmp_path, kind)
    together, plain = (scorer(folder, attention=attention).log_probs(batch) for attention in (None, "eager"))
    torch.testing.assert_close(together, plain, atol=2e-6, rtol=1e-6)
    config = Path(folder, "config.json")
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 64'))
    assert not torch.allclose(scorer(folder).log_probs(batch), plain, atol=1e-3)


def test_a_window_mask_equals_a_worked_example() -> None:
    window = Window(lambda row, head, query, key: (key <= query) & (query - key < 2), 2)
    assert window.mask(2, torch.device("cpu")) is None
    for tokens, expected in [
        (3, [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (4, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    ]:
        mask = window.mask(tokens, torch.device("cpu"))
        assert mask is not None and mask[0, 0].int().tolist() == expected


def test_a_mask_of_a_model_is_not_applied_to_packed_rows() -> None:
    query, mask = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(TypeError, match="Linear makes its own mask"):
        attend_packed(nn.Linear(1, 1), query, query, query, mask, packed=[(2, 2)])


@pytest.mark.parametrize(("causal", "queries"), [(True, 4), (False, 4), (True, 2)])
def test_only_causal_masks_of_full_rows_are_left_to_each_row(causal: bool, queries: int) -> None:
    """A mask that is more than causal, such as one that joins images, is computed as transformers does."""
    ones, sizes = torch.ones(1, 4, dtype=torch.bool), {"batch_size": 1, "q_length": queries, "kv_length": 4}
    settings = {"allow_is_causal_skip": causal, "mask_function": lambda row, head, query, key: key <= query + 1}
    mask = AttentionMaskInterface()[ATTENTION](attention_mask=ones, q_offset=4 - queries, **sizes, **settings)
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]][-queries:]
    assert mask is None if causal and queries == 4 else mask[0, 0].int().tolist() == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_gradient_checkpointing_works_with_packed_rows(kind: str, tmp_path: Path) -> None:
    folder, batch = folder_of(kind, tmp_path), ragged(rows=8)
    plain, again = trainer(folder), trainer(folder, gradient_checkpointing=True)
    assert rows_of_passes(again, batch) == {1} and torch.equal(plain.log_probs(batch), again.log_probs(batch))
    moved, same = (change(e, lambda e=e: e.update(batch, [all_rows(batch)], Pull())) for e in (plain, again))
    torch.testing.assert_close(moved, same, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"lora": LoRA()}, {"dtype": "bfloat16"}])
def test_packed_scoring_and_training_give_ratio_one(settings: dict[str, Any], folder: Folder) -> None:
    """Scoring and training use the same layout, in small and large micro-batches."""
    batch = ragged(rows=9)
    for max_tokens in (None, 30):
        engine, loss = trainer(folder("llama"), max_tokens=max_tokens, **settings), Pull()
        assert rows_of_passes(engine, batch) == {1}
        old = engine.log_probs(batch)
        engine.update(batch, [all_rows(batch)], loss)
        for output, _, part, _ in loss.seen:
            rows = [batch.uid.tolist().index(uid) for uid in part.uid]
            assert torch.equal(output, old[rows])


def test_rows_without_tokens_and_rows_with_masked_tokens_are_scored(folder: Folder) -> None:
    batch, engine = ragged(), scorer(folder("llama"))
    expected = engine.log_probs(batch)
    none = torch.zeros_like(batch.attention_mask)
    nothing = batch._replace(attention_mask=none, response_mask=torch.zeros_like(batch.response_mask))
    assert not engine.log_probs(nothing).any()
    mask = batch.attention_mask.clone()
    mask[0, 3] = False
    hidden = batch._replace(attention_mask=mask, response_mask=batch.response_mask & mask[:, -9:])
    plain = scorer(folder("llama"), attention="eager").log_probs(hidden)
    torch.testing.assert_close(engine.log_probs(hidden), plain, atol=2e-6, rtol=2e-6)
    assert not torch.allclose(plain[0], expected[0], atol=1e-3)


# --- other callers of the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_direct_calls_of_the_model_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Padded rows, a single row, and one that continues from a cache; `mistral` has sliding windows."""
    folder = folder_of(kind, tmp_path)
    model, plain = scorer(folder).model, AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(4, 20, (3, 24))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids, "attention_mask": mask, "position_ids": places},
        {"input_ids": ids[1:2], "attention_mask": mask[1:2]},
        {"input_ids": ids[1:2]},
    ]
    with torch.no_grad():
        for call in calls:
            found, expected = (m(**call).logits[call.get("attention_mask", mask[1:2]).bool()] for m in (model, plain))
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
        for m in (model, plain):
            m.generation_config.pad_token_id = 0
        sampled = [m.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8) for m in (model, plain)]
    assert torch.equal(*sampled)


def test_a_saved_folder_does_not_mention_packed_attention(folder: Folder, tmp_path: Path) -> None:
    engine = trainer(folder("llama"))
    engine.save_pretrained(str(tmp_path))
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_critic_packs_its_rows(folder: Folder) -> None:
    batch = ragged()
    together, padded = (
        TorchCritic(folder("llama"), attention=attention, device="cpu").build(CONTEXT) for attention in (None, "eager")
    )
    for engine in (together, padded):
        nn.init.normal_(engine._head.weight, generator=torch.Generator().manual_seed(0))
    assert (together._body.unpacked is None) and padded._body.unpacked is not None
    torch.testing.assert_close(together.values(batch), padded.values(batch), atol=5e-6, rtol=1e-5)
