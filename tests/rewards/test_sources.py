"""`by_data_source`: a function for each data source."""

from __future__ import annotations

from typing import Any

from flowrl.rewards import UnsafeSubprocess, by_data_source, from_openrlhf, gsm8k, verl_sources
from tests.support.errors import raises


def constant(value: float) -> Any:
    return lambda data_source, solution_str, ground_truth, extra_info: value


def test_an_equal_name_comes_before_patterns_and_these_before_the_default() -> None:
    by = by_data_source({"aime*": constant(1.0), "aime24": constant(2.0), "*": constant(3.0)}, default=constant(4.0))
    assert [by(name, "", "") for name in ("aime24", "aime25", "x")] == [2.0, 1.0, 3.0]
    assert by_data_source({"a": constant(1.0)}, default=constant(4.0))("b", "", "") == 4.0


def test_an_unknown_data_source_is_an_error() -> None:
    with raises("reward.unknown-data-source", data_source="openai/gsm8", known=("openai/gsm8k",)):
        by_data_source({"openai/gsm8k": gsm8k})("openai/gsm8", "", "")
    with raises("reward.invalid-settings"):
        by_data_source({})


def test_a_string_names_a_function() -> None:
    by = by_data_source({"a": "flowrl.rewards:gsm8k"}, default="flowrl.rewards:exact_match")
    assert [by(name, "So #### 4", "4") for name in "ab"] == [1.0, 0.0]


def test_the_prompt_reaches_functions_that_read_it() -> None:
    by = by_data_source({"a": from_openrlhf(lambda queries, prompts, labels: {"rewards": [len(prompts[0])]})}, gsm8k)
    assert by.reads_prompt and not by_data_source({"a": gsm8k}).reads_prompt
    prompt = [{"role": "user", "content": "abc"}]
    assert by(data_source="a", solution_str="", ground_truth="", extra_info={}, prompt=prompt) == {"score": 3}
    assert by(data_source="b", solution_str="#### 1", ground_truth="1", extra_info={}, prompt=prompt) == 1.0


def test_the_data_sources_of_verl() -> None:
    by = by_data_source(verl_sources(UnsafeSubprocess()))
    assert by("openai/gsm8k", "#### 4", "4") == by("aime2024", "$4$", "4") == 1.0
    assert by("searchR1_nq", "<answer>The cat</answer>", {"target": ["cat"]}) == 1.0
    tests = '{"inputs": ["1", "2"], "outputs": ["1", "3"]}'
    assert by("apps", "```python\nprint(input())\n```", tests) == {"score": 0.5, "passed": 0.5}
    assert "apps" not in verl_sources()


def test_the_answer_is_that_of_the_function_of_the_data_source() -> None:
    by = by_data_source({"openai/gsm8k": gsm8k, "own": constant(1.0)})
    assert by.answer("openai/gsm8k", "so #### 7") == "7"
    assert by.answer("own", " so #### 7 ") == "so #### 7"
    assert by.answer("own", " ") is None
