"""The graph of TRL's GRPO and RLOO."""

from __future__ import annotations

from typing import Any

from flowrl.importers.plan import GraphPlan, Name, call
from flowrl.importers.settings import Settings

VLLM_CORRECTION = "vllm_importance_sampling_"
_MEANS = {
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "sapo": "seq-mean-token-mean",
}
"""By ``loss_type``, the aggregation."""
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_SAMPLING = ("ignore_eos", "min_p", "temperature", "top_k", "top_p", *_PENALTIES)
_OF_STEP = "a mean over the tokens of an optimizer step"

LOSS_IMPORTS: dict[str, set[str]] = {
    "flowrl": {"Loss"},
    "flowrl.columns": {"Advantages", "LogProbs", "OldLogProbs", "ResponseMask"},
    "torch": {"Tensor"},
}
"""What the source of a loss needs, by module."""

_OWN = '''class {name}(Loss):
    """{summary}"""

    unit = "row"

    def __call__(
        self, log_probs: LogProbs, old_log_probs: OldLogProbs, advantages: Advantages, response_mask: ResponseMask
    ) -> Tensor:
        tokens = response_mask.sum(-1).clamp(min=1)
        ratio = {ratio}.exp()
        advantage = advantages.sum(-1) / tokens
        return -(ratio * advantage).minimum(ratio.clamp({low}, {high}) * advantage){scale}
'''
_SUM = "(log_probs - old_log_probs).sum(-1)"


