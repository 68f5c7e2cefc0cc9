"""Every recipe of ``examples/recipes`` runs end to end in its tiny form, under the names that it reads on the Hub.

A stand-in of the Hub has the tiny models and data; only sizes are set.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.data.keys import Key
from flowrl.references import load_object
from tests import ROOT
from tests.support.command_line import Command
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture
from tests.support.runs import described

pytestmark = pytest.mark.runs

RECIPES = ROOT / "examples" / "recipes"
SIZES = {
    "gsm8k": ["--engine=torch", "--set=generate.max_new_tokens=32"],
    "countdown": ["--engine=torch", "--set=generate.max_new_tokens=16", "--train=train[8:]", "--test=train[:8]"],
    "calculator": ["--engine=torch", "--set=interact.max_new_tokens=24", "--set=interact.context=200"],
    "dapo": [
        "--engine=torch",
        "--set=generate.max_new_tokens=8",
        "--set=collect.groups=2",
        "--set=collect.on_underfill=repeat",
    ],
    "dpo": [],
    "search": [
        "--engine=torch",
        "--set=interact.max_new_tokens=16",
        "--set=interact.context=160",
        "--test=validation[:8]",
    ],
    "rlhf": ["--engine=torch", "--set=generate.max_new_tokens=8"],
}


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each recipe has a module ``recipe``, which its ``data.py`` imports by this name."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in ("recipe", "tiny", "imitation", "arithmetic", "bm25"):
        sys.modules.pop(name, None)


def write_tiny(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``python data.py FOLDER`` writes."""
    monkeypatch.setattr(sys, "argv", ["data.py", str(folder)])
    monkeypatch.syspath_prepend(str(RECIPES / recipe))
    runpy.run_path(str(RECIPES / recipe / "data.py"), run_name="__main__")
    return folder


def test_every_recipe_is_tested() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/recipe.py")} == {*SIZES, "smollm2"}


@pytest.mark.parametrize("recipe", SIZES)
def test_a_recipe_trains_with_the_names_of_the_hub(
    recipe: str, command: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_tiny(recipe, tmp_path / "tiny", monkeypatch)
    names = runpy.run_path(str(RECIPES / recipe / "recipe.py"))
    hub.add(names["MODEL"], tiny / "model")
    hub.add(names["DATA"], tiny / "data", kind="dataset")
    if "HELD_OUT" in names:
        hub.add(names["HELD_OUT"], tiny / "test", kind="dataset")
    if "REWARD_MODEL" in names:
        hub.add(names["REWARD_MODEL"], tiny / "reward-model")
    target = f"{RECIPES / recipe / 'recipe.py'}:training"
    assert command("check", target).code == 0
    result = command("run", target, "--steps=2", "--folder=out", "--set=prompts=4", *SIZES[recipe])
    assert result.code == 0, result.err
    found = described(Path("out"))
    assert found["status"] == "finished" and (Path("out") / "actor" / "config.json").is_file()
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in steps if "timing/step" in line]
    assert len(trained) == 2
    if recipe == "calculator":
        assert trained[-1]["episodes/tool_calls"] > 0
    if recipe in ("calculator", "search"):
        assert trained[-1]["episodes/turns"] > 1
    if recipe not in ("dpo", "rlhf"):
        assert max(line["reward/max"] for line in trained) == 1.0  # the tiny model solves some


def test_the_recipe_of_a_pretrained_model(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", tiny)
    monkeypatch.setenv("STEPS", "1")
    monkeypatch.chdir(tmp_path)
    training = load_object(f"{RECIPES / 'smollm2' / 'recipe.py'}:training")()
    data = tmp_path / "runs" / "word-problems-data"
    train, heldout = (
        [*map(json.loads, (data / f"{name}.jsonl").read_text().splitlines())] for name in ("train", "heldout")
    )
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, heldout)]
    assert (len(train), len(heldout)) == (2000, 200) and not asked[0] & asked[1]
    for row in (*train, *heldout):
        first, second = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert int(row["ground_truth"]) == (first - second if "left" in row["prompt"][0]["content"] else first + second)
    assert len(training.run().validations) == 2


def test_the_control_of_a_pretrained_model_shuffles_scores() -> None:
    shuffled: Any = load_object(f"{RECIPES / 'smollm2' / 'recipe.py'}:Shuffled")()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    found = shuffled(scores, mask, Key(1))
    assert sorted(found.sum(-1).tolist()) == [1.0, 2.0, 3.0] and not torch.equal(found, scores)
    assert (found != 0).nonzero().tolist() == [[0, 1], [1, 2], [2, 0]]


def test_the_readme_of_a_recipe_names_its_commands() -> None:
    for recipe, sizes in SIZES.items():
        text = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
        assert f"flowrl run examples/recipes/{recipe}/recipe.py:training\n" in text
        assert f"python examples/recipes/{recipe}/data.py tiny\n" in text
        assert [size for size in sizes if size not in text] == []
        links = re.findall(r"\]\((?!https?:)([^)\s#]+)", text)
        assert [link for link in links if not (RECIPES / recipe / link).exists()] == []


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [("(1 + 2) / 3", Fraction(1), [1, 2, 3]), ("2 - -3*4", Fraction(14), [2, 3, 4]), (" 7 ", Fraction(7), [7])],
)
def test_the_value_of_an_expression(expression: str, value: Fraction, numbers: list[int]) -> None:
    value_of = load_object(f"{RECIPES / 'arithmetic.py'}:value_of")
    assert value_of(expression) == (value, numbers)


@pytest.mark.parametrize("expression", ["", "1 +", "1 / 0", "2 ** 9", "1.5", "True", "a", "f(1)", "1" * 201, "(" * 150])
def test_other_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        load_object(f"{RECIPES / 'arithmetic.py'}:value_of")(expression)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>3+5</think> <answer>(3 + 5) * 2</answer>", 1.0),
        ("<answer>1</answer><answer> 2*(5+3) = 16 </answer>", 1.0),
        ("<answer>2 * 8</answer>", 0.1),
        ("<answer>3 + 5 + 2</answer>", 0.1),
        ("<answer>3 + 5 + 5 + 3</answer>", 0.1),
        ("<answer>sixteen</answer>", 0.0),
        ("(3 + 5) * 2", 0.0),
    ],
)
def test_countdown_scores_the_last_answer(response: str, score: float) -> None:
    countdown: Any = load_object(f"{RECIPES / 'countdown' / 'recipe.py'}:countdown")
    assert countdown("countdown", response, {"target": 16, "numbers": [2, 3, 5]}) == score


def test_bm25_equals_its_formula() -> None:
    retriever: Any = load_object(f"{RECIPES / 'search' / 'bm25.py'}:BM25")
    found = retriever(["a b b", "B c", "c c c d"])
    mean, k1, b = 3.0, 1.2, 0.75
    weight = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))  # of "b" and of "c", each in two documents
    first = weight * 2 * (k1 + 1) / (2 + k1 * (1 - b + b * 3 / mean))
    second = weight * 1 * (k1 + 1) / (1 + k1 * (1 - b + b * 2 / mean))
    assert found.scores("b x") == pytest.approx([first, second, 0.0])
    assert found.top("B", 3) == ["a b b", "B c"] and found.top("B", 1) == ["a b b"] and found.top("x", 2) == []
    assert retriever([]).top("b", 1) == []
