"""The graph of a configuration of verl's ``main_ppo``."""

from __future__ import annotations

import math
from typing import Any

from flowrl.importers.plan import GraphPlan, call
from flowrl.importers.settings import Settings

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."

_ALGORITHMS = {
    "gae": "ppo",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "optimal_token_baseline": "otb",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
_OTHER_ESTIMATORS = {
    "grpo_passk": "the best response of a group gets its lead over the second best, and the others 0, which is another "
    "method than `pass_at_k`; write an operator",
    "tir_optimal_token_baseline": "the baseline of turns is not in flowrl; `otb` has one for each token",
}
_OTHER_LOSSES = {
    "clip_cov": "it keeps PPO's clip, which the loss of the paper, flowrl's `ClipCov`, does not have; write a `Loss`",
    "dro": "it is -A * log_prob + beta / 2 * (log r)**2, and flowrl's `DRO` the loss of the paper; write a `Loss`",
}
_OF_LOSS = {
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "gspo": "gspo",
    "kl_cov": "kl_cov",
    "sapo": "sapo",
}
"""Algorithms of flowrl that are GRPO with another loss."""

_ESTIMATORS = {"abs": "abs", "k1": "k1", "k2": "k2", "k3": "k3", "kl": "k1", "low_var_kl": "k3", "mse": "k2"}
_ESTIMATORS |= {f"{name}+": "k2" if own == "k2" else f"{own}+" for name, own in _ESTIMATORS.items() if own != "abs"}
_KL_IN_REWARD = frozenset({"ppo", "reinforce_plus_plus", "remax", "rloo"})
_LEVELS = {
    "seq_max_k2": "maximum",
    "seq_mean_k1": "geometric",
    "seq_mean_k2": "k2",
    "seq_mean_k3": "k3",
    "seq_sum_k1": "sequence",
    "token_k1": "token",
    "token_k2": "token",
}
"""The level of flowrl that each rejection of verl has."""


def graph_of(settings: Settings, reward: Any) -> GraphPlan:
    """The graph: an algorithm by the estimator of advantages and the loss, and what else the configuration sets."""
    get = settings.get
    estimator, mode = get("algorithm.adv_estimator"), get(f"{ACTOR}policy_loss.loss_mode")
    algorithm = _ALGORITHMS.get(estimator, "grpo")
    if estimator not in _ALGORITHMS:
        why = _OTHER_ESTIMATORS.get(estimator, "flowrl has no such estimator")
        settings.refuse("algorithm.adv_estimator", why)
    loss = _loss(settings, mode)
    if algorithm == "grpo":
        algorithm = _OF_LOSS.get(mode, "grpo")
    plan = GraphPlan(algorithm, _sampling(settings), reward)
    _alone(settings, plan)
    algorithm = plan.algorithm
    plan.wanted |= {
        "update_actor.loss": loss,
        **_aggregation(settings, mode),
        "update_actor.entropy": float(get(f"{ACTOR}entropy_coeff")),
        "generate.top_p": float(get(f"{ROLLOUT}top_p")),
        "generate.top_k": max(0, get(f"{ROLLOUT}top_k")),
        "generate.ignore_eos": get(f"{ROLLOUT}ignore_eos"),
    }
    if algorithm == "grpo" or algorithm in _OF_LOSS.values():
        plan.wanted["group_advantage.normalize_std"] = get("algorithm.norm_adv_by_std_in_grpo")
    _add_loss_settings(settings, plan)
    _add_kl(settings, plan)
    _add_advantages(settings, plan)
    _add_filter(settings, plan)
    _add_correction(settings, plan)
    _allow_as_verl(plan)
    return plan


def _sampling(settings: Settings) -> dict[str, Any]:
    """Settings that every algorithm has."""
    get = settings.get
    n, prompts, mini = get(f"{ROLLOUT}n"), get("data.train_batch_size"), get(f"{ACTOR}ppo_mini_batch_size")
    found = {
        "n": n,
        "temperature": float(get(f"{ROLLOUT}temperature")),
        "max_new_tokens": get(f"{ROLLOUT}response_length") or get("data.max_response_length"),
        "ppo_epochs": get(f"{ACTOR}ppo_epochs"),
        "mini_batch": None if mini >= prompts else mini * n,
    }
    get("data.max_response_length")
    return found


def _alone(settings: Settings, plan: GraphPlan) -> None:
    """Groups of one response, from whose score verl subtracts nothing."""
    estimator = settings.get("algorithm.adv_estimator")
    if plan.settings["n"] > 1 or plan.algorithm in ("ppo", "reinforce_plus_plus", "remax"):
        return
    if estimator not in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline") or settings.get(
        "algorithm.use_kl_in_reward"
    ):
        settings.refuse(f"{ROLLOUT}n", "the only response of a group has no baseline; sample several")
        return
    settings.differ(
        f"{ROLLOUT}n", f"the only response of a group, from whose score verl's {estimator} subtracts no baseline"
    )
    plan.algorithm, plan.settings["gamma"] = "reinforce_plus_plus", 1.0
    plan.drop += [] if estimator == "reinforce_plus_plus_baseline" else ["whiten"]