class OptimizerSteps:
    """How rows become optimizer steps in TRL: ``steps_per_generation``, accumulation and iterations.

    Attributes:
        rows: rows of a generation, over all processes.
        mini_batch: rows of an optimizer step; None for all.
        updates: optimizer steps for a generation.
        accumulates: whether an optimizer step is the mean over several passes, or processes.
    """

    def __init__(self, settings: Settings, processes: int) -> None:
        get = settings.get
        each, accumulation = int(get("per_device_train_batch_size")), int(get("gradient_accumulation_steps"))
        passes, given = get("steps_per_generation"), get("generation_batch_size")
        if passes is not None and given is not None:
            settings.refuse("generation_batch_size", "TRL refuses it together with steps_per_generation")
        elif given is not None:
            passes, rest = divmod(int(given), each * processes)
            if rest:
                settings.refuse("generation_batch_size", f"TRL needs a multiple of {each * processes}")
        passes = int(passes or accumulation)
        if passes % accumulation:
            settings.refuse(
                "steps_per_generation" if "steps_per_generation" in settings else "gradient_accumulation_steps",
                f"an optimizer step of {accumulation} passes over rows of several generations, here {passes} each",
            )
            passes = accumulation
        n = int(get("num_generations"))
        self.rows = each * passes * processes
        if self.rows % n:
            settings.refuse("num_generations", f"TRL needs a divisor of the {self.rows} rows of a generation")
        self.prompts = max(1, self.rows // n)
        self.mini_batch = None if passes == accumulation else each * accumulation * processes
        self.updates = passes // accumulation * int(get("num_iterations"))
        self.accumulates = accumulation * processes > 1


def _sampling(settings: Settings, steps: OptimizerSteps) -> dict[str, Any]:
    get = settings.get
    return {
        "n": int(get("num_generations")),
        "temperature": float(get("temperature")),
        "max_new_tokens": int(get("max_completion_length")),
        "ppo_epochs": int(get("num_iterations")),
        "mini_batch": steps.mini_batch,
    }


def _add_sampling(settings: Settings, plan: GraphPlan) -> None:
    """Further parameters of the engine."""
    get = settings.get
    plan.wanted |= {"generate.top_p": float(get("top_p")), "generate.top_k": max(0, int(get("top_k") or 0))}
    plan.wanted |= {"generate.min_p": float(get("min_p") or 0.0)}
    plan.wanted |= {"generate.repetition_penalty": float(get("repetition_penalty"))}
    given = settings.entries("generation_kwargs")
    for name, value in given.items():
        if name in ("stop", "stop_token_ids"):
            plan.wanted[f"generate.{name}"] = tuple(value) if isinstance(value, list | tuple) else (value,)
        elif name in _SAMPLING:
            plan.wanted[f"generate.{name}"] = value
        else:
            key = "generation_kwargs" if "generation_kwargs" in settings else f"generation_kwargs.{name}"
            settings.refuse(key, f"`Generate` has no {name}")
    if get("mask_truncated_completions"):
        most = plan.settings["max_new_tokens"]
        settings.differ(
            "mask_truncated_completions",
            f"a response of {most} tokens counts as truncated, also if it ends there; means are over the other rows",
        )
        after = "rloo_advantage" if plan.algorithm == "rloo" else "group_advantage"
        plan.insert["mask_overlong"] = call("After", after, call("MaskOverlong", most - 1))
        plan.wire["update_actor.rollout.response_mask"] = "mask_overlong.response_mask"


def grpo(settings: Settings, steps: OptimizerSteps) -> GraphPlan:
    """GRPO with its losses."""
    get = settings.get
    kind, level = str(get("loss_type")), str(get("importance_sampling_level"))
    normalized = get("multi_objective_aggregation") == "normalize_then_sum"
    plan = GraphPlan("gdpo" if normalized else "grpo", _sampling(settings, steps))
    loss = _loss(settings, kind, level)
    if loss.name == "PPOClip":
        plan.settings["clip"] = loss.args[0]
    plan.wanted |= {"update_actor.loss": loss, "update_actor.aggregation": _MEANS.get(kind, "token-mean")}
    if kind == "dr_grpo":
        plan.wanted["update_actor.norm"] = float(plan.settings["max_new_tokens"])
    _add_sampling(settings, plan)
    _say_means(settings, kind, steps)
    _add_kl(settings, plan, level)
    _add_entropy(settings, plan, kind, steps)
    return plan


def _loss(settings: Settings, kind: str, level: str) -> Any:
    """The policy loss."""
    get = settings.get
    low, given = float(get("epsilon")), get("epsilon_high")
    high, delta = low if given is None else float(given), get("delta")
    if level not in ("token", "sequence"):
        settings.refuse("importance_sampling_level", "TRL has token and sequence")
    if kind not in _MEANS:
        settings.refuse("loss_type", f"flowrl has {', '.join(_MEANS)}; write a `Loss` for another")
    if float(get("top_entropy_quantile")) < 1:
        settings.refuse("top_entropy_quantile", 'write a `Loss` of unit "batch" that reads `Entropies`')
    if get("off_policy_mask_threshold") is not None:
        settings.refuse("off_policy_mask_threshold", "`RolloutCorrection` rejects rows whatever their advantage")
    if kind in ("cispo", "sapo"):
        if level == "sequence":
            settings.refuse("importance_sampling_level", f"flowrl has {kind} with the ratio of each token")
        if delta is not None:
            settings.differ("delta", f"TRL's {kind} does not read it")
    if kind == "sapo":
        return call("SAPO", float(get("sapo_temperature_pos")), float(get("sapo_temperature_neg")))
    if kind == "cispo":  # TRL's bound is the weight itself, not its distance to 1
        if high <= 1:
            settings.refuse("epsilon_high", f"TRL's cispo caps weights at it: {high:g} caps even a ratio of 1")
            high = 5.0
        return call("CISPO", clip_high=high - 1.0)
    if not 0 < low < 1:
        settings.refuse("epsilon", "a lower bound of the ratio is above 0")
        low = 0.2
    if level == "sequence":
        if delta is not None:
            settings.refuse("delta", "`GSPO` has no further bound")
        return call("GSPO", low, high)
    if delta is not None and float(delta) <= 1 + high:
        settings.refuse("delta", f"`dual_clip` bounds ratios above 1 + epsilon_high = {1 + high:g}")
        delta = None
    return call("PPOClip", low, clip_high=None if high == low else high, dual_clip=delta and float(delta))


def _say_means(settings: Settings, kind: str, steps: OptimizerSteps) -> None:
    """Where TRL averages other rows than those of an optimizer step."""
    if kind == "bnpo" and steps.accumulates:
        settings.differ(
            "loss_type", "a mean over the tokens of an optimizer step; TRL's is the mean of those of its passes"
        )
    if kind in ("dapo", "cispo") and steps.mini_batch is not None:
        settings.differ(
            "loss_type", "a mean over the tokens of an optimizer step; TRL divides by the mean of all steps"
        )


def _add_kl(settings: Settings, plan: GraphPlan, level: str) -> None:
    """KL to the reference in the loss, by k3."""
    get = settings.get
    beta, corrected = float(get("beta")), bool(get("use_bias_correction_kl"))
    plan.settings["kl_coef"] = beta
    plan.wanted["update_actor.kl"] = call("KLLoss", "k3", beta, ratio=corrected) if beta else None
    if beta and corrected and level == "sequence":
        settings.refuse("use_bias_correction_kl", "`KLLoss` has the ratio of each token; set it to False")
    if not beta and "use_bias_correction_kl" in settings:
        settings.differ("use_bias_correction_kl", "without effect, because beta is 0")


def _add_entropy(settings: Settings, plan: GraphPlan, kind: str, steps: OptimizerSteps) -> None:
    coef = float(settings.get("entropy_coef") or 0.0)
    plan.wanted["update_actor.entropy"] = coef
    if not coef:
        return
    if _MEANS.get(kind) != "token-mean":
        settings.refuse("entropy_coef", f"flowrl averages the entropy as the loss, TRL's {kind} over tokens")
    elif steps.accumulates:
        settings.differ("entropy_coef", f"{_OF_STEP}; TRL's is the mean of those of its passes")
    if coef < 0:
        settings.refuse("entropy_coef", "flowrl has a bonus only")


def scale_advantages(settings: Settings, plan: GraphPlan) -> None:
    """Group-relative advantages with TRL's scale, and its eps."""
    kind = settings.get("scale_rewards")
    kind = {True: "group", False: "none"}.get(kind, kind) if isinstance(kind, bool) else kind
    if plan.algorithm == "gdpo":
        plan.wanted["gdpo_advantage.eps"] = 1e-4
        if "scale_rewards" in settings:
            settings.differ("scale_rewards", "TRL's normalize_then_sum does not read it")
        return
    if kind not in ("group", "none", "batch"):
        settings.refuse("scale_rewards", "TRL has group, batch and none")
    plan.wanted["group_advantage.normalize_std"] = kind == "group"
    if kind == "group":
        plan.wanted["group_advantage.eps"] = 1e-4
    if kind == "batch":
        scaled = call("NormalizeReward", "batch", shift_mean=False, eps=1e-4)
        plan.insert["normalize_reward"] = call("After", "reward", scaled)


def add_correction(settings: Settings, plan: GraphPlan) -> None:
    """TRL's weights for the mismatch between vLLM and the trainer, on by default."""
    get = settings.get
    mode, low = str(get(f"{VLLM_CORRECTION}mode")), get(f"{VLLM_CORRECTION}clip_min")
    cap = get(f"{VLLM_CORRECTION}cap")
    high = cap if cap is not None else get(f"{VLLM_CORRECTION}clip_max")
    if not get("use_vllm"):
        return
    if not get(f"{VLLM_CORRECTION}correction"):
        return
    level, _, way = mode.partition("_")
    if level not in ("token", "sequence") or way not in ("truncate", "mask"):
        settings.refuse(f"{VLLM_CORRECTION}mode", "TRL has token_ and sequence_ with truncate and mask")
        return
    if way == "truncate" and low is not None and high is not None:
        way = "clip"
    if (way == "truncate" or low is None) and high is None:
        settings.refuse(f"{VLLM_CORRECTION}clip_max", "`RolloutCorrection` needs a bound")
        return
    if level == "token" and get("importance_sampling_level") == "sequence":
        settings.refuse(f"{VLLM_CORRECTION}mode", "weights of tokens need the ratio of tokens: take sequence_")
    bounds = {"low": low and float(low), "high": None if high is None else float(high)}
    after = "gdpo_advantage" if plan.algorithm == "gdpo" else "group_advantage"
    plan.insert["correction"] = call("After", after, call("RolloutCorrection", level, way, **bounds))


def rloo(settings: Settings, steps: OptimizerSteps) -> GraphPlan:
    """RLOO."""
    get = settings.get
    beta = float(get("beta"))
    plan = GraphPlan("rloo", {**_sampling(settings, steps), "kl_coef": beta})
    _add_sampling(settings, plan)
    if not beta:
        plan.drop.append("kl_shape")
    plan.wanted["kl_shape.estimator"] = "k1"
    if get("normalize_advantages"):
        settings.refuse("normalize_advantages", "`Whiten` weighs rows by their tokens; write an operator")
    if steps.updates == 1:
        for key in ("epsilon", "epsilon_high"):
            if key in settings:
                settings.differ(key, "without effect, because a generation has one optimizer step")
    return plan


def own_loss(settings: Settings, plan: GraphPlan, steps: OptimizerSteps) -> str | None:
    """The source of a loss that flowrl does not have: those of whole responses, of RLOO in several steps and LUSPO."""
    get = settings.get
    low, high = float(get("epsilon")), get("epsilon_high")
    bounds = {"low": 1 - low, "high": 1 + (low if high is None else float(high))}
    if plan.algorithm == "rloo":
        if steps.updates == 1:  # every ratio is 1
            return None
        name, ratio, scale = "ResponseClip", _SUM, ""
        summary = "TRL's RLOO: the clipped surrogate of the ratio of a whole response."
    elif (get("loss_type"), get("importance_sampling_level")) == ("luspo", "sequence"):
        name, ratio, scale = "LUSPO", f"({_SUM} / tokens)", " * tokens"
        summary = "TRL's luspo: the clipped ratio of a response, as in GSPO, times its tokens."
        if float(get("beta")):
            settings.refuse("beta", "flowrl averages KL as the loss, TRL's luspo sums it over tokens")
        plan.wanted.pop("update_actor.loss")
    else:
        return None
    plan.wanted["update_actor.aggregation"] = "seq-mean-token-mean"
    plan.own["update_actor.loss"] = Name(f"{name}()")
    return _OWN.format(name=name, summary=summary, ratio=ratio, scale=scale, **bounds)


def clip_reward(settings: Settings, plan: GraphPlan) -> None:
    """RLOO's bounds of the reward, before KL."""
    if bounds := settings.get("reward_clip_range"):
        low, high = map(float, bounds)
        plan.insert["clip_reward"] = call("After", "reward", call("ClipReward", low, high))
