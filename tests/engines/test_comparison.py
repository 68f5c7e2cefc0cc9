"""`benchmarks/engines.py` measures the installed engines, and names the missing ones; `benchmarks/gpu_engines.py`
runs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "engines.py"


def tables() -> list[dict[str, list[str]]]:
    """The rows of the tables of the quick mode, by their first cell."""
    done = subprocess.run([sys.executable, str(SCRIPT), "quick"], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [text.strip().splitlines()[2:] for text in done.stdout.split("\n\n") if "  ---" in text]
    each = [[[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines] for lines in printed]
    return [{row[0]: row[1:] for row in cells if not row[0].startswith("---")} for cells in each]


@pytest.mark.skipif(
    find_spec("vllm") is not None or find_spec("sglang") is not None, reason="an engine is installed here"
)
def test_missing_engines_are_named() -> None:
    found, episodes = tables()
    assert set(episodes) == {"2 layers of 64, float32, torch"}
    assert set(found) == {
        "2 layers of 64, float32, torch",
        "vllm: not installed (make engines)",
        "sglang: not installed (make engines)",
    }
    assert len(found["2 layers of 64, float32, torch"]) == 7


@pytest.mark.engines("vllm", "sglang")
@pytest.mark.nightly
@pytest.mark.timeout(480)
def test_all_engines_load_the_same_weights_and_match_the_trainer() -> None:
    found, episodes = (
        {
            name.rpartition(" ")[2]: [float(cell.replace(",", "").rstrip("%")) for cell in row]
            for name, row in of.items()
        }
        for of in tables()
    )
    assert set(found) == {"torch", "vllm", "sglang", "LLM.generate"}
    assert found.pop("LLM.generate")[0] > 0
    assert set(episodes) == {"torch", "vllm", "sglang"} and all(min(row[:2]) > 0 for row in episodes.values())
    assert episodes["vllm"][3] > 10  # percent of the tokens before answers: whole blocks of 128
    megabytes, means, largest = ({row[column] for row in found.values()} for column in (4, 5, 6))
    assert len(megabytes) == 1
    assert max(means) < 1e-5 and max(largest) < 1e-4
    assert all(row[2] > 0 for row in found.values())  # tokens a second


@pytest.mark.engines("vllm", "sglang")
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "cases"),
    [
        (["vllm"], {"alone", "adapter", "asleep", "bfloat16", "real", "parallel", "turns"}),
        (["sglang", "alone"], {"alone"}),
    ],
)
def test_gpu_cases_run_on_a_cpu(words: list[str], cases: set[str]) -> None:
    """Missing requirements of the machine are named; all other checks pass."""
    script = str(SCRIPT.with_name("gpu_engines.py"))
    done = subprocess.run([sys.executable, script, "cpu", *words], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith(f"{words[0]}, ")]
    assert {line.partition(":")[0].removeprefix(f"{words[0]}, ") for line in lines} == cases
    assert all(" yes " in line or ": left out" in line for line in lines)


def test_an_unknown_case_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(SCRIPT.with_name("gpu_engines.py"))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [script, "asleeep"])
    with pytest.raises(SystemExit, match="asleeep: no engine or case; there are vllm, sglang, alone, "):
        runpy.run_path(script, run_name="__main__")
