"""Configurations of verl: ``main_ppo`` and the SFT trainer, with FSDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ImporterError
from flowrl.importers import hydra
from flowrl.importers.plan import GraphPlan, Imported, Name, across, call
from flowrl.importers.settings import Setting, Settings, Table
from flowrl.importers.verl_distill import distillation_of
from flowrl.importers.verl_graph import ACTOR, ROLLOUT, graph_of
from flowrl.importers.words import Word

STARTS = "verl.trainer.main_ppo or verl.trainer.sft_trainer"
MODEL = "actor_rollout_ref.model."
_SFT = ("sft_trainer", "fsdp_sft_trainer")
_DRIVERS = ("main_ppo", "main_dapo", *_SFT)
_REWARDS = {"openai/gsm8k": Name("gsm8k"), "*MATH*": Name("math"), "math_dapo*": Name("math"), "aime*": Name("math")}
"""Of verl's ``default_compute_score``, those that flowrl has for the data of its examples."""


def from_words(words: Sequence[Word]) -> tuple[str, dict[str, Setting], Mapping[str, str]] | None:
    """The part of verl that a command starts, its settings, and options of the launcher; None for other commands."""
    at = next(
        (
            i
            for i, word in enumerate(words)
            if word.text.rpartition(".")[2].removesuffix(".py") in _DRIVERS or Path(word.text).stem in _DRIVERS
        ),
        None,
    )
    if at is None:
        return None
    launcher = hydra.launched(words[:at])
    settings: dict[str, Setting] = {}
    rest = list(words[at + 1 :])
    for index, word in enumerate(rest):
        name, _, value = word.text.partition("=")
        if name in ("--config-name", "--config-path", "-cn", "-cp"):
            text = value or (rest[index + 1].text if index + 1 < len(rest) else "")
            settings[name] = Setting(name, text, word.line)
        elif (setting := hydra.override(word)) is not None:
            settings[setting.key] = setting
    driver = words[at].text
    return "sft" if any(name in driver for name in _SFT) else "main_ppo", settings, launcher


def of_file(path: Path) -> tuple[str, dict[str, Setting]]:
    """The settings of a YAML file."""
    settings = {setting.key: setting for setting in hydra.of_file(path)}
    return "main_ppo" if any(key.startswith("actor_rollout_ref.") for key in settings) else "sft", settings


def imported(part: str, given: Mapping[str, Setting], title: str, launcher: Mapping[str, str]) -> Imported:
    """A configuration as a training of flowrl."""
    settings = Settings(given, Table.of("verl", part))
    _refuse_other_configs(settings)
    return _sft(settings, title, launcher) if part == "sft" else _ppo(settings, title)


def _refuse_other_configs(settings: Settings) -> None:
    """Other trainers of verl, and images."""
    for key in ("--config-name", "-cn"):
        if key in settings and Path(str(settings.get(key))).stem not in (
            "ppo_trainer",
            "sft_trainer_engine",
            "sft_trainer",
        ):
            settings.refuse(key, "flowrl trains by FSDP2 only; Megatron, VeOmni and other engines are not read")
    for key in ("data.image_key", "data.video_key"):
        if key in settings:
            settings.refuse(key, "flowrl trains on text only")
    for key in ("engine", "model_engine", "optim"):
        if key in settings and settings.get(key) not in ("fsdp", "fsdp2", "dp"):
            settings.refuse(key, "flowrl trains by FSDP2 only")
    for key in (f"{ACTOR}strategy", "actor_rollout_ref.ref.strategy", "critic.strategy", "engine.strategy"):
        if key in settings and settings.get(key) not in ("fsdp", "fsdp2"):
            settings.refuse(key, "flowrl trains by FSDP2 only")


def _ppo(settings: Settings, title: str) -> Imported:
    get = settings.get
    functions: list[str] = []
    imports: dict[str, set[str]] = {}
    if get("distillation.enabled"):
        graph, functions, imports = distillation_of(settings)
    else:
        graph = graph_of(settings, _reward(settings))
        _add_reward_model(settings, graph)
    bind = _bindings(settings, graph)
    training = _training(settings, "main_ppo")
    training["data"] = _prompts(settings, "data.train_files")
    validation = _validation(settings)
    if validation is not None and not graph.has_reward:
        settings.differ("trainer.test_freq", "distillation has no reward to validate: no validation is written")
    elif validation is not None:
        if "reward" in graph.replace:
            validation.kwargs["until"] = "text_model_reward"
        training["validation"] = validation
    training["prompts"] = get("data.gen_batch_size") or get("data.train_batch_size")
    get("data.train_batch_size")
    return Imported(title, graph, bind, training, settings, functions, imports)


