"""On-policy distillation of verl: the graph of ``distillation.*``."""

from __future__ import annotations

from flowrl.importers.plan import GraphPlan, Name, call
from flowrl.importers.settings import Settings
from flowrl.importers.verl_graph import graph_of

LOSS = "distillation.distillation_loss."
_CLAMP = '''@operator
def clamp(advantages: Advantages) -> Advantages:
    """Bound the reward of a token."""
    return advantages.clamp(-{bound}, {bound})


'''


def distillation_of(settings: Settings) -> tuple[GraphPlan, list[str], dict[str, set[str]]]:
    """The graph, with the source of an operator and its imports if the loss is clamped."""
    get = settings.get
    rest = graph_of(settings, None)  # reads the settings that both have
    mode, gradient, clamp = get(f"{LOSS}loss_mode"), get(f"{LOSS}use_policy_gradient"), get(f"{LOSS}loss_max_clamp")
    names = ("n", "temperature", "max_new_tokens", "mini_batch")
    plan = GraphPlan("distill", {name: rest.settings[name] for name in names}, has_reward=False)
    keys = (
        "generate.top_p",
        "generate.top_k",
        "generate.ignore_eos",
        "update_actor.aggregation",
        "update_actor.entropy",
    )
    plan.wanted = {key: rest.wanted[key] for key in keys}
    if get(f"{LOSS}use_task_rewards"):
        settings.refuse(f"{LOSS}use_task_rewards", "distillation has no reward; add one by an edit of the graph")
    if float(get(f"{LOSS}distillation_loss_coef")) != 1:
        settings.refuse(f"{LOSS}distillation_loss_coef", "scale the learning rate instead")
    if get(f"{LOSS}log_prob_min_clamp") is not None and mode == "k1":
        settings.differ(f"{LOSS}log_prob_min_clamp", f"verl's {mode} does not read it")
    if mode == "k1" and gradient:
        low, high = (float(get(f"{LOSS}clip_ratio_{side}")) for side in ("low", "high"))
        plan.settings["clip"] = low
        plan.wanted["update_actor.loss"] = call("PPOClip", low, clip_high=None if high == low else high, dual_clip=3.0)
        if f"{LOSS}topk" in settings:
            settings.differ(f"{LOSS}topk", "verl's k1 does not read it")
        if clamp is None:
            return plan, [], {}
        plan.insert["clamp"] = call("After", "reverse_kl", Name("clamp"))
        return plan, [_CLAMP.format(bound=float(clamp))], {"flowrl": {"operator"}, "flowrl.columns": {"Advantages"}}
    if mode in ("forward_kl_topk", "reverse_kl_topk") and not gradient:
        plan.algorithm = "distill_top"
        plan.settings |= {"k": get(f"{LOSS}topk"), "beta": 0.0 if mode.startswith("forward") else 1.0}
        if clamp is not None:
            settings.refuse(f"{LOSS}loss_max_clamp", "`GKD` is not clamped; pass --allow to leave it out")
        if get(f"{LOSS}log_prob_min_clamp") is not None:
            settings.refuse(f"{LOSS}log_prob_min_clamp", "`GKD` is not clamped; pass --allow to leave it out")
        return plan, [], {}
    settings.refuse(f"{LOSS}loss_mode", "flowrl distills by k1 with a policy gradient, or by the top k of the teacher")
    return plan, [], {}
