"""Resuming with other inputs, or from a damaged folder, is refused, or repaired with a logged warning."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from flowrl import PromptData, Training, Validation
from flowrl.backends import TorchRollout
from flowrl.errors import DataError, StorageError
from flowrl.run.training.checkpoint import MANIFEST, STATE, Checkpoints
from tests.nightly import nightly
from tests.run.training.interrupted import STEPS, assert_same, cut_off, jobs, run, settings, without_times
from tests.support.errors import raises
from tests.support.jobs import write_prompts
from tests.support.runs import described

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def model(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose files a test may change, if it restores them."""
    return str(shutil.copytree(tiny, tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def cut(model: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after four steps, with a checkpoint after every second step."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    cut_off(jobs("grpo", model), prompts_file, folder, 4)
    return folder


@pytest.fixture
def copy(cut: Path, tmp_path: Path) -> Path:
    """A copy of `cut` that a test may change."""
    return shutil.copytree(cut, tmp_path / "copy")


@pytest.fixture(scope="module")
def uninterrupted(model: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(jobs("grpo", model), prompts_file, tmp_path_factory.mktemp("uninterrupted") / "run")


def with_other_weights(model: str, tmp_path: Path) -> str:
    """A copy of the model with other weights."""
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = min(weights)
    save_file({**weights, name: weights[name] * 1.001}, other / "model.safetensors", {"format": "pt"})
    return str(other)


class TestOtherInputs:
    def test_other_data_of_equal_length_is_refused(
        self, model: str, prompts_file: str, cut: Path, tmp_path: Path
    ) -> None:
        text = Path(prompts_file).read_text()
        other = tmp_path / "other.jsonl"
        other.write_text(text.replace('"ground_truth": "7"', '"ground_truth": "8"'))
        before = (cut / "run.json").read_bytes()
        with raises("resume.other-run", changed="content of the data"):
            run(jobs("grpo", model), str(other), cut, resume=True)
        assert (cut / "run.json").read_bytes() == before

    def test_corrected_data_is_accepted_and_recorded(
        self, model: str, prompts_file: str, copy: Path, tmp_path: Path
    ) -> None:
        """With as many rows, the run continues at its position."""
        other = tmp_path / "other.jsonl"
        other.write_text(Path(prompts_file).read_text().replace('"ground_truth": "7"', '"ground_truth": "8"'))
        resumed = run(jobs("grpo", model), str(other), copy, resume=True, accept=("data",))
        assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
        (change,) = described(copy)["accepted"]
        assert change["step"] == 4 and [*change["changed"]] == ["content of the data"]
        state = json.loads((copy / "checkpoints" / "step-000006" / STATE).read_text())
        assert state["data"] == {"epoch": 2, "offset": 6, "rows": 12} and state["accepted"] == [change]  # 30 draws
        again = run(jobs("grpo", model), str(other), copy, resume=True)  # the change is accepted once
        assert len(again.metrics) == STEPS and described(copy)["accepted"] == [change]

    def test_data_without_a_row_starts_over(
        self, model: str, prompts_file: str, copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = tmp_path / "other.jsonl"
        other.write_text("".join(Path(prompts_file).read_text().splitlines(keepends=True)[1:]))
        with raises("resume.other-run", changed="content of the data") as error:
            run(jobs("grpo", model), str(other), copy, resume=True)
        assert "--accept data" in error.value.message
        resumed = run(jobs("grpo", model), str(other), copy, resume=True, accept=("data",))
        assert len(resumed.metrics) == STEPS and "start over" in caplog.text

    def test_a_run_without_a_checkpoint_accepts_corrected_data(
        self, model: str, prompts_file: str, copy: Path, tmp_path: Path
    ) -> None:
        shutil.rmtree(copy / "checkpoints")
        other = tmp_path / "other.jsonl"
        other.write_text(Path(prompts_file).read_text().replace('"ground_truth": "7"', '"ground_truth": "8"'))
        with raises("resume.no-checkpoint"):
            run(jobs("grpo", model), str(other), copy, resume=True)
        assert len(run(jobs("grpo", model), str(other), copy, resume=True, accept=("data",)).metrics) == STEPS

    def test_accepting_data_covers_nothing_else(self, model: str, prompts_file: str, cut: Path) -> None:
        with raises("resume.other-run", changed="seed"):
            run(jobs("grpo", model), prompts_file, cut, resume=True, accept=("data",), seed=4)
        with raises("parameter.invalid"):
            run(jobs("grpo", model), prompts_file, cut.with_name("new"), accept=("data",))

    def test_another_model_at_the_same_path_is_refused(
        self, model: str, prompts_file: str, cut: Path, tmp_path: Path
    ) -> None:
        file = Path(model) / "model.safetensors"
        original = file.read_bytes()
        file.write_bytes((Path(with_other_weights(model, tmp_path)) / "model.safetensors").read_bytes())
        try:
            with raises("resume.other-run", changed="starting model"):
                run(jobs("grpo", model), prompts_file, cut, resume=True)
        finally:
            file.write_bytes(original)

    @pytest.mark.parametrize("role", ["actor", "ref"])
    def test_another_model_of_one_role_is_refused(
        self, model: str, prompts_file: str, cut: Path, tmp_path: Path, role: str
    ) -> None:
        other = jobs("grpo", with_other_weights(model, tmp_path)).graph.bindings[role]
        with raises("resume.other-run", changed="starting model"):
            run(jobs("grpo", model).edit(bind={role: other}), prompts_file, cut, resume=True)

    def test_file_locations_and_synced_weights_are_not_part_of_the_identity(
        self, model: str, prompts_file: str, tmp_path: Path
    ) -> None:
        """A run resumes if they change, or if unrelated files are added to the folder of a model."""
        moved = shutil.copytree(model, tmp_path / "moved")
        (moved / "README.md").write_text("moved")
        data = shutil.copyfile(prompts_file, tmp_path / "data.jsonl")
        rollout = {"rollout": TorchRollout(with_other_weights(model, tmp_path))}
        first = Training(jobs("grpo", model), PromptData(prompts_file), steps=1, prompts=5)
        second = Training(jobs("grpo", str(moved)).edit(bind=rollout), PromptData(str(data)), steps=2, prompts=5)
        assert first.identity() == second.identity()
        assert all(first.identity()["starting model"].values())

    def test_run_json_has_the_identity_of_the_run(self, cut: Path, prompts_file: str) -> None:
        identity = described(cut)["identity"]
        assert identity["content of the data"] == PromptData(prompts_file).digests()
        assert set(identity["starting model"]) == {"actor", "ref"}

    def test_a_changed_tokenizer_is_logged(
        self, model: str, prompts_file: str, copy: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is not refused, since a template may render today's date."""
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        original = tokenizer.chat_template
        tokenizer.chat_template = original.replace("<|assistant|>", "!<|assistant|>")
        files = {file: file.read_bytes() for file in Path(model).iterdir()}
        try:
            tokenizer.save_pretrained(model)
            config = Path(model) / "tokenizer_config.json"  # where older models have their template
            config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": tokenizer.chat_template}))
            with caplog.at_level(logging.WARNING):
                run(jobs("grpo", model), prompts_file, copy, resume=True)
        finally:
            for file in Path(model).iterdir():
                file.unlink() if file not in files else file.write_bytes(files[file])
        assert "was written with other prompts: the file, the tokenizer or its chat template has changed" in caplog.text
        assert "was written with other prompts of the validation 'val'" in caplog.text

    def test_a_validation_on_other_prompts_is_logged(
        self, model: str, prompts_file: str, copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = Validation(PromptData(write_prompts(tmp_path / "other.jsonl", 3)), every=3)
        with caplog.at_level(logging.WARNING):
            run(jobs("grpo", model), prompts_file, copy, resume=True, validation=other, steps=5)
        assert "written with other prompts of the validation 'val'" in caplog.text
        assert "made with other prompts:" not in caplog.text


class TestLines:
    """metrics.jsonl and predictions.jsonl."""

    def test_an_intact_folder_resumes_without_warnings(
        self, model: str, prompts_file: str, copy: Path, uninterrupted: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            assert_same(run(jobs("grpo", model), prompts_file, copy, resume=True), uninterrupted)
        of_files = ("run_folder", "checkpoint", "resume", "timeline")
        assert not [record for record in caplog.records if record.name.endswith(of_files)]

    @pytest.mark.parametrize(
        ("damage", "missing_step", "remaining"),
        [
            (lambda raw: b"", "the steps 1, 2, 3, 4", [5, 6]),
            nightly(lambda raw: raw[: raw.index(b'{"step": 3')], "the steps 3, 4", [1, 2, 5, 6]),
            (lambda raw: raw.replace(b'{"step": 2', b'{"step: 2'), "the steps 2", [1, 3, 4, 5, 6]),
            nightly(lambda raw: raw.replace(b'{"step": 2', b'\xff{"step": 2'), "the steps 2", [1, 3, 4, 5, 6]),
            (lambda raw: raw.replace(b'{"step": 1, "', b'{"step": 1, "extra": 1, "'), None, [1, 2, 3, 4, 5, 6]),
        ],
        ids=["deleted", "shortened", "broken", "bytes", "changed"],
    )
    def test_changed_metrics_are_logged(
        self,
        model: str,
        prompts_file: str,
        copy: Path,
        caplog: pytest.LogCaptureFixture,
        damage: Callable[[bytes], bytes],
        missing_step: str | None,
        remaining: list[int],
    ) -> None:
        file = copy / "metrics.jsonl"
        damaged = damage(file.read_bytes())
        file.write_bytes(damaged)
        if not damaged:
            file.unlink()
        with caplog.at_level(logging.WARNING):
            resumed = run(jobs("grpo", model), prompts_file, copy, resume=True)
        assert "metrics.jsonl has changed since the checkpoint after step 4 was written" in caplog.text
        assert f"and lacks {missing_step}: " in caplog.text if missing_step else "lacks" not in caplog.text
        assert [metrics["step"] for metrics in resumed.metrics] == remaining
        assert [line["step"] for line in without_times(file) if "actor/lr" in line] == remaining

    @pytest.mark.parametrize(
        "tail",
        [b'{"step": 5, "validation": "val", "response": "\xc3', nightly(b"\xff\xfe\n"), nightly(b"{}\n3\n[]\n")],
    )
    def test_truncated_prediction_lines_are_repaired(
        self,
        model: str,
        prompts_file: str,
        copy: Path,
        uninterrupted: Any,
        tail: bytes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for name in ("predictions.jsonl", "metrics.jsonl"):
            with (copy / name).open("ab") as file:
                file.write(tail)
        with caplog.at_level(logging.WARNING):
            assert_same(run(jobs("grpo", model), prompts_file, copy, resume=True), uninterrupted)
        assert "has changed since" not in caplog.text

    @pytest.mark.parametrize(
        ("name", "error", "verb"),
        [
            ("metrics.jsonl", DataError, "read"),
            ("predictions.jsonl", DataError, "read"),
            ("trace.json", StorageError, "written"),
        ],
    )
    def test_a_folder_in_place_of_a_file_is_refused(
        self, model: str, prompts_file: str, copy: Path, name: str, error: type[Exception], verb: str
    ) -> None:
        (copy / name).unlink()
        (copy / name).mkdir()
        with pytest.raises(error, match=rf"{name} cannot be {verb} \(Is a directory"):
            run(jobs("grpo", model), prompts_file, copy, resume=True, steps=5)
        assert described(copy)["status"] == "failed"

    @pytest.mark.parametrize(
        "content",
        [b"{", b'{"otherData": {}}', *map(nightly, (b"", b"[]", b"3", b"\xff", b"[" * 100_000))],
    )
    def test_a_malformed_trace_is_replaced(
        self, model: str, prompts_file: str, copy: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        (copy / "trace.json").write_bytes(content)
        with caplog.at_level(logging.WARNING):
            run(jobs("grpo", model), prompts_file, copy, resume=True, steps=5)
        assert "trace.json is not the trace of a run" in caplog.text
        assert json.loads((copy / "trace.json").read_text())["traceEvents"]


class TestCheckpoints:
    def test_unrelated_files_among_checkpoints_are_not_removed(
        self, model: str, prompts_file: str, copy: Path, uninterrupted: Any
    ) -> None:
        strays = [copy / "checkpoints" / name for name in (".step-x", ".step-best", "step-", ".step-000004.bak")]
        for stray in strays[:2]:
            stray.mkdir()
            (stray / "notes").touch()
        for stray in strays[2:]:
            stray.touch()
        assert_same(run(jobs("grpo", model), prompts_file, copy, resume=True), uninterrupted)
        assert all(stray.exists() for stray in strays) and (strays[0] / "notes").exists()

    def test_a_linked_checkpoint_is_used_and_its_target_is_not_removed(
        self, model: str, prompts_file: str, copy: Path, tmp_path: Path
    ) -> None:
        place = copy / "checkpoints" / "step-000004"
        place.rename(tmp_path / "target")
        place.symlink_to(tmp_path / "target")
        run(jobs("grpo", model), prompts_file, copy, resume=True, max_checkpoints=1)
        assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-000006"]
        assert (tmp_path / "target" / STATE).exists()  # only the link is removed

    @pytest.mark.parametrize(
        ("changed", "missing"),
        [
            ({"data": None}, "data"),
            ({"made_with": 3}, "made_with"),
            ({"bindings": []}, "bindings"),
            ({"bindings": {"actor": 3}}, "bindings"),
            ({"bindings": {"actor": {"$type": 3}}}, "bindings"),
            ({"lines": None}, "lines"),
            ({"state": "kl"}, "state"),
            ({"data": {"epoch": -1, "offset": 0, "rows": 12}}, None),
            ({"step": 3}, None),
        ],
        ids=str,
    )
    def test_a_malformed_checkpoint_state_is_refused(
        self, model: str, prompts_file: str, copy: Path, changed: dict[str, Any], missing: str | None
    ) -> None:
        """With a new manifest whose digests match."""
        shutil.rmtree(copy / "checkpoints" / "step-000002")
        reseal(copy / "checkpoints" / "step-000004", changed)
        with pytest.raises(DataError) as raised:
            run(jobs("grpo", model), prompts_file, copy, resume=True)
        assert raised.value.facts.get("missing") == missing
        if "step" in changed:
            assert raised.value.code == "checkpoint.damaged"
        elif missing is not None:
            assert raised.value.code == "resume.unknown-state"


def reseal(checkpoint: Path, changed: dict[str, Any]) -> None:
    """Rewrite the checkpoint with a changed state and a matching manifest."""
    state = {**json.loads((checkpoint / STATE).read_text()), **changed}
    original = shutil.move(checkpoint, checkpoint.with_name("original"))
    written = Checkpoints(checkpoint.parent, max_checkpoints=9).save(
        int(state["step"]),
        {k: v for k, v in state.items() if k != "step"},
        lambda draft: copy_roles(Path(original), draft),
    )
    if written != checkpoint:
        written.rename(checkpoint)
    shutil.rmtree(original)


def copy_roles(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.name not in (STATE, MANIFEST):
            shutil.copytree(path, target / path.name) if path.is_dir() else shutil.copyfile(path, target / path.name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"status": "failed", "identity": 3}',
        b'{"identity": {}}',
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_malformed_run_json_is_refused(prompts_file: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    for resume in (False, True):
        training = Training(
            jobs("grpo", "no such model"), PromptData(prompts_file), folder=str(tmp_path), resume=resume,
            **{k: v for k, v in settings(prompts_file).items()},
        )  # fmt: skip
        with raises("run.damaged", path=str(tmp_path)):
            training.run()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert training.steps == STEPS