def _reward(settings: Settings) -> Any:
    """The reward function: a file of the user's, or those of verl by data source."""
    get, name = settings.get, "custom_reward_function."
    managers = ("reward.reward_manager.name", "reward_model.reward_manager", "reward_manager.name")
    for key in managers:
        if get(key, "naive") not in (None, "naive", "dapo", "prime", "gdpo"):
            settings.refuse(key, "write a reward function in its place")
    for prefix in (f"reward.{name}", name):
        if path := settings.known_name(f"{prefix}path"):
            function = f"{path}:{get(f'{prefix}name') or 'compute_score'}"
            kwargs = {
                key.rpartition(".")[2]: get(key) for key in settings.given if key.startswith(f"{prefix}reward_kwargs.")
            }
            return call("from_verl", function, reward_kwargs=kwargs) if kwargs else function
    return call("by_data_source", _REWARDS)


def _add_reward_model(settings: Settings, graph: GraphPlan) -> None:
    """A classifier that scores responses, in place of the reward function."""
    for prefix, path in (("reward.reward_model.", "model_path"), ("reward_model.", "model.path")):
        if settings.get(f"{prefix}enable") and (model := settings.known_name(f"{prefix}{path}")):
            if graph.reward is not None and not isinstance(graph.reward, str):
                graph.reward = None
                graph.replace["reward"] = call("TextModelReward")
            else:
                settings.refuse(f"{prefix}enable", "combine a model and a function by `WeighRewards`")
            graph.bound["reward_model"] = call("TorchRewardModel", model, dtype="bfloat16")


def _bindings(settings: Settings, graph: GraphPlan) -> dict[str, Any]:
    """Backends by role, and the place."""
    get = settings.get
    model = settings.known_name(f"{MODEL}path")
    machines = int(get("trainer.nnodes"))
    gpus = int(get("trainer.n_gpus_per_node")) * machines
    ranks = {"ranks": gpus} if gpus > 1 else {}
    lora = _lora(settings, MODEL)
    bind: dict[str, Any] = {"actor": _trainer(settings, "TorchTrainer", model, f"{ACTOR}", ranks, lora)}
    bind["rollout"] = _engine(settings, model, gpus, None if get(f"{MODEL}lora.merge") else lora)
    ref = "actor_rollout_ref.ref.fsdp_config."
    offload = bool(get(f"{ref}param_offload"))
    if f"{ref}model_dtype" in settings:
        settings.differ(f"{ref}model_dtype", "flowrl keeps float32 weights and computes in bfloat16")
    roles = graph.edited().roles()
    if "ref" in roles:
        bind["ref"] = call(
            "TorchScorer",
            *([] if lora else [model]),
            dtype="bfloat16",
            **({} if lora else ranks),
            offload=offload and not lora,
        )
        if lora:
            bind["ref"] = call("TorchScorer")
    if "critic" in roles:
        critic = settings.known_name("critic.model.path")
        bind["critic"] = _trainer(settings, "TorchCritic", critic, "critic.", ranks, None)
    if "teacher" in roles:
        teacher = settings.known_name("distillation.teacher_models.teacher_model.model_path")
        bind["teacher"] = call("TorchScorer", teacher, dtype="bfloat16", **ranks)
    bind |= graph.bound
    if "reward_model" in graph.bound:
        bind["reward_model"].kwargs |= ranks
    if gpus > 1:
        bind["place"] = call("Colocate", gpus=gpus, **across(machines, gpus))
    return bind


