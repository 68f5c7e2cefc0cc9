"""``flowrl rows``: responses and episodes, selection, and refusals; `rows.py`, `episodes.py`, `printing.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import flowrl
from flowrl import PromptData, Validation
from flowrl.app.printing import excerpt, number, printable
from flowrl.app.rows import shown
from flowrl.episodes import Answer, Environment, Reply
from flowrl.operators import Interact
from tests import ROOT
from tests.support.command_line import Command, is_paragraph
from tests.support.jobs import job_of
from tests.support.runs import lines, train


class Echo(Environment):
    """Two turns; the reward of each is the length of its response."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"{len(answer.ids)} tokens", reward=float(len(answer.ids)), done=answer.turn == 1)


def record(row: str, score: float, ended: str = "done", step: int = 4, **more: Any) -> dict[str, Any]:
    """A line of `rollouts.jsonl` or `predictions.jsonl`."""
    sampled = {"turn": 0, "tokens": 3, "reward": score, "cut": ended == "context", "version": 1}
    messages = [
        {"role": "user", "content": "ask\n\x1b[2Jtwice"},
        {"role": "assistant", "content": f"it is {row}", "sampled": sampled},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    fault = "the episode of row 'd' failed" if ended == "failed" else None
    summary = {"ended": ended, "fault": fault, "tries": 2, "tool_calls": 2, "tool_errors": 1, "messages": messages}
    return {"step": step, "validation": "val", "row_id": row, "uid": "g", "score": score, "episode": summary, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [record("a", 0.5, step=2), record("b", 0.25), record("c", 1.0, "turns"), record("d", 0.0, "failed")]
    return written(tmp_path / "run", {"predictions.jsonl": rows})


def written(folder: Path, files: Mapping[str, list[Any]]) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_sampled_text_and_environment_text_have_different_marks(command: Command, folder: Path) -> None:
    result = command("rows", folder, "--row=b")
    assert result.code == 0
    assert result.out.splitlines() == [
        "3 rows of step 4 (val), mean score 0.417, 1.0 turns: 1 ended by its environment, 1 out of turns, 1 failed",
        "",
        "val, step 4, row b, score 0.25",
        "user",
        "| ask",
        "| \\x1b[2Jtwice",
        "policy, turn 1: 3 tokens, reward 0.25",
        "> it is b",
        "tool add",
        "| 3",
        "ended by its environment after 1 turns, attempt 2, 2 tool calls (1 invalid)",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "b"),
        (("--count=2",), "bc"),
        (("--best=3", "--count=3"), "cbd"),
        (("--worst=2", "--count=2"), "db"),
        (("--failed", "--count=9"), "d"),
        (("--step=2", "--of=val"), "a"),
        (("--row=g", "--count=9"), "bcd"),
        (("--failed", "--step=2"), ""),
    ],
)
def test_options_select_the_printed_episodes(
    command: Command, folder: Path, options: tuple[str, ...], expected: str
) -> None:
    out = command("rows", folder, *options).out
    assert [line[-1] for line in out.splitlines() if line.startswith("> it is")] == list(expected)
    assert ("No row matches." in out) == (not expected)


def test_a_term_that_was_not_recorded_is_left_out() -> None:
    """Rows of steps with other terms have null in those that they lack."""
    terms = {"reward/style": 1.0, "reward/style/weighted": 0.5, "reward/old": None, "reward/old/weighted": None}
    assert "score 0.5 = 0.5 (reward/style)\n" in shown({**record("b", 0.5, "failed"), **terms, "of": "val"}).plain


