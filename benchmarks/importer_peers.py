"""One step of verl and OpenRLHF by their own functions, from the settings of a configuration; see importer_numbers."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.importers.plan import Imported

A, R = "actor_rollout_ref.actor.", "algorithm.rollout_correction."


def verl(found: Imported, x: Mapping[str, Any]) -> dict[str, Tensor]:
    """Advantages, losses and gradients as verl's trainer computes them."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    get = found.settings.get
    old, rollout, mask = x["old_log_probs"], x["rollout_log_probs"], x["response_mask"].float()
    weights, bypass = None, get(f"{R}bypass_mode")
    if not bypass and (get(f"{R}rollout_is") or get(f"{R}rollout_rs")):
        names = (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_is_batch_normalize",
            "rollout_rs",
            "rollout_rs_threshold",
        )
        settings = {name: get(f"{R}{name}") for name in names}
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask, **settings)
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    rewards = x["token_level_scores"].clone()
    if get("algorithm.use_kl_in_reward"):
        kl = core_algos.kl_penalty(old, x["ref_log_prob"], get("algorithm.kl_penalty")) * mask
        rewards = rewards - float(get("algorithm.kl_ctrl.kl_coef")) * kl
    estimator = get("algorithm.adv_estimator")
    function = core_algos.get_adv_estimator_fn(estimator)
    gamma, lam, std = get("algorithm.gamma"), get("algorithm.lam"), get("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "gae":
        advantages, returns = function(rewards, x["values"], mask, gamma, lam)
    else:
        more = {"norm_adv_by_std_in_grpo": std} if estimator == "grpo" else {}
        config = OmegaConf.create({"gamma": gamma, "norm_adv_by_std_in_grpo": std})
        more |= {} if estimator == "reinforce_plus_plus" else {"index": x["uid"]}
        advantages, returns = function(token_level_rewards=rewards, response_mask=mask, config=config, **more)
    leaf = x["log_probs"].clone().requires_grad_()
    aggregation, actor = get(f"{A}loss_agg_mode"), _verl_actor(get)
    loss_of = core_algos.get_policy_loss_fn(get(f"{A}policy_loss.loss_mode"))
    loss, _ = loss_of(rollout if bypass else old, leaf, advantages, mask, aggregation, actor, weights)
    if get(f"{A}entropy_coeff"):
        loss = loss - get(f"{A}entropy_coeff") * core_algos.agg_loss(x["entropies"], mask, aggregation)
    if get(f"{A}use_kl_loss"):
        kl = core_algos.kl_penalty(leaf, x["ref_log_prob"], get(f"{A}kl_loss_type"))
        loss = loss + get(f"{A}kl_loss_coef") * core_algos.agg_loss(kl, mask, aggregation)
    numbers = _numbers("actor", loss, leaf, mask) | {"advantages": _weighed(advantages * mask, weights)}
    if estimator == "gae":
        values = x["new_values"].clone().requires_grad_()
        clip, how = get("critic.cliprange_value"), get("critic.loss_agg_mode")
        of_critic, _ = core_algos.compute_value_loss(values, returns, x["values"], mask, clip, how)
        numbers |= _numbers("critic", of_critic, values, mask)
    return numbers


def _verl_actor(get: Any) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
    of_loss = ("loss_mode", "kl_cov_ratio", "ppo_kl_coef")
    policy = PolicyLossConfig(**{name: get(f"{A}policy_loss.{name}") for name in of_loss})
    given = {name: get(f"{A}{name}") for name in names}
    return FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **given)


def _weighed(advantages: Tensor, weights: Tensor | None) -> Tensor:
    """flowrl weighs advantages where verl weighs losses."""
    return advantages if weights is None else advantages * weights


def _numbers(role: str, loss: Tensor, leaf: Tensor, mask: Tensor) -> dict[str, Tensor]:
    gradient = torch.autograd.grad(loss, leaf)[0]
    return {f"{role} loss": loss.detach(), f"{role} gradient": gradient * (mask > 0)}


