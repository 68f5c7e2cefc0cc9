"""Imports point one way, from room to room, and stay light."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import networkx as nx
import pytest

import flowrl
from flowrl.graphs import grpo
from tests import ROOT
from tests.support.rewards import digits
from tests.support.written_run import WrittenRun

FOLDERS = ("operators", "graphs", "backends")

# The rooms of the package, and what each may import besides itself; the map in docs/develop/house.md is the same.
GROUND = {
    "errors",
    "parameter_errors",
    "peer_names",
    "lazy",
    "padding",
    "references",
    "spec",
    "schedules",
    "columns",
    "records",
    "record_types",
}
LANGUAGE = {"ground", "data", "protocols", "core.operators", "core.graphs"}
ALLOWED: dict[str, set[str]] = {
    "ground": set(),
    "hub": {"ground"},
    "workers": {"ground"},
    "data": {"ground", "hub"},
    "protocols": {"ground", "hub", "data"},
    "core.operators": {"ground", "data"},
    "core.graphs": LANGUAGE - {"core.graphs"},
    "rules": LANGUAGE,
    "files": {*LANGUAGE, "rules"},
    "draw": {*LANGUAGE, "rules"},
    "edits": {*LANGUAGE, "rules", "files", "draw"},
    "sync": {"ground", "data", "protocols"},
    "run": {*LANGUAGE, "hub", "rules", "files", "edits", "draw", "sync"},
    "distributed": {*LANGUAGE, "workers", "sync", "run"},
    "auditing": {*LANGUAGE, "edits", "run", "operators"},
    "report": {"ground", "data", "run"},
    "look": {*LANGUAGE, "hub", "rules", "files", "edits", "draw", "operators", "run"},
    "top": {
        *LANGUAGE,
        "rules",
        "files",
        "edits",
        "draw",
        "run",
        "distributed",
        "evaluation",
        "auditing",
        "look",
        "report",
    },
    "importers": {"ground", "top"},
    "rewards": {"ground", "core.operators"},
    "episodes": {"ground", "workers", "data", "protocols", "core.operators"},
    "operators": {*LANGUAGE, "workers", "rewards", "episodes"},
    "graphs": {*LANGUAGE, "operators", "top"},
    "backends": {"ground", "hub", "data", "protocols", "sync"},
    "evaluation": {*LANGUAGE, "hub", "files", "run", "operators", "rewards"},
}
ALLOWED["app"] = {*ALLOWED}


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    folders = {"flowrl": ROOT / "flowrl", **{f"flowrl.{name}": ROOT / name for name in FOLDERS}}
    return {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for package, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(tuple(f"flowrl/{name}/" for name in FOLDERS))
    }


def room_of(name: str) -> str:
    """The room of a module, or of something that it defines."""
    _, second, third, *_ = [*name.split("."), "", ""]
    if second in {"app", "demo", "__main__"}:
        return "app"
    if second == "core":
        return "core.operators" if third == "operators" else "core.graphs"
    if second in ALLOWED:
        return second
    return "ground" if second in GROUND else "top"  # the package itself, graph.py, and names of its __init__


def imported(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, anywhere in the file, also under ``TYPE_CHECKING``."""
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
    own = room_of(module)
    findings = []
    for line, name in imported(module, path):
        if name.split(".")[0] in FOLDERS:
            findings.append(f"{path}:{line}: {name} is imported by the folder's name; it is flowrl.{name}")
        elif name.split(".")[0] == "flowrl" and room_of(name) not in {own, *ALLOWED[own]}:
            findings.append(f"{path}:{line}: {module} ({own}) imports {name} ({room_of(name)})")
    return findings


def test_every_module_belongs_to_a_room() -> None:
    assert {room_of(module) for module in module_files()} == ALLOWED.keys()