def test_a_terminal_gets_colors_but_no_escape_codes_of_the_text() -> None:
    text = shown({**record("b", 0.5, "failed"), "of": "val"})
    with (terminal := Console(force_terminal=True, color_system="standard")).capture() as colored:
        terminal.print(text)
    assert "\x1b[1;32m> it is b" in colored.get() and "\x1b[36m| ask" in colored.get()
    assert "\x1b[2J" not in colored.get()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step=3",), "run has no rows of val in step 3; it has those of the steps 2, 4."),
        (("--of=vall",), "it has those of val; did you mean 'val'?"),
        (("--row=x",), "has no row 'x'; there are b, c, d."),
        (("--best=1", "--worst=1"), "Pass one of the two"),
    ],
)
def test_a_selection_without_matches_is_refused_with_the_valid_values(
    command: Command, folder: Path, options: tuple[str, ...], message: str
) -> None:
    result = command("rows", folder.name, *options)
    assert result.code == 2 and is_paragraph(result) and message in result.err


def test_a_folder_without_valid_rows_is_refused(command: Command, tmp_path: Path) -> None:
    empty = written(tmp_path / "empty", {})
    single, odd = record("a", 1.0), record("b", 1.0, episode={"ended": "done", "messages": [3]})
    cases = {
        tmp_path: "holds no run",
        empty: "has no rows: neither row summaries",
        written(tmp_path / "odd", {"rollouts.jsonl": [single, odd]}): "has a damaged episode of row 'b' in step 4",
    }
    for folder, message in cases.items():
        result = command("rows", folder)
        assert result.code == 2 and is_paragraph(result) and message in result.err


def test_the_output_on_the_docs_page_is_current(command: Command, tmp_path: Path) -> None:
    def guessed(row: str, *turns: tuple[str, int, float]) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "3+4="}]
        for turn, (text, tokens, reward) in enumerate(turns):
            sampled = {"turn": turn, "tokens": tokens, "reward": reward, "cut": False, "version": 0}
            messages.append({"role": "assistant", "content": text, "sampled": sampled})
            messages.append({"role": "user", "content": "No. Try again."})
        ended = "done" if turns[-1][2] > 0 else "turns"
        summary = {"ended": ended, "fault": None, "tries": 1, "tool_calls": 0, "tool_errors": 0}
        score = sum(reward for *_, reward in turns)
        return {"step": 1, "row_id": row, "score": score, "episode": {**summary, "messages": messages[:-1]}}

    rows = [guessed("0/2/0#0", *[("1", 2, -0.1)] * 3), guessed("0/2/0#1", ("12", 3, -0.1), ("7", 2, 1.0))]
    written(tmp_path / "guess", {"rollouts.jsonl": rows})
    printed = command("rows", tmp_path / "guess", "--best=1").out
    page = (ROOT / "docs" / "how-to" / "episodes.md").read_text(encoding="utf-8")
    assert f"```text\n$ flowrl rows runs/guess --best 1\n{printed}```\n" in page


def test_control_characters_are_escaped() -> None:
    assert printable("a\tb\nc\r\x07\x9bé漢") == "a\tb\nc\\r\\x07\\x9bé漢"


