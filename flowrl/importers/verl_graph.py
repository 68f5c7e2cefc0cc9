"""The graph of a configuration of verl's ``main_ppo``."""

from __future__ import annotations

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
    "grpo_passk": "pass_at_k",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "optimal_token_baseline": "otb",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
_OF_LOSS = {
    "cispo": "cispo",
    "clip_cov": "clip_cov",
    "geo_mean": "gmpo",
    "gspo": "gspo",
    "kl_cov": "kl_cov",
    "sapo": "sapo",
}
"""Algorithms of flowrl that are GRPO with another loss."""

_ESTIMATORS = {"abs": "abs", "k1": "k1", "k2": "k2", "k3": "k3", "kl": "k1", "low_var_kl": "k3", "mse": "k2"}
_KL_IN_REWARD = frozenset({"ppo", "reinforce_plus_plus", "remax", "rloo"})
_ADVANTAGES = {"ppo": "whiten", "reinforce_plus_plus": "whiten", "remax": "subtract_baseline", "rloo": "rloo_advantage"}
_LEVELS = {
    "seq_mean_k1": "geometric",
    "seq_mean_k2": "k2",
    "seq_mean_k3": "k3",
    "seq_sum_k1": "sequence",
    "token_k1": "token",
}


def graph_of(settings: Settings, reward: Any) -> GraphPlan:
    """The graph: an algorithm by the estimator of advantages and the loss, and what else the configuration sets."""
    get = settings.get
    estimator, mode = get("algorithm.adv_estimator"), get(f"{ACTOR}policy_loss.loss_mode")
    algorithm = _ALGORITHMS.get(estimator, "grpo")
    if estimator not in _ALGORITHMS:
        settings.refuse("algorithm.adv_estimator", "flowrl has no such estimator")
    loss = _loss(settings, mode)
    if algorithm == "grpo":
        algorithm = _OF_LOSS.get(mode, "grpo")
    plan = GraphPlan(algorithm, _sampling(settings), reward)
    plan.wanted |= {
        "update_actor.loss": loss,
        "update_actor.aggregation": _aggregation(settings, mode),
        "update_actor.norm": get(f"{ACTOR}loss_scale_factor"),
        "update_actor.entropy": float(get(f"{ACTOR}entropy_coeff")),
        "generate.top_p": float(get(f"{ROLLOUT}top_p")),
        "generate.top_k": max(0, get(f"{ROLLOUT}top_k")),
        "generate.ignore_eos": get(f"{ROLLOUT}ignore_eos"),
    }
    if algorithm == "grpo" or algorithm in _OF_LOSS.values():
        plan.wanted["group_advantage.normalize_std"] = get("algorithm.norm_adv_by_std_in_grpo")
    _add_loss_settings(settings, plan)
    _add_kl(settings, plan)
    if algorithm == "ppo":
        _add_critic(settings, plan)
    elif algorithm in ("reinforce_plus_plus", "remax"):
        plan.settings["gamma"] = float(get("algorithm.gamma"))
    _add_filter(settings, plan)
    _add_correction(settings, plan)
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
        case "clip_cov":
            return call("ClipCov", *(get(f"{policy}clip_cov_{name}") for name in ("ratio", "lb", "ub")))
        case "kl_cov":
            return call("KLCov", get(f"{policy}kl_cov_ratio"), get(f"{policy}ppo_kl_coef"))
        case "dppo_tv" | "dppo_kl":
            return call("DPPO", mode[-2:], low, within_high=None if high == low else high)
    if mode != "vanilla":
        settings.refuse(f"{policy}loss_mode", "flowrl has no such loss; write a `Loss`")
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
        "clip_cov": ("share", "low", "high"),
        "gmpo": ("clip_log",),
        "gspo": ("clip_low", "clip_high"),
        "kl_cov": ("top", "coef"),
        "sapo": ("tau_pos", "tau_neg"),
    }.get(plan.algorithm, ())
    plan.settings |= {name: value for name, value in zip(names, loss.args, strict=False) if name}
    if loss.name == "PPOClip" and not names and plan.algorithm not in ("gdpo",):
        plan.settings["clip"] = loss.args[0]


def _aggregation(settings: Settings, mode: str) -> str:
    key = f"{ACTOR}loss_agg_mode"
    given = str(settings.get(key))
    if mode in ("sapo", "geo_mean") and given != "seq-mean-token-mean":
        settings.differ(key, f"verl's {mode} always takes seq-mean-token-mean")
        return "seq-mean-token-mean"
    return given


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
        loss = call("KLLoss", _estimator(settings, f"{ACTOR}kl_loss_type"), coef)
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
        return
    plan.settings["kl_coef"] = loss.args[1] if loss else shaped[0] if shaped and isinstance(shaped[0], float) else 0.0
    if shaped is not None:
        plan.insert["kl_shape"] = call("After", "reward", call("KLShape", *shaped))


def _estimator(settings: Settings, key: str) -> str:
    name = str(settings.get(key))
    if name not in _ESTIMATORS:
        settings.refuse(key, f"flowrl estimates KL by {', '.join(sorted(set(_ESTIMATORS.values())))}")
    return _ESTIMATORS.get(name, "k3")


def _add_critic(settings: Settings, plan: GraphPlan) -> None:
    get = settings.get
    names = {"gamma": "algorithm.gamma", "lam": "algorithm.lam"}
    plan.settings |= {name: float(get(key)) for name, key in names.items()}
    plan.settings["critic_warmup"] = get("trainer.critic_warmup")
    n, prompts, mini = plan.settings["n"], get("data.train_batch_size"), get("critic.ppo_mini_batch_size")
    plan.wanted |= {
        "update_critic.loss": call("ValueClip", float(get("critic.cliprange_value"))),
        "update_critic.aggregation": get("critic.loss_agg_mode"),
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


def _add_correction(settings: Settings, plan: GraphPlan) -> None:
    """Importance weights and rejection for the mismatch between the engine and the trainer."""
    get = settings.get
    level, rejects = get(f"{CORRECTION}rollout_is"), get(f"{CORRECTION}rollout_rs")
    bypass, kind = get(f"{CORRECTION}bypass_mode"), get(f"{CORRECTION}loss_type")
    after = _ADVANTAGES.get(plan.algorithm, "group_advantage")
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
    if level:
        threshold, normal = get(f"{CORRECTION}rollout_is_threshold"), get(f"{CORRECTION}rollout_is_batch_normalize")
        if not bypass or kind == "reinforce":
            weights = call("RolloutCorrection", level, "truncate", high=float(threshold), normalize=bool(normal))
            plan.insert["correction"] = call("After", after, weights)
    for index, option in enumerate(str(rejects).split(",") if rejects else ()):
        _add_rejection(settings, plan, option.strip(), index, after)


def _add_rejection(settings: Settings, plan: GraphPlan, option: str, index: int, after: str) -> None:
    key = f"{CORRECTION}rollout_rs_threshold"
    bounds = str(settings.get(key)).split(",")
    low, _, high = bounds[min(index, len(bounds) - 1)].strip().partition("_")
    if option not in _LEVELS or (not high and option.endswith("k1")):
        settings.refuse(f"{CORRECTION}rollout_rs", f"flowrl rejects by {', '.join(_LEVELS)}")
        return
    limits = {"low": float(low), "high": float(high)} if high else {"low": None, "high": float(low)}
    rejection = call("RolloutCorrection", _LEVELS[option], "reject", **limits)
    plan.insert["rejection" if not index else f"rejection_{index + 1}"] = call("After", after, rejection)