def test_the_table_of_rooms_in_the_docs_equals_this_one() -> None:
    text = (ROOT / "docs" / "develop" / "house.md").read_text(encoding="utf-8")
    rows = text.partition("<!-- rooms -->\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    every = ", ".join(ALLOWED)
    drawn = {room: {*may.replace("every other room", every).split(", ")} - {"", "app"} for room, _, _, may in cells}
    assert drawn == ALLOWED
    assert len(cells) == len(ALLOWED)


def test_rooms_import_only_what_the_table_allows() -> None:
    findings = [finding for module, path in module_files().items() for finding in forbidden(module, path)]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flowrl.core.graphs.graph", "from flowrl.operators import GAE"),
        ("flowrl.core.graphs.graph", "from flowrl import operators"),
        ("flowrl.graph", "from . import backends"),
        ("flowrl.core.graphs.graph", "def late():\n    import flowrl.graphs.ppo"),
        ("flowrl.core.graphs.graph", "import importlib\nimportlib.import_module('flowrl.operators')"),
        ("flowrl.core.graphs.graph", "import flowrl.app.cli"),
        ("flowrl.core.graphs.graph", "def late():\n    from flowrl.run.training.job import Job"),
        ("flowrl.core.graphs.graph", "from flowrl.graph import Graph"),
        ("flowrl.run.training.job", "def late():\n    from flowrl.distributed.runner import open_ray"),
        ("flowrl.data.metrics", "if TYPE_CHECKING:\n    from flowrl.core.operators.ports import Port"),
        ("flowrl.operators.gae", "from ..backends.torch_trainer import TorchTrainer"),
        ("flowrl.operators.gae", "if TYPE_CHECKING:\n    from flowrl.graphs import ppo"),
        ("flowrl.backends.torch.train.trainer", "from flowrl.operators import losses"),
        ("flowrl.graphs.ppo", "from flowrl.backends import TorchTrainer"),
        ("flowrl.graphs.ppo", "from operators import GAE"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert len(forbidden(module, path)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "flowrl.core.graphs.graph",
            "from flowrl.columns import Values\nfrom .errors import FlowrlError\nimport operator",
        ),
        ("flowrl.operators.gae", "from flowrl.spec import Spec\nfrom .policy_losses import PPOClip"),
        ("flowrl.graphs.ppo", "from flowrl.operators import GAE\nfrom flowrl.graph import algorithm"),
        ("flowrl.backends.torch.train.trainer", "from flowrl.protocols.protocols import Trainer\nimport transformers"),
        ("flowrl.app.cli", "from flowrl.backends import TorchTrainer\nfrom flowrl.graphs import ppo"),
        ("flowrl.demo.run", "from flowrl.graphs.grpo import grpo\nfrom ..cli import main"),
    ],
)
def test_a_permitted_import_has_no_finding(module: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert forbidden(module, path) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_importing_a_folder_without_the_package_name_is_refused(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and f"flowrl.{folder}" in last


def loaded_by(*stages: Sequence[str]) -> list[set[str]]:
    """``sys.modules`` of a new interpreter after each stage, in which it imports these modules."""
    code = "import importlib, json, sys\nloaded = []\n"
    for modules in stages:
        code += f"for name in {[*modules]}: importlib.import_module(name)\nloaded.append(list(sys.modules))\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(json.dumps(loaded))"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [set(modules) for modules in json.loads(done.stdout)]


ENGINES = ("ray", "vllm", "sglang", "megatron")
OPTIONAL = (*ENGINES, "matplotlib", "tensorboard", "tensordict", "wandb", "mlflow", "trackio")
HEAVY = ("transformers", "torch.distributed.tensor", "torch.distributed.fsdp", "peft", *ENGINES)


def test_imports_load_no_engine_and_no_optional_package() -> None:
    # Ray is for jobs that have a place: nothing but flowrl.distributed imports it, and only where such a job is opened.
    light = {f"flowrl.distributed.{name}" for name in ("place", "hosts.shards", "hosts.wire")}
    rooms = {*ALLOWED["top"], "sync", "top"} - {"distributed", "auditing"}
    modules = [module for module in module_files() if module in light or room_of(module) in rooms]
    assert light <= set(modules)
    runs, rooms_alone, backends = loaded_by(
        ["flowrl", "flowrl.graphs", "flowrl.run.training.training", "flowrl.report.terminal"],
        modules,
        ["flowrl.backends", "flowrl.backends.hosted.base", "flowrl.demo.model"],
    )
    assert runs.isdisjoint(HEAVY) and rooms_alone.isdisjoint(OPTIONAL) and backends.isdisjoint(HEAVY)


def test_commands_that_inspect_graphs_load_no_engine(tiny: str, tmp_path: Path) -> None:
    """At algorithms by name, then at an example that is bound to engines; only a check reads its model's tokenizer."""
    example = f"{ROOT / 'examples' / 'think.py'}:training"
    commands = ["list", "operators", "show grpo", "diff grpo ppo", "check grpo", "plan grpo"]
    commands += [f"{verb} {example}" for verb in ("show", "plan", "check")]
    code = f"""
import json, sys
from flowrl.app.cli import main
loaded = []
for command in {commands}:
    try:
        main(command.split())
    except SystemExit as end:
        assert not end.code, command
    loaded.append(list(sys.modules))
print(json.dumps(loaded))
"""
    environment = {**os.environ, "MODEL": tiny, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    loaded: list[set[str]] = [set(modules) for modules in json.loads(done.stdout.splitlines()[-1])]
    *drawn, _, planned, bound, bound_planned, bound_checked = loaded
    assert "flowrl.draw.mermaid" in drawn[-1] and "flowrl.run.training.training" not in drawn[-1]
    assert "torch" in planned and planned.isdisjoint({*HEAVY, "pyarrow", "flowrl.backends"})
    assert bound.isdisjoint(HEAVY) and bound_planned.isdisjoint(HEAVY)
    by_tokenizer = {"transformers", "torch.distributed.tensor", "torch.distributed.fsdp"}
    assert bound_checked.isdisjoint(set(HEAVY) - by_tokenizer)


def test_commands_that_read_files_of_a_run_load_no_torch(tmp_path: Path) -> None:
    run = WrittenRun(grpo(digits), tmp_path / "runs" / "a", steps=3).write()
    rules = tmp_path / "rules.py"
    rules.write_text("from flowrl.run.alarms import Above\n\nrules = (Above('reward/mean', -9.0),)\n")
    commands = [["runs", str(run.parent)], ["alarms", str(run)], ["alarms", str(run), f"--rules={rules}:rules"]]
    commands += [["rows", str(run), *options] for options in ([], ["--never"], ["--step=1", "--worst=2", "--text"])]
    commands += [["rows", str(run), "--step=3", "--against=1"], ["blame", str(run), "kl/ref", "--against=1"]]
    code = f"""
import sys
from flowrl.app.cli import main
for command in {commands}:
    try:
        main(command)
    except SystemExit as end:
        assert not end.code, command
    assert "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 alarms by the rules" in done.stdout


def circles(files: Mapping[str, Path]) -> list[list[str]]:
    """The modules that import each other in a loop, by imports wherever they stand."""
    network: nx.DiGraph[str] = nx.DiGraph()
    for module, path in files.items():
        for _, name in imported(module, path):
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module and target != "flowrl":
                network.add_edge(module, target)
    return [sorted(circle) for circle in nx.strongly_connected_components(network) if len(circle) > 1]


def test_there_are_no_circular_imports() -> None:
    assert circles(module_files()) == []


def test_a_circular_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from flowrl.data.b import B")
    (tmp_path / "b.py").write_text("def late():\n    from flowrl.data import a")
    assert circles({"flowrl.data.a": tmp_path / "a.py", "flowrl.data.b": tmp_path / "b.py"}) == [
        ["flowrl.data.a", "flowrl.data.b"]
    ]


def test_the_public_names_are_pinned() -> None:
    """If you add or remove one, update this list and the changelog."""
    assert flowrl.__all__ == [
        "INJECTED", "After", "Audit", "AuditTask", "Backend", "Best", "ByDifficulty", "Colocate", "Column", "Costs",
        "DataProto",
        "DemoBatch", "DemoData", "EarlyStopping", "Evaluation", "FlowrlError", "Graph", "Job", "Key", "Lag", "Loss",
            "MLflow", "Metrics", "Now",
        "Operator",
        "PreferenceBatch", "PreferenceData", "PromptBatch", "PromptData", "Reads", "RecordedRun",
        "Recording", "ReplaySampler", "Reporter", "Role",
        "RolloutBatch", "Sampler", "Source", "Spec", "Split", "State", "TensorBoard", "Terminal", "Trackio", "Training",
            "UnpairedBatch", "UnpairedData",
        "Validation", "WandB", "When", "Writes", "algorithm", "audit", "compare", "load", "open", "operator",
        "save",
    ]  # fmt: skip
    assert all(getattr(flowrl, name) is not None or name == "INJECTED" for name in flowrl.__all__)


PUBLIC = {
    "flowrl",
    "flowrl.backends",
    "flowrl.columns",
    "flowrl.core",
    "flowrl.data",
    "flowrl.demo",
    "flowrl.episodes",
    "flowrl.errors",
    "flowrl.graphs",
    "flowrl.operators",
    "flowrl.protocols",
    "flowrl.records",
    "flowrl.report",
    "flowrl.rewards",
    "flowrl.rules",
    "flowrl.run",
    "flowrl.run.alarms",
    "flowrl.schedules",
    "flowrl.sync",
}
"""What users import from; pinned."""


def test_docs_and_examples_import_from_public_paths_alone() -> None:
    # some examples of errors.md provoke a fault by replacing an internal function
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("[!e]*.md"), *(ROOT / "docs").glob("e[!r]*.md")]
    pages += (ROOT / "examples").glob("*.py")
    found = [
        (page.name, module)
        for page in pages
        for module in re.findall(r"^\s*(?:from|import) (flowrl[\w.]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        if module not in PUBLIC
    ]
    assert not found


@pytest.mark.parametrize("module", sorted(PUBLIC - {"flowrl.columns", "flowrl.errors", "flowrl.records"}))
def test_every_public_name_exists(module: str) -> None:
    package = importlib.import_module(module)
    missing = [name for name in package.__all__ if not hasattr(package, name)]
    assert package.__all__ and [name for name in missing if name not in ("Gym", "OpenEnv")] == []
