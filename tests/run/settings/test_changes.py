"""Settings by path: typed by what they set, wrong ones answered with the nearest, and what changes on a resume.

Covers `flowrl/run/settings/typed.py` and `resumed.py` there, and `flowrl/edits/parameters.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl import Colocate, PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.errors import FlowrlError
from flowrl.graphs import grpo
from flowrl.run.settings.changes import settable, with_settings
from flowrl.run.settings.resumed import changes
from flowrl.run.settings.typed import typed
from flowrl.run.training.identity import identity_of
from flowrl.schedules import Cosine, Linear
from tests.support.errors import raises
from tests.support.rewards import digits

ROOTS = {"data", "validation", "recording", "seed", "steps", "epochs"}
JOB = grpo(digits, n=2).bind(
    actor=TorchTrainer("model", AdamW(lr=1e-4)), ref=TorchScorer("model"), rollout=TorchRollout()
)
TRAINING = Training(
    JOB,
    PromptData("train.jsonl", chat_template_kwargs={"think": True}),
    steps=3,
    prompts=4,
    validation=(Validation(PromptData("held.jsonl"), name="greedy"), Validation(PromptData("held.jsonl"), name="pass")),
)


def actor(training: Training) -> Any:
    return training.job.graph.bindings["actor"]


def node(training: Training, name: str) -> Any:
    return training.job.graph[name].operator


FALLING = Linear(0.3, 0.2, steps=5)
LINEAR, COSINE = "Linear(0.3, 0.2, steps=5)", "Cosine(1.0, 0.0, steps=9)"


@pytest.mark.parametrize(
    ("path", "text", "read"),
    [
        ("actor.optimizer.lr", "1e-6", lambda t: actor(t).optimizer == AdamW(lr=1e-6)),
        ("actor.optimizer.betas", "(0.9, 0.95)", lambda t: actor(t).optimizer.betas == (0.9, 0.95)),
        ("actor.schedule", COSINE, lambda t: actor(t).schedule == Cosine(1.0, 0.0, steps=9)),
        ("update_actor.loss.clip_high", "0.28", lambda t: node(t, "update_actor").loss.clip_high == 0.28),
        (
            "update_actor.loss.clip_high",
            LINEAR,
            lambda t: node(t, "update_actor").loss.clip_high == Linear(0.3, 0.2, steps=5),
        ),
        ("update_actor.kl", "none", lambda t: node(t, "update_actor").kl is None),
        ("generate.stop", "('1', '2')", lambda t: node(t, "generate").stop == ("1", "2")),
        ("rollout", "VLLM('other')", lambda t: t.job.graph.bindings["rollout"] == VLLM("other")),
        ("actor.model", "2024", lambda t: actor(t).model == "2024"),
        ("data.chat_template_kwargs.think", "false", lambda t: t.data.chat_template_kwargs == {"think": False}),
        ("validation.pass.every", "3", lambda t: [one.every for one in t.validation] == [10, 3]),
        ("recording.budget", "1GB", lambda t: t.recording.budget == "1GB"),
        ("recording.columns", "none", lambda t: t.recording.columns is None),
        ("seed", "7", lambda t: t.seed == 7),
        ("epochs", "2", lambda t: (t.steps, t.epochs) == (None, 2)),
        ("lag", "1", lambda t: t.job.graph.lag.versions == 1),
        ("place", "Colocate(gpus=2)", lambda t: t.job.place == Colocate(gpus=2)),
        ("optimize", "false", lambda t: t.job.optimize is False),
    ],
)
def test_a_setting_is_typed_by_what_it_sets_and_changes_nothing_else(path: str, text: str, read: Any) -> None:
    changed = with_settings(TRAINING, {path: text})
    assert read(changed) and not read(TRAINING)
    assert path in settable(TRAINING)
    back = replace(changed, job=replace(changed.job, graph=TRAINING.job.graph, place=None, optimize=True))
    root = path.partition(".")[0]
    restored = {root, "steps", "epochs"} & ROOTS
    assert replace(back, **{name: getattr(TRAINING, name) for name in restored}) == TRAINING


def test_settings_of_one_spec_change_at_once() -> None:
    """Either alone is out of range."""
    both = {"update_actor.loss.clip_low": "0.4", "update_actor.loss.clip_high": "0.5", "actor.optimizer.lr": "1e-3"}
    changed = with_settings(TRAINING, both).job.graph
    assert (changed["update_actor"].operator.loss.clip_low, changed["update_actor"].operator.loss.clip_high) == (
        0.4,
        0.5,
    )
    assert changed.bindings["actor"].optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("path", "text", "code", "words"),
    [
        (
            "actor.lr",
            "1",
            "parameter.unknown",
            "--set actor.lr=1 names no setting of grpo; did you mean actor.optimizer.lr?",
        ),
        ("actr.optimizer.lr", "1", "parameter.unknown", "did you mean actor.optimizer.lr?"),
        ("lr", "1", "parameter.unknown", "did you mean actor.optimizer.lr?"),
        ("update_actor.loss.cliphigh", "1", "parameter.unknown", "update_actor.loss.clip_high"),
        ("batch.prompts", "1", "parameter.unknown", "prompts"),
        ("update_actor.loss.clip_high.x", "1", "parameter.unknown", "--set 'update_actor.loss.clip_high=...'."),
        ("actor.lora.r", "8", "parameter.unknown", "Set lora itself: --set 'actor.lora=LoRA(r=8)'."),
        ("actor.optimizer.lr", "abc", "parameter.invalid", "--set actor.optimizer.lr=abc: AdamW(...): lr='abc'"),
        ("actor.optimizer.lr", "-1", "parameter.invalid", "greater than 0"),
        ("steps", "0", "parameter.invalid", "--set steps=0: Training(...)"),
        ("actor.optimizer", "AdamW(lr=0)", "parameter.invalid", "AdamW(...): lr=0"),
        ("update_actor.loss", "GPSO()", "operator.unknown-name", "--set update_actor.loss=GPSO(): 'GPSO' is not"),
        ("rollout", "VLM('m')", "operator.unknown-name", "did you mean 'VLLM'?"),
        ("data", "x.jsonl", "parameter.invalid", "PromptData('x.jsonl')"),
        ("actor", "3", "backend.not-a-backend", "--set actor=3"),
    ],
)
def test_a_wrong_path_or_value_names_the_option_and_the_nearest_paths(
    path: str, text: str, code: str, words: str
) -> None:
    with raises(code) as caught:
        with_settings(TRAINING, {path: text})
    assert words in caught.value.message and caught.value.message.count("--set") <= 2


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("1e3", int | None, 1000.0),
        ("None", str, "None"),
        ("None", str | None, None),
        ("none", Literal["none", "all"] | None, "none"),
        ("true", bool, True),
        ("true", str, "true"),
        ("3", str | int, 3),
        ("'3'", str, "3"),
        ("(1, 2)", tuple[int, ...], (1, 2)),
        ("(1, 2)", str, "(1, 2)"),
        ("{'a': [1]}", Any, {"a": [1]}),
        ("AdamW(1e-3)", AdamW, AdamW(lr=1e-3)),
        ("__import__('os').getcwd()", Any, "__import__('os').getcwd()"),
        ("open('x')", Any, "open('x')"),
    ],
)
def test_text_becomes_the_value_that_its_annotation_allows(text: str, annotation: Any, value: Any) -> None:
    found = typed(text, annotation)
    assert (found, type(found)) == (value, type(value))


class TestResumed:
    @pytest.fixture
    def recorded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
        """The training, with a folder that describes a run of it."""
        monkeypatch.setattr(Training, "identity", lambda self: {})
        training = replace(TRAINING, folder=str(tmp_path), resume=True)
        (tmp_path / "run.json").write_text(json.dumps(training.describe()))
        return training

    def test_allowed_changes_are_named_with_both_values(self, recorded: Training) -> None:
        given = {"actor.optimizer.lr": "3e-6", "validation.pass.every": "2", "checkpoint_every": "5", "steps": "3"}
        lines = list(changes(with_settings(recorded, given), given, ()))
        assert lines == [
            "--set actor.optimizer.lr: 0.0001 in the recorded run, 3e-06 from now on",
            "--set validation.pass.every: 10 in the recorded run, 2 from now on",
            "--set checkpoint_every: None in the recorded run, 5 from now on",
        ]

    @pytest.mark.parametrize(
        ("path", "text", "changed"),
        [("update_actor.loss.clip_high", "0.28", "graph"), ("seed", "4", "seed"), ("data.path", "x.jsonl", "data")],
    )
    def test_what_belongs_to_the_identity_of_the_run_is_refused_unless_accepted(
        self, recorded: Training, path: str, text: str, changed: str
    ) -> None:
        training = with_settings(recorded, {path: text})
        with raises("resume.other-run", changed=changed) as caught:
            list(changes(training, {path: text}, ()))
        assert f"--set {path}={text}" in caught.value.message
        if changed == "data":
            assert "--accept data" in caught.value.message
            assert len(list(changes(training, {path: text}, ("data",)))) == 1

    def test_only_parts_of_the_identity_are_refused(self, recorded: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each path that may change leaves the identity as it is, and each refused one changes it."""

        def identity(training: Training) -> Any:
            monkeypatch.setattr(PromptData, "digests", lambda self: [])
            return identity_of(training.job.graph, training.sources, training.seed, training.prompts)

        values = {"actor.optimizer.lr": "3e-6", "lag": "1", "repeat.n": "3", "seed": "2", "prompts": "2", "steps": "9"}
        for path, text in {**values, "data.shuffle": "false", "recording.every": "7"}.items():
            training, refused = with_settings(recorded, {path: text}), False
            try:
                list(changes(training, {path: text}, ()))
            except FlowrlError:
                refused = True
            assert refused == (identity(training) != identity(recorded)), path
