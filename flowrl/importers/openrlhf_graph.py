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
_SHAPED = frozenset({"ppo", "reinforce_plus_plus"})
"""Algorithms whose KL may be in the reward."""
_WHITENED = frozenset({"gae", "reinforce", "reinforce_baseline"})
"""Estimators whose advantages are normalized over the batch."""
_KL_BOUND = 10.0
"""OpenRLHF bounds each estimate of KL."""
_NO_BOUND = 1e9
"""Above every ratio, which is at most exp(20)."""


def graph_of(settings: Settings) -> GraphPlan:
    """An algorithm by the estimator of advantages, and what else the flags set."""
    get = settings.get
    estimator = get("algo.advantage.estimator")
    if estimator not in _ALGORITHMS:
        settings.refuse("algo.advantage.estimator", "flowrl has no such estimator; write an operator")
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
    _add_loss(settings, plan)
    _add_aggregation(settings, plan)
    plan.wanted["update_actor.entropy"] = float(get("actor.entropy_coef") or 0.0)
    plan.wanted["generate.top_p"] = float(get("rollout.top_p"))
    if get("algo.advantage.no_std_norm") and estimator in _WHITENED:
        settings.refuse("algo.advantage.no_std_norm", "`Whiten` always scales; drop it, or write an operator")
    elif "algo.advantage.no_std_norm" in settings:
        settings.differ("algo.advantage.no_std_norm", f"without effect, because {estimator} does not read it")
    if estimator == "group_norm":
        plan.wanted["group_advantage.eps"] = 1e-9
    if estimator in _WHITENED:
        plan.wanted["whiten.unbiased"] = False
    if estimator == "dr_grpo":  # OpenRLHF has the advantages of Dr. GRPO, and averages over tokens
        plan.wanted["update_actor.norm"] = None
    _add_clip(settings, plan, estimator)
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


def _add_loss(settings: Settings, plan: GraphPlan) -> None:
    """PPO's loss or GSPO's."""
    get = settings.get
    low, high = get("actor.eps_clip_low_high") or [get("actor.eps_clip")] * 2
    dual = get("actor.dual_clip")
    get("actor.eps_clip")
    if get("actor.policy_loss_type") == "gspo":
        plan.wanted["update_actor.loss"] = call("GSPO", float(low), float(high))
        if dual:
            settings.refuse("actor.dual_clip", "flowrl's `GSPO` has no dual clip; write a `Loss`")
    else:
        bounds = {"clip_high": None if high == low else float(high), "dual_clip": dual and float(dual)}
        plan.wanted["update_actor.loss"] = call("PPOClip", float(low), **bounds)
        plan.settings["clip"] = float(low)


def _add_aggregation(settings: Settings, plan: GraphPlan) -> None:
    """How tokens are aggregated: GSPO always takes the mean over rows."""
    key = "actor.loss_agg_mode"
    mode = "token-mean" if settings.get(key) == "token-mean" else "seq-mean-token-mean"
    if plan.wanted["update_actor.loss"].name == "GSPO" and mode == "token-mean":
        mode = "seq-mean-token-mean"
        settings.differ(key, "OpenRLHF's gspo always takes the mean over rows")
    plan.wanted["update_actor.aggregation"] = mode
    other = settings.get("actor.entropy_coef") or settings.get("algo.kl.use_loss")
    if mode != "token-mean" and other:
        settings.differ(key, "OpenRLHF averages KL and entropy over tokens, flowrl over rows as the loss")


def _add_clip(settings: Settings, plan: GraphPlan, estimator: str) -> None:
    """The bounds of a score, which OpenRLHF applies after the baseline of a group."""
    low, high = map(float, settings.get("reward.clip_range"))
    if estimator in ("gae", "reinforce"):
        plan.insert["clip_reward"] = call("After", "reward", call("ClipReward", low, high))
    elif "reward.clip_range" in settings:
        settings.refuse("reward.clip_range", f"OpenRLHF bounds the score minus the baseline of {estimator}")
    else:
        settings.differ(
            "reward.clip_range", f"advantages are not bounded; OpenRLHF bounds them at {low:g} and {high:g}"
        )


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
    if in_loss and get("algo.kl.unbiased_gradient"):
        settings.refuse("algo.kl.unbiased_gradient", 'flowrl has `KLLoss("k3+")`, without a weight for off-policy rows')
    plan.wanted["update_actor.kl"] = call("KLLoss", estimator, coef, bound=_KL_BOUND) if in_loss and coef else None
    if plan.algorithm in _SHAPED:
        if in_loss or not coef:
            plan.drop.append("kl_shape")
            return
        plan.settings["kl_coef"] = coef
        adaptive = call("AdaptiveKL", target=float(target or 0), horizon=get("algo.kl.horizon"), coef=coef)
        plan.wanted |= {"kl_shape.coef": adaptive if target else coef, "kl_shape.estimator": estimator}
        plan.wanted["kl_shape.bound"] = _KL_BOUND
        return
    if plan.algorithm == "rloo":
        plan.drop.append("kl_shape")
    else:
        plan.set_kl_coef(coef if in_loss else 0.0)
    if coef and not in_loss:
        settings.refuse(
            "algo.kl.init_coef",
            "OpenRLHF subtracts KL from each token after the baseline of the group; pass --algo.kl.use_loss, or 0",
        )


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
    gating = get(f"{CORRECTION}gating") or "ratio"
    if gating != "ratio" or plan.wanted["update_actor.loss"].name == "GSPO":
        settings.refuse(f"{CORRECTION}level", "flowrl corrects PPO's loss by ratios; write an operator")
        return
    low = low or None
    if level == "token":
        way = "mask" if mode == "mask" else "clip" if low else "truncate"
        plan.insert["correction"] = _after(plan, call("RolloutCorrection", "token", way, low=low, high=high))
        return
    # rows out of bounds have weight 0, and the tokens of others their own ratios
    plan.insert["correction"] = _after(plan, call("RolloutCorrection", "token", "truncate", high=_NO_BOUND))
    plan.insert["rejection"] = _after(plan, call("RolloutCorrection", "geometric", "reject", low=low, high=high))


def _after(plan: GraphPlan, correction: Any) -> Any:
    return call("After", plan.advantages(), correction)
