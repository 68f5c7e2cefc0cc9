"""`Reward`: scores land on the last token, and what cannot be scored is refused by name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.columns import ResponseMask, ResponseText
from flowrl.core.operators.operator import Operator
from flowrl.data.metrics import Metrics
from flowrl.errors import FlowrlError, ParameterError, PortError, RewardError
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo
from flowrl.operators.reward.operator import Reward, place_scores
from flowrl.records import PromptBatch
from tests.support.errors import raises
from tests.support.kernel import exact
from tests.support.rows.reward_rows import objects, rows, values

# ------------------------------------------------------------------------------------------------------------- scores


def test_the_score_is_on_the_last_masked_token(scores: Callable[[str], str]) -> None:
    batch = rows(["7", "8", "7"], ["7", "7", "7"], mask=[[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
    out = Reward(scores("exact"))(*batch)
    assert out.dtype == torch.float32
    assert out.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]


def test_fully_masked_rows_are_not_scored_or_counted(scores: Callable[[str], str]) -> None:
    metrics = Metrics()
    batch = rows(["ok", "bad", "ok"], mask=[[1, 0], [0, 0], [1, 1]])
    out = Reward(scores("raising"))(*batch, metrics=metrics)
    assert out.tolist() == [[1, 0], [0, 0], [0, 1]]
    assert metrics["reward/mean"].weight == 2


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches_are_accepted(shape: tuple[int, int], scores: Callable[[str], str]) -> None:
    rollout, prompts = rows(["x"] * shape[0])
    metrics = Metrics()
    out = Reward(scores("raising"))(
        rollout._replace(response_mask=torch.zeros(shape, dtype=torch.bool)), prompts, metrics
    )
    assert out.shape == shape and not out.any() and not metrics


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_place_scores_uses_the_last_token_of_each_row(mask: list[list[bool]]) -> None:
    placed = place_scores(torch.arange(1.0, len(mask) + 1), torch.tensor(mask)).tolist()
    for i, row in enumerate(mask):
        expected = [0.0] * 5
        if any(row):
            expected[max(t for t in range(5) if row[t])] = i + 1.0
        assert placed[i] == expected


def test_reward_metrics(scores: Callable[[str], str]) -> None:
    metrics = Metrics()
    batch = rows(["a"] * 4, extra=[{"score": s} for s in (1.0, -2.0, 0.5, 0.25)])
    assert values(Reward(scores("from_extra")), *batch, metrics) == [1.0, -2.0, 0.5, 0.25]
    assert metrics.compute() == {"reward/mean": -0.0625, "reward/min": -2.0, "reward/max": 1.0}
    metrics = Metrics()
    assert values(Reward(scores("verdict")), *rows(["7", "8"], ["7", "7"]), metrics) == [0.5, 0.5]
    assert metrics.compute() == {"reward/mean": 0.5, "reward/min": 0.5, "reward/max": 0.5, "reward/acc": 0.5}


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(2.0), 2.0),
        (np.array(3), 3.0),
    ],
)
def test_accepted_score_types(returned: Any, score: float) -> None:
    assert values(Reward(lambda **_: returned), *rows(["a"])) == [score]
    assert values(Reward(lambda **_: {"score": returned}), *rows(["a"])) == [score]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (math.nan, "returned the score nan"),
        (math.inf, "returned the score inf"),
        (1e39, "range of float32"),
        (10**400, "returned the score inf"),
        ("1.0", "returned '1.0', expected a number or a dict"),
        (None, "returned None, expected a number or a dict"),
        (torch.ones(2), "expected a number or a dict"),
        ({"acc": 1.0}, "expected a number under 'score'"),
        ({"score": None}, "expected a number under 'score'"),
        ({"score": 1.0, "max": 3.0}, "a number named 'max', a reserved name"),
    ],
)
def test_invalid_scores_name_the_row(returned: Any, message: str) -> None:
    reward = Reward(lambda solution_str, **_: returned if solution_str == "bad" else 1.0)
    with raises("reward.invalid-score", node="reward", row="row-1") as error:
        reward(*rows(["ok", "bad"]))
    assert message in error.value.message


# ---------------------------------------------------------------------------------------------- definition and graphs


def trl_style(prompts: Any, completions: Any, **kwargs: Any) -> Any: ...


async def awaited(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


class Awaited:
    async def __call__(self, **columns: Any) -> float:
        return 1.0


def test_a_placeholder_without_a_function_is_refused_at_run() -> None:
    graph = grpo(None, n=2)
    with raises("reward.no-function", node="reward"):
        graph.bind().refuse_missing()
    with raises("reward.no-function", node="reward"):
        Reward(None)(*rows(["7"]))
    given = graph.edit(set={"reward.fn": exact})
    assert given.fingerprint() == grpo(exact, n=2).fingerprint() != graph.fingerprint()
    assert Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()
    given.bind().refuse_missing()


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("nowhere.py:exact", "nowhere.py' does not exist"),
        ("no_such_package.rewards:exact", "No module named 'no_such_package'"),
        ("no_such_module_at_all:exact", "no module 'no_such_module_at_all' is on sys.path"),
        ("flowrl.errors:exact", "does not define 'exact'"),
        ("exact", "Write 'package.module:name' or 'path/to/file.py:name'"),
        (lambda solution, answer: 1.0, "cannot be called by keyword with data_source, solution_str"),
        (trl_style, "The reward function trl_style(prompts"),
        (awaited, "The reward function awaited is async and returns a coroutine"),
        (functools.partial(awaited, extra_info=None), "is async"),
        (Awaited(), "is async"),
        (3, "expected a function"),
        (float, "The reward function float is a class, which returns an object"),
        ("flowrl.errors:RewardError", "errors.py has a class under that name. Name a function, or a method"),
        ("flowrl.operators.reward.pool:END_LIMIT", "pool.py has a literal (float) under that name"),
    ],
)
def test_a_missing_function_is_refused_at_construction(fn: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        Reward(fn)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("f = 3", "has a literal (int) under that name. Name a function"),
        ("f: dict = {'a': [1]}", "has a literal (dict) under that name"),
        ("class f:\n    def __call__(self, **columns): ...", "has a class under that name"),
    ],
)
def test_unsuitable_definitions_are_refused_without_running_the_file(source: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"import no_such_package\n{source}\n")
    with pytest.raises(ParameterError, match=re.escape(message)) as error:
        score(f"{file}:f")
    assert f"{file}:f" in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(prompts, completions, **kw): ...",
            "f(prompts, completions, **kw) cannot be called by keyword with data_",
        ),
        ("def f(data_source, solution_str, ground_truth): ...", "got an unexpected keyword argument 'extra_info'"),
        ("def f(data_source, /, solution_str, ground_truth, extra_info): ...", "cannot be called by keyword"),
        (
            "def f(*, data_source, solution_str, ground_truth, extra_info=2, more): ...",
            "missing a required argument: 'm",
        ),
        ("async def f(data_source, solution_str, ground_truth, extra_info=None): ...", "f is async and returns"),
        ("async def f(**columns): ...", "await in it by asyncio.run(...)"),
        ("def f(**columns): ...\nf = (lambda f: lambda answer: f)(f)", "cannot be called by keyword with data_"),
        ("f = float", "f is a class, which returns an object"),
        ("f = max(1.0, 3.0)", "f is a float, expected a function"),
        ("import no_such_package\ndef f(**columns): ...", "importing it raised ModuleNotFoundError"),
    ],
)
def test_an_unsuitable_named_function_is_refused_before_the_run(source: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"{source}\n")
    job = score(f"{file}:f").bind()
    with pytest.raises(RewardError, match=re.escape(message)) as error:
        job.refuse_missing()
    assert str(error.value).startswith("reward: ") and f"{file}:f" in str(error.value)
    with pytest.raises(RewardError, match=re.escape(message)):
        Reward(f"{file}:f")(*rows(["a"]))


@pytest.mark.parametrize(
    "source",
    [
        "def f(data_source, solution_str, ground_truth, extra_info: 'Unknown' = max(1, 2)) -> 'Nowhere': ...",
        "def f(**columns): ...",
        "def f(solution_str, ground_truth, *rest, extra_info={}, data_source): ...",
        "@lambda f: lambda **columns: f\ndef f(prompts, completions): ...",
        "if False:\n    from rewards_in_c import f\nelse:\n    def f(**columns): ...",
        "def f(answer): ...\ndef f(**columns): ...",
        "f = lambda **columns: 1.0",
        "class Scale:\n    def __call__(self, **columns): ...\nf = Scale()",
    ],
)
def test_a_suitable_named_function_is_accepted(source: str, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"{source}\n")
    score(f"{file}:f").bind().refuse_missing()


def test_a_missing_name_lists_what_the_file_defines(scores: Callable[[str], str]) -> None:
    with pytest.raises(
        ParameterError, match=r"does not define 'exakt'; it defines .*exact, verdict.*; did you mean 'exact'\?"
    ):
        Reward(scores("exakt"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0.0},
        {"timeout": math.inf},
        {"timeout": True},
        {"timeout": "3"},
        {"on_error": "skip"},
        {"on_error": math.nan},
        {"on_error": True},
        {"workers": 0},
        {"workers": True},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        Reward(lambda **_: 1.0, **wrong)


class Echoed(NamedTuple):
    response_text: ResponseText
    response_mask: ResponseMask


class Echo(Operator):
    """A rollout whose responses are the ground truths."""

    def __call__(self, batch: PromptBatch) -> Echoed:
        mask = torch.tensor([[True, False, False], [True, True, False]])
        return Echoed(batch.ground_truth.copy(), mask)


@algorithm
def score(batch: PromptBatch, reward_fn: Any) -> Any:
    rollout = Echo()(batch)
    return Reward(reward_fn)(rollout, batch)


def test_reward_works_on_symbols_and_tensors(scores: Callable[[str], str]) -> None:
    graph = score(scores("exact"))
    node = graph.nodes["reward"]
    assert isinstance(node.operator, Reward) and node.operator.granularity == "row"
    assert {str(field): str(edge) for field, edge in node.inputs.items()} == {
        "rollout.response_text": "echo.response_text",
        "rollout.response_mask": "echo.response_mask",
        **{f"prompts.{c}": f"batch.{c}" for c in ("data_source", "ground_truth", "extra_info", "row_id")},
    }
    two = objects(["a", "b"])
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    batch = PromptBatch(tokens, tokens.bool(), two, two, two, two, objects([None, None]), two)
    assert score.step(batch, scores("exact")).tolist() == [[1, 0, 0], [0, 1, 0]]

    @algorithm
    def crossed(batch: PromptBatch, other: PromptBatch) -> Any:
        return Reward(scores("exact"))(Echo()(batch), other)

    with pytest.raises(PortError, match="batch axis"):
        crossed()


def test_errors_survive_pickling(scores: Callable[[str], str]) -> None:
    import pickle

    with pytest.raises(FlowrlError) as error:
        Reward(scores("nothing"))(*rows(["a"]))
    again = pickle.loads(pickle.dumps(error.value))
    assert type(again) is RewardError and str(again) == str(error.value)
