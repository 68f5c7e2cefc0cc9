"""The settings of a script: those of its configuration, of its trainer, and of what it builds for them."""

from __future__ import annotations

from typing import Any

from flowrl.importers.settings import Setting
from flowrl.importers.trl.script import Script, setting
from flowrl.importers.trl.values import Data, Flags, Made, Unknown, first_unknown

_ORDER = {
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "RLOOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}
"""Positional arguments of the trainers."""
_READ = frozenset({"args", "eval_dataset", "model", "peft_config", "ref_model", "reward_funcs", "train_dataset"})
"""Arguments of a trainer that the importer reads itself."""
_LORA = {"lora_alpha": 8, "lora_dropout": 0.0, "r": 8, "target_modules": None}
"""Arguments of PEFT's ``LoraConfig`` that flowrl has, with their defaults."""


def given_by(script: Script) -> dict[str, Setting]:
    """All settings of a script, by TRL's keys."""
    made = script.trainers[-1]
    made.kwargs = dict(zip(_ORDER.get(made.kind, ()), made.args, strict=False)) | made.kwargs
    config = made.kwargs.get("args")
    given = _of_config(script, config, made.line)
    given |= _of_model(made)
    given |= _of_adapter(made)
    data = made.kwargs.get("train_dataset")
    if isinstance(data, Data):
        given |= _of_data(data, made.line)
    elif data is not None or "dataset_name" not in given:
        given["train_dataset"] = Setting("train_dataset", None, made.line, (_why(data),))
        made.kwargs["train_dataset"] = Data("prompts.jsonl")
        given["dataset_name"] = Setting("dataset_name", "prompts.jsonl", made.line)
    for name in made.kwargs.keys() - _READ:
        if made.kwargs[name] is not None:
            given[name] = _short(name, made.kwargs[name], made.line)
    return given


def _of_config(script: Script, config: Any, line: int) -> dict[str, Setting]:
    if isinstance(config, Flags):
        own = script.flags.own.keys() - script.flags.defaults.keys()
        return {key: one for key, one in config.given.items() if key not in own}
    if isinstance(config, Made):
        values = dict(zip(("output_dir",), config.args, strict=False)) | config.kwargs
        return {key: setting(key, value, config.line) for key, value in values.items()}
    return {} if config is None else {"args": Setting("args", None, line, (_why(config),))}


def _of_model(made: Made) -> dict[str, Setting]:
    """The model, by name or loaded by transformers."""
    model, line = made.kwargs.get("model"), made.line
    if isinstance(model, Made) and model.kind == "from_pretrained":
        name = model.args[0] if model.args else model.kwargs.get("pretrained_model_name_or_path")
        more = {key: value for key, value in model.kwargs.items() if key != "pretrained_model_name_or_path"}
        found = {"model_name_or_path": setting("model_name_or_path", name, model.line)}
        for key, value in more.items():
            found[f"model_init_kwargs.{key}"] = setting(f"model_init_kwargs.{key}", value, model.line)
        return found
    return {} if model is None else {"model_name_or_path": _short("model_name_or_path", model, line)}


def _of_adapter(made: Made) -> dict[str, Setting]:
    """The adapter, as the flags of TRL's scripts; nothing for one of the flags themselves."""
    adapter, found = made.kwargs.get("peft_config"), {}
    if isinstance(adapter, Flags):
        return {key: one for key, one in adapter.given.items() if key == "use_peft" or key.startswith("lora_")}
    if adapter is None:
        return {}
    if not isinstance(adapter, Made) or adapter.kind not in ("LoraConfig", "ModelConfig"):
        return {"peft_config": _short("peft_config", adapter, made.line)}
    if adapter.kind == "ModelConfig":
        return {key: setting(key, value, adapter.line) for key, value in adapter.kwargs.items()}
    given = dict(zip(("task_type",), adapter.args, strict=False)) | adapter.kwargs
    values = {**_LORA, **{key: value for key, value in given.items() if key not in ("bias", "task_type")}}
    found["use_peft"] = Setting("use_peft", True, adapter.line)
    for key, value in values.items():
        name = key if key.startswith(("lora_", "use_")) else f"lora_{key}"
        found[name] = setting(name, value, adapter.line)
    return found


def _of_data(data: Data, line: int) -> dict[str, Setting]:
    name = data.name[0] if isinstance(data.name, list) and len(data.name) == 1 else data.name
    found = {"dataset_name": setting("dataset_name", name, line)}
    if data.config is not None:
        found["dataset_config"] = setting("dataset_config", data.config, line)
    if data.split is not None:
        found["dataset_train_split"] = setting("dataset_train_split", data.split, line)
    return found


def _why(value: Any) -> str:
    if value is None:
        return "the trainer gets no data set"
    found = first_unknown(value)
    return found.why if found else f"{getattr(value, 'kind', type(value).__name__)} is not read"


def _short(key: str, value: Any, line: int) -> Setting:
    """A setting by what is known of it: a literal, or the name of what is not."""
    if isinstance(value, int | float | str | bool | Unknown):
        return setting(key, value, line)
    if isinstance(value, Made):
        return Setting(key, value.kind, line)
    return Setting(key, getattr(value, "name", None) or type(value).__name__, line)
