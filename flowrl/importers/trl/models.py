"""The trained model of TRL's configurations: precision, optimizer, schedule of the learning rate, and adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowrl.importers.plan import GraphPlan, call
from flowrl.importers.settings import Settings

_IGNORED = frozenset({"device_map", "low_cpu_mem_usage", "torch_dtype", "use_cache", "use_kernels"})
"""Arguments of ``from_pretrained`` that change no result, or are read under another name."""


_EIGHT_BIT = ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
"""The optimizers of transformers whose states are in 8 bits."""


def dtype_of(settings: Settings) -> str:
    """The precision of the passes; weights are float32."""
    get = settings.get
    keys = ("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype")
    key = next((key for key in keys if key in settings), "dtype")
    get("dtype")
    own = str(get(key) or "float32").rpartition(".")[2]
    if get("fp16") or own not in ("auto", "bfloat16", "float32"):
        settings.refuse("fp16" if get("fp16") else key, "flowrl trains in bfloat16 over float32 weights, or in float32")
    if own == "bfloat16":
        settings.differ(key, "flowrl computes in bfloat16 over weights in float32")
    mixed = get("bf16")  # None is True, unless fp16 is set
    return "float32" if mixed is False and own == "float32" else "bfloat16"


def read_model_arguments(settings: Settings) -> None:
    """What a model is loaded with, besides its precision."""
    get = settings.get
    for key in ("load_in_4bit", "load_in_8bit", "trust_remote_code"):
        if get(key):
            settings.refuse(key, "flowrl has no quantization, and runs no code of a model")
    if get("attn_implementation") not in (None, "eager", "sdpa"):
        settings.differ("attn_implementation", "flowrl's attention is sdpa")
    get("model_init_kwargs")
    for key in [key for key in settings.given if key.startswith("model_init_kwargs.")]:
        name, value = key.partition(".")[2], get(key)
        if name == "attn_implementation" and value not in (None, "eager", "sdpa"):
            settings.differ(key, "flowrl's attention is sdpa")
        elif name not in (*_IGNORED, "attn_implementation", "dtype") and value not in (None, False, "main"):
            settings.refuse(key, "flowrl loads a model by its folder or name, without quantization or code of its own")


def trainer(settings: Settings, model: str, processes: int) -> Any:
    """The trained model with its optimizer."""
    get = settings.get
    read_model_arguments(settings)
    optimizer = str(get("optim")).rpartition(".")[2].lower()
    if optimizer not in ("adamw_torch", "adamw_torch_fused", "none", *_EIGHT_BIT):
        settings.refuse("optim", "flowrl has `AdamW`, `Muon` and `SGD`; write an `Optimizer` for another")
    decay = float(get("weight_decay"))
    if decay:
        settings.differ("weight_decay", "flowrl decays every weight; transformers leaves out biases and norms")
    adam = call(
        "AdamW",
        lr=float(get("learning_rate")),
        betas=(float(get("adam_beta1")), float(get("adam_beta2"))),
        eps=float(get("adam_epsilon")),
        weight_decay=decay,
        **({"bits": 8} if optimizer in _EIGHT_BIT else {}),
    )
    lora = lora_of(settings)
    # TRL's default has no effect on models without routers.
    asked = "router_aux_loss_coef" in settings
    balancing = {"router_aux_loss_coef": float(get("router_aux_loss_coef"))} if asked else {}
    return call(
        "TorchTrainer",
        model,
        optimizer=adam,
        schedule=schedule(settings),
        grad_clip=float(get("max_grad_norm") or 0.0) or None,
        dtype=dtype_of(settings),
        gradient_checkpointing=_checkpointing(settings),
        **({"ranks": processes} if processes > 1 else {}),
        **({"lora": lora} if lora else {}),
        **balancing,
    )


def _checkpointing(settings: Settings) -> bool | str:
    """Which layers are recomputed."""
    recomputes = bool(settings.get("gradient_checkpointing"))
    if not settings.get("activation_offloading"):
        return recomputes
    if not recomputes:
        settings.differ("activation_offloading", "flowrl recomputes layers whose inputs are offloaded")
    return "offload"


def schedule(settings: Settings) -> Any:
    """The schedule of the learning rate; without `max_steps` it lasts as long as the run."""
    get = settings.get
    kind = str(get("lr_scheduler_type")).rpartition(".")[2].lower()
    steps = max(0, int(get("max_steps") or 0))
    length = {"steps": steps} if steps else {}
    warmup = {"warmup": part} if (part := _warmup(settings, steps, kind)) else {}
    if kind in ("constant", "constant_with_warmup"):
        return call("Constant", 1.0, **warmup)
    floor = _floor(settings, kind, settings.entries("lr_scheduler_kwargs"))
    if floor is not None:
        return call("Linear" if kind == "linear" else "Cosine", 1.0, floor, **length, **warmup)
    settings.refuse(
        "lr_scheduler_type", "flowrl has `Constant`, `Linear`, `Cosine` and `WSD`; write a `Schedule` for another"
    )
    return call("Constant", 1.0, **warmup)


def _warmup(settings: Settings, steps: int, kind: str) -> int | float:
    """Optimizer steps of the warm-up, or without `max_steps` their share of all."""
    given = float(settings.get("warmup_steps") or 0)
    if kind == "constant" and given:
        settings.differ("warmup_steps", "without effect, because lr_scheduler_type is constant")
        return 0
    if given >= 1:
        return int(given)
    return math.ceil(given * steps) if steps else given


def _floor(settings: Settings, kind: str, more: Mapping[str, Any]) -> float | None:
    """The share of the learning rate that a schedule ends at; None for a schedule that flowrl does not have."""
    if kind in ("linear", "cosine") and not more:
        return 0.0
    if kind == "cosine_with_min_lr" and more.keys() <= {"min_lr", "min_lr_rate"} and more:
        rate, lowest = more.get("min_lr_rate"), more.get("min_lr")
        return float(rate) if rate is not None else float(lowest or 0.0) / float(settings.get("learning_rate"))
    return None


def lora_of(settings: Settings) -> Any:
    """The adapter; None without."""
    get = settings.get
    if not get("use_peft"):
        return None
    if float(get("lora_dropout") or 0):
        settings.differ("lora_dropout", "flowrl's `LoRA` has no dropout")
    targets = get("lora_target_modules")
    if targets is None:
        targets = ["q_proj", "v_proj"]
        settings.differ("lora_target_modules", "PEFT's default for Llama, Qwen, Mistral and Gemma; other models differ")
    names = [targets] if isinstance(targets, str) else [str(name) for name in targets]
    if any(name.endswith(",") for name in names):
        settings.differ("lora_target_modules", "without the commas, which PEFT would take as parts of the names")
    names = [name.rstrip(",") for name in names]
    whole = len(names) == 1 and names[0] == "all-linear"
    return call(
        "LoRA",
        r=get("lora_r"),
        alpha=float(get("lora_alpha")),
        targets=names[0] if whole else tuple(names),
        **({"modules_to_save": tuple(saved)} if (saved := get("lora_modules_to_save")) else {}),
    )


def training(settings: Settings, prompts: int, updates: int = 1) -> dict[str, Any]:
    """Length, folder and checkpoints of a training whose steps have `updates` optimizer steps."""
    get = settings.get
    given, epochs = max(0, int(get("max_steps") or 0)), float(get("num_train_epochs"))
    if given and "num_train_epochs" in settings:
        settings.differ("num_train_epochs", f"max_steps={given} holds")
    if not given and epochs != int(epochs):
        settings.refuse("num_train_epochs", "flowrl counts whole epochs: pass max_steps")
    if given % updates:
        settings.differ("max_steps", f"a step of flowrl has {updates} optimizer steps: rounded up")
    saved = get("save_steps") if str(get("save_strategy")).rpartition(".")[2].lower() == "steps" else None
    if saved and float(saved) < 1:
        settings.refuse("save_steps", "flowrl counts steps: pass their number")
        saved = None
    kept = get("save_total_limit")
    return {
        "data": None,
        "steps": math.ceil(given / updates) if given else None,
        "epochs": None if given else max(1, int(epochs)),
        "prompts": prompts,
        "seed": get("seed"),
        "folder": settings.name("output_dir") or "runs/trl",
        "checkpoint_every": math.ceil(int(saved) / updates) if saved else None,
        **({"max_checkpoints": kept} if kept else {}),
        **({"resume": "or-start"} if get("resume_from_checkpoint") else {}),
    }


def move_reference(settings: Settings, plan: GraphPlan, processes: int, updates: int = 1) -> None:
    """TR-DPO's reference, which moves every so many optimizer steps, of which a step has `updates`."""
    get = settings.get
    if not get("sync_ref_model"):
        return
    alpha, (every, rest) = float(get("ref_model_mixup_alpha")), divmod(int(get("ref_model_sync_steps")), updates)
    if "ref" not in plan.edited().roles() or get("use_peft"):
        settings.refuse("sync_ref_model", "TRL refuses it without a model of the reference: with beta 0, or an adapter")
    elif processes > 1:
        settings.refuse("sync_ref_model", "`SyncReference` needs a reference on one rank")
    elif rest:
        settings.refuse("ref_model_sync_steps", f"a step has {updates} optimizer steps; pass a multiple")
    else:
        moved = call("SyncReference", alpha=alpha)
        if every > 1:
            moved.method = call("when", every=every, start=every - 1)
        plan.insert["sync_reference"] = call("After", "update_actor", moved)
