"""Configurations and scripts of TRL as trainings of flowrl."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flowrl.errors import ImporterError
from flowrl.importers.plan import Imported, across, call
from flowrl.importers.settings import Setting, Settings, Table
from flowrl.importers.trl import graph
from flowrl.importers.trl.agent import Agent
from flowrl.importers.trl.commands import PARTS, launched, of_arguments
from flowrl.importers.trl.data import Prompts
from flowrl.importers.trl.functions import Copies
from flowrl.importers.trl.given import given_by
from flowrl.importers.trl.models import dtype_of, move_reference, trainer, training
from flowrl.importers.trl.rewards import Rewards
from flowrl.importers.trl.script import Script, read
from flowrl.importers.trl.supervised import supervised
from flowrl.importers.words import Word


def of_python(text: str, path: Path, title: str, arguments: Sequence[str]) -> Imported:
    """A script, with the given flags, else those of the first command in its docstring, and the GPUs of its launcher.

    Raises:
        ImporterError: it is not valid Python, or has no trainer that flowrl reads.
    """
    before, flags = ([], arguments) if arguments else _documented(text)
    given = of_arguments([Word(word) for word in flags])
    launcher = launched([Word(word) for word in before], given)
    own = path.stem in PARTS and "def make_parser(subparsers" in text  # a script of TRL itself, which its command runs
    return imported(path.stem if own else "", given, title, launcher if own else {**launcher, "script": str(path)})


def _documented(text: str) -> tuple[list[str], list[str]]:
    """The first command in a docstring or comment: the words before the script, and its flags."""
    command = re.search(
        r"(?:python|accelerate launch|trl)\b[^`\"]*?\s(--model_name_or_path.*?|--\w+.*?)(?:\n\s*#?\s*\n|```|\"\"\"|$)",
        text,
        re.DOTALL,
    )
    if command is None:
        return [], []
    flags = re.sub(r"\\\s*\n\s*#?", " ", command[1])
    script = re.search(r"\S+\.py\s", flags)
    before = [*text[command.start() : command.start(1)].split(), *flags[: script.start() if script else 0].split()]
    try:
        return before, shlex.split(flags[script.end() if script else 0 :].replace("\n", " "))
    except ValueError:
        return [], []


def imported(part: str, given: Mapping[str, Setting], title: str, launcher: Mapping[str, str]) -> Imported:
    """A configuration, with what a script adds to it, as a training of flowrl.

    Raises:
        ImporterError: it names no model or data set, or its script has no trainer that flowrl reads.
    """
    script = None
    if path := launcher.get("script"):
        part, script = _script(Path(path), given)
        given = given_by(script)
    settings = Settings(_flat(given), Table.of("trl", part))
    if "train_dataset" in settings:
        reason = "; ".join(settings.given["train_dataset"].unknown)
        settings.refuse("train_dataset", f"{reason}: save its rows as a file")
    model, data = settings.name("model_name_or_path"), settings.name("dataset_name")
    if data is None and (mixture := settings.get("datasets")):
        data = _only(settings, mixture)
    if model is None or data is None:
        raise ImporterError(
            f"The configuration names no {'model' if model is None else 'data set'}. Pass the flags of the script: "
            f"flowrl from-trl FILE -- --model_name_or_path MODEL --dataset_name NAME.",
            code="import.no-training",
            file=title,
        )
    processes = settings.gpus(launcher, "pass --num_processes for more")
    if part in ("dpo", "sft"):
        found = supervised(part, settings, title, model, data, processes, script)
    else:
        found = _of_responses(part, settings, title, model, script, processes)
    if processes > 1:
        found.bind["place"] = call("Colocate", gpus=processes, **across(int(launcher["machines"]), processes))
    found.notes += [] if script is None else script.notes
    _say_idle(settings)
    return found


_IDLE: Mapping[str, Sequence[str]] = {
    "eval_strategy": ("dataset_test_split", "eval_steps", "num_generations_eval"),
    "sync_ref_model": ("ref_model_*",),
    "use_adaptive_entropy": ("entropy_coef_*", "entropy_target"),
    "use_peft": ("lora_*", "use_dora", "use_rslora"),
    "use_vllm": ("vllm_*",),
}
"""By switch, the keys that have no effect while it is off."""


def _say_idle(settings: Settings) -> None:
    """List the keys that TRL does not read in this configuration."""
    loss = str(settings.get("loss_type"))
    for key in settings.given.keys() - settings.read:
        for switch, names in _IDLE.items():
            off = str(settings.get(switch)).rpartition(".")[2].lower() in ("no", "none", "false")
            if off and any(fnmatchcase(key, name) for name in names):
                settings.differ(key, f"without effect, because {switch} is off")
        if key.startswith(("sapo_", "vespo_")) and not key.startswith(f"{loss}_"):
            settings.differ(key, f"without effect, because loss_type is {loss}")


def _script(path: Path, given: Mapping[str, Setting]) -> tuple[str, Script]:
    """A script, and which of its trainers is read."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise ImporterError(
            f"{path} is not valid Python: {error}. Pass a script.", code="import.unreadable-file", file=path
        ) from error
    called = {ast.unparse(node.func): node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call)}
    trainers = {name: line for name, line in called.items() if name.endswith("Trainer")}
    part = next((part for part in PARTS if any(name.endswith(f"{part.upper()}Trainer") for name in trainers)), None)
    script = None if part is None else read(path, text, tree, given, Table.of("trl", part).defaults)
    if part is None or script is None or not script.trainers:
        found = ", ".join(f"{name} (line {line})" for name, line in trainers.items()) or "no trainer"
        raise ImporterError(
            f"{path} calls {found}; flowrl reads GRPOTrainer, RLOOTrainer, SFTTrainer and DPOTrainer. Pass the "
            f"command line or the YAML of one of them.",
            code="import.no-training",
            file=path,
        )
    if len(script.trainers) > 1:
        script.notes.append(f"{len(script.trainers)} trainers are made; the last one is imported")
    return script.trainers[-1].kind.removesuffix("Trainer").lower(), script


