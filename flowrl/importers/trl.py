"""SFT and DPO of TRL: command lines (``trl dpo``, a script with flags) and configurations in YAML.

Python scripts of TRL read their flags: those given to the command, else the first command in the script's docstring.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ImporterError
from flowrl.importers import hydra
from flowrl.importers.plan import GraphPlan, Imported, call
from flowrl.importers.settings import Setting, Settings, Table, is_file
from flowrl.importers.words import Word

STARTS = "trl sft, trl dpo, or a script sft.py or dpo.py"
_PARTS = ("dpo", "sft")


def from_words(words: Sequence[Word]) -> tuple[str, dict[str, Setting], Mapping[str, str]] | None:
    """The trainer that a command line starts, and its flags; None for other command lines."""
    names = [Path(word.text).name.removesuffix(".py") for word in words]
    at = next(
        (
            i
            for i, name in enumerate(names)
            if name in _PARTS and ((i and names[i - 1] == "trl") or words[i].text.endswith(".py"))
        ),
        None,
    )
    if at is None:
        return None
    words = [word._replace(text=_underscored(word.text)) for word in words[at + 1 :]]
    return names[at], hydra.flags(words), {}


def _underscored(text: str) -> str:
    """A flag of ``HfArgumentParser``, which takes hyphens for underscores."""
    flag, equals, value = text.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}" if flag.startswith("--") else text


def of_file(path: Path) -> tuple[str, dict[str, Setting]]:
    """The settings of a YAML file; a key of DPO alone makes it one of DPO."""
    settings = {setting.key: setting for setting in hydra.of_file(path)}
    only = Table.of("trl", "dpo").defaults.keys() - Table.of("trl", "sft").defaults.keys()
    return "dpo" if only & settings.keys() else "sft", settings


def of_python(text: str, path: Path, title: str, arguments: Sequence[str]) -> Imported:
    """A script: its trainer by its syntax tree, and its flags.

    Raises:
        ImporterError: it is not valid Python, has another trainer, or there are no flags.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ImporterError(
            f"{path} is not valid Python: {error}. Pass a script.", code="import.unreadable-file", file=path
        ) from error
    called = {ast.unparse(node.func): node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call)}
    trainers = {name: line for name, line in called.items() if name.endswith("Trainer")}
    part = next((part for part in _PARTS if f"{part.upper()}Trainer" in trainers), None)
    if part is None:
        found = ", ".join(f"{name} (line {line})" for name, line in trainers.items()) or "no trainer"
        raise ImporterError(
            f"{path} calls {found}; flowrl reads SFTTrainer and DPOTrainer. Pass the command line or the YAML of a "
            f"supported trainer.",
            code="import.no-training",
            file=path,
        )
    words = [f"{part}.py", *(arguments or _documented(text))]
    settings = from_words([Word(word) for word in words])
    assert settings is not None
    return imported(part, settings[1], title, {})


def _documented(text: str) -> list[str]:
    """The flags of the first command in a docstring or comment."""
    command = re.search(
        r"(?:python|accelerate launch|trl)\b[^`\"]*?\s(--model_name_or_path.*?|--\w+.*?)(?:\n\s*#?\s*\n|```|\"\"\"|$)",
        text,
        re.DOTALL,
    )
    if command is None:
        return []
    flags = re.sub(r"\\\s*\n\s*#?", " ", command[1])
    start = flags.find("--dataset_name") if flags.find(".py") > 0 else 0
    try:
        return shlex.split(flags[start:].replace("\n", " "))
    except ValueError:
        return []


def imported(part: str, given: Mapping[str, Setting], title: str, launcher: Mapping[str, str]) -> Imported:
    """SFT or DPO as a training of flowrl."""
    settings = Settings(given, Table.of("trl", part))
    get = settings.get
    model, data = settings.name("model_name_or_path"), settings.name("dataset_name")
    if model is None or data is None:
        raise ImporterError(
            f"The configuration names no {'model' if model is None else 'data set'}. Pass the flags of the script: "
            f"flowrl from-trl FILE -- --model_name_or_path MODEL --dataset_name NAME.",
            code="import.no-training",
            file=title,
        )
    bind: dict[str, Any] = {"actor": _trainer(settings, model)}
    if part == "sft":
        graph = GraphPlan("sft", has_reward=False)
        source = "DemoData"
        if "eos_token" in settings:
            settings.differ("eos_token", "turns are trained up to the token that ends them in the chat template")
    else:
        if get("loss_type") not in (["sigmoid"], "sigmoid", None):
            settings.refuse("loss_type", "flowrl's `DPO` is the sigmoid loss; write a `Loss` for another")
        options = {"beta": float(get("beta")), "label_smoothing": float(get("label_smoothing"))}
        graph = GraphPlan("dpo", options, has_reward=False)
        source = "PreferenceData"
        bind["ref"] = call("TorchScorer") if get("use_peft") else call("TorchScorer", model, dtype=_dtype(settings))
    length = get("max_length")
    settings.differ("max_length", "rows are not cut: a longer prompt or response is dropped")
    name = get("dataset_config")
    training = _training(settings)
    training["data"] = call(
        source,
        data,
        max_prompt_length=length,
        max_response_length=length,
        overlong="drop",
        **({} if is_file(data) else {"split": get("dataset_train_split")}),
        **({"name": name} if name else {}),
    )
    return Imported(title, graph, bind, training, settings)


