"""Scripts of OpenRLHF: ``train_ppo_ray``, ``train_sft`` and ``train_dpo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.importers.hydra import flags, launched
from flowrl.importers.openrlhf_graph import graph_of
from flowrl.importers.plan import GraphPlan, Imported, across, call
from flowrl.importers.settings import Setting, Settings, Table, is_file
from flowrl.importers.words import Word

STARTS = "openrlhf.cli.train_ppo_ray, train_sft or train_dpo"
_COMMANDS = ("train_ppo_ray", "train_sft", "train_dpo")


def from_words(words: Sequence[Word]) -> tuple[str, dict[str, Setting], Mapping[str, str]] | None:
    """The command of OpenRLHF that a command line starts, and its flags; None for other command lines."""
    names = [
        Path(word.text).stem.rpartition(".")[2] if "/" in word.text else word.text.rpartition(".")[2] for word in words
    ]
    at = next((index for index, name in enumerate(names) if name in _COMMANDS), None)
    if at is None:
        return None
    return names[at], flags(words[at + 1 :]), launched(words[:at])


def imported(part: str, given: Mapping[str, Setting], title: str, launcher: Mapping[str, str]) -> Imported:
    """A command as a training of flowrl."""
    settings = Settings(given, Table.of("openrlhf", part))
    if part == "train_ppo_ray":
        return _ppo(settings, title)
    return _supervised(settings, part, title, launcher)


def _ppo(settings: Settings, title: str) -> Imported:
    get = settings.get
    graph = graph_of(settings)
    bind = _bindings(settings, graph)
    columns = {"prompt": get("data.input_key"), "ground_truth": get("data.label_key")}
    training = _training(settings)
    training["epochs"] = get("train.num_episodes")
    training["prompts"] = get("rollout.batch_size")
    training["data"] = _data(settings, "PromptData", "prompt_", columns)
    if validation := _validation(settings, graph, columns):
        training["validation"] = validation
    return Imported(title, graph, bind, training, settings)


def _bindings(settings: Settings, graph: GraphPlan) -> dict[str, Any]:
    """Backends by role, and the place."""
    get = settings.get
    model = settings.known_name("actor.model_name_or_path")
    gpus = int(get("actor.num_gpus_per_node")) * (machines := int(get("actor.num_nodes")))
    tensor = int(get("vllm.tensor_parallel_size"))
    engines = int(get("vllm.num_engines") or max(1, gpus // tensor))
    ranks = {"ranks": gpus} if gpus > 1 else {}
    lora = _lora(settings)
    bind = {
        "actor": _trainer(settings, "TorchTrainer", model, "actor.", ranks, lora),
        "rollout": call(
            "VLLM",
            model,
            tensor_parallel=tensor,
            ranks=engines,
            memory_fraction=float(get("vllm.gpu_memory_utilization")),
            prefix_caching=bool(get("vllm.enable_prefix_caching")),
            **({"engine_args": {"enforce_eager": True}} if get("vllm.enforce_eager") else {}),
        ),
    }
    roles = graph.edited().roles()
    if "ref" in roles:
        offload = bool(get("ref.offload"))
        bind["ref"] = (
            call("TorchScorer")
            if lora
            else call("TorchScorer", model, dtype=_dtype(settings), **ranks, offload=offload)
        )
    if "critic" in roles:
        reward = None if graph.reward else settings.name("reward.model_name_or_path")
        critic = settings.name("critic.model_name_or_path") or reward or model
        bind["critic"] = _trainer(settings, "TorchCritic", critic, "critic.", ranks, None)
    if "reward_model" in roles:
        reward = settings.name("reward.model_name_or_path")
        bind["reward_model"] = call(
            "TorchRewardModel",
            reward,
            normalize=bool(get("reward.normalize_enable")),
            dtype=_dtype(settings),
            **ranks,
            offload=bool(get("reward.offload")),
        )
    if get("reward.normalize_enable"):
        what = "the critic's values are not" if "reward_model" in roles else "scores of a function are not, nor values"
        settings.differ("reward.normalize_enable", f"{what} normalized by the mean and std of the reward model")
    if (place := _place(settings, gpus, machines, engines, tensor)) is not None:
        bind["place"] = place
    return bind


def _place(settings: Settings, gpus: int, machines: int, engines: int, tensor: int) -> Any:
    """The place of trainers on `gpus` of `machines`, and of engines of `tensor` GPUs each; None is one process."""
    near = across(machines, gpus)
    if settings.get("train.colocate_all"):
        return call("Colocate", gpus=gpus, **near) if gpus > 1 else None
    if near and near["per_machine"] % tensor:  # an engine shares a machine, which has more GPUs than these
        settings.differ("actor.num_gpus_per_node", "Ray chooses the machines; set per_machine= of the place")
        del near["per_machine"]
    return call("Split", train=gpus, rollout=engines * tensor, **near)


def _validation(settings: Settings, graph: GraphPlan, columns: Mapping[str, Any]) -> Any:
    """Validation every so many steps; None without a period or a data set."""
    get = settings.get
    every, name = get("eval.steps"), settings.name("eval.dataset")
    if name is None or every in (-1, None):
        return None
    changes = {"generate.temperature": float(get("eval.temperature")), "repeat.n": get("eval.n_samples_per_prompt")}
    split = {} if is_file(name) else {"split": get("eval.split")}
    named = {own: other for own, other in columns.items() if own != other}
    return call(
        "Validation",
        call("PromptData", name, **split, **({"columns": named} if named else {})),
        every=every,
        changes=changes,
        **({} if graph.reward else {"until": "text_model_reward"}),
    )


def _supervised(settings: Settings, part: str, title: str, launcher: Mapping[str, str]) -> Imported:
    """SFT and DPO."""
    get = settings.get
    gpus = settings.gpus(launcher, "set ranks= and place= in the file for more")
    model = settings.known_name("model.model_name_or_path")
    lora = _lora(settings)
    ranks = {"ranks": gpus} if gpus > 1 else {}
    bind = {"actor": _trainer(settings, "TorchTrainer", model, "", ranks, lora)}
    if gpus > 1:
        bind["place"] = call("Colocate", gpus=gpus, **across(int(launcher["machines"]), gpus))
    training = _training(settings)
    if get("eval.steps") not in (-1, None) and get("eval.dataset"):
        settings.refuse("eval.dataset", "a loss on held-out rows is not written; pass validation= to `Training`")
    training["epochs"], training["prompts"] = get("train.max_epochs"), get("train.batch_size")
    if part == "train_sft":
        graph = GraphPlan("sft", has_reward=False)
        columns = {"prompt": get("data.input_key"), "response": get("data.output_key")}
        if get("data.multiturn") or not columns["response"]:
            columns = {"messages": columns["prompt"]}
        training["data"] = _data(settings, "DemoData", "", columns)
    else:
        beta, smoothing = float(get("model.beta")), float(get("model.label_smoothing"))
        graph = GraphPlan("dpo", {"beta": beta, "label_smoothing": smoothing}, has_reward=False)
        if get("model.ipo_enable"):
            graph = GraphPlan("ipo", {"tau": beta}, has_reward=False)
            if smoothing:
                settings.differ("model.label_smoothing", "without effect, because model.ipo_enable is on")
        ref = settings.name("ref.model_name_or_path") or model
        bind["ref"] = call("TorchScorer", ref, dtype=_dtype(settings), **ranks, offload=bool(get("ref.offload")))
        columns = {name: get(f"data.{name}_key") for name in ("prompt", "chosen", "rejected")}
        training["data"] = _data(settings, "PreferenceData", "", {k: v for k, v in columns.items() if v})
    return Imported(title, graph, bind, training, settings)


def _dtype(settings: Settings) -> str:
    name = settings.get("ds.param_dtype")
    if name not in ("bf16", "fp32"):
        settings.refuse("ds.param_dtype", "flowrl trains in bfloat16 over float32 weights, or in float32")
    return "float32" if name == "fp32" else "bfloat16"


def _trainer(settings: Settings, name: str, model: Any, prefix: str, ranks: Mapping[str, int], lora: Any) -> Any:
    """A trained model with its optimizer and the schedule of its learning rate."""
    get = settings.get
    if get(f"{prefix}optim") != "adam":
        settings.refuse(f"{prefix}optim", "flowrl has `AdamW`, `Muon` and `SGD`; write an `Optimizer` for another")
    adam = f"{prefix}adam."
    betas = tuple(float(beta) for beta in get(f"{adam}betas"))
    optimizer = {"lr": float(get(f"{adam}lr")), "betas": betas, "eps": float(get(f"{adam}eps"))}
    key = "actor.gradient_checkpointing_enable" if prefix else "model.gradient_checkpointing_enable"
    balancing = get("actor.aux_loss_coef" if prefix else "model.aux_loss_coef")
    return call(
        name,
        model,
        optimizer=call("AdamW", **optimizer, weight_decay=float(get(f"{adam}weight_decay"))),
        schedule=_schedule(settings, prefix),
        grad_clip=float(get(f"{prefix}max_norm")),
        dtype=_dtype(settings),
        gradient_checkpointing=bool(get(key)),
        **ranks,
        **({"offload": "optimizer"} if get("ds.adam_offload") else {}),
        **({"lora": lora} if lora else {}),
        **({"router_aux_loss_coef": float(balancing)} if name == "TorchTrainer" and balancing else {}),
    )


def _schedule(settings: Settings, prefix: str) -> Any:
    """The schedule of the learning rate over the optimizer steps of the run, by its name in transformers."""
    get = settings.get
    key = f"{prefix}lr_scheduler"
    kind, share, least = get(key), float(get(f"{prefix}lr_warmup_ratio")), float(get(f"{prefix}min_lr_ratio"))
    warmup = {"warmup": share} if share else {}
    match kind:
        case "constant":  # transformers' has no warm-up
            return call("Constant", 1.0)
        case "constant_with_warmup":
            return call("Constant", 1.0, **warmup)
        case "cosine_with_min_lr":
            return call("Cosine", 1.0, least, **warmup)
        case "cosine" | "linear":
            return call(kind.capitalize(), 1.0, 0.0, **warmup)
    settings.refuse(key, "flowrl has constant, linear and cosine learning rates; write a `Schedule`")
    return call("Constant", 1.0)


def _lora(settings: Settings) -> Any:
    get = settings.get
    if not (rank := get("ds.lora.rank")):
        return None
    targets = get("ds.lora.target_modules")
    targets = tuple(targets) if isinstance(targets, list) else targets
    return call("LoRA", r=rank, alpha=float(get("ds.lora.alpha")), targets=targets)


def _data(settings: Settings, source: str, kind: str, columns: Mapping[str, Any]) -> Any:
    """A source of rows: a file, or a data set on the Hub with its split."""
    get = settings.get
    name, split = str(settings.name(f"data.{kind}dataset")), get(f"data.{kind or 'dataset_'}split")
    longest = get("data.max_len")
    own = "the prompt has it, and the response rollout.max_new_tokens" if kind else "each has it"
    settings.differ("data.max_len", f"the limit of prompt and response together; in flowrl {own}")
    if get("data.max_samples") is not None and "data.max_samples" in settings:
        split = f"{split}[:{get('data.max_samples')}]"
    named = {own: other for own, other in columns.items() if own != other}
    template = get("data.apply_chat_template")
    if not template and "data.apply_chat_template" in settings.table.defaults:
        settings.differ("data.apply_chat_template", "flowrl always applies the chat template of the model")
    return call(
        source,
        name,
        max_prompt_length=longest,
        **({} if kind else {"max_response_length": longest}),
        overlong="drop",
        **({} if is_file(name) else {"split": split}),
        **({"columns": named} if named else {}),
    )


def _training(settings: Settings) -> dict[str, Any]:
    get = settings.get
    saved, folder = get("ckpt.save_steps"), settings.name("ckpt.output_dir") or "runs"
    for key in ("ckpt.path", "ckpt.save_hf"):
        if key in settings:
            settings.differ(key, "checkpoints and the trained model are in the folder of the run")
    return {
        "data": None,
        "epochs": None,
        "prompts": None,
        "seed": get("train.seed"),
        "folder": folder,
        "checkpoint_every": saved if saved and saved > 0 else None,
        "max_checkpoints": get("ckpt.max_num"),
        **({"resume": "or-start"} if get("ckpt.load_enable") else {}),
    }
