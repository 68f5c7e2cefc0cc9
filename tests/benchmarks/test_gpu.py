"""`benchmarks/gpu.py`: every part runs on the CPU with tiny sizes, one that fails or overruns its limit is named, and
the results are a page."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "evidence" / "gpu.md"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # parts add the folder of the tests
    return import_module("gpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models that parts share."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture
def found(gpu: Any, folder: Path) -> Any:
    """Runs a part in this process; returns what it found, by kind."""
    parts, report = import_module("on_gpu.parts"), import_module("on_gpu.report")

    def run(name: str) -> dict[str, list[dict[str, Any]]]:
        [part] = [part for part in parts.PARTS if part.name == name]
        target, file = parts.Target("cpu", 2, folder), folder / f"{name}.jsonl"
        assert part.lacks(target) is None
        parts.run_here(part.run, target.device, str(target.count), str(folder), str(file))
        each: dict[str, list[dict[str, Any]]] = {"check": [], "table": [], "skip": []}
        for one in report.Report(file).read():
            each[one["kind"]].append(one)
        assert all(one["passed"] for one in each["check"]), each["check"]
        return each

    return run


@pytest.mark.parametrize("name", ["numbers", "times", "sync"])
def test_a_part_runs_on_a_cpu(found: Any, name: str) -> None:
    each = found(name)
    assert each["check"]
    for table in each["table"]:
        assert table["rows"] and all(len(row) == len(table["heads"]) for row in table["rows"])


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["memory", "turns", "speed", "meshes", "tests"])
def test_a_longer_part_runs_on_a_cpu(found: Any, name: str) -> None:
    each = found(name)
    assert each["check"] or each["table"]
    skipped = {
        "memory": ["bfloat16, checkpointed, offloaded"],  # a CPU has one memory
        "meshes": ["meshes of 4 processes", "meshes of 8 processes"],
    }
    assert name not in skipped or [one["what"] for one in each["skip"]] == skipped[name]


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_training_runs_on_a_cpu(found: Any) -> None:
    assert len(found("training")["check"]) == 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_command_runs_parts_in_processes_and_writes_a_file(gpu: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    assert gpu.main(gpu.parsed(["--cpu", "sync", "numbers", "--file", str(file)])) == 0
    text = file.read_text()
    assert "| GPUs | none: this is the CPU" in text
    assert text.index("| `numbers` |") < text.index("| `sync` |") and text.count("| passed |") == 2


def watched(gpu: Any, tmp_path: Path, code: str, limit: int) -> Any:
    """The outcome of a part whose process runs `code`, which may write to the file ``report``."""
    parts, report = import_module("on_gpu.parts"), import_module("on_gpu.report")
    file = tmp_path / "report.jsonl"
    part = parts.Part("one", "One", limit, "")
    return parts.watch(part, [sys.executable, "-c", f"report = {str(file)!r}\n{code}"], report.Report(file))


CHECK = """open(report, "w").write('{"kind": "check", "what": "sums", "passed": %s, "found": "1 | 2"}\\n')"""


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        (CHECK % "true", "passed", ""),
        (CHECK % "false", "FAILED", ""),
        (f"{CHECK % 'true'}; raise SystemExit(3)", "FAILED", "status 3"),
    ],
)
def test_a_part_fails_by_a_check_or_an_error(gpu: Any, tmp_path: Path, code: str, status: str, why: str) -> None:
    outcome = watched(gpu, tmp_path, code, 60)
    assert outcome.status == status and why in outcome.why
    assert outcome.fine == (status == "passed") and [one["what"] for one in outcome.found] == ["sums"]


def test_a_part_over_its_limit_ends_with_its_processes_and_keeps_what_it_found(gpu: Any, tmp_path: Path) -> None:
    code = f"""
import os, signal
from flowrl.workers.supervisor import supervise
supervise(lambda: None)
{CHECK % "true"}
if pid := os.fork():
    open(report + ".pid", "w").write(str(pid))
else:
    os.setsid()
signal.pause()
"""
    outcome = watched(gpu, tmp_path, code, 3)
    assert outcome.status == "OVERRAN" and "3 s" in outcome.why and len(outcome.found) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "report.jsonl.pid").read_text()), 0)


def test_parts_fit_into_half_an_hour_and_exist(gpu: Any) -> None:
    parts = import_module("on_gpu.parts")
    assert sum(part.limit for part in parts.PARTS) <= 29 * 60
    assert all(callable(parts.load(part.run)) for part in parts.PARTS if part.name not in ("vllm", "sglang"))


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA H200", 140.0, "H200"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("NVIDIA GH200 480GB", 94.5, None),
    ],
)
def test_the_hardware_of_a_gpu_is_found_by_its_name(gpu: Any, name: str, memory: float, expected: str | None) -> None:
    found = import_module("on_gpu.machine").known(name, memory)
    assert (found and found.name) == expected


def test_what_is_missing_is_named_with_the_command(gpu: Any, tmp_path: Path) -> None:
    parts = import_module("on_gpu.parts")
    part = parts.Part("one", "One", 60, "", {"no_such_package": "pip install that"}, devices=2)
    assert part.lacks(parts.Target("cuda", 2, tmp_path)) == "no_such_package cannot be imported: pip install that"
    lonely = parts.Part("one", "One", 60, "", devices=2)
    assert lonely.lacks(parts.Target("cuda", 1, tmp_path)) == "it needs 2 GPUs, and there is 1"
    assert parts.run(lonely, parts.Target("cuda", 1, tmp_path), 1).status == "skipped"


def test_the_page_has_the_machine_the_parts_and_what_they_found(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = import_module("on_gpu.report")
    table = {"kind": "table", "title": "Rates", "heads": ["", "GB/s"], "rows": [["copy", "2"]]}
    check = {"kind": "check", "what": "same", "passed": False, "found": "a | b"}
    outcomes = [
        report.Outcome("sync", "Weights", "FAILED", 12.0, 60, [check, table]),
        report.Outcome("meshes", "Meshes", "skipped", 0.0, 60, [], "it needs 2 GPUs, and there is 1"),
    ]
    text = report.page([("torch", "2.13")], outcomes, "2026-01-02")
    for line in (
        "| torch | 2.13 |",
        "| `sync` | Weights | **FAILED** | 12 of 60 s |",
        "| `meshes` | Meshes | skipped: it needs 2 GPUs, and there is 1 | 0 of 60 s |",
        "| same | **NO** | a \\| b |",
        "| copy | 2 |",
    ):
        assert line in text.splitlines()
    page = tmp_path / "gpu.md"
    page.write_text(f"# Head\n{gpu.MARK}\nNot run yet.\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    gpu.write(page, text)
    assert page.read_text() == f"# Head\n{gpu.MARK}\n{text}"


def test_the_page_of_the_docs_says_whether_it_was_run(gpu: Any) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(gpu.MARK)[2].strip()
    assert text.startswith("**Not run yet**") or "GPUs | none" not in text
