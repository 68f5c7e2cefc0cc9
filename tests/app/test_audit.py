"""``flowrl audit``, and its output on `docs/evidence/audit.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl.app.algorithms
import flowrl.graphs
from flowrl import AuditTask, audit
from flowrl.app.audit import row, table
from flowrl.graphs import grpo
from tests import ROOT
from tests.auditing.listed import unread
from tests.support.command_line import Command, is_paragraph, write

PAGE = ROOT / "docs" / "evidence" / "audit.md"
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
    def generates(batch: PromptBatch) -> RolloutBatch:
        return Generate()(batch)
"""


def test_audit_prints_whether_a_graph_is_biased(command: Command, tmp_path: Path) -> None:
    write(tmp_path / "mine.py", GRAPHS)
    result = command("audit", "mine.py:graph", "--prompts=1", "--n=2")
    assert result.code == 0
    assert "rloo · expected reward - 0.05 · KL(actor || ref)\nall 16 runs, 2 rows each: unbiased\n" in result.out
    moved = command("audit", "mine.py:graph", "--prompts=1", "--n=2", "--age=0.5", "--seed=3", "--right-or-wrong")
    assert "biased by" in moved.out
    assert "without off-policy age" in " ".join(moved.out.split())
    sampled = command("audit", "mine.py:graph", "--prompts=1", "--n=2", "--limit=1", "--samples=5", "--steps=2")
    assert "5 sampled runs" in sampled.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py:generates"], "generates trains no policy"),
        (["mine.py:graph", "--steps=0"], "steps"),
        (["mine.py:graph", "--n=0"], "audit(n=0): expected an integer"),
        (["mine.py:graph", "--role=judge"], "and not 'judge'"),
        (["mine.py:graph", "--all"], "Pass one of the two"),
        ([], "Pass one of the two"),
    ],
)
def test_misuse_prints_one_paragraph(command: Command, tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path / "mine.py", GRAPHS)
    result = command("audit", *arguments)
    assert result.code == 2
    assert is_paragraph(result)
    assert message in result.err


def _after(mark: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n\n")[2]


def test_the_output_on_the_docs_page_is_current() -> None:
    printed = str(audit(grpo(unread, kl_coef=0.0), AuditTask(prompts=1), n=2))
    assert _after("printed").startswith(f"```text\n{printed}\n```")


def test_the_table_on_the_docs_page_lists_every_algorithm() -> None:
    lines = _after("algorithms").strip().splitlines()
    expected = table()
    assert lines[:2] == [next(expected), next(expected)]
    listed = [line.split("`")[1] for line in lines[2:]]
    assert listed == flowrl.graphs.__all__, "write what `flowrl audit --all` prints into docs/evidence/audit.md"
    assert all(line.count("|") - line.count("\\|") == 8 for line in lines)


@pytest.mark.parametrize("name", ["remax"])
def test_a_row_of_the_table_on_the_docs_page_is_current(name: str) -> None:
    assert row(name) in _after("algorithms").splitlines()


def test_an_algorithm_that_cannot_be_audited_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flowrl.app.algorithms, "graph", lambda name: grpo(unread).subgraph(until="reward"))
    assert row("grpo").startswith("| `grpo` | cannot be audited: grpo trains no policy | ")
