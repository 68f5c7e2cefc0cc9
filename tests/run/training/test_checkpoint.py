"""Checkpoints are atomic; damage is detected, and loading falls back to the previous checkpoint."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from flowrl.errors import DataError
from flowrl.run.training.checkpoint import MANIFEST, STATE, Checkpoints, find_fault
from tests.support.errors import raises


def engines(content: bytes = b"weights") -> Callable[[Path], None]:
    """Writes what engines would: a folder per role, and an empty file."""

    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.safetensors").write_bytes(content)
        (folder / "actor" / "optimizer.bin").write_bytes(content[::-1])
        (folder / "empty").write_bytes(b"")

    return write


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Complete checkpoints after steps 10 and 20."""
    saved = Checkpoints(tmp_path / "checkpoints", max_checkpoints=3)
    for step in (10, 20):
        saved.save(step, {"kl": step / 7}, engines(b"weights of %d" % step))
    return saved


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class TestSave:
    def test_saved_files_and_state_are_loaded(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest()
        assert found is not None
        path, state = found
        assert path == checkpoints.folder / "step-000020"
        assert state == {"kl": 20 / 7, "step": 20}
        assert (path / "actor" / "model.safetensors").read_bytes() == b"weights of 20"
        assert names(path) == ["actor", "empty", MANIFEST, STATE]

    def test_numbers_in_the_state_round_trip_exactly(self, tmp_path: Path) -> None:
        state = {"floats": [0.1, 1e-308, -0.0, math.inf], "nan": math.nan, "seed": 2**63 + 1, "none": None, "ü": "é"}
        checkpoints = Checkpoints(tmp_path, max_checkpoints=1)
        checkpoints.save(1, state, engines())
        found = checkpoints.latest()
        assert found is not None
        assert repr(found[1]) == repr({**state, "step": 1})

    def test_an_empty_folder_has_no_checkpoint(self, tmp_path: Path) -> None:
        assert Checkpoints(tmp_path / "none", max_checkpoints=1).latest() is None
        assert Checkpoints(tmp_path / "none", max_checkpoints=1).steps() == []

    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_max_checkpoints_limits_the_saved_checkpoints(self, tmp_path: Path, limit: int) -> None:
        checkpoints = Checkpoints(tmp_path, limit)
        for step in range(1, 5):
            checkpoints.save(step, {}, engines())
        assert checkpoints.steps() == list(range(1, 5))[-limit:]
        assert names(tmp_path) == [f"step-{step:06d}" for step in checkpoints.steps()]

    @pytest.mark.parametrize("limit", [0, -1])
    def test_max_checkpoints_below_one_is_refused(self, tmp_path: Path, limit: int) -> None:
        with raises("checkpoint.none-retained", found=limit):
            Checkpoints(tmp_path, limit)

    def test_seven_digit_steps_are_in_order(self, tmp_path: Path) -> None:
        checkpoints = Checkpoints(tmp_path, max_checkpoints=2)
        for step in (999_999, 1_000_000):
            checkpoints.save(step, {}, engines())
        assert checkpoints.steps() == [999_999, 1_000_000]
        found = checkpoints.latest()
        assert found is not None and found[1]["step"] == 1_000_000

    def test_unrelated_folders_are_not_removed(self, checkpoints: Checkpoints) -> None:
        for name in ("step-best", "step-20-copy", "step-7", "notes"):
            (checkpoints.folder / name).mkdir()
        checkpoints.save(30, {}, engines())
        assert checkpoints.steps() == [10, 20, 30]
        assert {"step-best", "step-20-copy", "step-7", "notes"} < set(names(checkpoints.folder))

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"position": (1, 2)}, r"\['position'\] is a tuple"),
            ({"kl": {"a": object()}}, r"\['kl'\]\['a'\] is an object"),
            ({"counts": {1: 2}}, "has the key 1"),
        ],
    )
    def test_a_state_that_json_would_change_is_refused(
        self, checkpoints: Checkpoints, state: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            checkpoints.save(30, state, lambda folder: pytest.fail("was written"))
        assert names(checkpoints.folder) == ["step-000010", "step-000020"]

    def test_the_state_has_the_step_of_the_checkpoint(self, checkpoints: Checkpoints) -> None:
        checkpoints.save(30, {"step": 4}, engines())
        found = checkpoints.latest()
        assert found is not None and found[1] == {"step": 30}


class TestCutOff:
    @staticmethod
    def fail(folder: Path) -> None:
        engines()(folder)
        raise OSError("no space left on device")

    def test_an_error_while_writing_keeps_the_previous_checkpoint(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(30, {}, self.fail)
        assert names(checkpoints.folder) == ["step-000010", "step-000020"]
        found = checkpoints.latest()
        assert found is not None and found[1]["step"] == 20

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_a_crash_at_any_system_call_preserves_a_complete_checkpoint(
        self, checkpoints: Checkpoints, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is either the new checkpoint or the previous one."""
        real, survived = getattr(os, call), 0
        for n in range(20):
            calls = 0

            def crash(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > n:  # noqa: B023
                    raise KeyboardInterrupt
                return real(*arguments)

            with monkeypatch.context() as patched:
                patched.setattr(os, call, crash)
                try:
                    checkpoints.save(30, {"n": n}, engines())
                    survived += 1
                except KeyboardInterrupt:
                    pass
            found = checkpoints.latest()
            assert found is not None
            assert (found[1]["step"], found[1].get("n", n)) in ((20, n), (30, n))
            shutil.rmtree(checkpoints.folder / "step-000030", ignore_errors=True)
        assert 0 < survived < 20

    @pytest.mark.parametrize("step", [30, 40])
    def test_leftovers_of_a_killed_process_are_replaced(self, checkpoints: Checkpoints, step: int) -> None:
        leftover = checkpoints.folder / f".step-{step:06d}.partial"
        leftover.mkdir()
        (leftover / "old").write_text("of another attempt")
        assert checkpoints.steps() == [10, 20]
        found = checkpoints.latest()
        assert found is not None and found[1]["step"] == 20
        path = checkpoints.save(30, {}, engines())
        assert find_fault(path) is None
        assert not (path / "old").exists()
        assert names(checkpoints.folder) == ["step-000010", "step-000020", "step-000030"]


class TestAgain:
    """A resumed run saves some steps a second time."""

    def test_saving_a_step_again_replaces_it(self, checkpoints: Checkpoints) -> None:
        path = checkpoints.save(20, {"again": True}, engines(b"other weights"))
        assert (path / "actor" / "model.safetensors").read_bytes() == b"other weights"
        assert checkpoints.latest() == (path, {"again": True, "step": 20})
        assert names(checkpoints.folder) == ["step-000010", "step-000020"]

    def test_a_failed_replacement_keeps_the_old_checkpoint(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(20, {}, TestCutOff.fail)
        found = checkpoints.latest()
        assert found is not None and found[1] == {"kl": 20 / 7, "step": 20}

    def test_saving_an_earlier_step_removes_later_checkpoints(self, tmp_path: Path) -> None:
        """Otherwise a damaged later one would count towards `max_checkpoints`."""
        checkpoints = Checkpoints(tmp_path, max_checkpoints=1)
        checkpoints.save(30, {}, engines())
        (tmp_path / "step-000030" / STATE).unlink()
        checkpoints.save(25, {}, engines())
        assert checkpoints.steps() == [25]


class TestDamage:
    def test_damage_to_any_byte_is_detected(self, tmp_path: Path) -> None:
        path = Checkpoints(tmp_path, max_checkpoints=1).save(1, {"kl": 0.5}, engines(b"ab"))
        assert find_fault(path) is None
        tried = 0
        for file in [file for file in path.rglob("*") if file.is_file()]:
            original = file.read_bytes()
            for at in range(len(original)):
                for bit in (1, 2, 4, 8, 16, 32, 64, 128):
                    file.write_bytes(original[:at] + bytes([original[at] ^ bit]) + original[at + 1 :])
                    fault = find_fault(path)
                    assert fault is not None, (file.name, at, bit)
                    assert str(path) in fault and (file.name in fault or file.name == MANIFEST)
                    tried += 1
            file.write_bytes(original)
        assert tried > 1000
        assert find_fault(path) is None

    def test_truncation_at_any_byte_is_detected(self, tmp_path: Path) -> None:
        path = Checkpoints(tmp_path, max_checkpoints=1).save(1, {}, engines(b"abc"))
        for file in [file for file in path.rglob("*") if file.is_file()]:
            original = file.read_bytes()
            for length in range(len(original)):
                file.write_bytes(original[:length])
                assert find_fault(path) is not None, (file.name, length)
            file.write_bytes(original + b"\0")
            assert find_fault(path) is not None, file.name
            file.write_bytes(original)

    def test_missing_files_are_detected(self, tmp_path: Path) -> None:
        path = Checkpoints(tmp_path, max_checkpoints=1).save(1, {}, engines())
        for file in [file for file in path.rglob("*") if file.is_file()]:
            original = file.read_bytes()
            file.unlink()
            fault = find_fault(path)
            assert fault is not None and file.name in fault
            file.mkdir()
            assert find_fault(path) is not None
            file.rmdir()
            file.write_bytes(original)

    @pytest.mark.parametrize(
        "text", ["", "[]", "3", "{}", '{"files": 3, "digest": ""}', '{"files": ["a"], "digest": ""}']
    )
    def test_malformed_manifests_are_detected(self, checkpoints: Checkpoints, text: str) -> None:
        path = checkpoints.folder / "step-000020"
        (path / MANIFEST).write_text(text)
        assert MANIFEST in str(find_fault(path))

    @pytest.mark.parametrize("name", ["a\0b", "pipe", "actor", "../none"])
    def test_manifest_entries_that_are_not_files_are_detected(self, checkpoints: Checkpoints, name: str) -> None:
        """Also with a valid digest: reading the listed names must neither raise nor block."""
        path = checkpoints.folder / "step-000020"
        os.mkfifo(path / "pipe")
        files = json.loads((path / MANIFEST).read_text())["files"] | {name: "0" * 32}
        seal = xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
        (path / MANIFEST).write_text(json.dumps({"files": files, "digest": seal}))
        assert str(find_fault(path)).endswith(f"is damaged: the file {name!r} is missing")

    def test_unlisted_files_are_detected(self, checkpoints: Checkpoints) -> None:
        path = checkpoints.folder / "step-000020"
        manifest = json.loads((path / MANIFEST).read_text())
        del manifest["files"]["empty"]
        (path / MANIFEST).write_text(json.dumps(manifest))
        assert find_fault(path) is not None

    def test_extra_hidden_files_are_accepted(self, checkpoints: Checkpoints) -> None:
        path = checkpoints.folder / "step-000020"
        (path / ".nfs0001").write_bytes(b"of the file system")
        assert find_fault(path) is None

    def test_latest_falls_back_to_the_previous_checkpoint(
        self, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
    ) -> None:
        (checkpoints.folder / "step-000020" / "actor" / "model.safetensors").write_bytes(b"weights of 21")
        with caplog.at_level(logging.WARNING):
            found = checkpoints.latest()
        assert found is not None
        assert (found[0].name, found[1]["step"]) == ("step-000010", 10)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        for part in ("step-000020", "actor/model.safetensors has changed", "resuming from step-000010"):
            assert part in record.getMessage()

    def test_undamaged_checkpoints_log_no_warning(
        self, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints.latest()
        assert not caplog.records

    def test_a_folder_of_damaged_checkpoints_is_refused(self, checkpoints: Checkpoints) -> None:
        (checkpoints.folder / "step-000010" / MANIFEST).unlink()
        (checkpoints.folder / "step-000020" / "empty").write_bytes(b"?")
        with raises("checkpoint.damaged", path=str(checkpoints.folder)) as raised:
            checkpoints.latest()
        newest, oldest = raised.value.facts["faults"]
        assert "step-000020 is damaged: empty" in newest and "step-000010 has no readable manifest.json" in oldest
