"""`Evaluation`: its rows, the folder that it writes and continues, determinism, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import flowrl
from flowrl import Evaluation, PromptData, rewards
from flowrl.backends import TorchRollout
from flowrl.data import ChatTokenizer
from flowrl.evaluation.estimates import Response, estimates
from flowrl.operators import Generate
from flowrl.run.training.job import Job
from tests.support.errors import raises
from tests.support.runs import described, lines


def evaluation(tiny: str, prompts_file: str, folder: Path, **settings: Any) -> Evaluation:
    """An evaluation of 12 prompts, in batches of 5."""
    given = {"generate": Generate(max_new_tokens=4), "n": 4, "k": (1, 4), "batch": 5, "folder": str(folder)} | settings
    engine = TorchRollout(tiny, frozen=True, device="cpu")
    return Evaluation(engine, PromptData(prompts_file), rewards.gsm8k(method="flexible"), **given)


def test_the_folder_has_every_row_and_opens_as_a_run(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = evaluation(tiny, prompts_file, tmp_path / "out").run(lambda *progress: seen.append(progress))
    assert seen == [(5, 12), (10, 12), (12, 12)] and found.prompts == 12
    rows = lines(found.folder / "predictions.jsonl")
    assert [row["row_id"] for row in rows] == [f"0/{prompt}/0#{i}" for prompt in range(12) for i in range(4)]
    assert all(
        row["score"] == rewards.gsm8k(method="flexible")("", row["response"], row["ground_truth"]) for row in rows
    )
    groups = [[Response(row["score"], row["answer"]) for row in rows[i : i + 4]] for i in range(0, 48, 4)]
    assert found.estimates == estimates(groups, (1, 4))
    assert found.truncated == sum(row["response_tokens"] == 4 for row in rows) / 48
    opened = flowrl.open(found.folder)
    assert opened.status == "finished" and opened.predictions == rows
    [metrics] = opened.validations.to_pylist()
    assert metrics["eval/pass@4"] == found.estimates["pass@4"].mean
    assert metrics["eval/reward/mean"] == found.estimates["avg@4"].mean


def test_the_greedy_response_is_that_of_transformers(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    greedy = {"generate": Generate(temperature=0.0, max_new_tokens=6), "n": 1, "k": (1,), "limit": 3}
    found = evaluation(tiny, prompts_file, tmp_path / "out", **greedy).run()
    rows, tokenizer = lines(found.folder / "predictions.jsonl"), ChatTokenizer(tiny)
    assert [row["uid"] for row in rows] == ["0/0/0", "0/1/0", "0/2/0"]
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for row in rows:
        ids = torch.tensor([tokenizer.prompt_ids(row["prompt"])])
        with torch.no_grad():
            sampled = model.generate(ids, attention_mask=ids > -1, max_new_tokens=6, do_sample=False)
        assert row["response"] == tokenizer.decode(sampled[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("batch", [1, 12])
def test_the_rows_do_not_depend_on_batches(batch: int, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    first, second = (
        evaluation(tiny, prompts_file, tmp_path / str(size), batch=size, limit=4).run() for size in (3, batch)
    )
    assert lines(first.folder / "predictions.jsonl") == lines(second.folder / "predictions.jsonl")
    other = evaluation(tiny, prompts_file, tmp_path / "other", seed=1, limit=4).run()
    assert lines(first.folder / "predictions.jsonl") != lines(other.folder / "predictions.jsonl")


def test_an_interrupted_evaluation_continues_without_sampling_again(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluation(tiny, prompts_file, tmp_path / "whole").run()
    expected = (whole.folder / "predictions.jsonl").read_bytes()

    def interrupt(done: int, prompts: int) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        evaluation(tiny, prompts_file, folder).run(interrupt)
    written = (folder / "predictions.jsonl").read_bytes()
    assert described(folder)["status"] == "interrupted" and written == b"".join(expected.splitlines(True)[:20])
    torn = b"".join(expected.splitlines(True)[:22])[:-9]  # killed while it wrote the second response of a prompt
    (folder / "predictions.jsonl").write_bytes(torn)
    sampled, sample = [], Evaluation._sampled
    monkeypatch.setattr(
        Evaluation, "_sampled", lambda self, steps, batch: sampled.extend(batch["uid"]) or sample(self, steps, batch)
    )
    continued = evaluation(tiny, prompts_file, folder).run()
    assert (folder / "predictions.jsonl").read_bytes() == expected
    assert continued.estimates == whole.estimates
    assert sampled == [f"0/{prompt}/0" for prompt in range(5, 12)]


def test_a_finished_evaluation_computes_further_metrics_from_its_rows(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluation(tiny, prompts_file, tmp_path / "out")
    before = first.run()
    monkeypatch.setattr(Job, "open", lambda *_: pytest.fail("it loads the model"))
    after = dataclasses.replace(first, k=(2,)).run()
    assert list(after.estimates) == ["avg@4", "pass@2", "maj@2"]
    assert after.estimates["avg@4"] == before.estimates["avg@4"]
    [metrics] = lines(after.folder / "metrics.jsonl")
    assert "eval/pass@2" in metrics and "eval/pass@4" not in metrics


def test_votes_are_the_answers_of_a_function(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text("def first(response):\n    return response[:1] or None\n")
    reference = f"{tmp_path / 'answers.py'}:first"
    found = evaluation(tiny, prompts_file, tmp_path / "out", answer=reference, limit=2).run()
    assert all(row["answer"] == (row["response"][:1] or None) for row in lines(found.folder / "predictions.jsonl"))
    own = Evaluation(
        TorchRollout(tiny, frozen=True, device="cpu"),
        PromptData(prompts_file),
        "tests.support.rewards:digits",
        Generate(temperature=0.0, max_new_tokens=4),
        limit=2,
        folder=str(tmp_path / "own"),
    ).run()
    assert all(row["answer"] == (row["response"].strip() or None) for row in lines(own.folder / "predictions.jsonl"))


def test_a_folder_of_something_else_is_refused(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    evaluation(tiny, prompts_file, tmp_path / "out", limit=1).run()
    with raises("resume.other-run", path=str(tmp_path / "out"), changed=("seed",)):
        evaluation(tiny, prompts_file, tmp_path / "out", limit=1, seed=3).run()
    (tmp_path / "run").mkdir()
    of_a_run = {"status": "finished", "identity": {"seed": 0}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(of_a_run))
    with raises("resume.other-run", path=str(tmp_path / "run")):
        evaluation(tiny, prompts_file, tmp_path / "run").run()


def test_settings_that_do_not_fit_are_refused(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    with raises("parameter.invalid"):
        evaluation(tiny, prompts_file, tmp_path, k=(1, 8))
    with raises("parameter.invalid"):
        evaluation(tiny, prompts_file, tmp_path, generate=Generate(temperature=0.0))
    synced = dataclasses.replace(evaluation(tiny, prompts_file, tmp_path), engine=TorchRollout(tiny))
    with raises("backend.never-synced"):
        synced.run()
