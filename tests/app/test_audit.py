"""``flowrl audit``, and the page about it."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl.app.shelf
import flowrl.graphs
from flowrl import AuditTask, audit
from flowrl.app.audit import row, table
from flowrl.graphs import grpo
from tests import ROOT
from tests.auditing.listed import unread
from tests.support.command_line import Command, is_paragraph, write

PAGE = ROOT / "docs" / "audit.md"
GRAPHS = """
    from flowrl import PromptBatch, algorithm
    from flowrl.graphs import grpo, rloo
    from flowrl.operators import Generate
    from flowrl.records import RolloutBatch

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        return 0.0

    graph = rloo(reward)
    biased = grpo(reward)

    @algorithm
    def answers(batch: PromptBatch) -> RolloutBatch:
        return Generate()(batch)
"""


def test_it_prints_what_it_finds(command: Command, tmp_path: Path) -> None:
    write(tmp_path / "mine.py", GRAPHS)
    answer = command("audit", "mine.py:graph", "--prompts=1", "--n=2")
    assert answer.code == 0
    assert "rloo · expected reward - 0.05 · KL(actor || ref)\nall 16 runs, 2 rows each: unbiased\n" in answer.out
    moved = command("audit", "mine.py:graph", "--prompts=1", "--n=2", "--age=0.5", "--seed=3", "--right-or-wrong")
    assert "biased by" in moved.out
    assert "without off-policy age" in " ".join(moved.out.split())
    sampled = command("audit", "mine.py:graph", "--prompts=1", "--n=2", "--limit=1", "--samples=5", "--steps=2")
    assert "5 sampled runs" in sampled.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine.py:answers"], "answers trains no policy"),
        (["mine.py:graph", "--steps=0"], "steps"),
        (["mine.py:graph", "--n=0"], "audit(n=0): expected an integer"),
        (["mine.py:graph", "--role=judge"], "and not 'judge'"),
        (["mine.py:graph", "--shelf"], "Pass one of the two"),
        ([], "Pass one of the two"),
    ],
)
def test_misuse_is_a_paragraph(command: Command, tmp_path: Path, arguments: list[str], said: str) -> None:
    write(tmp_path / "mine.py", GRAPHS)
    answer = command("audit", *arguments)
    assert answer.code == 2
    assert is_paragraph(answer)
    assert said in answer.err


def _after(mark: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n\n")[2]


def test_what_the_page_prints_is_printed_by_the_code() -> None:
    printed = str(audit(grpo(unread, kl_coef=0.0), AuditTask(prompts=1), n=2))
    assert _after("printed").startswith(f"```text\n{printed}\n```")


def test_the_table_of_the_page_has_every_algorithm() -> None:
    lines = _after("shelf").strip().splitlines()
    made = table()
    assert lines[:2] == [next(made), next(made)]
    listed = [line.split("`")[1] for line in lines[2:]]
    assert listed == flowrl.graphs.__all__, "write what `flowrl audit --shelf` prints into docs/audit.md"
    assert all(line.count("|") - line.count("\\|") == 8 for line in lines)


@pytest.mark.parametrize("name", ["remax"])
def test_a_line_of_the_table_is_what_the_command_makes(name: str) -> None:
    assert row(name) in _after("shelf").splitlines()


def test_what_cannot_be_audited_has_a_line_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flowrl.app.shelf, "graph", lambda name: grpo(unread).subgraph(until="reward"))
    assert row("grpo").startswith("| `grpo` | cannot be audited: grpo trains no policy | ")
