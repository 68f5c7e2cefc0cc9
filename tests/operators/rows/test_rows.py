"""Predicates of gates against independent code, and training on the rows that pass."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl import After, PromptData, Validation
from flowrl.errors import NodeError
from flowrl.graphs import grpo
from flowrl.operators import Collect, Filter, Length, Ranked, Spread
from tests.support.errors import raises
from tests.support.jobs import column, job_of, write_prompts
from tests.support.kernel import answers
from tests.support.runs import train

ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 3)), min_size=1)


def columns(rows: list[tuple[str, float, int]]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Scores on the last token on the mask, NaN off it, and groups; a row of length 0 is masked entirely."""
    lengths = torch.tensor([length for *_, length in rows])
    mask = torch.arange(3) < lengths[:, None]
    scores = torch.full((len(rows), 3), torch.nan).masked_fill(mask, 0.0)
    for row, (_, score, length) in enumerate(rows):
        if length:
            scores[row, length - 1] = score
    return scores, mask, column([group for group, *_ in rows])


@given(ROWS, st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_spread_keeps_groups_of_different_scores(rows: list[tuple[str, float, int]], least: float) -> None:
    groups: dict[str, list[float]] = defaultdict(list)
    for group, score, length in rows:
        if length:
            groups[group].append(np.float32(score).item())
    spread = {group: max(scores) - min(scores) for group, scores in groups.items()}
    expected = [group in spread and spread[group] > 0 and spread[group] >= least for group, *_ in rows]
    assert Spread(least)(*columns(rows)).tolist() == expected


@given(ROWS, st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)))
def test_length_keeps_rows_within_its_bounds(rows: list[tuple[str, float, int]], least: int, most: int | None) -> None:
    expected = [least <= length <= (3 if most is None else most) for *_, length in rows]
    assert Length(least, most)(columns(rows)[1]).tolist() == expected


@given(ROWS, st.integers(0, 4), st.integers(0, 4))
@example([("a", 0.0, 1), ("a", 1.0, 1)], 0, 3)
def test_ranked_keeps_both_ends_of_each_group(rows: list[tuple[str, float, int]], best: int, worst: int) -> None:
    """A row passes if fewer rows than `best` are better, or fewer than `worst` worse; of equal ones the earlier is."""
    if not best + worst:
        with raises("rows.invalid-settings", best=0, worst=0):
            Ranked(best, worst)
        return

    def better(a: int, b: int) -> bool:
        return rows[a][1] > rows[b][1] or (rows[a][1] == rows[b][1] and a < b)

    expected = []
    for row, (group, _, length) in enumerate(rows):
        peers = [i for i, (name, _, n) in enumerate(rows) if name == group and n and i != row]
        above, below = sum(better(i, row) for i in peers), sum(better(row, i) for i in peers)
        expected.append(length > 0 and (above < best or below < worst))
    assert Ranked(best, worst)(*columns(rows)).tolist() == expected


def test_ranked_refuses_nan_scores() -> None:
    mask = torch.tensor([[True], [True]])
    with raises("reward.not-finite", node="ranked", row=1):
        Ranked()(torch.tensor([[1.0], [torch.nan]]), mask, column(["a", "a"]))


def tied(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Groups of prompts with an odd number are tied; in others, what begins with a digit is right."""
    return 0.5 if int(ground_truth) % 2 else float(solution_str[:1].isdigit())


def same(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.5


def test_a_filtered_job_trains_on_passing_rows_and_validates_on_all(tiny: str, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    job = job_of("grpo", tiny, tied, n=6).edit(insert={"filter": After("reward", Filter(Spread()))})
    run = train(job, data, tmp_path / "run", prompts=8, steps=2, validation=Validation(PromptData(data), every=1))
    for step in run.metrics:
        assert step["filter/offered"] == 48
        assert 0 < step["filter/kept"] < 48
        assert step["filter/kept"] % 6 == 0  # whole groups
        assert step["reward/kept_mean"] != step["reward/mean"]
    assert all("val/filter/kept" not in validated for validated in run.validations)
    # A validation on every prompt: odd ones are tied at 0.5.
    assert run.validations[0]["val/reward/mean"] >= 0.25


def test_filtering_out_every_row_is_an_error(tiny: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny, same, n=2).edit(insert={"filter": After("reward", Filter(Spread()))})
    with pytest.raises(NodeError, match=r"filter failed in step 1: DataError: filter kept none of 8 rows, so"):
        train(job, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "run")


def test_a_direct_call_of_collect_is_one_round() -> None:
    """A direct call cannot run further rounds, so missing groups count at once."""
    rollout = answers(rows=6)
    mask = torch.arange(4) < torch.tensor([1, 3, 3, 4, 4, 4])[:, None]
    rollout, uid = rollout._replace(response_mask=mask), column(["a", "a", "b", "b", "c", "c"])

    def collect(groups: int, **settings: Any) -> Any:
        return Collect(Length(least=3), groups=groups, **settings)(rollout, uid=uid)

    assert collect(1)[1].tolist() == ["b", "b"]  # the first that passes, and whole groups only
    assert collect(2)[1].tolist() == ["b", "b", "c", "c"]
    with raises("rows.underfilled", node="collect", expected=3, found=2):
        collect(3)
    assert collect(3, on_underfill="train")[1].tolist() == ["b", "b", "c", "c"]
    collected, ids = collect(5, on_underfill="repeat")
    assert ids.tolist() == ["b", "b", "c", "c", "b+1", "b+1", "c+1", "c+1", "b+2", "b+2"]
    assert torch.equal(collected.response_mask, mask[[2, 3, 4, 5, 2, 3, 4, 5, 2, 3]])


def test_a_validation_downstream_of_a_filter_drops_it() -> None:
    graph = grpo(same).edit(insert={"long": After("generate", Filter(Length(least=2)))})
    assert "long" in graph.ancestors("reward")
    held_out = Validation(PromptData("prompts.jsonl")).graph(graph)
    assert set(held_out.nodes) == {"batch", "repeat", "generate", "reward"}
