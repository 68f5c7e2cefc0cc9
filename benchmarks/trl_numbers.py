"""Record TRL's own advantages and gradients for the configurations of `tests/importers/trl/cases.py`.

    PYTHONPATH=FOLDER python benchmarks/trl_numbers.py   # writes tests/importers/trl/numbers.json

FOLDER has TRL with accelerate and datasets, installed by ``pip install --no-deps --target``; ``make race`` sets up
such an environment, too. TRL's trainers score rows and compute their loss; only the engine, the model and the reward
functions are replaced by numbers.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from peer_numbers import ROOT, recorded_inputs
from torch import Tensor

from tests.importers.trl.cases import CASES, command, inputs, scores

END, PAD, TOKEN = 1, 0, 2


class Model:
    """In place of a model: log-probs, and whether it trains."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs


def _accelerator() -> SimpleNamespace:
    """One process."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        gather=lambda t: t,
        gather_for_metrics=lambda t: t,
        reduce=lambda t, reduction: t,
        sync_gradients=False,
    )


def trainer_of(part: str, flags: list[str], x: dict[str, Tensor]) -> Any:
    """A trainer of TRL with these flags, whose engine, models and reward functions are the numbers of `x`."""
    import trl
    from transformers import HfArgumentParser

    config_of, base = getattr(trl, f"{part.upper()}Config"), getattr(trl, f"{part.upper()}Trainer")
    own = {"reward_funcs": 1, "reward_weights": 1}
    parser = HfArgumentParser(config_of)
    config, rest = parser.parse_args_into_dataclasses(
        ["--output_dir", "x", "--bf16", "False", "--use_cpu", *flags], return_remaining_strings=True
    )
    assert all(not flag.startswith("--") or flag[2:] in own or flag[2:] in _OF_SCRIPT for flag in rest), rest
    last = len(flags) - flags[::-1].index("--reward_funcs")
    functions = [flag for flag in flags[last:] if flag.startswith("own.")]

    class OfNumbers(base):  # type: ignore[misc, valid-type]
        """TRL's trainer without a model."""

        def __init__(self) -> None:
            self.args = config
            for name in _SHARED:
                if hasattr(config, name):
                    setattr(self, name, getattr(config, name))
            if "--reward_clip_range" in flags:  # of which TRL's parser makes characters; a YAML file gives numbers
                at = flags.index("--reward_clip_range")
                self.reward_clip_range = float(flags[at + 1]), float(flags[at + 2])
            self.epsilon_low = config.epsilon
            self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
            weights = config.reward_weights or [1.0] * len(functions)
            self.reward_weights = torch.tensor(weights, dtype=torch.float32)
            self.reward_funcs = self.reward_func_names = functions
            self.model, self.ref_model = Model(x["old_log_probs"]), Model(x["ref_log_prob"])
            self.accelerator = _accelerator()
            self.environment_factories, self.environments, self.tools = None, None, []
            self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [END]
            self._metrics: Any = defaultdict(lambda: defaultdict(list))
            self._logs: Any = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
            self._pending_extra_logs, self._pending_metrics = {}, {}
            self.aux_loss_enabled = self._entropy_bonus_enabled = False
            self.current_gradient_accumulation_steps = config.gradient_accumulation_steps
            self.pad_to_multiple_of, self._is_vlm, self.chat_template_kwargs = None, False, {}

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            lengths = x["mask"].sum(-1).tolist()
            full = int(x["mask"].shape[1])
            cut = full if config.mask_truncated_completions else full + 1
            ids = [[TOKEN] * (n - 1) + [TOKEN if n >= cut else END] for n in lengths]
            sampled = x["old_log_probs"] - 0.1 * x["weights"].log()
            log_probs = [row[:n].tolist() for row, n in zip(sampled, lengths, strict=True)]
            found = ([[TOKEN]] * len(prompts), ids, None, ids, log_probs, {}, None, None)
            return found if part == "grpo" else found[:2] + found[3:4]

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return torch.stack([scores(x)[name.partition(".")[2]] for name in functions], -1)

        def _get_per_token_logps_and_entropies(self, model: Model, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return model.log_probs, torch.zeros_like(model.log_probs), None

    return OfNumbers()


_SHARED = (
    "beta", "importance_sampling_level", "loss_type", "mask_truncated_completions", "max_completion_length",
    "multi_objective_aggregation", "normalize_advantages", "num_generations", "num_iterations",
    "off_policy_mask_threshold", "reward_clip_range", "scale_rewards", "top_entropy_quantile", "use_vllm",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "log_multimodal",
)  # fmt: skip
_OF_SCRIPT = frozenset({"dataset_name", "model_name_or_path", "reward_funcs"})


def numbers(name: str, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Advantages of rows, and the gradient of the loss of each optimizer step."""
    part, x = CASES[name][0], inputs(name, x)
    trainer = trainer_of(part, shlex.split(command(name))[2:], x)
    rows, args = len(x["mask"]), trainer.args
    batch = trainer._generate_and_score_completions([{"prompt": "q"}] * rows)
    each, gradients = args.per_device_train_batch_size, []
    for start in range(0, rows, each):
        own = {
            key: value[start : start + each] if isinstance(value, Tensor) and value.ndim else value
            for key, value in batch.items()
        }
        if part == "grpo" and "old_per_token_logps" not in own:  # TRL takes ratios of 1 in the first of several steps
            own["old_per_token_logps"] = x["old_log_probs"][start : start + each]
        leaf = x["log_probs"][start : start + each].clone().requires_grad_()
        trainer.model = Model(leaf)
        loss = trainer._compute_loss(trainer.model, own)
        scale = args.gradient_accumulation_steps if part == "rloo" else 1  # of transformers' Trainer
        gradients.append(torch.autograd.grad(loss, leaf)[0] / scale)
    return {"advantages": batch["advantages"], "gradient": torch.cat(gradients)}


def main() -> None:
    x = recorded_inputs()
    found = {name: {key: one.tolist() for key, one in numbers(name, x).items()} for name in CASES}
    file = ROOT / "tests" / "importers" / "trl" / "numbers.json"
    text = json.dumps({"version": f"trl {version('trl')}", "numbers": found})
    file.write_text(text.replace("}, ", "},\n") + "\n", encoding="utf-8")
    print(f"{len(found)} configurations: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