def _trainer(settings: Settings, name: str, model: Any, prefix: str, ranks: Mapping[str, int], lora: Any) -> Any:
    """A trained model with its optimizer."""
    get = settings.get
    fsdp = f"{prefix}fsdp_config." if prefix == ACTOR else f"{prefix}fsdp."
    folder = MODEL if prefix == ACTOR else "critic.model."
    dtype = get(f"{fsdp}dtype", "bfloat16")
    if get(f"{fsdp}model_dtype", "fp32") not in ("fp32", "float32"):
        settings.differ(f"{fsdp}model_dtype", "flowrl keeps float32 weights and computes in bfloat16")
    tokens = get(f"{prefix}ppo_max_token_len_per_gpu") if get(f"{prefix}use_dynamic_bsz") else None
    return call(
        name,
        model,
        optimizer=_optimizer(settings, f"{prefix}optim."),
        schedule=_schedule(settings, f"{prefix}optim.", _updates(settings, prefix)),
        grad_clip=get(f"{prefix}grad_clip") if f"{prefix}grad_clip" in settings else get(f"{prefix}optim.clip_grad"),
        dtype=dtype,
        gradient_checkpointing=_checkpointing(settings, folder),
        max_tokens=tokens,
        **ranks,
        offload=_offload(settings, fsdp) if name == "TorchTrainer" else False,
        reshard_after_forward=bool(get(f"{fsdp}reshard_after_forward", True)),
        **({"lora": lora} if lora else {}),
    )


def _offload(settings: Settings, prefix: str) -> bool | str:
    """What is in CPU memory."""
    parameters, optimizer = (bool(settings.get(f"{prefix}{part}_offload")) for part in ("param", "optimizer"))
    return parameters if parameters == optimizer else "parameters" if parameters else "optimizer"


def _checkpointing(settings: Settings, prefix: str) -> bool | str:
    """Which layers are recomputed, of a model whose keys begin with `prefix`."""
    recomputes = bool(settings.get(f"{prefix}enable_gradient_checkpointing"))
    if not settings.get(f"{prefix}enable_activation_offload"):
        return recomputes
    if not recomputes:
        settings.differ(f"{prefix}enable_activation_offload", "flowrl recomputes layers whose inputs are offloaded")
    return "offload"


def _optimizer(settings: Settings, prefix: str) -> Any:
    get = settings.get
    bits = {"bits": 8} if get(f"{prefix}optimizer") == "AdamW8bit" else {}
    if not bits and get(f"{prefix}optimizer") not in ("AdamW", None):
        settings.refuse(f"{prefix}optimizer", "flowrl has `AdamW`, `Muon` and `SGD`; write an `Optimizer` for another")
    betas = tuple(float(beta) for beta in get(f"{prefix}betas"))
    decay = float(get(f"{prefix}weight_decay"))
    return call("AdamW", lr=float(get(f"{prefix}lr")), betas=betas, weight_decay=decay, **bits)


def _schedule(settings: Settings, prefix: str, updates: int) -> Any:
    """The schedule of the learning rate, over all optimizer steps: `updates` in each step of verl."""
    get = settings.get
    kind = get(f"{prefix}warmup_style") or get(f"{prefix}lr_scheduler_type")
    steps, share, least = (
        get(f"{prefix}{name}") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio")
    )
    warmup = max(0, steps or 0) * updates or float(share or 0.0)
    if f"{prefix}total_training_steps" in settings:
        settings.differ(f"{prefix}total_training_steps", "without effect: verl sets the length of the run")
    if kind not in ("constant", "cosine"):
        settings.refuse(f"{prefix}lr_scheduler_type", "flowrl has Constant, Cosine, Linear and WSD; write a `Schedule`")
    if kind != "cosine" and not warmup:
        return call("Constant", 1.0)
    if updates > 1:
        settings.differ(
            f"{prefix}lr_scheduler_type",
            f"verl changes the learning rate after each step, flowrl after each of its {updates} optimizer steps",
        )
    more = {"warmup": warmup} if warmup else {}
    return call("Cosine", 1.0, float(least or 0.0), **more) if kind == "cosine" else call("Constant", 1.0, **more)


