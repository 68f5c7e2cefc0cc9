"""Chat templates are tested with a test episode before a model loads: with thinking, tools and replies."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Training
from flowrl.episodes import Answer, Environment, Reply, Toolbox
from flowrl.episodes.rehearsal import rehearse
from flowrl.errors import EpisodeError, FlowrlError
from flowrl.operators import Interact
from tests.support.errors import raises
from tests.support.jobs import job_of, write_prompts
from tests.support.templates import LLAMA3, MERGING, QWEN3, tokenizer_of


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


TOOLS = Toolbox([add], "hermes")


class Asks(Environment):
    async def step(self, answer: Answer) -> Reply:
        return Reply("Are you sure?", reward=1.0, done=answer.turn == 1)


@pytest.mark.parametrize("check", ["strict", "loose"])
@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "gemma", "mistral"])
def test_templates_that_only_append_pass(name: str, check: Any) -> None:
    rehearse(tokenizer_of(name), check, None, replies=True)


@pytest.mark.parametrize("parser", ["hermes", "json", lambda text: []])
@pytest.mark.parametrize(("name", "replies"), [("llama3", True), ("qwen2.5", True), ("qwen3", False)])
def test_templates_are_tested_with_tools(name: str, replies: bool, parser: Any) -> None:
    """Qwen 3 renders thinking after the last user message, so with tools alone it only appends."""
    rehearse(tokenizer_of(name), "strict", Toolbox([add], parser), replies)


@pytest.mark.parametrize(
    ("name", "toolbox", "there", "written"),
    [
        ("qwen3", None, "<think>", "42<|im_end|>"),
        ("qwen3", TOOLS, "<think>", "<tool_call>"),
    ],
)
def test_a_template_that_strips_only_thinking_passes_with_a_warning(
    name: str, toolbox: Toolbox | None, there: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A response with thinking is an error of its row, see `tests/data/text/test_transcript.py`."""
    rehearse(tokenizer_of(name), "loose", toolbox, replies=True)
    warning = caplog.messages[-1]
    assert "test episode" in warning and "only without thinking in the policy" in warning
    before, _, after = "".join(warning.split()).partition("thetemplatewrites")
    assert there in before and written in after


