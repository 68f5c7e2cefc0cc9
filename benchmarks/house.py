"""Size of the code, and the number of files that a call enters, for this tree or another one.

    python benchmarks/house.py [--entered]            # this tree; --entered also lists the entered files
    python benchmarks/house.py --tree PATH            # another tree

Steps are the second ones of a GRPO job with the demo's model, because the first fills caches. "Machine" is `flowrl/`
without operators, engines and graphs. On Ray every role has its own slot, so that weights are sent.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from harness import table

ROOMS = ("flowrl", "operators", "graphs", "backends")
PROMPTS, GROUP, TOKENS = 2, 4, 4
AIMS = {
    "graph.bind enters": "3",
    "graph.mermaid enters": "15",
    "a local step enters in the machine": "9",
    "a Ray step enters in the driver": "20",
}
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Calls = Counter[str]
"""Function calls by file."""


# ---- lines


def files(tree: Path) -> Iterator[Path]:
    """The modules of the product, without the symlinks in ``flowrl/``."""
    for room in ROOMS:
        yield from (path for path in sorted((tree / room).rglob("*.py")) if path.resolve() == path)


def lines_of(source: str) -> tuple[int, int]:
    """Lines of code, without imports, and lines of docstrings."""
    code: set[int] = set()
    docstrings: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            code.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code - docstrings), len(docstrings)


def longest_repeat(sources: dict[str, str]) -> tuple[int, str]:
    """The longest run of duplicated lines, ignoring blank lines and indentation: its length and places."""
    lines = [
        (text, f"{name}:{number}")
        for name, source in sources.items()
        for number, line in enumerate([*source.splitlines(), f"# end of {name}"], 1)
        if (text := line.strip())
    ]
    texts = [text for text, _ in lines]
    suffixes = sorted(range(len(texts)), key=lambda i: texts[i : i + 200])
    longest, where = 0, ""
    for first, second in pairwise(suffixes):
        length = 0
        for one, other in zip(texts[first:], texts[second : len(texts)], strict=False):
            if one != other:
                break
            length += 1
        length = min(length, abs(first - second))
        if length > longest:
            longest, where = length, " = ".join(sorted((lines[first][1], lines[second][1])))
    return longest, where


# ---- calls


@contextmanager
def counted(tree: Path) -> Iterator[Calls]:
    """Calls of the project's functions by this thread in the block."""
    calls: Calls = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
    of_files = dict(calls)
    calls.clear()
    for name, times in of_files.items():
        file = Path(name).resolve()  # flowrl/operators is operators
        if file.is_file() and any(file.is_relative_to(tree / room) for room in ROOMS):
            calls[str(file.relative_to(tree))] += times


def of_calls(tree: Path, base: Path) -> dict[str, Calls]:
    """The calls of each measure in `AIMS`."""
    from flowrl.demo.model import build
    from flowrl.demo.task import write_dataset

    build(base / "model", steps=1)
    write_dataset(base / "data")
    bind, mermaid = of_graph(tree)
    local, ray = of_step(tree, base, ray=False), of_step(tree, base, ray=True)
    machine = Counter({file: times for file, times in local.items() if file.startswith("flowrl" + os.sep)})
    return dict(zip(AIMS, (bind, mermaid, machine, ray), strict=True))


def of_graph(tree: Path) -> tuple[Calls, Calls]:
    """The calls of the second `Graph.bind` and `Graph.mermaid`."""
    from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
    from flowrl.demo.verifier import score_and_thinking
    from flowrl.graphs import grpo

    graph = grpo(score_and_thinking, n=GROUP)
    engines = {"actor": TorchTrainer("model"), "ref": TorchScorer("model"), "rollout": TorchRollout()}
    for _ in range(2):
        with counted(tree) as bind:
            graph.bind(**engines)
        with counted(tree) as mermaid:
            graph.mermaid()
    return bind, mermaid


def of_step(tree: Path, base: Path, ray: bool) -> Calls:
    """The calls of one step in this process, which runs the nodes or dispatches them to Ray."""
    from flowrl import Colocate, PromptData
    from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
    from flowrl.demo.verifier import score_and_thinking
    from flowrl.graphs import grpo

    model = str(base / "model")
    graph = grpo(score_and_thinking, n=GROUP, max_new_tokens=TOKENS)
    engines = {"actor": TorchTrainer(model), "ref": TorchScorer(model)}
    if ray:
        job = graph.bind(**engines, rollout=TorchRollout(model), place=Colocate(gpus=3))
    else:
        job = graph.bind(**engines, rollout=TorchRollout())
    with job.open(seed=0) as steps:
        prompts = PromptData(str(base / "data" / "train.jsonl")).load(steps.tokenizer(), seed=0)
        steps.sync()
        steps.step(prompts.next(PROMPTS), 0)
        batch = prompts.next(PROMPTS)
        with counted(tree) as calls:
            steps.step(batch, 1)
    return calls


def main(tree: Path, entered: bool) -> None:
    """Measure a tree and print one table."""
    with tempfile.TemporaryDirectory() as folder:
        calls = of_calls(tree, Path(folder))
    sources = {str(path.relative_to(tree)): path.read_text(encoding="utf-8") for path in files(tree)}
    code, docstrings = (sum(column) for column in zip(*map(lines_of, sources.values()), strict=True))
    longest, where = longest_repeat(sources)
    rows = [
        ["lines of code, without imports", f"{code:,}", "22,000"],
        ["lines of docstrings", f"{docstrings:,}", "7,500"],
        *([f"files that {what}", f"{len(found)}", AIMS[what]] for what, found in calls.items()),
        ["longest run of duplicated lines", str(longest), "12"],
    ]
    table(f"{len(sources)} files", ["", "here", "aim"], rows)
    print(f"\n  equal: {where}")
    for what, found in calls.items() if entered else ():
        listed = [[file, str(times)] for file, times in sorted(found.items())]
        table(f"files that {what}", ["", "calls"], [*listed, ["", str(found.total())]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--entered", action="store_true")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    sys.path.insert(0, str(tree))
    os.chdir(tree)  # Ray's processes import from there
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on CPU slots, wherever this runs
    main(tree, arguments.entered)