def _clips(settings: Settings) -> tuple[float, float]:
    low, high = settings.get(f"{ACTOR}clip_ratio_low"), settings.get(f"{ACTOR}clip_ratio_high")
    both = settings.get(f"{ACTOR}clip_ratio")
    if both not in (low, high):
        settings.differ(f"{ACTOR}clip_ratio", f"verl reads clip_ratio_low={low} and clip_ratio_high={high} instead")
    return float(low), float(high)


def _loss(settings: Settings, mode: str) -> Any:
    """The policy loss."""
    get = settings.get
    low, high = _clips(settings)
    dual, policy = get(f"{ACTOR}clip_ratio_c"), f"{ACTOR}policy_loss."
    if mode not in ("vanilla", "geo_mean") and f"{ACTOR}clip_ratio_c" in settings:
        settings.differ(f"{ACTOR}clip_ratio_c", f"verl's {mode} does not read it")
    match mode:
        case "gspo":
            return call("GSPO", low, high)
        case "cispo":  # a ratio is positive, so a lower bound of 1 or more never clips
            return call("CISPO", min(low, 1.0), high)
        case "sapo":
            return call("SAPO", *(_tau(settings, name) for name in ("tau_pos", "tau_neg")))
        case "gpg":
            return call("Reinforce")
        case "geo_mean":
            if low != high:
                settings.refuse(f"{ACTOR}clip_ratio_high", "`GMPO` has one bound for both sides")
            return call("GMPO", low)
        case "kl_cov":
            return call("KLCov", get(f"{policy}kl_cov_ratio"), get(f"{policy}ppo_kl_coef"))
        case "dppo_tv" | "dppo_kl":
            return call("DPPO", mode[-2:], low, within_high=None if high == low else high)
    if mode != "vanilla":
        settings.refuse(f"{policy}loss_mode", _OTHER_LOSSES.get(mode, "flowrl has no such loss; write a `Loss`"))
    return call("PPOClip", low, clip_high=None if high == low else high, dual_clip=dual and float(dual))


def _tau(settings: Settings, name: str) -> float:
    """A temperature of SAPO, which verl reads from the actor, and scripts also set in the policy loss."""
    value = settings.get(f"{ACTOR}{name}")
    other = f"{ACTOR}policy_loss.{name}"
    if other in settings:
        given = settings.get(other)
        settings.differ(other, f"verl reads {ACTOR}{name}={value} instead" if given != value else "")
    return float(value)


def _add_loss_settings(settings: Settings, plan: GraphPlan) -> None:
    """Settings of the loss that are those of its algorithm."""
    loss = plan.wanted["update_actor.loss"]
    names = {
        "cispo": (None, "clip_high"),
        "gmpo": ("clip_log",),
        "gspo": ("clip_low", "clip_high"),
        "kl_cov": ("top", "coef"),
        "sapo": ("tau_pos", "tau_neg"),
    }.get(plan.algorithm, ())
    plan.settings |= {name: value for name, value in zip(names, loss.args, strict=False) if name}
    if loss.name == "PPOClip" and not names and plan.algorithm not in ("gdpo",):
        plan.settings["clip"] = loss.args[0]