@pytest.mark.parametrize(
    ("name", "toolbox", "arguments"),
    [
        ("qwen3", None, {}),
        ("qwen3", TOOLS, {}),
        ("merging", None, {}),
        ("qwen3", None, {"enable_thinking": False}),
        ("qwen3", TOOLS, {"enable_thinking": False}),
    ],
)
def test_a_template_that_rewrites_turns_passes_with_segments(
    name: str, toolbox: Toolbox | None, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rehearse(tokenizer_of(name), "strict", toolbox, True, arguments, "segment")
    assert not [message for message in caplog.messages if "test episode" in message]
    with raises("episode.reply-left-out", role="tool", path=tokenizer_of("toolless").folder):
        rehearse(tokenizer_of("toolless"), "strict", TOOLS, True, {}, "segment")


@pytest.mark.parametrize(
    ("name", "toolbox", "arguments", "there", "written"),
    [
        ("merging", None, {}, "17and25?<end>", "17and25?Areyousure?"),
        ("qwen3", None, {"enable_thinking": False}, "<think></think>", "<|im_start|>assistant42"),
        ("qwen3", TOOLS, {"enable_thinking": False}, "<think></think>", "<|im_start|>assistant<tool_call>"),
    ],
)
def test_a_template_that_rewrites_turns_is_refused_with_both_texts(
    name: str, toolbox: Toolbox | None, arguments: dict[str, Any], there: str, written: str
) -> None:
    with pytest.raises(EpisodeError, match="The test episode before loading") as error:
        rehearse(tokenizer_of(name), "loose", toolbox, toolbox is None, arguments)
    before, _, after = "".join(str(error.value).split()).partition("thetemplatewrites")
    assert there in before and (written in after or name == "qwen3")


@pytest.mark.parametrize(
    ("name", "message"), [("toolless", "leaves out the reply .*'role': 'tool'"), ("bare", "'tool'")]
)
def test_replies_omitted_by_a_template_are_refused(name: str, message: str) -> None:
    with pytest.raises(EpisodeError, match=rf"tool calls\) failed: .*{message}"):
        rehearse(tokenizer_of(name), "loose", TOOLS, replies=False)
    rehearse(tokenizer_of(name), "loose", None, replies=True)


def test_a_template_that_rejects_two_tool_replies_is_refused() -> None:
    with pytest.raises(EpisodeError, match=r"failed: .*one tool at a time"):
        rehearse(tokenizer_of("single"), "loose", TOOLS, replies=False)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_unsupported_roles_of_a_template_are_refused(name: str) -> None:
    with pytest.raises(EpisodeError, match=r"tool calls\) failed: .*must alternate"):
        rehearse(tokenizer_of(name), "loose", TOOLS, replies=False)


@pytest.mark.parametrize("name", ["qwen3", "merging"])
def test_check_off_skips_the_test_episode(name: str) -> None:
    rehearse(tokenizer_of(name), "off", TOOLS, replies=True)


def test_unknown_template_arguments_are_refused() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    with pytest.raises(EpisodeError, match="chat_template_kwargs has 'enable_thinking'"):
        rehearse(tokenizer, "loose", None, replies=True, template_kwargs={"enable_thinking": False})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_parser_of_vllm_without_vllm_is_refused() -> None:
    with raises("package.not-installed", package="vllm"):
        rehearse(tokenizer_of("qwen2.5"), "loose", Toolbox([add], "vllm:hermes"), replies=False)


class TestLaunch:
    """A job or training with a model whose template merges turns."""

    @pytest.fixture
    def folder(self, folder_with: Callable[[str], str]) -> str:
        return folder_with(MERGING)

    def job(self, folder: str, check: Any = "loose") -> Any:
        operator = Interact(Asks, max_turns=2, context=250, max_new_tokens=4, check=check)
        return job_of("grpo", folder, n=2).edit(replace={"generate": operator}, drop=["reward"])

    def test_a_failing_test_episode_is_reported_before_loading(self, folder: str, tmp_path: Path) -> None:
        for weights in Path(folder).glob("*.safetensors"):
            weights.write_bytes(b"no model can be loaded from this")
        training = Training(self.job(folder), PromptData(write_prompts(tmp_path / "data.jsonl")), steps=1, prompts=2)
        with pytest.raises(EpisodeError, match=r"^interact: The test episode .*<end>"):
            training.job.refuse_missing()
        with pytest.raises(FlowrlError, match=r"^interact: The test episode"), training.job.open():
            raise AssertionError("opened")

    def test_check_off_allows_a_rewriting_template(self, folder: str, tmp_path: Path) -> None:
        data = PromptData(write_prompts(tmp_path / "data.jsonl"))
        run = Training(self.job(folder, "off"), data, steps=1, prompts=2, folder=str(tmp_path / "run")).run()
        assert run.metrics[0]["episodes/turns"] == 2

    @pytest.mark.parametrize("template", [LLAMA3, QWEN3])
    def test_an_appending_template_runs(self, template: str, folder_with: Callable[[str], str]) -> None:
        self.job(folder_with(template)).refuse_missing()


@pytest.fixture
def folder_with(tiny: str, tmp_path: Path) -> Callable[[str], str]:
    """A copy of the tiny model with another chat template."""

    def copied(template: str) -> str:
        folder = Path(shutil.copytree(tiny, tmp_path / "model"))
        (folder / "chat_template.jinja").write_text(template)
        return str(folder)

    return copied


@pytest.mark.parametrize("check", ["loose", "off"])
@pytest.mark.parametrize(("name", "missing"), [("qwen2.5", False), ("llama3", True), ("qwen3", True)])
def test_tools_that_the_template_does_not_describe_are_a_warning(
    name: str, missing: bool, check: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rehearse(tokenizer_of(name), check, TOOLS, replies=False)
    assert any("does not describe the tools add" in message for message in caplog.messages) == missing
