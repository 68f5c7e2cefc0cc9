"""Names of parameters in TRL, verl and OpenRLHF, for errors about unknown parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable

_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_generations": ("TRL", ("n",)),
    "max_completion_length": ("TRL", ("max_new_tokens",)),
    "response_length": ("TRL", ("max_new_tokens",)),
    "beta": ("TRL", ("kl_coef",)),
    "epsilon": ("TRL", ("clip", "clip_low")),
    "epsilon_high": ("TRL", ("clip_high",)),
    "cliprange": ("TRL", ("clip", "clip_low")),
    "num_iterations": ("TRL", ("ppo_epochs",)),
    "num_ppo_epochs": ("TRL", ("ppo_epochs",)),
    "reward_funcs": ("TRL", ("reward_fn",)),
    "max_steps": ("TRL", ("steps",)),
    "num_train_epochs": ("TRL", ("epochs",)),
    "load_best_model_at_end": ("TRL", ("load_best_at_end",)),
    "metric_for_best_model": ("TRL", ("keep_best",)),
    "total_epochs": ("verl", ("epochs",)),
    "total_training_steps": ("verl", ("steps",)),
    "rollout_n": ("verl", ("n",)),
    "max_response_length": ("verl", ("max_new_tokens",)),
    "kl_loss_coef": ("verl", ("kl_coef",)),
    "clip_ratio": ("verl", ("clip", "clip_low")),
    "clip_ratio_low": ("verl", ("clip_low",)),
    "clip_ratio_high": ("verl", ("clip_high",)),
    "clip_ratio_c": ("verl", ("dual_clip",)),
    "entropy_coeff": ("verl", ("entropy",)),
    "n_samples_per_prompt": ("OpenRLHF", ("n",)),
    "generate_max_len": ("OpenRLHF", ("max_new_tokens",)),
    "init_kl_coef": ("OpenRLHF", ("kl_coef",)),
    "eps_clip": ("OpenRLHF", ("clip", "clip_low")),
    "lambd": ("OpenRLHF", ("lam",)),
    "max_epochs": ("OpenRLHF", ("ppo_epochs",)),
}
"""By name: the library, and the names of flowrl, of which the first that a call has is meant."""


def translated(given: Iterable[str], known: Container[str], form: str = " ({})") -> str:
    """What unknown parameters are called here: ``" (TRL's num_generations is n here)"``; empty if none is known."""
    found = []
    for name in given:
        library, names = _NAMES.get(name, ("", ()))
        ours = next((own for own in names if own in known), None)
        if ours is not None and name not in known:
            found.append(f"{library}'s {name} is {ours} here")
    return form.format(", ".join(found)) if found else ""