def _aggregation(settings: Settings, mode: str) -> dict[str, Any]:
    """How tokens of the policy are aggregated, and the constant by which they may be divided."""
    key = f"{ACTOR}loss_agg_mode"
    given = str(settings.get(key))
    if mode in ("sapo", "geo_mean") and given != "seq-mean-token-mean":
        settings.differ(key, f"verl's {mode} always takes seq-mean-token-mean")
        given = "seq-mean-token-mean"
    return {"update_actor.aggregation": given, "update_actor.norm": _norm(settings, given, ACTOR)}


def _norm(settings: Settings, aggregation: str, prefix: str) -> float | None:
    """The constant of an aggregation; verl's default is the width of its rows."""
    key = f"{prefix}loss_scale_factor"
    norm = settings.get(key)
    if aggregation != "seq-mean-token-sum-norm":
        if norm is not None:
            settings.differ(key, f"without effect, because loss_agg_mode is {aggregation}")
        return None
    if norm is None:
        norm = settings.get(f"{ROLLOUT}response_length") or settings.get("data.max_response_length")
        settings.differ(key, f"verl divides by the width of its rows, the response length: norm={norm}")
    return float(norm)


def _allow_as_verl(plan: GraphPlan) -> None:
    """The rules that verl's own configuration breaks, with the reason in the file."""
    loss, aggregation = plan.wanted["update_actor.loss"].name, plan.wanted["update_actor.aggregation"]
    if loss == "Reinforce" and (plan.settings["mini_batch"] or plan.settings["ppo_epochs"] > 1):
        plan.allow["FR020"] = "verl takes several optimizer steps without a ratio"
    if loss == "GSPO" and not aggregation.startswith("seq-mean-token-mean"):
        plan.allow["FR018"] = f"verl aggregates by loss_agg_mode={aggregation}"


def _add_kl(settings: Settings, plan: GraphPlan) -> None:
    """KL to the reference in the reward, in the loss, or neither."""
    get = settings.get
    in_loss, in_reward = get(f"{ACTOR}use_kl_loss"), get("algorithm.use_kl_in_reward")
    shaped = None
    if in_reward:
        kind, coef = get("algorithm.kl_ctrl.type"), float(get("algorithm.kl_ctrl.kl_coef"))
        adaptive = {"target": get("algorithm.kl_ctrl.target_kl"), "horizon": get("algorithm.kl_ctrl.horizon")}
        estimator = _estimator(settings, "algorithm.kl_penalty")
        shaped = (call("AdaptiveKL", **adaptive, coef=coef) if kind == "adaptive" else coef, estimator)
    else:
        for name in ("kl_penalty", "kl_ctrl.kl_coef", "kl_ctrl.type"):
            if f"algorithm.{name}" in settings:
                settings.differ(f"algorithm.{name}", "without effect, because algorithm.use_kl_in_reward is False")
    loss = None
    if in_loss:
        coef = float(get(f"{ACTOR}kl_loss_coef"))
        estimator = _estimator(settings, f"{ACTOR}kl_loss_type")
        loss = call("KLLoss", estimator, coef, **_bound(estimator))
    else:
        for name in ("kl_loss_coef", "kl_loss_type"):
            if f"{ACTOR}{name}" in settings:
                settings.differ(f"{ACTOR}{name}", "without effect, because use_kl_loss is False")
    plan.wanted["update_actor.kl"] = loss
    if plan.algorithm in _KL_IN_REWARD:
        if shaped is None:
            plan.drop.append("kl_shape")
        else:
            plan.settings["kl_coef"] = shaped[0] if isinstance(shaped[0], float) else 0.001
            plan.wanted |= {"kl_shape.coef": shaped[0], "kl_shape.estimator": shaped[1]}
            plan.wanted |= {f"kl_shape.{name}": bound for name, bound in _bound(shaped[1]).items()}
        return
    plan.set_kl_coef(loss.args[1] if loss else shaped[0] if shaped and isinstance(shaped[0], float) else 0.0)
    if shaped is not None:
        plan.add_kl_shape(call("KLShape", *shaped, **_bound(shaped[1])))


def _estimator(settings: Settings, key: str) -> str:
    name = str(settings.get(key))
    if name not in _ESTIMATORS:
        settings.refuse(key, f"flowrl estimates KL by {', '.join(sorted(set(_ESTIMATORS.values())))}")
    return _ESTIMATORS.get(name, "k3")


def _bound(estimator: str) -> dict[str, float]:
    """verl bounds the value of k3, and of no other estimate."""
    return {"bound": 10.0} if estimator.startswith("k3") else {}