def openrlhf(found: Imported, x: Mapping[str, Any]) -> dict[str, Tensor]:
    """Advantages, losses and gradients as OpenRLHF's trainer computes them."""
    losses, utils, maker = _openrlhf()
    get = found.settings.get
    mask, kl, in_loss = x["response_mask"], torch.zeros_like(x["log_probs"]), bool(get("algo.kl.use_loss"))
    if not in_loss:
        kl = utils.compute_approx_kl(x["old_log_probs"], x["ref_log_prob"], kl_estimator=get("algo.kl.estimator"))
    experience = SimpleNamespace(
        rewards=x["token_level_scores"].sum(-1),
        index=list(range(len(mask))),
        values=x["values"],
        action_mask=mask,
        kl=kl,
        info={},
    )
    nested = _nested({**found.settings.table.defaults, **{key: one.value for key, one in found.settings.given.items()}})
    estimator = get("algo.advantage.estimator")
    owner = maker.RemoteExperienceMaker.__new__(maker.RemoteExperienceMaker)
    owner.strategy, owner.args = SimpleNamespace(args=nested), nested
    owner.advantage_estimator, owner.kl_ctl = estimator, SimpleNamespace(value=float(get("algo.kl.init_coef")))
    (made,) = owner.compute_advantages_and_returns([experience])
    low, high = get("actor.eps_clip_low_high") or [get("actor.eps_clip")] * 2
    prefix = "algo.advantage.is_correction_"
    correction = {f"is_correction_{name}": get(f"{prefix}{name}") for name in ("level", "mode", "gating", "threshold")}
    policy = losses.PolicyLoss(
        low, high, get("actor.dual_clip"), get("actor.loss_agg_mode") == "token-mean", get("actor.policy_loss_type"),
        **correction,
    )  # fmt: skip
    leaf = x["log_probs"].clone().requires_grad_()
    loss = policy(leaf, x["old_log_probs"], made.advantages, mask, x["rollout_log_probs"])[0]
    coef = float(get("algo.kl.init_coef"))
    if in_loss and coef:
        kl = utils.compute_approx_kl(leaf, x["ref_log_prob"], kl_estimator=get("algo.kl.estimator"))
        loss = loss + coef * losses.aggregate_loss(kl, mask)
    numbers = _numbers("actor", loss, leaf, mask)
    if get(f"{prefix}level") in ("off", None):
        numbers["advantages"] = made.advantages * mask
    if estimator == "gae":
        values = x["new_values"].clone().requires_grad_()
        of_critic = losses.ValueLoss(get("critic.value_clip"))(values, x["values"], made.returns, mask)
        numbers |= _numbers("critic", of_critic, values, mask)
    return numbers


def _nested(flat: Mapping[str, Any]) -> SimpleNamespace:
    """Namespaces of dotted keys."""
    root = SimpleNamespace()
    for key, value in flat.items():
        *parts, last = key.split(".")
        owner = root
        for part in parts:
            if not hasattr(owner, part):
                setattr(owner, part, SimpleNamespace())
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return root


def _openrlhf() -> tuple[Any, Any, Any]:
    """Its modules of losses, of KL and of advantages, without what the packages around them import: DeepSpeed, vLLM and
    flash-attention, which these functions do not use."""
    if "openrlhf" not in sys.modules:
        root = next(Path(path) for path in sys.path if (Path(path) / "openrlhf" / "models" / "loss.py").exists())
        for name in ("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils"):
            package = types.ModuleType(name)
            package.__path__ = [str(root / name.replace(".", "/"))]
            sys.modules[name] = package
        for name in ("deepspeed", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher", "openrlhf.utils.utils"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["openrlhf.trainer.ray.launcher"].RayActorGroup = None  # type: ignore[attr-defined]
        sys.modules["openrlhf.utils.utils"].zero_pad_sequences = None  # type: ignore[attr-defined]
    names = ("openrlhf.models.loss", "openrlhf.models.utils", "openrlhf.trainer.ppo_utils.experience_maker")
    losses, utils, maker = map(importlib.import_module, names)
    return losses, utils, maker
