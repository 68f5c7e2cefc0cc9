"""Configurations of TRL whose numbers are compared, and what the graphs that are written for them compute."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.importers.plan import Imported
from flowrl.operators import Reward
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.reward.operator import place_scores
from tests.support.rows.peer_rows import groups

_ONE_STEP = "--per_device_train_batch_size 3 --gradient_accumulation_steps 2 --num_generations 3"
_TWO = "--reward_funcs own.first own.second --reward_weights 1 0.5"
_VLLM = "--use_vllm --vllm_importance_sampling_mode"
CASES: dict[str, tuple[str, str]] = {
    "dapo": ("grpo", ""),
    "grpo": ("grpo", "--loss_type grpo"),
    "bnpo": ("grpo", "--loss_type bnpo --per_device_train_batch_size 6 --gradient_accumulation_steps 1"),
    "dr_grpo": ("grpo", "--loss_type dr_grpo --max_completion_length 7"),
    "cispo": ("grpo", "--loss_type cispo --epsilon_high 1.4"),
    "sapo": ("grpo", "--loss_type sapo --sapo_temperature_neg 1.3"),
    "luspo": ("grpo", "--loss_type luspo"),
    "luspo by responses": ("grpo", "--loss_type luspo --importance_sampling_level sequence"),
    "gspo": ("grpo", "--loss_type grpo --importance_sampling_level sequence --epsilon 0.03 --epsilon_high 0.4"),
    "gspo over tokens": ("grpo", "--importance_sampling_level sequence"),
    "bounds": ("grpo", "--epsilon 0.1 --epsilon_high 0.28 --delta 1.5"),
    "kl": ("grpo", "--beta 0.3"),
    "kl without the ratio": ("grpo", "--beta 0.3 --use_bias_correction_kl False --loss_type dr_grpo"),
    "mini-batches": ("grpo", "--loss_type grpo --gradient_accumulation_steps 1 --steps_per_generation 2"),
    "no scale": ("grpo", "--scale_rewards none"),
    "scale of the batch": ("grpo", "--scale_rewards batch"),
    "two rewards": ("grpo", _TWO),
    "two normalized rewards": ("grpo", f"{_TWO} --multi_objective_aggregation normalize_then_sum"),
    "sequence_mask": ("grpo", f"{_VLLM} sequence_mask --vllm_importance_sampling_clip_max 1.01"),
    "sequence_truncate": ("grpo", f"{_VLLM} sequence_truncate --vllm_importance_sampling_clip_max 1.01"),
    "token_mask": ("grpo", f"{_VLLM} token_mask --vllm_importance_sampling_clip_min 0.9 --beta 0.2"),
    "token_truncate": ("grpo", f"{_VLLM} token_truncate --vllm_importance_sampling_clip_max 1.1 --loss_type sapo"),
    "truncated": ("grpo", "--mask_truncated_completions --max_completion_length 5"),
    "rloo": ("rloo", ""),
    "rloo without kl": ("rloo", "--beta 0"),
    "rloo of clipped rewards": ("rloo", f"{_TWO} --reward_clip_range 0.3 0.9"),
    "rloo in mini-batches": ("rloo", "--gradient_accumulation_steps 1 --steps_per_generation 2 --epsilon_high 0.5"),
}
"""By name, the trainer and the flags that are not those of `_ONE_STEP`."""


def command(name: str) -> str:
    """The command line of a case; later flags hold."""
    part, flags = CASES[name]
    head = f"trl {part} --model_name_or_path model --dataset_name data.jsonl --max_steps 10"
    return f"{head} --reward_funcs own.first {_ONE_STEP} {flags}\n"


def inputs(name: str, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a case: those of the policy itself for RLOO in one step, where every ratio is 1."""
    on_policy = CASES[name][0] == "rloo" and "mini-batches" not in name
    return {**x, **({"log_probs": x["old_log_probs"]} if on_policy else {})}


def scores(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rewards of rows by two functions."""
    return {"first": x["rewards of mask"].sum(-1), "second": x["weights"][:, 0]}


def numbers(found: Imported, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Advantages, and the gradient of the loss of each optimizer step in the log-probs, of an imported training."""
    names: dict[str, Any] = {}
    exec(compile(found.program(reward=False).source(), "<imported>", "exec"), names)
    graph = names["training"].job.graph
    columns = {
        "generate.response_mask": x["mask"],
        "generate.rollout_log_probs": x["old_log_probs"] - 0.1 * x["weights"].log(),
        "old_log_prob.old_log_probs": x["old_log_probs"],
        "ref_log_prob.ref_log_prob": x["ref_log_prob"],
        "repeat.uid": groups(x),
    }
    given = scores(x)
    for name, node in graph.nodes.items():
        edges = {str(port): str(edge) for port, edge in node.inputs.items()}
        if isinstance(node.operator, Reward):
            scored = given["second" if name == "second" else "first"]
            columns[f"{name}.token_level_scores"] = place_scores(scored, x["mask"])
        elif name == "update_actor":
            read = {port.rpartition(".")[2]: columns[field] for port, field in edges.items() if field in columns}
            return {"advantages": read["advantages"], "gradient": _gradient(node.operator, x, read)}
        elif edges and all(field in columns for field in edges.values()) and name != "mismatch":
            arguments = {port: columns[field] for port, field in edges.items()}
            if "metrics" in inspect.signature(type(node.operator).__call__).parameters:
                arguments["metrics"] = Metrics()
            outputs = [edge for other in graph.nodes.values() for edge in other.inputs.values() if edge.node == name]
            result = node.operator(**arguments)
            columns |= {str(field): result for field in outputs}
    raise AssertionError("the graph has no update_actor")


def _gradient(update: Any, x: Mapping[str, Tensor], columns: Mapping[str, Any]) -> Tensor:
    objective = TokenObjective(update.loss, update.aggregation, update.norm, update.kl)
    rows, size = len(x["mask"]), update.mini_batch or len(x["mask"])
    parts = []
    for start in range(0, rows, size):
        own = {name: column[start : start + size] for name, column in columns.items()}
        batch = SimpleNamespace(**{"ref_log_prob": None} | own)
        leaf = x["log_probs"][start : start + size].clone().requires_grad_()
        loss = objective(leaf, None, batch, objective.weights(own["response_mask"]), Metrics())
        parts.append(torch.autograd.grad(loss, leaf)[0])
    return torch.cat(parts)
