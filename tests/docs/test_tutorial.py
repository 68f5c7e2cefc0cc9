"""The chapters of the tutorial work as a newcomer types them, in one folder and in order (see typed.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.demo import task
from flowrl.demo.model import make_tokenizer
from flowrl.graphs import grpo, ppo
from tests import ROOT
from tests.docs.typed import Typist, blocks

TUTORIAL = ROOT / "docs" / "tutorial"
CHAPTERS = ("sums", "grpo", "operator", "loss")
CHEAP = ("flowrl diff", "flowrl show", "flowrl plan", "python ")  # these start no engine and no Ray


def type_after_two_chapters(reader: Typist, name: str) -> None:
    """Type a chapter that builds on the files and the model of the first two; their runs are left out."""
    for before in CHAPTERS[:2]:
        reader.type(TUTORIAL / f"{before}.md", lambda line: line.startswith(("flowrl ", "tail ", "python try_")))
    reader.type(TUTORIAL / f"{name}.md")


def test_the_first_four_chapters_work_with_fast_settings(tmp_path: Path) -> None:
    reader = Typist(tmp_path, fast=True, in_process=("flowrl ", "python "))
    for name in CHAPTERS:
        reader.type(TUTORIAL / f"{name}.md")


@pytest.mark.engines
def test_the_chapter_on_vllm_works_with_fast_settings(tmp_path: Path) -> None:
    type_after_two_chapters(Typist(tmp_path, fast=True, in_process=CHEAP), "vllm")


@pytest.mark.ray
def test_the_chapter_on_ray_works_with_fast_settings(tmp_path: Path) -> None:
    type_after_two_chapters(Typist(tmp_path, fast=True, in_process=CHEAP), "ray")


@pytest.mark.engines
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_chapter_on_vllm_works_as_printed(tmp_path: Path) -> None:
    type_after_two_chapters(Typist(tmp_path), "vllm")


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_chapter_on_ray_works_as_printed(tmp_path: Path) -> None:
    type_after_two_chapters(Typist(tmp_path), "ray")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has typed the first four chapters as printed."""
    reader = Typist(tmp_path_factory.mktemp("reader"))
    for name in CHAPTERS:
        reader.type(TUTORIAL / f"{name}.md")
    return reader.folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", ["ppo-001", "grpo-001", "short-001", "soft-001"])
def test_the_model_learns_as_the_chapters_say(printed: Path, run: str) -> None:
    folder = printed / "runs" / run
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    right = {
        step: sum(row["score"] for row in lines if row["step"] == step) / 500 for step in {row["step"] for row in lines}
    }
    assert right[0] < 0.3
    assert right[max(right)] > 0.95
    assert (folder / "actor" / "config.json").is_file()


def test_the_algorithms_of_the_tutorial_equal_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    shown = [text for name in CHAPTERS for block in blocks(TUTORIAL / f"{name}.md") for text in block.shown]
    before, after = (make("reward.py:score", max_new_tokens=28, mini_batch=128) for make in (ppo, grpo))
    assert any(text.startswith(f"{before.diff(after)}\n") for text in shown)
    assert before.mermaid().replace("fn=reward.py", "fn=my_reward.py") in "".join(shown)


def test_the_picture_with_vllm_differs_in_the_title_of_a_role() -> None:
    [swap, _, _] = [block for block in blocks(TUTORIAL / "vllm.md") if block.language == "sh"]
    *_, picture = swap.shown
    assert '"rollout: VLLM"' in picture
    assert picture.count("VLLM") == 1 and "TorchRollout" not in picture


@pytest.mark.nightly
def test_warm_started_model_has_something_to_learn(printed: Path) -> None:
    """On held-out prompts it answers mostly directly and mostly wrongly, sometimes thinks and is then mostly right.

    Exact, without sampling: the probability of each whole response under the model, at temperature 1.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(printed / "model"), make_tokenizer()
    problems = task.split().heldout
    users = [[{"role": "user", "content": p.prompt}] for p in problems]
    prompts = tokenizer.apply_chat_template(users, add_generation_prompt=True, return_dict=False)

    def probability(texts: list[str]) -> torch.Tensor:
        responses = tokenizer([t + tokenizer.eos_token for t in texts], add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        with torch.no_grad():
            log_probs = model(input_ids=ids.clamp(min=0)).logits[:, 8:-1].log_softmax(-1)
        chosen = log_probs.gather(2, ids[:, 9:, None].clamp(min=0))[..., 0]
        return torch.where(ids[:, 9:] >= 0, chosen, 0.0).sum(1).exp()

    with torch.no_grad():
        first = model(input_ids=torch.tensor(prompts)).logits[:, -1].softmax(-1)
    thinks = first[:, tokenizer.convert_tokens_to_ids("<think>")].mean()
    direct = probability([p.answer for p in problems]).mean() / (1 - thinks)
    worked = probability([p.worked for p in problems]).mean() / thinks
    assert 0.2 < thinks < 0.4
    assert direct < 0.2
    assert worked > 0.6
