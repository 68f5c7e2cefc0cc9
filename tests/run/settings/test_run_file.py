"""A training as a file: round trips are exact, and the text is what a person would write.

Covers also `flowrl/files/concise.py` and `flowrl/files/names.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl import After, Best, Colocate, EarlyStopping, Lag, PromptData, Recording, Training, Validation, When
from flowrl.backends import VLLM, AdamW, LoRA, SGLang, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.graphs import dapo, grpo, ppo
from flowrl.operators import PassAtK
from flowrl.run.alarms import DEFAULT, Above, Check
from flowrl.schedules import Cosine, Linear
from tests.support.command_line import write
from tests.support.errors import raises
from tests.support.rewards import digits

DATA = PromptData("train.jsonl", chat_template_kwargs={"think": True, "tools": [{"name": "add", "of": ["int", "int"]}]})
ACTOR = TorchTrainer("model", AdamW(lr=1e-4, betas=(0.9, 0.95)), schedule=Cosine(1.0, 0.0, steps=100))


def odd(history: Any) -> None:
    """A rule that never fires."""


def small(**changed: Any) -> Training:
    job = grpo(digits, n=2).bind(actor=ACTOR, ref=TorchScorer("model"), rollout=TorchRollout())
    return Training(job, DATA, **{"steps": 3, "prompts": 4} | changed)


def large() -> Training:
    graph = ppo(digits, n=2, mini_batch=8).edit(
        set={"update_actor.loss.clip_high": Linear(0.3, 0.2, steps=10), "generate.stop": ("END",)},
        when={"update_actor": When(start=2)},
        lag=Lag(1, spans=True),
        allow={"FR007": "greedy is the baseline only"},
        name="mine",
    )
    job = graph.bind(
        actor=TorchTrainer("model", lora=LoRA(r=4, targets=("q_proj", "v_proj"))),
        critic=TorchCritic("model"),
        ref=TorchScorer(),
        rollout=VLLM("model", engine_args={"seed": 1, "stop": ["a", "b"]}),
        place=Colocate(gpus=2, memory=40.0),
        optimize=False,
    )
    held = PromptData("held.jsonl")
    checks = (
        Validation(held, every=2, name="greedy", goal=0.9),
        Validation(
            PromptData("held.jsonl"), name="pass", changes={"repeat.n": 4}, insert={"k": After("reward", PassAtK(4))}
        ),
        Validation(
            PromptData("held.jsonl"), name="other", bind={"rollout": SGLang("model")}, drop=("x",), until=("reward",)
        ),
    )
    return Training(
        job,
        {"batch": PromptData(("a.jsonl", "b.jsonl"), shuffle=False)},
        epochs=2,
        prompts=8,
        seed=7,
        validation=checks,
        early_stopping=EarlyStopping("greedy/reward/mean", patience=2, min_delta=0.01),
        keep_best=Best("greedy/reward/mean", mode="min"),
        load_best_at_end=True,
        folder="runs/mine",
        save_model=False,
        checkpoint_every=5,
        max_checkpoints=2,
        resume="or-start",
        accept=("data",),
        rollouts_every=3,
        recording=Recording(columns=None, budget=10**9),
        alarms=(*DEFAULT, Above("kl/ref", 1.0, action="stop"), Check(odd)),
        costs="runs/other",
    )


TRAININGS: dict[str, Callable[[], Training]] = {
    "small": small,
    "large": large,
    "no alarms": lambda: small(alarms=(), keep_best="val/loss", validation=Validation(DATA)),
    "a reward by name": lambda: Training(
        dapo("tests.support.rewards:digits", n=2).bind(actor=TorchTrainer("model"), rollout=TorchRollout()),
        DATA,
        steps=1,
        prompts=2,
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_trainings_round_trip(name: str, ending: str, tmp_path: Path) -> None:
    training, path = TRAININGS[name](), tmp_path / f"run.{ending}"
    flowrl.save(training, path)
    read = flowrl.load(path)
    assert read == training and read.job == training.job
    assert read.job.graph.fingerprint() == training.job.graph.fingerprint()
    flowrl.save(read, tmp_path / f"again.{ending}")
    assert (tmp_path / f"again.{ending}").read_text() == path.read_text()


def test_the_file_has_public_names_and_only_what_differs_from_defaults(tmp_path: Path) -> None:
    flowrl.save(small(seed=3), tmp_path / "run.yaml")
    data = yaml.safe_load((tmp_path / "run.yaml").read_text())
    graph = data.pop("graph")
    assert data == {
        "flowrl": 2,
        "data": {"$type": "PromptData", "path": "train.jsonl", "chat_template_kwargs": DATA.chat_template_kwargs},
        "steps": 3,
        "prompts": 4,
        "seed": 3,
        "bindings": {
            "actor": {
                "$type": "TorchTrainer",
                "model": "model",
                "optimizer": {"$type": "AdamW", "lr": 0.0001, "betas": [0.9, 0.95]},
                "schedule": {"$type": "Cosine", "start": 1.0, "end": 0.0, "steps": 100},
            },
            "ref": {"$type": "TorchScorer", "model": "model"},
            "rollout": {"$type": "TorchRollout"},
        },
    }
    assert graph["nodes"]["repeat"] == {"operator": {"$type": "Repeat", "n": 2}, "inputs": {"prompts": "batch"}}
    assert graph["nodes"]["reward"]["operator"]["fn"] == {"$function": "tests.support.rewards:digits"}


def test_a_person_may_write_any_form_of_a_name_and_a_number(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    flowrl.save(small(), path)
    text = path.read_text().replace("lr: 0.0001", "lr: 1e-4").replace("$type: AdamW", "$type: flowrl.backends:AdamW")
    assert flowrl.load(write(path, text)) == small()


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("steps: 3", "stepz: 3", "file.malformed", "did you mean 'steps'?"),
        ("steps: 3", "steps: 0", "parameter.invalid", "run.yaml"),
        ("steps: 3", "optimize: 3\nsteps: 3", "file.malformed", "optimize"),
        ("lr: 0.0001", "lr: -1", "parameter.invalid", "bindings.actor.optimizer"),
        ("$type: AdamW", "$type: AdamV", "operator.unknown-name", "did you mean 'AdamW'?"),
        ("$type: AdamW", "$type: load", "operator.unknown-name", "load"),
        ("flowrl: 2", "flowrl: 1", "file.wrong-format", "format 2"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    old: str, new: str, code: str, words: str, tmp_path: Path
) -> None:
    flowrl.save(small(), tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert old in text
    with raises(code) as caught:
        flowrl.load(write(tmp_path / "run.yaml", text.replace(old, new)))
    assert words in str(caught.value)


def test_code_that_the_program_has_not_imported_is_refused_unless_imports_is_true(tmp_path: Path) -> None:
    reward = write(
        tmp_path / "mine.py",
        """
        from pathlib import Path
        (Path(__file__).parent / "ran").touch()
        def score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0
        """,
    )
    flowrl.save(small(), tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    write(tmp_path / "run.yaml", text.replace("$function: tests.support.rewards:digits", f"$function: {reward}:score"))
    with raises("file.not-imported") as caught:
        flowrl.load(tmp_path / "run.yaml")
    assert "imports=True" in caught.value.message and "--import" in caught.value.message
    shown = flowrl.load(tmp_path / "run.yaml", imports=False)
    with raises("file.not-imported"):
        shown.run()
    assert not (tmp_path / "ran").exists()
    assert flowrl.load(tmp_path / "run.yaml", imports=True).job.graph["reward"].operator.fn("", "", "") == 1.0
    assert (tmp_path / "ran").exists()


def test_a_job_and_a_training_with_a_lambda_are_refused(tmp_path: Path) -> None:
    with raises("file.malformed", where="flowrl.save", found="Job"):
        flowrl.save(small().job, tmp_path / "run.yaml")  # type: ignore[arg-type]
    with raises("file.no-import-path"):
        flowrl.save(small(alarms=(lambda history: None,)), tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == []
