"""`TorchRewardModel` equals transformers on each unpadded row; refused folders and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, BertConfig

from flowrl.backends import TorchRewardModel, TorchRollout, TorchTrainer
from flowrl.errors import BindError
from flowrl.graphs import grpo
from flowrl.operators import ModelReward, TextModelReward
from flowrl.protocols.scorers import RewardScorer, TextRewardScorer
from flowrl.run.engine.build import EngineBuilder
from tests.nightly import nightly_except
from tests.support.architectures import SETTINGS
from tests.support.errors import raises
from tests.support.kernel import exact
from tests.support.models import CHAT_TEMPLATE, EOS, KINDS, PAD, VOCAB, char_tokenizer, ragged, tiny_config

OTHERS = ["deepseek_v3", "falcon", "gpt_oss", "jamba", "phimoe", "qwen3_next"]
"""Other architectures that have a sequence classifier in transformers."""


def reward_folder(path: Path, kind: str = "llama", labels: int = 1, pad: int | None = PAD, seed: int = 3) -> str:
    """A tiny random reward model, and its tokenizer."""
    ids = dict(vocab_size=VOCAB, pad_token_id=pad, eos_token_id=EOS, bos_token_id=EOS)
    config = tiny_config(kind) if kind in KINDS else CONFIG_MAPPING[kind](**ids, **SETTINGS[kind])
    config.num_labels, config.pad_token_id = labels, pad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name and "conv" not in name:
                    parameter.normal_(0.0, 0.15)
    folder = str(path / f"{kind}-{labels}")
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def build(spec: TorchRewardModel) -> Any:
    return EngineBuilder({"reward_model": spec}, 0).engine("reward_model")


@torch.no_grad()
def reference_scores(folder: str, rows: list[torch.Tensor], label: int = 0) -> torch.Tensor:
    """Scores of transformers for each row without padding."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return torch.stack([model(input_ids=row[None]).logits[0, label] for row in rows])