def _add_advantages(settings: Settings, plan: GraphPlan) -> None:
    """What the estimator of advantages reads; other settings have no effect."""
    get, algorithm = settings.get, plan.algorithm
    if algorithm == "ppo":
        _add_critic(settings, plan)
        return
    if algorithm in ("reinforce_plus_plus", "remax") and "gamma" not in plan.settings:
        plan.settings["gamma"] = float(get("algorithm.gamma"))
    if algorithm == "gpg":
        plan.wanted["gpg_advantage.counts"] = "nonzero"
    if algorithm == "gdpo":
        _add_rewards(settings, plan)
    of_critic = (key for key in settings.given if key.startswith("critic."))
    for key in ("algorithm.lam", "algorithm.gamma", "trainer.critic_warmup", *of_critic):
        if key in settings and key not in settings.read:
            settings.differ(key, f"without effect, because {get('algorithm.adv_estimator')} does not read it")


def _add_rewards(settings: Settings, plan: GraphPlan) -> None:
    """The rewards of GDPO: entries of what the reward function returns."""
    keys, weights = settings.get("algorithm.gdpo_reward_keys"), settings.get("algorithm.gdpo_reward_weights")
    function = plan.reward
    if not keys or not (isinstance(function, str) or getattr(function, "name", "") == "from_verl"):
        settings.refuse("algorithm.adv_estimator", "GDPO needs gdpo_reward_keys of a custom_reward_function")
        return
    path, kwargs = (function, {}) if isinstance(function, str) else (function.args[0], function.kwargs)
    terms = [call("from_verl", path, **kwargs, key=key) for key in keys]
    plan.reward, plan.settings["others"] = terms[0], dict(zip(keys[1:], terms[1:], strict=True))
    if weights:
        plan.settings["weights"] = dict(zip(["reward", *keys[1:]], map(float, weights), strict=True))


def _add_critic(settings: Settings, plan: GraphPlan) -> None:
    get = settings.get
    names = {"gamma": "algorithm.gamma", "lam": "algorithm.lam"}
    plan.settings |= {name: float(get(key)) for name, key in names.items()}
    plan.settings["critic_warmup"] = get("trainer.critic_warmup")
    n, prompts, mini = plan.settings["n"], get("data.train_batch_size"), get("critic.ppo_mini_batch_size")
    plan.wanted |= {
        "update_critic.loss": call("ValueClip", float(get("critic.cliprange_value"))),
        "update_critic.aggregation": get("critic.loss_agg_mode"),
        "update_critic.norm": _norm(settings, get("critic.loss_agg_mode"), "critic."),
        "update_critic.ppo_epochs": get("critic.ppo_epochs"),
        "update_critic.mini_batch": None if mini >= prompts else mini * n,
    }


def _add_filter(settings: Settings, plan: GraphPlan) -> None:
    """Dynamic sampling, and DAPO's penalty of overlong responses."""
    get = settings.get
    if get("algorithm.filter_groups.enable"):
        metric, rounds = get("algorithm.filter_groups.metric"), get("algorithm.filter_groups.max_num_gen_batches")
        if metric not in (None, "acc", "score", "seq_reward", "seq_final_reward"):
            settings.refuse(
                "algorithm.filter_groups.metric", "`Spread` reads scores; write a predicate for another metric"
            )
        collect = call("Collect", call("Spread"), groups=get("data.train_batch_size"), rounds=rounds or 8)
        plan.insert["collect"] = call("After", "reward", collect)
    for prefix in ("reward_model.", "reward.reward_kwargs.", "reward_model.reward_kwargs."):
        if get(f"{prefix}overlong_buffer_cfg.enable") or get(f"{prefix}overlong_buffer.enable"):
            name = "overlong_buffer" if f"{prefix}overlong_buffer.enable" in settings else "overlong_buffer_cfg"
            most = plan.settings["max_new_tokens"]
            size, factor = get(f"{prefix}{name}.len"), get(f"{prefix}{name}.penalty_factor", 1.0)
            penalty = call("OverlongPenalty", most, size, weight=float(factor))
            plan.insert["overlong_penalty"] = call("After", "reward", penalty)
            get(f"{prefix}max_resp_len"), get(f"{prefix}{name}.log")
            continue
        for key in settings.given:
            if key.startswith((f"{prefix}overlong_buffer", f"{prefix}max_resp_len")):
                settings.differ(key, "without effect, because the overlong buffer is not enabled")


