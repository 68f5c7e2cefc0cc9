"""Write the keys and defaults of verl, TRL and OpenRLHF for the importers, from unpacked packages.

    pip download --no-deps verl==0.9.1 trl==1.16.0 openrlhf==0.11.2   # then unzip each wheel into a folder
    python benchmarks/importer_keys.py verl FOLDER

YAML files are loaded safely and Python files are parsed; nothing of the packages runs. TRL's classes derive from
transformers' `TrainingArguments`, whose fields are read from the installed package.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parents[1] / "flowrl" / "importers" / "tables"
_TRL = {
    "grpo": "trainer/grpo_config.py:GRPOConfig",
    "rloo": "trainer/rloo_config.py:RLOOConfig",
    "dpo": "trainer/dpo_config.py:DPOConfig",
    "sft": "trainer/sft_config.py:SFTConfig",
    "kto": "trainer/kto_config.py:KTOConfig",
    "reward": "trainer/reward_config.py:RewardConfig",
}
_SHARED = (
    "trainer/model_config.py:ModelConfig",
    "scripts/utils.py:ScriptArguments",
    "scripts/utils.py:DatasetMixtureConfig",
)
_SCRIPTS = {"grpo": "scripts/grpo.py:GRPOScriptArguments", "rloo": "scripts/rloo.py:RLOOScriptArguments"}
"""Further arguments of the scripts of some trainers."""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested mapping, without those of Hydra."""
    for name, value in tree.items():
        if name in ("defaults", "_target_", "hydra"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def verl(folder: Path) -> dict[str, dict[str, Any]]:
    """Of `main_ppo`, whose composed configuration verl ships, and of the SFT trainer with FSDP."""
    configs = next(folder.rglob("trainer/config/ppo_trainer.yaml")).parent
    sft = dict(leaves(_yaml(configs / "sft_trainer_engine.yaml")))
    for part, file in {
        "model": "model/hf_model.yaml",
        "engine": "engine/fsdp.yaml",
        "optim": "optim/fsdp.yaml",
    }.items():
        sft |= leaves(_yaml(configs / file), f"{part}.")
    return {"main_ppo": dict(leaves(_yaml(configs / "_generated_ppo_trainer.yaml"))), "sft": sft}


def trl(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each trainer's configuration class, with those of its script."""
    from transformers import TrainingArguments

    root = next(folder.rglob("trainer/grpo_config.py")).parents[1]
    inherited = {
        f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(TrainingArguments)
    }
    base = fields(root, "trainer/base_config.py:_BaseConfig")
    shared = {key: value for name in _SHARED for key, value in fields(root, name).items()}
    more = {part: fields(root, name) for part, name in _SCRIPTS.items()}
    return {
        part: {**inherited, **base, **shared, **more.get(part, {}), **fields(root, name)} for part, name in _TRL.items()
    }


def fields(root: Path, name: str) -> dict[str, Any]:
    """The fields of a dataclass with their defaults; None for those that are computed."""
    file, _, cls = name.partition(":")
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls)
    return {
        node.target.id: default_of(node.value)
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }


def default_of(node: ast.expr) -> Any:
    """A literal, the default of ``field(default=...)``, or what a factory returns."""
    if isinstance(node, ast.Call):
        given = {one.arg: one.value for one in node.keywords}
        node = given.get("default") or given.get("default_factory") or node
    if isinstance(node, ast.Lambda):
        node = node.body
    try:
        return ast.literal_eval(node)
    except ValueError:
        return {"list": [], "dict": {}}.get(ast.unparse(node))


def openrlhf(folder: Path) -> dict[str, dict[str, Any]]:
    """Of the parsers of each command, and of the functions that add arguments for several prefixes."""
    root = next(folder.rglob("cli/train_ppo_ray.py")).parents[1]
    commands = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")
    return {name: flags(root, root / "cli" / f"{name}.py") for name in commands}


def flags(root: Path, file: Path) -> dict[str, Any]:
    """The flags of a command with their defaults."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for name in node.args[:1]:
                if isinstance(name, ast.Constant):
                    found[str(name.value).lstrip("-")] = _default(node, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            found |= _of_loop(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("add_"):
            found |= _of_helper(root, node)
    return found


def _of_loop(loop: ast.For) -> dict[str, Any]:
    try:
        items = ast.literal_eval(loop.iter)
    except ValueError:
        return {}
    assert isinstance(loop.target, ast.Name)
    return {key: value for item in items for key, value in _formatted(loop, {loop.target.id: item})}


def _of_helper(root: Path, call: ast.Call) -> dict[str, Any]:
    """The flags that a shared function adds, with its arguments in their names."""
    assert isinstance(call.func, ast.Name)
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == call.func.id:
                names = [argument.arg for argument in node.args.args]
                given = {name: ast.literal_eval(v) for name, v in zip(names[1:], call.args[1:], strict=False)}
                given |= {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
                return dict(_formatted(node, given))
    return {}


def _formatted(node: ast.AST, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "add_argument":
            for name in one.args[:1]:
                if isinstance(name, ast.JoinedStr):
                    parts = [
                        str(part.value)
                        if isinstance(part, ast.Constant)
                        else str(names.get(ast.unparse(part.value), ""))  # type: ignore[attr-defined]
                        for part in name.values
                    ]
                    yield re.sub(r"^\.", "", "".join(parts).lstrip("-")), _default(one, names)


def _default(call: ast.Call, names: Mapping[str, Any]) -> Any:
    given = {one.arg: one.value for one in call.keywords}
    action = ast.unparse(given["action"]).strip("'\"") if "action" in given else ""
    if "default" not in given:
        return {"store_true": False, "store_false": True}.get(action)
    node = given["default"]
    if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare):  # 1e-6 if prefix == "actor" else ...
        left, right = names.get(ast.unparse(node.test.left)), ast.literal_eval(node.test.comparators[0])
        node = node.body if left == right else node.orelse
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "float") and node.args:
        value = ast.literal_eval(node.args[0])
        return int(value) if ast.unparse(node.func) == "int" else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("framework", choices=("verl", "trl", "openrlhf"))
    arguments.add_argument("folder", type=Path, help="of the unpacked wheel")
    given = arguments.parse_args()
    parts = {"verl": verl, "trl": trl, "openrlhf": openrlhf}[given.framework](given.folder)
    metadata = next(given.folder.rglob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    version = next(line.removeprefix("Version: ") for line in metadata.splitlines() if line.startswith("Version: "))
    text = json.dumps({"version": version, "parts": parts}, indent=0, default=str, sort_keys=True)
    (TABLES / f"{given.framework}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{given.framework} {version}: {', '.join(f'{name} {len(keys)}' for name, keys in parts.items())}")


if __name__ == "__main__":
    main()