def _dtype(settings: Settings) -> str:
    given = settings.get("dtype")
    return "bfloat16" if given in ("bfloat16", "auto", None) or settings.get("bf16") else "float32"


def _trainer(settings: Settings, model: str) -> Any:
    get = settings.get
    if get("optim") not in ("adamw_torch", "adamw_torch_fused", None):
        settings.refuse("optim", "flowrl has `AdamW` and `SGD`; write an `Optimizer` for another")
    for key in ("load_in_4bit", "load_in_8bit", "trust_remote_code"):
        if get(key):
            settings.refuse(key, "flowrl has no quantization, and runs no code of a model")
    betas = (float(get("adam_beta1")), float(get("adam_beta2")))
    adam = call(
        "AdamW",
        lr=float(get("learning_rate")),
        betas=betas,
        eps=float(get("adam_epsilon")),
        weight_decay=float(get("weight_decay")),
    )
    steps, kind = get("max_steps"), str(get("lr_scheduler_type")).rpartition(".")[2].lower()
    warmup = int(get("warmup_steps") or 0) if float(get("warmup_steps") or 0) >= 1 else 0
    schedules = {"cosine": "Cosine", "linear": "Linear"}
    if kind in schedules and steps and steps > 0:
        schedule = call(schedules[kind], 1.0, 0.0, steps=steps, warmup=warmup)
    else:
        schedule = call("Constant", 1.0, warmup=warmup)
        if kind not in ("constant", "constant_with_warmup"):
            settings.differ(
                "lr_scheduler_type",
                f"{kind} needs max_steps: the learning rate is constant until you pass schedule=... with its steps",
            )
    lora = {}
    if get("use_peft"):
        targets = get("lora_target_modules")
        targets = (tuple(targets) if isinstance(targets, list) else targets) or "all-linear"
        saved = {"modules_to_save": tuple(found)} if (found := get("lora_modules_to_save")) else {}
        lora = {"lora": call("LoRA", r=get("lora_r"), alpha=float(get("lora_alpha")), targets=targets, **saved)}
    return call(
        "TorchTrainer",
        model,
        optimizer=adam,
        schedule=schedule,
        grad_clip=float(get("max_grad_norm")),
        dtype=_dtype(settings),
        gradient_checkpointing=bool(get("gradient_checkpointing")),
        **lora,
        **_balancing(settings, "router_aux_loss_coef"),
    )


def _balancing(settings: Settings, key: str) -> dict[str, float]:
    """The load-balancing loss, where it is asked for: TRL's default has no effect on models without routers."""
    return {"router_aux_loss_coef": float(settings.get(key))} if key in settings else {}


def _training(settings: Settings) -> dict[str, Any]:
    get = settings.get
    steps = get("max_steps")
    epochs = get("num_train_epochs")
    if steps and steps > 0 and "num_train_epochs" in settings:
        settings.differ("num_train_epochs", f"max_steps={steps} holds")
    rows = int(get("per_device_train_batch_size")) * int(get("gradient_accumulation_steps"))
    saved = get("save_steps") if str(get("save_strategy")).rpartition(".")[2].lower() == "steps" else None
    kept = get("save_total_limit")
    if str(get("eval_strategy")).rpartition(".")[2].lower() not in ("no", "none"):
        settings.differ("eval_strategy", "a loss on held-out rows is not a validation of flowrl: none is written")
        get("eval_steps"), get("dataset_test_split")
    return {
        "data": None,
        "steps": steps if steps and steps > 0 else None,
        "epochs": None if steps and steps > 0 else int(epochs),
        "prompts": rows,
        "seed": get("seed"),
        "folder": settings.name("output_dir") or "runs/trl",
        "checkpoint_every": int(saved) if saved else None,
        **({"max_checkpoints": kept} if kept else {}),
    }
