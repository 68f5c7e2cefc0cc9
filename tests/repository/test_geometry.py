"""One place says what a process of an engine is: `flowrl/protocols/mesh.py`. Elsewhere in the rooms below, code that
reads a rank or a number of processes is in `EXCEPTIONS`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("backends/torch", "operators", "flowrl/sync")
NAMES = {"rank", "ranks", "world_size", "get_rank", "get_world_size", "get_local_rank", "get_coordinate"}
"""Attributes; also `size` of a mesh."""
ENVIRONMENT = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}

EXCEPTIONS = {
    ("backends/torch/on_mesh.py", "_check"): "the short form of a mesh of one axis",
    ("backends/torch/on_mesh.py", "geometry"): "the short form of a mesh of one axis",
    ("backends/torch/on_mesh.py", "join"): "launching: one process needs no group",
    ("backends/torch/meshes/group.py", "__init__"): "launching: this process's place in the group",
    ("backends/torch/train/sharded.py", "_device_mesh"): "launching: the device mesh of all processes",
    ("backends/torch/train/sharded.py", "__init__"): "launching: whether fsdp is the only axis",
    ("backends/torch/train/sharded.py", "shard_over"): "launching: the number of processes",
    ("backends/torch/meshes/group.py", "joined"): "launching: refuses a group of another size",
    ("backends/torch/meshes/group.py", "all_or_none"): "names the rank that failed",
    ("backends/torch/train/tensor_parallel.py", "_split_vocabulary"): "the part of a weight",
    ("backends/torch/train/expert_parallel.py", "_split"): "the part of the experts, and of tokens that others have",
    ("backends/torch/train/checkpoint.py", "save"): "each process writes its own file",
    ("backends/torch/train/saving.py", "_files"): "each process writes some of the files",
    ("backends/torch/train/trainer.py", "refuse_follow"): "refuses weights in several pieces",
}


def uses(source: str) -> Iterator[tuple[str, str]]:
    """The functions that read a rank or a number of processes, with what they read."""
    tree = ast.parse(source)
    inside: dict[ast.AST, str] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside |= dict.fromkeys(ast.walk(function), function.name)  # of nested functions, the inner one
    for node in ast.walk(tree):
        where = inside.get(node, "")
        if isinstance(node, ast.Attribute):
            of_mesh = ast.unparse(node.value).endswith("mesh") and node.attr == "size"
            if node.attr in NAMES or of_mesh:
                yield where, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in ENVIRONMENT:
            yield where, str(node.value)


def test_only_the_exceptions_read_ranks() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for where, what in uses(Path(path).read_text(encoding="utf-8")):
            found.setdefault((path.relative_to(ROOT).as_posix(), where), []).append(what)
    others = {place: what for place, what in found.items() if place not in EXCEPTIONS}
    assert not others, f"use `ProcessMesh.position` or `Mesh`, or name an exception: {others}"
    assert not (unused := EXCEPTIONS.keys() - found.keys()), f"no longer exceptions: {unused}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(mesh):\n    return mesh.rank == 0", [("f", "mesh.rank")]),
        ("def f(self):\n    return dist.get_world_size()", [("f", "dist.get_world_size")]),
        ("def f():\n    def g():\n        return os.environ['RANK']", [("g", "RANK")]),
        ("x = self._model.mesh.size", [("", "self._model.mesh.size")]),
        ("def f(mesh, x):\n    return mesh.position.reports, x.size(), group.sum, lora.r", []),
    ],
)
def test_a_use_is_found(source: str, found: list[tuple[str, str]]) -> None:
    assert list(uses(source)) == found
