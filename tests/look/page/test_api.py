"""The views of the page against the files that they are read from.

Tests of `api.py`, `plain.py`, `watched.py`, `text.py`, and of flowrl/look/page/views/now.py,
flowrl/look/page/views/rows.py, flowrl/look/page/views/tokens.py, flowrl/look/page/views/prompts.py,
flowrl/look/page/views/times.py, flowrl/look/page/views/descriptions.py and the rest there.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoTokenizer

import flowrl
from flowrl.draw.svg import svg
from flowrl.errors import DataError
from flowrl.graphs import grpo
from flowrl.look.page.plain import dumps, messages_of, short
from flowrl.look.page.text import shown
from flowrl.look.page.views.tokens import pieces
from flowrl.look.page.watched import Growing
from flowrl.run.training.lock import LOCK
from tests.look.page.pages import api_of, asked, written
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import exact
from tests.support.runs import lines, train
from tests.support.written_run import SECONDS, WrittenRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps, two of them with texts."""
    return written(tmp_path_factory.mktemp("runs") / "run", steps=5, texts=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: str, prompts_file: str) -> Path:
    """A real run of GRPO, with columns."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(job_of("grpo", tiny, n=3), prompts_file, folder, steps=2)
    return folder


def rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    found = [row for file in (folder / "rows").iterdir() for row in pq.read_table(file).to_pylist()]
    return [row for row in found if row["step"] == step]


class TestMetrics:
    def test_columns_are_those_of_the_file(self, folder: Path) -> None:
        found, written_lines = asked(api_of(folder), "metrics", run="run"), lines(folder / "metrics.jsonl")
        for part, held in (("training", False), ("validation", True)):
            mine = [line for line in written_lines if ("timing/step" not in line) == held]
            assert found[part]["steps"] == [line["step"] for line in mine]
            for key, column in found[part]["columns"].items():
                assert column == pytest.approx([line[key] for line in mine], rel=1e-5)

    def test_only_new_lines_are_sent_and_a_line_that_is_being_written_waits(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=2)
        api, file = api_of(run), run / "metrics.jsonl"
        first = asked(api, "metrics", run="run")
        with file.open("a") as more:
            more.write('{"step": 3, "timing/step": 1.0, "reward/mean": 0.5}\n{"step": 4, "timi')
        again = {"after": first["after"], "start": first["start"]}
        second = asked(api, "metrics", run="run", **again)
        assert second["again"] and second["training"] == {
            "steps": [3],
            "columns": {"timing/step": [1.0], "reward/mean": [0.5]},
        }
        with file.open("a") as more:
            more.write('ng/step": 2.0}\n')
        third = asked(api, "metrics", run="run", after=second["after"], start=second["start"])
        assert third["training"]["steps"] == [4]

    def test_a_run_that_resumed_is_sent_as_a_whole(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=4)
        api, file = api_of(run), run / "metrics.jsonl"
        first = asked(api, "metrics", run="run")
        kept = b"".join(line for line in file.read_bytes().splitlines(True) if json.loads(line)["step"] <= 2)
        (tmp_path / "new").write_bytes(kept + b'{"step": 3, "timing/step": 9.0}\n')
        (tmp_path / "new").replace(file)  # as a run rewinds its files
        found = asked(api, "metrics", run="run", after=first["after"], start=first["start"])
        assert not found["again"] and found["training"]["steps"] == [1, 2, 3]
        assert found["training"]["columns"]["timing/step"][-1] == 9.0

    def test_damaged_lines_are_left_out_and_named(self, tmp_path: Path) -> None:
        file, damage = tmp_path / "lines", dict[Path, DataError | None]()
        growing = Growing(file, damage.__setitem__)
        assert growing.records() == []
        file.write_bytes(b'{"a": 1}\nnull\n\xff\xfe{\n[1]\n{"b": "\xe2\x80\xa8"}\n{"c": NaN}\n{"d')
        assert [one for one in growing.records() if "c" not in one] == [{"a": 1}, {"b": "\u2028"}]
        assert (found := damage[file]) is not None and found.facts["lines"] == (2, 3, 4)
        with file.open("ab") as more:
            more.write(b'": 1}\n{\n')
        assert growing.records()[-1] == {"d": 1}
        assert (found := damage[file]) is not None and found.facts["lines"] == (2, 3, 4, 8)
        (tmp_path / "whole").write_bytes(b'{"a": 1}\n')
        (tmp_path / "whole").replace(file)
        assert growing.records() == [{"a": 1}] and damage[file] is None


class TestNow:
    def test_shares_and_numbers_are_those_of_the_step(self, folder: Path) -> None:
        found = asked(api_of(folder), "now", run="run", step=3)
        line = next(line for line in lines(folder / "metrics.jsonl") if line["step"] == 3 and "timing/step" in line)
        assert found["nodes"]["reward"]["value"] == pytest.approx(line["reward/mean"], rel=1e-5)
        for node, seconds in SECONDS.items():
            assert found["nodes"][node]["share"] == pytest.approx(seconds / line["timing/step"], rel=1e-5)
            assert found["nodes"][node]["rows"] == 32
        assert (found["done"], found["planned"], found["elapsed"]) == (3, 5, 15.0)

    def test_a_run_in_progress_shows_what_runs_and_the_time_left(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=4, status="running")
        described = json.loads((run / "run.json").read_text())
        described["training"]["steps"] = 10
        (run / "run.json").write_text(json.dumps(described))
        assert api_of(run).answer("runs", {})[0]["status"] == "killed"
        (run / LOCK).write_text(json.dumps({"host": os.uname().nodename, "process": os.getpid()}))
        with (run / "spans.jsonl").open("a") as spans:
            spans.write(json.dumps({"open": "val", "time": time.time()}) + "\n")
            spans.write(json.dumps({"open": "generate", "time": time.time()}) + "\n")
        api = api_of(run)
        found = asked(api, "now", run="run")
        assert api.answer("runs", {})[0]["status"] == "running"
        assert found["open"] == ["generate"] and found["nodes"]["generate"]["open"]
        assert found["left"] == pytest.approx(6 * 3.0)

    def test_a_folder_without_a_step_says_so(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=0)
        found = asked(api_of(run), "now", run="run")
        assert (found["step"], found["done"], found["newest"]) == (None, 0, []) and found["no_rows"]


class TestRows:
    def test_the_table_and_its_groups(self, folder: Path) -> None:
        found, rows = asked(api_of(folder), "rows", run="run", step=5), rows_of(folder, 5)
        assert found["count"] == len(rows) == 32
        assert found["data"]["score"] == [row["score"] for row in rows]
        assert found["data"]["advantage"] == pytest.approx([row["advantage"] for row in rows], rel=1e-5)
        by_uid: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            by_uid.setdefault(row["uid"], []).append(i)
        assert {group["uid"]: group["rows"] for group in found["groups"]} == by_uid
        assert found["reward"] == []  # reward/thinks is the score here

    def test_responses_are_there_where_texts_were_recorded(self, folder: Path) -> None:
        texts = pq.read_table(folder / "texts" / "step-000005.parquet").to_pylist()
        found = asked(api_of(folder), "rows", run="run", step=5)
        assert (found["responses"], found["note"]) == ([row["response"] for row in texts], None)
        without = asked(api_of(folder), "rows", run="run", step=4)
        assert without["responses"] is None and "Recording(texts=1)" in without["note"]

    def test_long_responses_are_cut_alike_and_the_answer_says_so(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=1, texts_of=["a" * 1_000_000, "b"])
        found = asked(api_of(run), "rows", run="run", step=1)
        assert {len(text) for text in found["responses"]} == {found["clipped"], 1}
        assert len(dumps(found)) < 1_200_000
        row = asked(api_of(run), "row", run="run", step=1, row=found["data"]["row_id"][0])
        assert row["messages"][-1]["text"] == "a" * 1_000_000

    def test_a_row_has_its_numbers_and_its_group(self, folder: Path) -> None:
        rows = rows_of(folder, 5)
        found = asked(api_of(folder), "row", run="run", step=5, row=rows[3]["row_id"])
        assert dict(found["numbers"])["kl"] == pytest.approx(rows[3]["kl"], rel=1e-5)
        assert [one["row_id"] for one in found["group"]] == [r["row_id"] for r in rows if r["uid"] == rows[3]["uid"]]
        assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
        assert found["address"] == f"5/group_advantage.advantages[{rows[3]['row_id']}]"
        assert "columns='all'" in found["note"]


class TestTokens:
    def test_they_spell_the_response_and_have_the_numbers_of_the_columns(self, trained: Path, tiny: str) -> None:
        run, api = flowrl.open(trained), api_of(trained)
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        for row in rows_of(trained, 2):
            tokens = asked(api, "row", run="trained", step=2, row=row["row_id"])["tokens"]
            i = list(run.column("2/repeat.row_id")).index(row["row_id"])
            mask = run.column("2/generate.response_mask")[i]
            ids = run.column("2/generate.responses")[i][mask]
            assert "".join(tokens["text"]) == tokenizer.decode(ids)
            old, ref, rollout = (
                run.column(f"2/{name}")[i][mask]
                for name in ("old_log_prob.old_log_probs", "ref_log_prob.ref_log_prob", "generate.rollout_log_probs")
            )
            columns = {name: one["values"] for name, one in tokens["columns"].items()}
            advantage = run.column("2/group_advantage.advantages")[i][mask]
            np.testing.assert_allclose(columns["advantage"], advantage, rtol=1e-5)
            np.testing.assert_allclose(columns["log p − log p_ref"], old - ref, rtol=1e-4, atol=1e-9)  # noqa: RUF001
            np.testing.assert_allclose(columns["trainer − engine"], old - rollout, rtol=1e-4, atol=1e-9)  # noqa: RUF001
            np.testing.assert_allclose(columns["log p"], old, rtol=1e-5)
            entropies = run.column("2/update_actor.entropies")[i][mask]
            np.testing.assert_allclose(columns["entropy"], entropies, rtol=1e-5)
            assert np.mean(columns["entropy"]) == pytest.approx(row["entropy"], rel=1e-5)

    def test_a_character_of_several_tokens_is_at_the_first(self) -> None:
        parts = {1: b"a", 2: b"\xe2", 3: b"\x82", 4: b"\xac", 5: b"b"}

        def decode(ids: Any) -> str:
            return b"".join(parts[i] for i in ids).decode(errors="replace")

        assert pieces([1, 2, 3, 4, 5], decode) == ["a", "€", "", "", "b"]
        assert "".join(pieces([1, 2, 3], decode)) == "a" + decode([2, 3])
        assert pieces([7, 8], None) == ["7 ", "8 "]


class TestWhy:
    def test_why_and_replay_are_those_of_the_run(self, trained: Path) -> None:
        api, run, row = api_of(trained), flowrl.open(trained), rows_of(trained, 2)[0]
        address = asked(api, "row", run="trained", step=2, row=row["row_id"])["address"]
        assert address == f"2/group_advantage.advantages[{row['row_id']}]"
        assert asked(api, "why", run="trained", address=address)["text"] == str(run.why(address))
        assert "group_advantage  same bits" in asked(api, "replay", run="trained", step=2)["text"]


class TestPrompts:
    def test_training_prompts_over_steps(self, folder: Path) -> None:
        found = asked(api_of(folder), "prompts", run="run", of="training")
        means: dict[int, dict[int, list[float]]] = {}
        for step in range(1, 6):
            for row in rows_of(folder, step):
                means.setdefault(row["prompt"], {}).setdefault(step, []).append(row["score"])
        assert {one["prompt"]: dict(zip(one["steps"], one["scores"], strict=True)) for one in found["prompts"]} == {
            prompt: {step: float(np.mean(scores)) for step, scores in steps.items()} for prompt, steps in means.items()
        }

    def test_what_became_of_each_prompt(self, folder: Path) -> None:
        found = asked(api_of(folder), "prompts", run="run")
        scores: dict[str, list[float]] = {}
        for line in lines(folder / "predictions.jsonl"):
            scores.setdefault(line["uid"], []).append(line["score"])
        for one in found["prompts"]:
            right = [score == 1.0 for score in scores[one["prompt"]]]
            kind = "never" if not any(right) else "always" if all(right) else "learned" if right[-1] else "unlearned"
            assert one["kind"] == kind
        assert sum(found["counts"].values()) == 24 and found["of"] == "val" and found["sources"] == ["val", "training"]

    @pytest.mark.parametrize("of", ["val", "training"])
    def test_the_answers_to_a_prompt(self, folder: Path, of: str) -> None:
        api = api_of(folder)
        one = asked(api, "prompts", run="run", of=of)["prompts"][0]
        found = asked(api, "prompt", run="run", of=of, prompt=one["prompt"])
        assert {answer["step"] for answer in found["answers"]} == set(one["steps"])
        assert found["messages"][0]["text"] == one["text"]


class TestTime:
    def test_lanes_and_costs(self, folder: Path) -> None:
        found = asked(api_of(folder), "time", run="run", step=2)
        (lane,) = found["lanes"]
        assert lane["place"] == "this process" and lane["depth"] == 1
        assert found["end"] == pytest.approx(sum(SECONDS.values()), abs=0.01)
        costs = {cost["name"]: cost for cost in found["costs"]}
        assert costs["generate"]["total"] == pytest.approx(5 * SECONDS["generate"])
        assert costs["generate"]["share"] == pytest.approx(SECONDS["generate"] / sum(SECONDS.values()), rel=1e-4)
        assert [cost["total"] for cost in found["costs"]] == sorted((c["total"] for c in found["costs"]), reverse=True)

    def test_a_folder_of_format_1_has_its_trace(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "old").mkdir()
        for name in ("run.json", "metrics.jsonl", "trace.json"):
            (tmp_path / "old" / name).write_bytes((trained / name).read_bytes())
        new, old = (asked(api_of(path), "time", run=path.name, step=2) for path in (trained, tmp_path / "old"))
        names = [[span["name"] for lane in one["lanes"] for span in lane["spans"]] for one in (new, old)]
        assert names[0] == names[1] and names[0]


class TestGraph:
    def test_the_drawing_has_all_nodes_and_edges_and_the_colors_of_its_roles(self, folder: Path) -> None:
        graph, found = grpo(exact, n=4), asked(api_of(folder), "graph", run="run")
        assert [node["name"] for node in found["nodes"]] == list(graph.nodes)
        assert {(e["from"], e["to"]) for e in found["edges"]} == {
            (s, node.name) for node in graph.nodes.values() for s in node.sources
        }
        for node in graph.nodes:
            assert f'<g data-node="{node}">' in found["svg"] and f'<g data-node="{node}">' in svg(graph)
        assert found["mermaid"] == graph.mermaid()
        reward = next(node for node in found["nodes"] if node["name"] == "reward")
        assert reward["metrics"] == ["reward/mean", "reward/thinks"] and reward["color"] is None
        colors = {node["role"]: node["color"] for node in found["nodes"] if node["role"]}
        assert colors == {"rollout": 0, "actor": 1, "ref": 2}

    def test_a_graph_that_cannot_be_read_is_an_error_and_the_rest_is_shown(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", steps=2)
        (run / "run.json").write_text("{")
        api = api_of(run)
        head = api.answer("runs", {})[0]
        assert head["status"] == "damaged" and str(run / "run.json") in head["damage"][0]
        with pytest.raises(DataError) as error:
            asked(api, "graph", run="run")
        assert error.value.code == "run.damaged"
        assert asked(api, "metrics", run="run")["training"]["steps"] == [1, 2]
        assert asked(api, "now", run="run")["done"] == 2 and asked(api, "rows", run="run", step=2)["count"] == 32
        assert asked(api, "time", run="run", step=2)["lanes"] and asked(api, "run", run="run")["sections"]


def test_the_description_names_what_ran(trained: Path) -> None:
    sections = dict(asked(api_of(trained), "run", run="trained")["sections"])
    assert ["status", "finished"] in sections["Run"] and ["steps", "2"] in sections["Training"]
    assert dict(sections["Versions"])["flowrl"] and dict(sections["Recorded"])["columns"]
    assert dict(sections["Engine: actor"])["backend"] == "TorchTrainer"


class TestDamage:
    """A damaged file is named, by the page and as text, and the rest is shown."""

    @pytest.fixture
    def copied(self, tmp_path: Path, trained: Path) -> Path:
        ignored = shutil.ignore_patterns("checkpoints", "actor")
        return shutil.copytree(trained, tmp_path / "run", ignore=ignored)

    @pytest.mark.parametrize("name", ["metrics.jsonl", "spans.jsonl", "predictions.jsonl", "alarms.jsonl"])
    def test_a_line(self, copied: Path, name: str) -> None:
        file = copied / name
        before = file.read_bytes() if file.exists() else b""
        file.write_bytes(b"{\n" + before)
        api = api_of(copied)
        answers = [asked(api, view, run="run", step=2) for view in ("now", "time", "rows")]
        assert answers[0]["done"] == 2 and answers[1]["lanes"] and answers[2]["count"] == 12
        asked(api, "prompts", run="run")
        (damage,) = api.answer("runs", {})[0]["damage"]
        assert f"{file} is damaged in line 1." in damage
        console = Console(width=4 * len(damage), file=io.StringIO())
        console.print(shown(api, "run"))
        assert damage in console.file.getvalue()  # type: ignore[attr-defined]

    def test_the_rows_of_a_step(self, copied: Path) -> None:
        api, file = api_of(copied), truncated(copied / "rows" / "step-000002.parquet")
        with raises("run.damaged", path=str(file)):
            asked(api, "rows", run="run", step=2)
        assert str(file) in asked(api, "now", run="run", step=2)["no_rows"]
        assert asked(api, "rows", run="run", step=1)["count"] == 12 and asked(api, "prompts", run="run")["prompts"]
        assert str(file) in api.answer("runs", {})[0]["damage"][0]

    def test_the_texts_of_a_step(self, copied: Path) -> None:
        api, file = api_of(copied), truncated(copied / "texts" / "step-000002.parquet")
        found = asked(api, "rows", run="run", step=2)
        assert found["count"] == 12 and found["responses"] is None and str(file) in found["note"]
        assert asked(api, "rows", run="run", step=1)["responses"]
        assert str(file) in api.answer("runs", {})[0]["damage"][0]

    def test_the_columns_of_a_step(self, copied: Path) -> None:
        api, file = api_of(copied), truncated(copied / "columns" / "batch@repeat" / "step-000002.parquet")
        row = asked(api, "rows", run="run", step=2)["data"]["row_id"][0]
        with raises("run.damaged", path=str(file)):
            asked(api, "why", run="run", address=f"2/group_advantage.advantages[{row}]")
        assert asked(api, "row", run="run", step=2, row=row)["messages"]

    def test_the_spans_of_format_1(self, copied: Path) -> None:
        (copied / "spans.jsonl").unlink()
        api, file = api_of(copied), truncated(copied / "trace.json")
        assert not asked(api, "time", run="run", step=2)["lanes"]
        assert str(file) in api.answer("runs", {})[0]["damage"][0]


def truncated(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:40])
    return file


def test_plain_values() -> None:
    assert [short(value) for value in (1.23456789, float("nan"), float("-inf"), 3, True, None, "a")] == [
        1.23457,
        None,
        None,
        3,
        True,
        None,
        "a",
    ]
    assert json.loads(dumps({"text": "\ud800\u2028\x00</script>"})) == {"text": "\ud800\u2028\x00</script>"}
    assert dumps("\ud800\u2028é").isascii()
    assert messages_of([{"role": "user", "content": [{"type": "text"}]}, "odd"]) == [
        {"role": "user", "text": '[{"type": "text"}]'},
        {"role": "prompt", "text": "odd"},
    ]


@pytest.mark.parametrize("algorithm", ["ppo", "dapo", "rloo"])
def test_every_view_answers_for_an_algorithm(algorithm: str, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    train(job_of(algorithm, tiny), prompts_file, tmp_path / "run", steps=2)
    api = api_of(tmp_path / "run")
    rows = asked(api, "rows", run="run", step=2)["data"]
    row = next(row for row, fate in zip(rows["row_id"], rows["fate"], strict=True) if fate == "trained")
    views: dict[str, dict[str, int]] = {
        "graph": {},
        "metrics": {},
        "now": {},
        "prompts": {},
        "run": {},
        "rows": {"step": 2},
        "time": {"step": 2},
    }
    for view, parameters in views.items():
        assert dumps(asked(api, view, run="run", **parameters))
    tokens = asked(api, "row", run="run", step=2, row=row)["tokens"]
    assert {"advantage", "log p"} <= set(tokens["columns"])
    assert len({len(column["values"]) for column in tokens["columns"].values()} | {len(tokens["text"])}) == 1


class TestCompare:
    def test_sides_parameters_and_held_out_answers(self, tmp_path: Path) -> None:
        folders = [written(tmp_path / name, steps=6, seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 2))]
        for folder in folders[2:]:
            described = json.loads((folder / "run.json").read_text())
            described["graph"]["nodes"]["repeat"]["operator"]["n"] = 8
            (folder / "run.json").write_text(json.dumps(described))
        found = asked(api_of(*folders), "compare")
        assert [side["runs"] for side in found["sides"]] == [["a", "b"], ["c"]]
        tables = {table["title"].partition(",")[0]: table["rows"] for table in found["tables"]}
        assert ["repeat.n", "4", "8"] in tables["Parameters that differ"] and "not two methods" in found["basis"]
        mine = flowrl.compare(folders)
        assert tables["Final values"][0][:2] == [
            "reward/mean",
            pytest.approx(np.mean(mine.sides[0].final("reward/mean")), rel=1e-5),
        ]
        assert found["held_out"]["count"] == len(mine.held_out.changed) and found["diff"] is None

    def test_graphs_that_differ_in_nodes_are_drawn(self, tmp_path: Path) -> None:
        plain = written(tmp_path / "plain", steps=1)
        (tmp_path / "edited").mkdir()
        graph = grpo(exact, n=4).edit(drop=["mismatch"])
        edited = WrittenRun(graph, tmp_path / "edited", steps=1).write()
        found = asked(api_of(plain, edited), "compare")
        assert ">removed</text>" in found["diff"]
        names = [row[0] for row in found["tables"][0]["rows"]]
        assert not [name for name in names if name.startswith("mismatch")]
