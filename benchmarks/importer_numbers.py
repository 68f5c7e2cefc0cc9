"""Compare one step of imported configurations with the functions of verl and OpenRLHF, on shared random rows.

    PYTHONPATH=FOLDER python benchmarks/importer_numbers.py verl        # FOLDER: see peer_numbers.py
    PYTHONPATH=FOLDER python benchmarks/importer_numbers.py openrlhf    # FOLDER has OpenRLHF 0.11.2, unpacked

Each configuration is imported, the graph of the written file computes advantages, losses and gradients, and the peer's
own functions compute them from the same keys. It prints the largest difference of each, for gradients and advantages
relative to the peer's largest value, and exits with 1 if one is above 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from harness import table  # noqa: E402

from flowrl.importers.importing import Source, import_file  # noqa: E402
from flowrl.importers.plan import Imported  # noqa: E402
from tests.support.rows.importer_rows import numbers, rows  # noqa: E402

SEEDS, GROUPS, N, WIDTH, LIMIT = 5, 24, 4, 48, 1e-5

A, R, C = "actor_rollout_ref.actor.", "algorithm.rollout_correction.", "algorithm.kl_ctrl."
KL = f"{A}use_kl_loss=True {A}kl_loss_coef=0.05 {A}kl_loss_type="
SHAPED = f"algorithm.use_kl_in_reward=True {C}kl_coef=0.05 algorithm.kl_penalty="
VERL = {
    "grpo": "",
    "grpo, k3 in the loss, entropy": f"{KL}low_var_kl {A}entropy_coeff=0.01",
    "grpo, k3+ in the loss": f"{KL}k3+",
    "grpo, mse in the loss": f"{KL}mse",
    "grpo, k3 in the reward": f"{SHAPED}low_var_kl",
    "grpo without std, by rows": f"algorithm.norm_adv_by_std_in_grpo=False {A}loss_agg_mode=seq-mean-token-mean",
    "dr. grpo": f"algorithm.norm_adv_by_std_in_grpo=False {A}loss_agg_mode=seq-mean-token-sum-norm",
    "clip higher, dual clip": f"{A}clip_ratio_low=0.1 {A}clip_ratio_high=0.28 {A}clip_ratio_c=1.5",
    "ppo": f"algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.gamma=0.99 {SHAPED}kl critic.model.path=m",
    "rloo": f"algorithm.adv_estimator=rloo {SHAPED}kl",
    "reinforce++": f"algorithm.adv_estimator=reinforce_plus_plus {SHAPED}kl",
    "reinforce++ with a baseline": f"algorithm.adv_estimator=reinforce_plus_plus_baseline {KL}mse",
    "reinforce++ with a baseline, no kl": "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    "opo": "algorithm.adv_estimator=opo",
    "gpg": f"algorithm.adv_estimator=gpg {A}policy_loss.loss_mode=gpg",
    "gspo": f"{A}policy_loss.loss_mode=gspo {A}clip_ratio_low=3e-4 {A}clip_ratio_high=4e-4 "
    f"{A}loss_agg_mode=seq-mean-token-mean",
    "gspo by tokens": f"{A}policy_loss.loss_mode=gspo",
    "sapo": f"{A}policy_loss.loss_mode=sapo {A}tau_neg=1.2",
    "cispo": f"{A}policy_loss.loss_mode=cispo {A}clip_ratio_low=10",
    "geo_mean": f"{A}policy_loss.loss_mode=geo_mean {A}clip_ratio_low=0.4 {A}clip_ratio_high=0.4",
    "kl_cov": f"{A}policy_loss.loss_mode=kl_cov {A}policy_loss.kl_cov_ratio=0.02",
    "dppo_tv": f"{A}policy_loss.loss_mode=dppo_tv {A}clip_ratio_c=20",
    "dppo_kl": f"{A}policy_loss.loss_mode=dppo_kl {A}clip_ratio_c=20",
    "token weights": f"{R}rollout_is=token {R}rollout_is_threshold=1.2",
    "sequence weights, normalized": f"{R}rollout_is=sequence {R}rollout_is_batch_normalize=True",
    "weights in a range": f"{R}rollout_is=token {R}rollout_is_threshold=0.8_1.2",
    "rejection of tokens": f"{R}rollout_rs=token_k1 {R}rollout_rs_threshold=1.3",
    "rejection of rows and tokens": f"{R}rollout_rs=token_k2,seq_mean_k1,seq_mean_k3,seq_max_k2 "
    f"{R}rollout_rs_threshold=0.05,0.95_1.05,0.03,0.2",
    "rejection, whitened": f"algorithm.adv_estimator=reinforce_plus_plus {R}rollout_rs=seq_mean_k1 "
    f"{R}rollout_rs_threshold=0.95_1.05",
    "bypass": f"{R}bypass_mode=True {R}rollout_is=token",
}
O = "--algo.advantage.estimator"  # noqa: E741
OPENRLHF = {
    "ppo": f"{O} gae --algo.advantage.lambd 0.95 --algo.advantage.gamma 0.99 --reward.model_name_or_path m",
    "ppo, k2, dual clip": f"{O} gae --algo.kl.estimator k2 --actor.dual_clip 1.5 --reward.model_name_or_path m",
    "ppo, bounded rewards": f"{O} gae --reward.clip_range -0.5 1.5 --reward.model_name_or_path m",
    "reinforce": f"{O} reinforce --algo.advantage.gamma 0.99",
    "group_norm": f"{O} group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.05",
    "reinforce_baseline": f"{O} reinforce_baseline --algo.kl.use_loss --algo.kl.estimator k2",
    "rloo": f"{O} rloo --algo.kl.init_coef 0",
    "dr_grpo": f"{O} dr_grpo --algo.kl.init_coef 0",
    "dapo": f"{O} group_norm --actor.eps_clip_low_high 0.2 0.27 --algo.kl.init_coef 0",
    "gspo": f"{O} group_norm --actor.policy_loss_type gspo --algo.kl.init_coef 0",
    "clipped weights": f"{O} group_norm --algo.kl.init_coef 0 --algo.advantage.is_correction_level token "
    "--algo.advantage.is_correction_mode clip --algo.advantage.is_correction_threshold 0.8 1.2",
    "masked weights": f"{O} group_norm --algo.kl.init_coef 0 --algo.advantage.is_correction_level token "
    "--algo.advantage.is_correction_mode mask --algo.advantage.is_correction_threshold 0.8 1.2",
    "masked rows": f"{O} group_norm --algo.kl.init_coef 0 --algo.advantage.is_correction_level seq "
    "--algo.advantage.is_correction_mode mask --algo.advantage.is_correction_threshold 0.95 1.05",
}
_SCRIPTS = {
    "verl": f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=x.parquet "
    f"data.train_batch_size={GROUPS} {A}ppo_mini_batch_size={GROUPS} data.max_response_length={WIDTH} "
    f"actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n={N} ",
    "openrlhf": f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset x.jsonl "
    f"--rollout.batch_size {GROUPS} --rollout.n_samples_per_prompt {N} --train.batch_size {GROUPS * N} "
    f"--rollout.max_new_tokens {WIDTH} --reward.remote_url reward.py ",
}


def imported(framework: str, more: str) -> Imported:
    """A configuration as its importer reads it."""
    script = _SCRIPTS[framework] + more
    if "--reward.model_name_or_path" in more:
        script = script.replace("--reward.remote_url reward.py ", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.sh"
        file.write_text(script + "\n", encoding="utf-8")
        found, _ = import_file(framework, Source(file))
    refused = [str(remark) for remark in found.settings.report(()).refused]
    assert not refused, refused
    return found


def difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference, and the number that has it."""
    parts = {}
    for name, of in theirs.items():
        scale = 1.0 if name.endswith("loss") else float(of.double().abs().max())  # losses are sums that cancel
        parts[name] = float((mine[name].double() - of.double()).abs().max()) / (scale or 1.0)
    worst = max(parts, key=lambda name: parts[name])
    return parts[worst], worst


def compare(framework: str, peer: Callable[[Imported, Mapping[str, Any]], dict[str, Tensor]]) -> int:
    """Print the table; the number of differences above the limit."""
    lines, odd = [], 0
    for name, more in {"verl": VERL, "openrlhf": OPENRLHF}[framework].items():
        found = imported(framework, more)
        graph, worst = found.graph.edited(), (0.0, "")
        for seed in range(SEEDS):
            x = rows(seed, GROUPS, N, WIDTH, scores="bits" if seed % 2 else "reals")
            worst = max(worst, difference(numbers(graph, x), peer(found, x)))
        odd += worst[0] > LIMIT
        lines.append([name, f"{worst[0]:.1e}", worst[1]])
    title = f"{SEEDS} batches of {GROUPS * N} rows of up to {WIDTH} tokens"
    release = version(framework) if framework == "verl" else "0.11.2"
    table(title, [f"{framework} {release}", "largest difference", "of"], lines)
    return odd


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("verl", "openrlhf"))
    chosen = parser.parse_args().peer
    if chosen == "verl":
        from importer_peers import verl as peer
    else:
        from importer_peers import openrlhf as peer
    sys.exit(1 if compare(chosen, peer) else 0)