def _flat(given: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with a key for each entry of those that are dicts: ``model_init_kwargs.dtype``."""
    found: dict[str, Setting] = {}
    for key, one in given.items():
        if isinstance(one.value, dict) and one.value:
            for name, value in one.value.items():
                found[f"{key}.{name}"] = Setting(f"{key}.{name}", value, one.line)
        else:
            found[key] = one
    return found


def _only(settings: Settings, mixture: Any) -> str | None:
    """The data set of a mixture of one."""
    if not isinstance(mixture, list) or len(mixture) != 1 or not isinstance(mixture[0], dict):
        settings.refuse("datasets", "pass one data set by dataset_name; write a source for a mixture")
        return None
    return str(mixture[0].get("path"))


def _of_responses(
    part: str, settings: Settings, title: str, model: str, script: Script | None, processes: int
) -> Imported:
    """GRPO or RLOO."""
    get = settings.get
    copies = None if script is None else Copies(script)
    rewards = Rewards(settings, script, copies)
    rewards.read(_functions(settings, script))
    steps = graph.OptimizerSteps(settings, processes)
    functions: list[str] = []
    imports: dict[str, set[str]] = {}
    plan = graph.grpo(settings, steps) if part == "grpo" else graph.rloo(settings, steps)
    if (loss := graph.own_loss(settings, plan, steps)) is not None:
        functions.append(loss)
        imports |= graph.LOSS_IMPORTS
    agent = Agent(settings, script, rewards) if script is not None and Agent.is_of(script) else None
    prompts = Prompts(settings, None if script is None else _data(script, "train_dataset"), rewards.columns, copies)
    if agent is None:
        rewards.add_to(plan, prompts.conversational)
    else:
        agent.add_to(plan)
        functions.append(agent.source())
        imports["flowrl.episodes"] = {"play_as_trl"}
    if part == "grpo":
        graph.scale_advantages(settings, plan)
        graph.add_correction(settings, plan)
    else:
        graph.clip_reward(settings, plan)
    move_reference(settings, plan, processes, steps.updates)
    found = training(settings, steps.prompts, steps.updates)
    found["data"] = prompts.source(prompts.split(get("dataset_train_split")))
    if (validation := _validation(settings, script, rewards, prompts, steps, copies)) is not None:
        found["validation"] = validation
    sources = [] if copies is None else [*copies.sources.values()]
    bind = _bindings(settings, plan, model, processes)
    return Imported(title, plan, bind, found, settings, [*functions, *sources], imports)


def _functions(settings: Settings, script: Script | None) -> list[Any]:
    """The reward functions, and the reward model."""
    get = settings.get
    model, named = get("reward_model_name_or_path"), get("reward_funcs")
    if script is not None:
        given = script.trainers[-1].kwargs.get("reward_funcs")
        return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    named = [named] if isinstance(named, str) else list(named or [])
    return [*([model] if model else []), *named]


def _data(script: Script, name: str) -> Any:
    return script.trainers[-1].kwargs.get(name)


def _validation(
    settings: Settings, script: Script | None, rewards: Rewards, prompts: Prompts, steps: Any, copies: Copies | None
) -> Any:
    """Validation every so many steps; None without."""
    get = settings.get
    strategy = str(get("eval_strategy")).rpartition(".")[2].lower()
    if strategy in ("no", "none"):
        return None
    every = get("eval_steps") or get("logging_steps")
    if strategy != "steps" or float(every) < 1:
        settings.differ("eval_strategy", "flowrl validates every so many steps: no validation is written")
        return None
    if script is not None:
        data = _data(script, "eval_dataset")
        if data is None:
            return None
        prompts = prompts.of(data)
    split = prompts.split(get("dataset_test_split"))
    n = get("num_generations_eval")
    changes = {"changes": {"repeat.n": int(n)}} if n and int(n) != int(get("num_generations")) else {}
    return call("Validation", prompts.source(split), every=max(1, int(every) // steps.updates), **changes)


def _bindings(settings: Settings, plan: Any, model: str, processes: int) -> dict[str, Any]:
    """Backends by role."""
    ranks = {"ranks": processes} if processes > 1 else {}
    actor = trainer(settings, model, processes)
    lora = {"lora": actor.kwargs["lora"]} if "lora" in actor.kwargs else {}
    bind: dict[str, Any] = {"actor": actor, "rollout": _engine(settings, model, processes, lora)}
    if "ref" in plan.edited().roles():
        bind["ref"] = call("TorchScorer") if lora else call("TorchScorer", model, dtype=dtype_of(settings), **ranks)
    bind |= plan.bound
    if "reward_model" in plan.bound:
        bind["reward_model"].kwargs |= ranks
    return bind


def _engine(settings: Settings, model: str, processes: int, lora: Mapping[str, Any]) -> Any:
    """vLLM, or the model itself."""
    get = settings.get
    if not get("use_vllm"):
        return call("TorchRollout", model, ranks=processes) if processes > 1 else call("TorchRollout")
    if get("vllm_mode") == "server":
        settings.differ("vllm_mode", "flowrl starts the engine, on the GPUs of the training")
    tensor = max(1, min(int(get("vllm_tensor_parallel_size") or 1), processes))
    kind = get("vllm_model_impl")
    get("vllm_enable_sleep_mode")  # by the place
    return call(
        "VLLM",
        model,
        tensor_parallel=tensor,
        ranks=max(1, processes // tensor),
        dtype=dtype_of(settings),
        memory_fraction=float(get("vllm_gpu_memory_utilization")),
        max_model_len=get("vllm_max_model_length"),
        **lora,
        **({"engine_args": {"model_impl": kind}} if kind != "vllm" else {}),
    )
