"""Imports point one way (``graphs → operators → kernel ← backends``) and stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("operators", "graphs", "backends")

# What a part may import besides itself. "app" is what stands on top of everything: the command line and the demo.
ALLOWED: dict[str, set[str]] = {
    "kernel": set(),
    "operators": {"kernel"},
    "graphs": {"kernel", "operators"},
    "backends": {"kernel"},
    "app": {"kernel", *FOLDERS},
}


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    folders = {"flowrl": ROOT / "flowrl", **{f"flowrl.{name}": ROOT / name for name in FOLDERS}}
    return {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for package, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(tuple(f"flowrl/{name}/" for name in FOLDERS))
    }


def part_of(module: str) -> str:
    second = module.removeprefix("flowrl").removeprefix(".").split(".")[0]
    if second in FOLDERS:
        return second
    return "app" if second in {"cli", "demo", "__main__"} else "kernel"


def imported(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, wherever in the file it stands, also under ``TYPE_CHECKING``."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def forbidden(module: str, path: Path) -> list[str]:
    own = part_of(module)
    findings = []
    for line, name in imported(module, path):
        if name.split(".")[0] in FOLDERS:
            findings.append(f"{path}:{line}: {name} is imported by the folder's name; it is flowrl.{name}")
        elif name.split(".")[0] == "flowrl" and part_of(name) not in {own, *ALLOWED[own]}:
            findings.append(f"{path}:{line}: {module} ({own}) imports {name} ({part_of(name)})")
    return findings


def test_every_part_of_the_package_is_looked_at() -> None:
    assert {part_of(module) for module in module_files()} >= {"kernel", *FOLDERS}


def test_imports_point_one_way() -> None:
    findings = [finding for module, path in module_files().items() for finding in forbidden(module, path)]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flowrl.graph", "from flowrl.operators import GAE"),
        ("flowrl.graph", "from flowrl import operators"),
        ("flowrl.graph", "from . import backends"),
        ("flowrl.graph", "def late():\n    import flowrl.graphs.ppo"),
        ("flowrl.graph", "import importlib\nimportlib.import_module('flowrl.operators')"),
        ("flowrl.graph", "import flowrl.cli"),
        ("flowrl.operators.gae", "from ..backends.torch_trainer import TorchTrainer"),
        ("flowrl.operators.gae", "if TYPE_CHECKING:\n    from flowrl.graphs import ppo"),
        ("flowrl.backends.torch_trainer", "from flowrl.operators import losses"),
        ("flowrl.graphs.ppo", "from flowrl.backends import TorchTrainer"),
        ("flowrl.graphs.ppo", "from operators import GAE"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert len(forbidden(module, path)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flowrl.graph", "from flowrl.columns import Values\nfrom .errors import FlowrlError\nimport operator"),
        ("flowrl.operators.gae", "from flowrl.spec import Spec\nfrom .losses import PPOClip"),
        ("flowrl.graphs.ppo", "from flowrl.operators import GAE\nfrom flowrl.algorithm import algorithm"),
        ("flowrl.backends.torch_trainer", "from flowrl.engines import Trainer\nimport transformers"),
        ("flowrl.cli", "from flowrl.backends import TorchTrainer\nfrom flowrl.graphs import ppo"),
        ("flowrl.demo.run", "from flowrl.graphs.grpo import grpo\nfrom ..cli import main"),
    ],
)
def test_a_right_import_is_allowed(module: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert forbidden(module, path) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_second_import_name_is_refused(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and f"flowrl.{folder}" in last


def loaded_by(*modules: str) -> set[str]:
    """Top-level names in ``sys.modules`` after a fresh interpreter has imported the modules."""
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_flowrl_and_its_graphs_load_neither_engines_nor_transformers() -> None:
    graphs = ("flowrl", "flowrl.graphs", "flowrl.job", "flowrl.training", "flowrl.report")  # what the commands need
    assert loaded_by(*graphs).isdisjoint({"ray", "vllm", "sglang", "transformers"})


def test_backends_load_no_engine_before_one_is_built() -> None:
    assert loaded_by("flowrl.backends").isdisjoint({"ray", "vllm", "sglang", "peft"})


def test_no_module_of_the_kernel_loads_an_optional_package() -> None:
    # Ray is for jobs that have a place: nothing but flowrl.distributed imports it, and only where such a job is opened.
    light = {"flowrl.distributed", *(f"flowrl.distributed.{name}" for name in ("place", "shards", "wire"))}
    kernel = [m for m in module_files() if part_of(m) == "kernel" and (m in light or "distributed" not in m)]
    assert light <= set(kernel)
    assert loaded_by(*kernel).isdisjoint({"ray", "vllm", "sglang", "matplotlib", "tensorboard", "tensordict"})