def _updates(settings: Settings, prefix: str) -> int:
    """The optimizer steps of a role in each step of verl."""
    mini, prompts = settings.get(f"{prefix}ppo_mini_batch_size"), settings.get("data.train_batch_size")
    return int(settings.get(f"{prefix}ppo_epochs")) * max(1, -(-int(prompts) // int(mini)))


def _lora(settings: Settings, prefix: str) -> Any:
    get = settings.get
    rank = get(f"{prefix}lora_rank")
    if not rank:
        return None
    targets = get(f"{prefix}target_modules")
    targets = targets if isinstance(targets, str) else tuple(targets)
    path = settings.name(f"{prefix}lora_adapter_path")
    start = {} if path is None else {"adapter_path": path}
    return call("LoRA", r=rank, alpha=float(get(f"{prefix}lora_alpha")), targets=targets, **start)


def _engine(settings: Settings, model: Any, gpus: int, lora: Any) -> Any:
    """The rollout engine."""
    get = settings.get
    name = get(f"{ROLLOUT}name")
    engines = {"sglang": "SGLang", "vllm": "VLLM"}
    if name not in engines:
        settings.refuse(f"{ROLLOUT}name", "flowrl samples by vLLM, SGLang, or its own `TorchRollout`")
    engine = engines.get(name, "VLLM")
    tensor = min(int(get(f"{ROLLOUT}tensor_model_parallel_size")), gpus)
    args = {}
    if get(f"{ROLLOUT}enforce_eager"):
        args["enforce_eager" if engine == "VLLM" else "disable_cuda_graph"] = True
    for other in {*engines} - {name}:
        for key in settings.given:
            if key.startswith(f"{ROLLOUT}engine_kwargs.{other}."):
                settings.differ(key, f"without effect, because the engine is {name}")
    prefix = f"{ROLLOUT}engine_kwargs.{name}."
    args |= {key.removeprefix(prefix): get(key) for key in settings.given if key.startswith(prefix)}
    return call(
        engine,
        model,
        tensor_parallel=tensor,
        ranks=max(1, gpus // tensor),
        dtype=get(f"{ROLLOUT}dtype"),
        memory_fraction=float(get(f"{ROLLOUT}gpu_memory_utilization")),
        max_model_len=get(f"{ROLLOUT}max_model_len"),
        max_num_seqs=get(f"{ROLLOUT}max_num_seqs"),
        prefix_caching=get(f"{ROLLOUT}enable_prefix_caching"),
        **({"lora": lora} if lora else {}),
        **({"engine_args": args} if args else {}),
    )


def _prompts(settings: Settings, key: str) -> Any:
    """A source of prompts."""
    get = settings.get
    drop = bool(get("data.filter_overlong_prompts"))
    if get("data.truncation") not in ("error", None) and not drop:
        settings.differ("data.truncation", "flowrl cuts no prompt: a longer one is an error")
    elif drop:
        get("data.truncation")
    columns = {}
    for name, column in {"prompt_key": "prompt", "reward_fn_key": "data_source"}.items():
        if (given := get(f"data.{name}")) != column:
            columns[column] = given
    template = {
        k.rpartition(".")[2]: get(k) for k in settings.given if k.startswith("data.apply_chat_template_kwargs.")
    }
    return call(
        "PromptData",
        _paths(settings, key),
        max_prompt_length=get("data.max_prompt_length"),
        overlong="drop" if drop else "error",
        shuffle=bool(get("data.shuffle" if key == "data.train_files" else "data.validation_shuffle")),
        **({"chat_template_kwargs": template} if template else {}),
        **({"columns": columns} if columns else {}),
    )


def _paths(settings: Settings, key: str) -> Any:
    value = settings.get(key)
    paths = tuple(map(str, value)) if isinstance(value, list) else str(value)
    return paths[0] if isinstance(paths, tuple) and len(paths) == 1 else paths


def _validation(settings: Settings) -> Any:
    """Validation every so many steps; none without a period."""
    get, prefix = settings.get, f"{ROLLOUT}val_kwargs."
    every = get("trainer.test_freq")
    if not get("data.val_files") or every is None or every <= 0:
        get("data.val_files")
        for key in settings.given:
            if key.startswith(prefix) or key in ("trainer.val_before_train", "data.val_batch_size"):
                settings.differ(key, "without effect, because no validation is written: trainer.test_freq is -1")
        return None
    changes: dict[str, Any] = {}
    if get(f"{prefix}do_sample"):
        changes["generate.temperature"] = float(get(f"{prefix}temperature"))
        changes["generate.top_p"], changes["generate.top_k"] = (
            float(get(f"{prefix}top_p")),
            max(0, get(f"{prefix}top_k")),
        )
    else:
        for name in ("temperature", "top_p", "top_k"):
            if f"{prefix}{name}" in settings:
                settings.differ(f"{prefix}{name}", "without effect, because do_sample is False")
    if (count := get(f"{prefix}n")) != 1:
        changes["repeat.n"] = count
    if "trainer.val_before_train" in settings and not get("trainer.val_before_train"):
        settings.differ("trainer.val_before_train", "flowrl always validates before the first step")
    more = {"changes": changes} if changes else {}
    batch = get("data.val_batch_size")
    return call(
        "Validation", _prompts(settings, "data.val_files"), every=every, **more, **({"batch": batch} if batch else {})
    )


def _training(settings: Settings, part: str) -> dict[str, Any]:
    """Length, folder and checkpoints."""
    get = settings.get
    steps = get("trainer.total_training_steps")
    kept, saved = get("trainer.max_actor_ckpt_to_keep"), get("trainer.save_freq")
    get("trainer.max_critic_ckpt_to_keep"), get("trainer.max_ckpt_to_keep"), get("trainer.resume_from_path")
    names = [settings.name(f"trainer.{name}") for name in ("project_name", "experiment_name")]
    folder = settings.name("trainer.default_local_dir") if "trainer.default_local_dir" in settings else None
    seed = get("data.seed") if part == "main_ppo" else get("trainer.seed")
    if "trainer.logger" in settings:
        trackers = [name for name in _listed(get("trainer.logger")) if name != "console"]
        if trackers:
            settings.differ("trainer.logger", f"pass --report {' --report '.join(trackers)} to `flowrl run`")
    if steps and "trainer.total_epochs" in settings:
        settings.differ("trainer.total_epochs", f"without effect, because trainer.total_training_steps is {steps}")
    if get("trainer.resume_mode") == "auto" and "trainer.resume_mode" in settings:
        settings.differ("trainer.resume_mode", 'resume="or-start"')
    return {
        "data": None,
        "steps": steps,
        "epochs": None if steps else get("trainer.total_epochs"),
        "prompts": None,
        **({"seed": seed} if seed else {}),
        "folder": folder or "/".join(["runs", *(name for name in names if name)]),
        "checkpoint_every": saved if saved and saved > 0 else None,
        **({"max_checkpoints": kept} if kept else {}),
        **({"resume": "or-start"} if get("trainer.resume_mode") == "auto" else {}),
        **({"rollouts_every": 1} if settings.name("trainer.rollout_data_dir") else {}),
    }


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _sft(settings: Settings, title: str, launcher: Mapping[str, str]) -> Imported:
    get = settings.get
    gpus = settings.gpus(launcher, "set ranks= and place= in the file for more")
    graph = GraphPlan("sft", has_reward=False)
    lora = _lora(settings, "model.")
    actor = call(
        "TorchTrainer",
        settings.known_name("model.path"),
        optimizer=_optimizer(settings, "optim."),
        schedule=_schedule(settings, "optim.", 1),
        grad_clip=get("optim.clip_grad"),
        dtype=get("engine.dtype", "bfloat16"),
        gradient_checkpointing=_checkpointing(settings, "model."),
        max_tokens=get("data.max_token_len_per_gpu") if get("data.use_dynamic_bsz") else None,
        **({"ranks": gpus} if gpus > 1 else {}),
        offload=_offload(settings, "engine."),
        reshard_after_forward=bool(get("engine.reshard_after_forward", True)),
        **({"lora": lora} if lora else {}),
    )
    if get("data.truncation") not in ("error", None):
        settings.differ("data.truncation", "flowrl cuts no row: a longer one is an error")
    if get("data.max_length"):
        settings.differ("data.max_length", "the limit of prompt and response together; each has it in flowrl")
    length = {"max_prompt_length": get("data.max_length"), "max_response_length": get("data.max_length")}
    training = _training(settings, "sft")
    training["data"] = call("DemoData", _paths(settings, "data.train_files"), **length)
    training["prompts"] = get("data.train_batch_size")
    if get("trainer.test_freq", -1) > 0 and get("data.val_files"):
        settings.refuse("trainer.test_freq", "a loss on held-out demonstrations is not a validation of flowrl")
    elif "data.val_files" in settings:
        get("data.val_files")
        settings.differ("data.val_files", "not read, because trainer.test_freq is -1")
    bind = {"actor": actor}
    if gpus > 1:
        bind["place"] = call("Colocate", gpus=gpus, **across(int(launcher["machines"]), gpus))
    return Imported(title, graph, bind, training, settings)


__all__ = ["ImporterError", "from_words", "imported", "of_file"]