def _add_correction(settings: Settings, plan: GraphPlan) -> None:
    """Importance weights and rejection for the mismatch between the engine and the trainer."""
    get = settings.get
    level, rejects = get(f"{CORRECTION}rollout_is"), get(f"{CORRECTION}rollout_rs")
    bypass, kind = get(f"{CORRECTION}bypass_mode"), get(f"{CORRECTION}loss_type")
    if bypass and kind == "reinforce":
        plan.wanted["update_actor.loss"] = call("Reinforce")
        settings.differ(
            f"{CORRECTION}bypass_mode",
            "flowrl weighs by the policy at the start of the step, which it scores once more",
        )
    elif bypass:
        loss = plan.wanted["update_actor.loss"]
        if loss.name != "PPOClip":
            settings.refuse(f"{CORRECTION}bypass_mode", f"`{loss.name}` has no ratio to the rollout")
        loss.kwargs["ratio_to"] = "rollout"
        plan.drop += [] if rejects else ["old_log_prob", "mismatch"]
    if level and (not bypass or kind == "reinforce"):
        plan.insert["correction"] = call("After", plan.advantages(), _weights(settings, level))
    elif level:
        settings.differ(f"{CORRECTION}rollout_is", "without effect: in bypass mode the clipped ratio corrects")
    options = [option.strip() for option in str(rejects).split(",")] if rejects else []
    # verl rejects by the whole mask: rows first, since a rejected token would leave the mean over its row
    for index in sorted(range(len(options)), key=lambda index: options[index].startswith("token")):
        _add_rejection(settings, plan, options[index], index)


def _weights(settings: Settings, level: str) -> Any:
    """Truncated weights for one threshold; weights of 0 outside of two, as in ``"0.5_5.0"``."""
    get = settings.get
    low, _, high = str(get(f"{CORRECTION}rollout_is_threshold")).rpartition("_")
    bounds = {"low": float(low), "high": float(high)} if low else {"high": float(high)}
    normal = bool(get(f"{CORRECTION}rollout_is_batch_normalize"))
    return call("RolloutCorrection", level, "mask" if low else "truncate", **bounds, normalize=normal)


def _add_rejection(settings: Settings, plan: GraphPlan, option: str, index: int) -> None:
    """Rejected rows leave the mask of the updates and of the whitening, but not of the advantages, as in verl."""
    key = f"{CORRECTION}rollout_rs_threshold"
    bounds = str(settings.get(key)).split(",")
    low, _, high = bounds[min(index, len(bounds) - 1)].strip().rpartition("_")
    if option not in _LEVELS:
        settings.refuse(f"{CORRECTION}rollout_rs", f"flowrl rejects by {', '.join(_LEVELS)}")
        return
    limits: dict[str, Any] = {"low": None, "high": float(high)}
    if option.endswith("k1"):  # its k1 is that of the engine's ratio to the trainer, the reciprocal
        limits = {"low": 1.0 / float(high), "high": 1.0 / float(low) if low else float(high)}
    elif option in ("seq_max_k2", "token_k2"):  # d**2 / 2 of the log-ratio d is at most the threshold
        widest = math.exp(math.sqrt(2.0 * float(high)))
        limits = {"low": 1.0 / widest if option == "token_k2" else None, "high": widest}
    before = [name for name in plan.insert if name.startswith("mask_mismatch")]
    name = f"mask_mismatch_{len(before) + 1}" if before else "mask_mismatch"
    plan.insert[name] = call("After", "old_log_prob", call("MaskMismatch", _LEVELS[option], **limits))
    plan.wire |= {port: f"{name}.response_mask" for port in _masked(plan)}
    if before:
        plan.wire[f"{name}.response_mask"] = f"{before[-1]}.response_mask"


def _masked(plan: GraphPlan) -> list[str]:
    """The ports that read the mask after a rejection."""
    ports = ["update_actor.rollout.response_mask"]
    ports += ["update_critic.rollout.response_mask"] if plan.algorithm == "ppo" else []
    return [*ports, *(["whiten.response_mask"] if plan.advantages() == "whiten" else [])]
