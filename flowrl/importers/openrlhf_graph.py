"""The graph of OpenRLHF's ``train_ppo_ray``."""

from __future__ import annotations

from typing import Any

from flowrl.importers.plan import GraphPlan, call
from flowrl.importers.settings import Settings

CORRECTION = "algo.advantage.is_correction_"
_ALGORITHMS = {
    "dr_grpo": "dr_grpo",
    "gae": "ppo",
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
}
_SHAPED = frozenset({"ppo", "reinforce_plus_plus", "rloo"})
"""Algorithms whose KL is in the reward."""


def graph_of(settings: Settings) -> GraphPlan:
    """An algorithm by the estimator of advantages, and what else the flags set."""
    get = settings.get
    estimator = get("algo.advantage.estimator")
    if estimator not in _ALGORITHMS:
        settings.refuse("algo.advantage.estimator", "flowrl has no such estimator")
    n, prompts, mini = get("rollout.n_samples_per_prompt"), get("rollout.batch_size"), get("train.batch_size")
    sampling = {
        "n": n,
        "temperature": float(get("rollout.temperature")),
        "max_new_tokens": get("rollout.max_new_tokens") or get("data.max_len"),
        "ppo_epochs": get("train.max_epochs"),
        "mini_batch": None if mini >= prompts * n else mini,
    }
    plan = GraphPlan(_ALGORITHMS.get(estimator, "grpo"), sampling, _reward(settings))
    if plan.reward is None:
        plan.replace["reward"] = call("TextModelReward")
    low, high = get("actor.eps_clip_low_high") or [get("actor.eps_clip")] * 2
    dual = get("actor.dual_clip")
    get("actor.eps_clip")
    if get("actor.policy_loss_type") == "gspo":
        plan.wanted["update_actor.loss"] = call("GSPO", float(low), float(high))
    else:
        bounds = {"clip_high": None if high == low else float(high), "dual_clip": dual and float(dual)}
        plan.wanted["update_actor.loss"] = call("PPOClip", float(low), **bounds)
        plan.settings["clip"] = float(low)
    plan.wanted["update_actor.aggregation"] = get("actor.loss_agg_mode")
    plan.wanted["update_actor.entropy"] = float(get("actor.entropy_coef") or 0.0)
    plan.wanted["generate.top_p"] = float(get("rollout.top_p"))
    if get("algo.advantage.no_std_norm"):
        plan.wanted["group_advantage.normalize_std"] = False
    _add_kl(settings, plan)
    if plan.algorithm == "ppo":
        _add_critic(settings, plan)
    elif plan.algorithm == "reinforce_plus_plus":
        plan.settings["gamma"] = float(get("algo.advantage.gamma"))
    elif float(get("algo.advantage.gamma")) != 1.0:
        settings.refuse("algo.advantage.gamma", f"{plan.algorithm} has no discount")
    _add_filter(settings, plan)
    _add_correction(settings, plan)
    return plan


def _reward(settings: Settings) -> Any:
    """The reward function; None for a reward model."""
    url = settings.name("reward.remote_url")
    if url is None:
        return None
    if not url.endswith(".py"):
        settings.refuse("reward.remote_url", "call the server in a reward function")
    return call("from_openrlhf", f"{url}:reward_func")


def _add_kl(settings: Settings, plan: GraphPlan) -> None:
    get = settings.get
    coef, estimator, target = float(get("algo.kl.init_coef")), get("algo.kl.estimator"), get("algo.kl.target")
    in_loss = bool(get("algo.kl.use_loss"))
    plan.wanted["update_actor.kl"] = call("KLLoss", estimator, coef) if in_loss and coef else None
    if plan.algorithm in _SHAPED:
        if in_loss or not coef:
            plan.drop.append("kl_shape")
            return
        plan.settings["kl_coef"] = coef
        adaptive = call("AdaptiveKL", target=float(target or 0), horizon=get("algo.kl.horizon"), coef=coef)
        plan.wanted |= {"kl_shape.coef": adaptive if target else coef, "kl_shape.estimator": estimator}
        return
    plan.settings["kl_coef"] = coef
    if coef and not in_loss:
        plan.insert["kl_shape"] = call("After", "reward", call("KLShape", coef, estimator))


def _add_critic(settings: Settings, plan: GraphPlan) -> None:
    get = settings.get
    plan.settings |= {"gamma": float(get("algo.advantage.gamma")), "lam": float(get("algo.advantage.lambd"))}
    plan.settings["critic_warmup"] = max(0, get("critic.freezing_steps"))
    plan.wanted["update_critic.loss"] = call("ValueClip", float(get("critic.value_clip")))


def _add_filter(settings: Settings, plan: GraphPlan) -> None:
    """Dynamic sampling, and the penalty of overlong responses."""
    get = settings.get
    if get("algo.dynamic_filtering_enable"):
        if [float(bound) for bound in get("algo.dynamic_filtering_range")] != [0.0, 1.0]:
            settings.refuse("algo.dynamic_filtering_range", "`Spread` drops groups of equal scores")
        settings.differ(
            "algo.dynamic_filtering_enable",
            "groups of equal scores are replaced, which are those of 0 or 1 for such rewards",
        )
        plan.insert["collect"] = call(
            "After", "reward", call("Collect", call("Spread"), groups=get("rollout.batch_size"))
        )
    if buffer := get("reward.overlong_buffer_len"):
        weight = float(get("reward.overlong_penalty_factor"))
        penalty = call("OverlongPenalty", plan.settings["max_new_tokens"], int(buffer), weight=weight)
        plan.insert["overlong_penalty"] = call("After", "reward", penalty)


def _add_correction(settings: Settings, plan: GraphPlan) -> None:
    """Importance weights for the mismatch between the engine and the trainer."""
    get = settings.get
    level, mode = get(f"{CORRECTION}level"), get(f"{CORRECTION}mode")
    if get(f"{CORRECTION}enable"):  # flags of other versions
        kind = get(f"{CORRECTION}type", "tis")
        level, mode = (
            ("token", {"icepop": "mask", "tis": "clip"}[kind]) if kind in ("icepop", "tis") else ("seq", "mask")
        )
        settings.differ(
            f"{CORRECTION}enable", f"a flag of another version than {settings.table.version}, read as {kind}"
        )
    if level in ("off", None):
        return
    low, high = [None, *map(float, get(f"{CORRECTION}threshold"))][-2:]
    if level != "token" or get(f"{CORRECTION}gating") != "ratio":
        settings.refuse(f"{CORRECTION}level", "flowrl weighs by token; write further rejections by hand")
        return
    if mode == "clip" and low:
        settings.differ(f"{CORRECTION}threshold", f"weights are bounded from above, and not raised to {low}")
    way = {"low": low, "high": high} if mode == "mask" else {"high": high}
    after = {"ppo": "whiten", "reinforce_plus_plus": "whiten", "rloo": "rloo_advantage"}.get(
        plan.algorithm, "group_advantage"
    )
    weights = call("RolloutCorrection", "token", "mask" if mode == "mask" else "truncate", **way)
    plan.insert["correction"] = call("After", after, weights)