@pytest.mark.parametrize("kind", nightly_except(["llama", "gpt2", OTHERS[0]], [*KINDS, *OTHERS]))
def test_scores_equal_those_of_transformers_row_by_row(kind: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path, kind)
    batch = ragged(rows=8, seed=5)
    rows = [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    found = build(TorchRewardModel(model=folder, device="cpu", max_tokens=40)).rewards(batch)
    expected = reference_scores(folder, rows)
    assert expected.std() > 0.01
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_scores_are_normalized_by_the_configuration(tmp_path: Path) -> None:
    folder, batch = reward_folder(tmp_path), ragged(rows=4)
    plain = build(TorchRewardModel(model=folder, device="cpu")).rewards(batch)
    with raises("model.no-moments", mean=None, std=None):
        build(TorchRewardModel(model=folder, device="cpu", normalize=True))
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mean": 0.5, "std": 2.0}))
    found = build(TorchRewardModel(model=folder, device="cpu", normalize=True)).rewards(batch)
    torch.testing.assert_close(found, (plain - 0.5) / 2.0)


def test_pad_tokens_inside_a_row_do_not_end_it(tmp_path: Path) -> None:
    """Transformers scores the last token that is not padding, also where EOS is the pad token."""
    folder = reward_folder(tmp_path, pad=EOS)
    batch = ragged(rows=4)
    ids = batch.input_ids.clone()
    ids[:, -1], ids[:, 8] = EOS, EOS
    batch = batch._replace(input_ids=ids)
    rows = [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    assert any(int(row[-1]) == EOS for row in rows)
    found = build(TorchRewardModel(model=folder, device="cpu")).rewards(batch)
    torch.testing.assert_close(found, reference_scores(folder, rows), atol=1e-5, rtol=1e-5)


def test_padding_and_other_rows_do_not_change_scores(tmp_path: Path) -> None:
    engine, batch = build(TorchRewardModel(model=reward_folder(tmp_path), device="cpu")), ragged()
    assert isinstance(engine, RewardScorer) and isinstance(engine, TextRewardScorer)
    expected = engine.rewards(batch)
    wider = batch._replace(
        input_ids=torch.nn.functional.pad(batch.input_ids, (3, 2), value=77),
        attention_mask=torch.nn.functional.pad(batch.attention_mask, (3, 2)),
        position_ids=torch.nn.functional.pad(batch.position_ids, (3, 2), value=10**6),
        response_mask=torch.nn.functional.pad(batch.response_mask, (0, 2)),
    )
    torch.testing.assert_close(engine.rewards(wider), expected, atol=1e-5, rtol=1e-5)


def test_text_is_rendered_by_the_chat_template_of_the_model(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path, "qwen2")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|{{ message['role'] }}|>", "{{ message['role'][0] }}: ")
    tokenizer.save_pretrained(folder)
    talks = [
        [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": answer}]
        for answer in ("4", "it is four, or so", "")
    ]
    rows = [torch.tensor(tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)) for talk in talks]
    engine = build(TorchRewardModel(model=folder, device="cpu"))
    torch.testing.assert_close(engine.rewards_of(talks), reference_scores(folder, rows), atol=1e-5, rtol=1e-5)
    assert engine.rewards_of([]).shape == (0,)


def test_text_that_spells_control_tokens_adds_none(tmp_path: Path) -> None:
    """The scores are those of the spelled characters, which a training could otherwise learn to write as turns."""
    folder = reward_folder(tmp_path, "qwen2")
    engine = build(TorchRewardModel(model=folder, device="cpu"))
    tokens = engine.tokenizer.control_tokens
    control = [*tokens.special, *tokens.written]
    ids = {i for token in control for i in engine.tokenizer.encode(token)}

    def turns(answer: str) -> list[int]:
        talk = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": answer}]
        return [i for i in engine.tokenizer.conversation_ids(talk) if i in ids]

    assert turns("4") and all(turns(f"4{token}5") == turns("45") for token in control)


def test_label_selects_one_of_several_outputs(tmp_path: Path) -> None:
    folder, batch = reward_folder(tmp_path, labels=3), ragged()
    rows = [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    found = build(TorchRewardModel(model=folder, label=2, device="cpu")).rewards(batch)
    torch.testing.assert_close(found, reference_scores(folder, rows, 2), atol=1e-5, rtol=1e-5)
    for label in (None, 3):
        with raises("model.label", label=label, labels=("LABEL_0", "LABEL_1", "LABEL_2")):
            TorchRewardModel(model=folder, label=label).refuse_missing()


def test_a_folder_without_a_reward_head_needs_head_random(tiny: str, tmp_path: Path) -> None:
    with raises("model.reward-head", head="stored"):
        build(TorchRewardModel(model=tiny, label=0, device="cpu"))
    one, same, other = (
        EngineBuilder({"r": TorchRewardModel(model=tiny, label=0, head="random", device="cpu")}, seed).engine("r")
        for seed in (0, 0, 1)
    )
    scores = one.rewards(ragged())
    assert torch.equal(scores, same.rewards(ragged())) and not torch.equal(scores, other.rewards(ragged()))
    with raises("model.reward-head", head="random"):
        build(TorchRewardModel(model=reward_folder(tmp_path), head="random", device="cpu"))


def test_folders_without_a_reward_model_are_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "bert")
    with raises("model.not-a-reward-model", architecture="BertForSequenceClassification"):
        TorchRewardModel(model=str(tmp_path / "bert")).refuse_missing()
    with raises("model.not-found", found="does not exist"):
        TorchRewardModel(model=str(tmp_path / "nothing")).refuse_missing()
    folder = Path(reward_folder(tmp_path))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": torch.full((1, 64), torch.nan)}, folder / "model.safetensors")
    with raises("model.reward-head", path=str(folder)):
        build(TorchRewardModel(model=str(folder), device="cpu"))


def test_sequences_are_not_truncated(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 14}))
    engine = build(TorchRewardModel(model=folder, device="cpu"))
    with raises("model.too-long", row=0, found=16, expected=14):
        engine.rewards(ragged())
    with raises("model.too-long", row=0, expected=14):
        engine.rewards_of([[{"role": "user", "content": "a long question"}, {"role": "assistant", "content": "so"}]])


def test_a_sleeping_reward_model_refuses_to_score(tmp_path: Path) -> None:
    engine = build(TorchRewardModel(model=reward_folder(tmp_path), device="cpu"))
    engine.sleep()
    with raises("engine.asleep", call="rewards"):
        engine.rewards(ragged())
    engine.wake()
    assert engine.rewards(ragged()).isfinite().all()


def test_a_reward_model_with_another_vocabulary_scores_text_only(tiny: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path, seed=4)
    tokens = json.loads((file := Path(folder, "tokenizer.json")).read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokens))
    roles = {
        "actor": TorchTrainer(tiny, device="cpu"),
        "rollout": TorchRollout(),
        "reward_model": TorchRewardModel(model=folder, device="cpu"),
    }
    plain = grpo(exact, kl_coef=0.0)
    with pytest.raises(BindError, match="'actor' and 'reward_model' have different vocabularies: 2 ids differ"):
        plain.edit(replace={"reward": ModelReward()}).bind(**roles).refuse_unready()
    plain.edit(replace={"reward": TextModelReward()}).bind(**roles).refuse_unready()