def test_episodes_logged_by_a_run_are_complete_and_printable(
    command: Command, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    operator = Interact(Echo, max_turns=2, context=120, max_new_tokens=4)
    job = job_of("grpo", tiny, n=2).edit(replace={"generate": operator}, drop=["reward"])
    validation = Validation(PromptData(prompts_file), every=2, until="interact", changes={"repeat.n": 1})
    folder = tmp_path / "run"
    train(job, prompts_file, folder, steps=2, prompts=2, validation=validation, rollouts_every=2)
    predictions, rollouts = (lines(folder / f"{name}.jsonl") for name in ("predictions", "rollouts"))
    assert {row["step"] for row in predictions} == {0, 2} and [row["step"] for row in rollouts] == [2] * 4
    assert [row["row_id"][-2:] for row in rollouts] == ["#0", "#1"] * 2
    for row in (*predictions, *rollouts):
        sampled = [m["sampled"] for m in row["episode"]["messages"] if "sampled" in m]
        assert [turn["reward"] for turn in sampled] == [turn["tokens"] for turn in sampled]
        assert row["score"] == sum(turn["tokens"] for turn in sampled) and len(sampled) == 2
    for line in lines(folder / "metrics.jsonl")[1:3]:
        assert line["timing/waiting_share"] == pytest.approx(line["timing/waiting"] / line["timing/step"])
    for of, rows in (("val", predictions), ("training", rollouts)):
        out = command("rows", folder, f"--of={of}", "--best=1").out
        best = max(row["score"] for row in rows if row["step"] == 2)
        assert f"({of})" in out and f"score {best:g}\n" in out and out.count("\npolicy, turn ") == 2


@pytest.fixture(scope="module")
def finished(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO: three steps of twelve prompts, with a validation."""
    folder = tmp_path_factory.mktemp("rows") / "grpo"
    validation = Validation(PromptData(prompts_file), every=3, changes={"repeat.n": 1})
    train(job_of("grpo", tiny, n=2), prompts_file, folder, prompts=12, validation=validation)
    return folder


def test_single_responses_are_a_table_and_one_row_is_shown_in_full(command: Command, finished: Path) -> None:
    run = flowrl.open(finished)
    worst = run.rows(3, worst=2)["row_id"].to_pylist()
    out = command("rows", finished, "--worst=2").out
    assert out.startswith("24 rows of step 3 (training), mean score ")
    assert [line.split()[1] for line in out.splitlines()[4:6]] == worst
    whole = command("rows", finished, f"--row={worst[0]}").out
    text = run.texts(3)[worst[0]]
    assert f"| {printable(text['prompt'][0]['content'])}\n" in whole and "\n> " in whole


def test_rows_as_json_have_their_numbers_and_texts(command: Command, finished: Path) -> None:
    found = json.loads(command("rows", finished, "--step=2", "--json").out)
    run = flowrl.open(finished)
    assert [row["row_id"] for row in found] == run.rows(2)["row_id"].to_pylist()
    assert found[0]["response"] == run.texts(2)[found[0]["row_id"]]["response"]
    assert len(json.loads(command("rows", finished, "--prompt=3", "--json").out)) == 2


def test_two_steps_are_side_by_side_by_prompt(command: Command, finished: Path) -> None:
    found = json.loads(command("rows", finished, "--against=1", "--prompt=5", "--json").out)
    (pair,) = found
    rows = [flowrl.open(finished).rows(step, prompt=5)["score"].to_pylist() for step in (1, 3)]
    assert pair["prompt"] == 5 and (pair["before"], pair["after"]) == pytest.approx([sum(s) / 2 for s in rows])
    assert [row["step"] for row in pair["rows"]] == [1, 3]
    out = command("rows", finished, "--of=val", "--against=0", "--count=1").out
    assert "step 0" in out and "step 3" in out and "score" in out


def test_prompts_that_no_row_solved_are_listed(command: Command, finished: Path) -> None:
    never = flowrl.open(finished).prompts(never=True)
    assert command("rows", finished, "--never").out.startswith(f"{len(never)} of 12 prompts were never solved")
    assert len(json.loads(command("rows", finished, "--never", "--json").out)) == len(never)


def test_a_column_without_numbers_is_refused_with_the_others(command: Command, finished: Path) -> None:
    result = command("rows", finished, "--best=1", "--by=fate")
    assert result.code == 2 and is_paragraph(result) and "response_tokens" in result.err


def test_numbers_and_excerpts_are_short() -> None:
    assert [number(value) for value in (None, 0.123456, 3, True)] == ["", "0.1235", "3", "True"]
    assert excerpt("a\nb") == "a\\nb" and excerpt("abcdef", 4) == "abc…"


def test_terms_of_a_weighed_reward_are_shown_with_what_they_add(command: Command, tmp_path: Path) -> None:
    terms = {"reward/right": 1.0, "reward/right/weighted": 1.0, "reward/form": 0.5, "reward/form/weighted": 0.25}
    rows = [{"step": 1, "validation": "val", "row_id": "a", "score": 1.25, "response": "12", **terms}]
    folder = written(tmp_path / "run", {"predictions.jsonl": rows})
    assert "row a, score 1.25 = 1 (reward/right) + 0.25 (reward/form)" in command("rows", folder, "--row=a").out
    table = command("rows", folder).out
    assert "reward/right" in table and "0.25" in table
