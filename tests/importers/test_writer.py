"""Files read as a person would write them, and set only what differs; tests writer.py and plan.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.importers.writer import written
from tests.importers.scripts import verl

EXPECTED = '''"""From run.sh, a configuration of verl 0.9.1."""

from flowrl import Colocate, PromptData, Training
from flowrl.backends import VLLM, TorchTrainer
from flowrl.graphs import grpo
from flowrl.rewards import by_data_source, gsm8k, math

graph = grpo(
    by_data_source({"openai/gsm8k": gsm8k, "*MATH*": math, "math_dapo*": math, "aime*": math}),
    n=4,
    max_new_tokens=512,
    mini_batch=64,
    kl_coef=0.0,
)
graph = graph.edit(set={"update_actor.loss.dual_clip": 3.0})
'''


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    found, _ = verl(tmp_path)
    source = found.program().source()
    assert source.startswith(EXPECTED)
    assert max(map(len, source.splitlines())) <= 120
    ast.parse(source)


@pytest.mark.parametrize("name", ['a"""\nwritten = 1\n"""b.sh', "it's \\.sh", 'q".sh'])
def test_a_title_stays_in_the_docstring(name: str, tmp_path: Path) -> None:
    found, _ = verl(tmp_path)
    found.title = f"From {name}."
    tree = ast.parse(found.program().source())
    assert ast.get_docstring(tree, clean=False) == found.title
    assert not any(isinstance(node, ast.Name) and node.id == "written" for node in ast.walk(tree))


@given(st.text(st.characters(codec="utf-8")))
@example("\\'")
def test_text_is_written_so_that_python_reads_it_back(text: str) -> None:
    assert ast.literal_eval(written(text)) == text
