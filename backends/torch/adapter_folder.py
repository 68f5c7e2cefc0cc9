"""Folders of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.backends.torch.lora import PREFIX, Adapter, LoRA, in_file
from flowrl.errors import BindError
from flowrl.hub.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, name_of

logger = logging.getLogger(__name__)

_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
)
"""Options of PEFT that change what an adapter computes, and that `LoRA` does not have."""


def adapted_modules(names: Iterable[str]) -> list[str]:
    """The names of the layers, such as ``q_proj``, that the low-rank weights of an adapter belong to."""
    return sorted({name.split(".")[-3] for name in names if ".lora_" in name})


def adapter_config(names: Iterable[str], lora: LoRA) -> dict[str, Any]:
    """The ``adapter_config.json`` for weights of an adapter with these names."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": adapted_modules(names),
        "bias": "none",
    }


def save_adapter(folder: str, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write an adapter to a folder; `weights` are from `Adapter.weights`, unsharded."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, Path(folder, ADAPTER_WEIGHTS), metadata={"format": "pt"})


def export_adapter(folder: str, adapter: Adapter, weights: Mapping[str, Tensor], model: str) -> None:
    """As `save_adapter`, with a configuration from which PEFT builds the same adapter over `model`: full names, since
    one such as ``out_proj`` may also select layers that are not adapted."""
    save_adapter(
        folder,
        weights,
        adapter_config(weights, adapter.lora)
        | {
            "target_modules": sorted(adapter.layers),
            "modules_to_save": adapter.modules or None,
            "fan_in_fan_out": any(layer.fan_in_fan_out for layer in adapter.layers.values()),
            "base_model_name_or_path": name_of(model),
        },
    )


def refuse_no_adapter(folder: str) -> dict[str, Any]:
    """The configuration of an adapter's folder; raises `BindError` if there is none, or one without weights."""
    try:
        config = json.loads(Path(folder, ADAPTER_CONFIG).read_bytes())
        found = None if isinstance(config, dict) else f"has a {ADAPTER_CONFIG} that is not an object"
    except FileNotFoundError:
        found = f"has no {ADAPTER_CONFIG}" if os.path.isdir(folder) else "does not exist"
    except (OSError, ValueError) as error:
        found = f"has a {ADAPTER_CONFIG} that cannot be read ({error})"
    if found is None and not Path(folder, ADAPTER_WEIGHTS).is_file():
        found = f"has no {ADAPTER_WEIGHTS}"
    if found is None:
        return config  # type: ignore[no-any-return]
    raise BindError(
        f"The adapter folder {folder!r} {found}; expected one that PEFT's model.save_pretrained(folder) wrote, or the "
        f"folder actor/adapter of a run. Correct LoRA(adapter_path=...), or pass the name of a repository of the Hub.",
        code="lora.adapter-not-found",
        path=folder,
        found=found,
    )


def read_adapter(adapter: Adapter, model: str) -> dict[str, Tensor]:
    """The weights of the folder ``adapter.lora.adapter_path`` by their names in the LM of the folder `model`.

    Raises `BindError` if the folder has no adapter, or one with other settings, layers or shapes than `adapter`.
    """
    folder = str(adapter.lora.adapter_path)
    config = refuse_no_adapter(folder)
    _refuse_unsupported(folder, config)
    try:
        stored = load_file(Path(folder, ADAPTER_WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise _mismatch(folder, f"its {ADAPTER_WEIGHTS} is damaged ({error})", "Use another copy") from error
    _refuse_other_settings(folder, adapter, config, stored)
    names = {in_file(name): name for name in adapter.parameters()}
    blank = {name: tuple(parameter.shape) for name, parameter in adapter.parameters().items()}
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in stored.items()}
    if wrong := sorted(name for name in blank if shapes[name] != blank[name]):
        fault = f"{in_file(wrong[0])} has shape {shapes[wrong[0]]}, and the model needs {blank[wrong[0]]}"
        raise _mismatch(
            folder, fault, f"Bind the model that it was trained on: {config.get('base_model_name_or_path')}"
        )
    if broken := sorted(name for name, tensor in stored.items() if not tensor.isfinite().all()):
        raise _mismatch(folder, f"{broken[0]} has NaN or infinity", "Use another copy")
    return {names[name]: tensor.float() for name, tensor in stored.items()}


def warn_of_other_base(lora: LoRA, model: str) -> None:
    """Warn if an adapter names another base model than `model`: by their last names, since folders move."""
    base = json.loads(Path(str(lora.adapter_path), ADAPTER_CONFIG).read_bytes()).get("base_model_name_or_path")
    if base and _last(base) != _last(name_of(model)):
        logger.warning(
            "The adapter in %r was trained on %r, and training starts from it on %r.",
            lora.adapter_path,
            base,
            name_of(model),
        )


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _refuse_unsupported(folder: str, config: Mapping[str, Any]) -> None:
    """Refuse adapters of another kind than `LoRA`."""
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    found = [f"{name}={config[name]!r}" for name in _UNSUPPORTED if config.get(name)]
    found += [f"peft_type={kind!r}"] if kind != "LORA" else []
    found += [f"bias={bias!r}"] if bias != "none" else []
    if found:
        raise BindError(
            f"The adapter in {folder!r} has {', '.join(found)}, which LoRA(...) cannot continue. Merge it into the "
            f"model with PEFT's merge_and_unload(), save that with save_pretrained(folder), and train the "
            f"folder with a new adapter.",
            code="lora.unsupported-adapter",
            path=folder,
            found=found,
        )


def _refuse_other_settings(
    folder: str, adapter: Adapter, config: Mapping[str, Any], stored: Mapping[str, Tensor]
) -> None:
    """Refuse an adapter of other layers, rank or scaling than `adapter`; names the `LoRA` that fits."""
    lora, parts = adapter.lora, [name.removeprefix(PREFIX) for name in stored]
    layers = {name.rpartition(".lora_")[0] for name in parts if ".lora_" in name}
    modules = {name.rpartition(".")[0] for name in parts if ".lora_" not in name}
    there = {name for name, _ in adapter.lm.named_modules()}
    if unknown := sorted((layers | modules) - there):
        fault = f"it has weights of {', '.join(unknown[:3])} ({len(unknown)} in all), which {_kind(adapter)} lacks"
        raise _mismatch(
            folder, fault, f"Bind the model that it was trained on: {config.get('base_model_name_or_path')}"
        )
    rank = int(config.get("r", 0))
    alpha = config.get("lora_alpha", 0) * (math.sqrt(rank) if config.get("use_rslora") else 1)
    saved = {name.rpartition(".")[0] for name in adapter.saved}
    if (rank, alpha, layers, modules) == (lora.r, lora.alpha, {*adapter.layers}, saved):
        if stored.keys() != {in_file(name) for name in adapter.parameters()}:
            raise _mismatch(folder, f"its {ADAPTER_WEIGHTS} lacks some of its weights", "Use another copy")
        return
    written = [f"r={rank}", f"alpha={alpha!r}", f"targets={_selecting(layers, there)}"]
    written += [f"modules_to_save={_selecting(modules, there)}"] if modules else []
    fit = f"LoRA({', '.join(written)}, adapter_path={folder!r})"
    raise _mismatch(folder, f"it was trained with other settings than {lora!r}", f"Pass those: {fit}")


def _selecting(names: set[str], there: set[str]) -> tuple[str, ...]:
    """The shortest names that select exactly these modules of all that are `there`."""
    last = {name.rpartition(".")[2] for name in names}
    selected = {name for name in there if name.rpartition(".")[2] in last}
    return tuple(sorted(last if selected == names else names))


def _kind(adapter: Adapter) -> str:
    return type(adapter.lm).__name__


def _mismatch(folder: str, fault: str, fix: str) -> BindError:
    return BindError(
        f"Training cannot start from the adapter in {folder!r}: {fault}. {fix}.",
        code="lora.adapter-mismatch",
        path=folder,
        fault=fault,
    )
