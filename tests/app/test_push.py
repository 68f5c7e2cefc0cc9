"""Models by name on the command line: ``flowrl check``, ``flowrl run``, and ``flowrl push`` (`flowrl/app/export.py`,
`flowrl/hub/upload.py`) with its card (`flowrl/look/model_card.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from flowrl import PreferenceData, Training
from flowrl.backends import TorchRewardTrainer
from flowrl.graphs import reward_model
from tests.support.command_line import Command, is_paragraph, write
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture

NAMED = """
    from flowrl import PromptData, Training
    from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
    from flowrl.graphs import grpo
    from tests.support.rewards import digits

    job = grpo(digits, n=2, max_new_tokens=4).bind(
        actor=TorchTrainer("org/tiny", device="cpu"), rollout=TorchRollout(), ref=TorchScorer("org/tiny", device="cpu")
    )
    training = Training(job, PromptData({prompts!r}), steps=2, prompts=2, folder="own")
"""


@pytest.fixture
def target(hub: Hub, tiny: str, prompts_file: str, command: Command) -> str:
    """A training of a model of the Hub."""
    hub.add("org/tiny", tiny)
    return f"{write(Path('named.py'), NAMED.format(prompts=prompts_file))}:training"


def test_check_reads_only_metadata(command: Command, target: str, hub: Hub) -> None:
    result = command("check", target)
    assert result.code == 0 and "all roles are bound" in result.out and "Responses end with <eos>" in result.out
    assert "config.json" in hub.downloads() and "model.safetensors" not in hub.downloads()


def test_check_refuses_a_repository_that_is_not_there_or_lacks_weights(command: Command, target: str, hub: Hub) -> None:
    hub.add("org/tiny", {"config.json": b"{}", "pytorch_model.bin": b""})
    result = command("check", target)
    assert result.code == 1 and "Role 'actor'" in result.out and "[hub.no-safetensors]" in result.out
    del hub.repositories["models/org/tiny"]
    assert "[hub.unknown-repository]" in command("check", target).out


def test_check_offline_says_what_it_did_not_verify(
    command: Command, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = command("check", target)
    assert result.code == 0 and result.out.startswith("Not verified: Role 'actor': 'org/tiny'")
    assert "no rule is violated" in result.out


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub, uploading without Xet
def test_a_pushed_model_loads_and_its_card_says_what_trained_it(
    command: Command, target: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("run", target).code == 0
    result = command("push", "own", "me/trained")
    assert result.code == 2 and is_paragraph(result) and "[hub.no-token]" in result.err
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    result = command("push", "own", "me/trained")
    assert result.code == 2 and is_paragraph(result) and "[hub.refused]" in result.err
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    result = command("push", "own", "me/trained", "--private")
    assert result.code == 0 and f"{hub.address}/me/trained/commit/" in result.out
    repository = hub.repositories["models/me/trained"]
    assert repository.visibility == "private"
    assert {name: Path("own/actor", name).read_bytes() for name in repository.files if name != "README.md"} == {
        path.name: path.read_bytes() for path in Path("own/actor").iterdir()
    }
    _, front, card = repository.files["README.md"].decode().split("---\n", 2)
    described = json.loads(Path("own/run.json").read_text())
    data = yaml.safe_load(front)
    assert data["base_model"] == "org/tiny" and data["library_name"] == "transformers" and "grpo" in data["tags"]
    assert "```mermaid\nflowchart" in card and described["versions"]["flowrl"] in card
    assert described["commits"][0]["commit"] in card and "| seed | 0 |" in card and "| reward/mean |" in card
    assert "prompts.jsonl" in card and str(Path.cwd()) not in card
    again = command("push", "own", "me/trained")
    assert again.code == 0 and len(repository.commits) == 3
    write(Path("pushed/.keep"), "")
    for name, content in repository.files.items():
        Path("pushed", name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained("pushed", local_files_only=True)


def test_a_run_without_a_trained_model_is_not_pushed(command: Command, target: str) -> None:
    assert command("run", target, "--folder", "own").code == 0
    Path("own/actor/config.json").unlink()
    result = command("push", "own", "me/trained")
    assert result.code == 2 and is_paragraph(result) and "[run.no-model]" in result.err


def test_a_role_that_was_not_trained_is_refused_with_those_that_were(command: Command, target: str) -> None:
    assert command("run", target).code == 0
    result = command("push", "own", "me/trained", "--role", "critic")
    assert result.code == 2 and "--role actor" in result.err and "[run.no-model]" in result.err
    assert command("push", "own", "me/trained", "--role", "actor", "--card", "card.md").code == 0
    assert Path("card.md").read_text().startswith("---\nbase_model: org/tiny\n")


def test_the_card_of_a_reward_model_is_that_of_a_classifier(command: Command, tiny: str) -> None:
    pairs = [{"prompt": f"q{i}", "chosen": "12", "rejected": "abc"} for i in range(4)]
    job = reward_model().bind(reward_model=TorchRewardTrainer(tiny, device="cpu"))
    Training(job, PreferenceData(pairs), steps=1, prompts=4, folder="own").run()
    assert command("push", "own", "me/trained", "--card", "card.md").code == 0
    card = Path("card.md").read_text()
    assert "pipeline_tag: text-classification" in card and "| reward_model/loss |" in card
