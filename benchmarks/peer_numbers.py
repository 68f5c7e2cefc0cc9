"""Compare verl's and TRL's own code with flowrl's on random tokens, or record it for the tests.

    PYTHONPATH=FOLDER python benchmarks/peer_numbers.py verl             # the largest differences, over 20 seeds
    PYTHONPATH=FOLDER python benchmarks/peer_numbers.py verl record      # writes tests/operators/peers/verl.json

FOLDER has the peer and the imports that the environment lacks, as installed by ``pip install --no-deps --target``, verl
by `race/verl.txt` and TRL with accelerate and datasets by `race/requirements.txt`. ``make race`` sets up
``.venv-race/verl``, and ``.venv-race`` with TRL. The recorded file has the version, the inputs and the results, so that
`tests/operators/test_peer_numbers.py` needs no peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from harness import table  # noqa: E402

from tests.support.rows import peer_rows  # noqa: E402

FOLDER = ROOT / "tests" / "operators" / "peers"
SEEDS, GROUPS, TOKENS = 20, 64, 48


def recorded_inputs() -> dict[str, Tensor]:
    """Two groups of three rows of different lengths; one row of the first is longer than the others."""
    lengths, scores = torch.tensor([5, 3, 2, 4, 4, 1]), torch.tensor([1.0, 0.2, 0.5, 0.0, 0.7, 0.3])
    return inputs(lengths, scores, torch.Generator().manual_seed(0))


def random_inputs(seed: int) -> dict[str, Tensor]:
    """Many groups of three rows of random lengths, at least 1, and random scores."""
    generator = torch.Generator().manual_seed(seed)
    rows = GROUPS * peer_rows.ROWS_OF_A_GROUP
    lengths = torch.randint(1, TOKENS + 1, (rows,), generator=generator)
    return inputs(lengths, torch.rand(rows, generator=generator), generator)


def inputs(lengths: Tensor, scores: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Columns of rows with these lengths, in tokens, and scores."""
    shape = len(lengths), int(lengths.max())

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator) + shift

    mask = torch.arange(shape[1]) < lengths[:, None]
    log_probs = (normal(0.8, -1.2)).clamp(max=-0.01)

    def on_last(mask: Tensor) -> Tensor:
        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        return torch.where(last, scores[:, None], 0.0)

    old = (log_probs + normal(0.6)).clamp(max=-0.01)
    found = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "ref_log_prob": (log_probs + normal(0.7).clamp(-2.0, 2.0)).clamp(max=-0.01),  # verl's k3 ends at 10
        "advantages": normal(1.0)[:, :1].expand(shape).contiguous(),
        "sum_of_squares": old.exp().square() + (1.0 - old.exp()).square() * torch.rand(shape, generator=generator),
        "weights": 2.0 * torch.rand(shape, generator=generator),
        "mask": mask,
        "holes": torch.rand(shape, generator=generator) < 0.7,
    }
    return {**found, **{f"rewards of {name}": on_last(found[name]) for name in ("mask", "holes")}}


def gradient(of: Callable[[Tensor], Tensor], log_probs: Tensor) -> Tensor:
    """The gradient of a loss in the log-probs."""
    leaf = log_probs.clone().requires_grad_()
    return torch.autograd.grad(of(leaf), leaf)[0]


def verl_numbers(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Estimators of KL, aggregation, advantages and losses of verl."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    groups, rows = peer_rows.groups(x), len(x["mask"])
    found: dict[str, Tensor] = {}
    for estimator in peer_rows.ESTIMATORS:

        def kl(log_probs: Tensor, estimator: str = estimator) -> Tensor:
            return core_algos.kl_penalty(log_probs, x["ref_log_prob"], estimator)

        found[f"kl {estimator}"] = kl(x["log_probs"])
        found[f"gradient of kl {estimator}"] = gradient(lambda log_probs, kl=kl: kl(log_probs).sum(), x["log_probs"])
    found["token-sum"] = core_algos.agg_loss(x["log_probs"], x["mask"].float(), "token-sum")

    def baseline(function: Callable[..., tuple[Tensor, Tensor]], mask: str, weights: Tensor | None) -> Tensor:
        given = x[f"rewards of {mask}"], x[mask].float(), groups, x["old_log_probs"], x["sum_of_squares"], weights
        return function(*given, handle_zero_tail=True)[0]

    by_position = core_algos.compute_optimal_token_baseline_advantage
    found["otb"] = baseline(by_position, "mask", None)
    found["otb with weights"] = baseline(by_position, "mask", x["weights"])
    found["otb of turns"] = baseline(
        core_algos.compute_multi_turn_optimal_token_baseline_advantage, "holes", x["weights"]
    )
    for low, high in ((0.05, 0.2), (0.2, 0.05)):
        config = FSDPActorConfig(
            rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=20.0
        )
        for divergence in ("tv", "kl"):
            loss = core_algos.get_policy_loss_fn(f"dppo_{divergence}")
            found[f"dppo {divergence} {low} {high}"] = gradient(
                lambda log_probs, loss=loss, config=config: loss(
                    x["old_log_probs"], log_probs, x["advantages"], x["mask"].float(), "token-mean", config
                )[0],
                x["log_probs"],
            )
    one_token = torch.ones(rows, 1)
    for std in (True, False):
        terms = {"first": x["rewards of mask"].sum(-1).numpy(), "second": x["weights"][:, 0].numpy()}
        found[f"gdpo {'with' if std else 'without'} std"] = core_algos.compute_gdpo_outcome_advantage(
            torch.zeros(rows, 1),
            one_token,
            groups,
            norm_adv_by_std_in_grpo=std,
            config={"gdpo_reward_keys": [*terms], "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch=terms,
            batch={"prompts": torch.ones(rows, 2), "attention_mask": torch.ones(rows, 3, dtype=torch.int64)},
        )[0]
    return found


def trl_numbers(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of GRPO's loss of TRL, with KL in the loss."""
    from trl import GRPOTrainer

    class OfLogProbs(GRPOTrainer):
        """TRL's trainer, which gets its log-probs in place of a model."""

        def __init__(self, corrected: bool) -> None:
            accelerator = SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t)
            self.model, self.accelerator = SimpleNamespace(training=False), accelerator
            self.args = SimpleNamespace(use_bias_correction_kl=corrected, delta=None)
            self.loss_type, self.importance_sampling_level, self.beta = "bnpo", "token", 0.3
            self.epsilon_low = self.epsilon_high = 0.2
            self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
            self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
            self._metrics: Any = {"eval": defaultdict(list)}

        def _get_per_token_logps_and_entropies(self, model: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return model, torch.zeros_like(model), None

    mask = x["mask"].long()
    batch = {
        "prompt_ids": torch.ones(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": x["advantages"],
        "old_per_token_logps": x["old_log_probs"],
        "ref_per_token_logps": x["ref_log_prob"],
    }
    found = {
        name: gradient(
            lambda leaf, corrected=corrected: OfLogProbs(corrected)._compute_loss(leaf, batch), x["log_probs"]
        )
        for name, corrected in (("kl", False), ("kl with the ratio", True))
    }
    return found | {name: gradient(loss, x["log_probs"]) for name, loss in trl_preferences(x).items()}


def trl_preferences(x: dict[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Losses of TRL in log-probs: of the best and the worst row of each group, and of all rows with a label each.

    ORPO's likelihood is the paper's, since TRL's includes the prompt.
    """
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    best, worst = peer_rows.best_and_worst(x)
    mask, ref, lengths = x["mask"], x["ref_log_prob"] * x["mask"], x["mask"].sum(-1)
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda t: t)
    common = {"beta": 0.3, "accelerator": accelerator, "alpha": 0.0, "label_smoothing": 0.0}

    def mean(leaf: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (leaf * mask).sum(-1) / lengths
        return log_p[best], log_p[worst]

    def simpo(leaf: Tensor) -> Tensor:
        settings = SimpleNamespace(**common, loss_type="simpo", simpo_gamma=0.6)
        return CPOTrainer.cpo_loss(settings, *mean(leaf))[0].mean()

    def orpo(leaf: Tensor) -> Tensor:
        return -mean(leaf)[0].mean() - ORPOTrainer.odds_ratio_loss(SimpleNamespace(**common), *mean(leaf))[0].mean()

    order = torch.cat([best, worst])
    labels = peer_rows.labels(x)
    moved = ((x["log_probs"] - x["ref_log_prob"]) * mask).sum(-1)  # in place of mismatched rows, as any estimate
    return {
        "dpo": lambda leaf: _of_trl("DPOTrainer", leaf * mask, ref, mask, order, loss_types=["sigmoid"]),
        "ipo": lambda leaf: _of_trl("DPOTrainer", leaf * mask, ref, mask, order, loss_types=["ipo"]),
        "simpo": simpo,
        "orpo": orpo,
        "kto": lambda leaf: _of_trl("KTOTrainer", leaf * mask, ref, mask, None, label=labels, kl=moved),
    }


def _of_trl(trainer: str, new: Tensor, ref: Tensor, mask: Tensor, order: Tensor | None, **settings: Any) -> Tensor:
    """`_compute_loss` of a trainer of TRL, with log-probs in place of a model: those of `order`, or all rows."""
    import trl

    rows = slice(None) if order is None else order
    label, kl = settings.pop("label", None), settings.pop("kl", None)
    self = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=lambda t: t, gather_for_metrics=lambda t: t),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=0.3,
        label_smoothing=0.0,
        aux_loss_enabled=False,
        ld_alpha=None,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=1.3,
        undesirable_weight=0.6,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _compute_kl_logps=lambda model, batch: kl,
        **settings,
    )
    shifted = torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], 1)[rows].long()
    none = torch.zeros_like(new[rows])
    output = SimpleNamespace(log_probs=new[rows], entropy=none, mean_logits=none, is_top1=none.bool())
    inputs = {"input_ids": shifted, "attention_mask": torch.ones_like(shifted), "completion_mask": shifted}
    sums = ref[rows].sum(-1)
    if order is not None:
        inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), sums.chunk(2), strict=True))
    else:
        inputs |= {"ref_logps": sums, "ref_KL_logps": torch.zeros_like(sums), "label": label}
    found: Tensor = getattr(trl, trainer)._compute_loss(self, lambda **_: output, inputs, False)
    return found


def record(peer: str) -> None:
    """Write the file of a peer."""
    x = recorded_inputs()
    parts = {"in": x, "out": PEERS[peer](x)}
    lists = {part: {name: tensor.tolist() for name, tensor in of.items()} for part, of in parts.items()}
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"version": f"{peer} {version(peer)}", **lists})
    (FOLDER / f"{peer}.json").write_text(text.replace('], "', '],\n"') + "\n", encoding="utf-8")


def compare(peer: str) -> None:
    """Print the largest difference of each number, and the largest absolute value of the peer's."""
    worst, size = dict[str, float](), dict[str, float]()
    own = {"verl": peer_rows.verl_numbers, "trl": peer_rows.trl_numbers}[peer]
    for seed in range(SEEDS):
        x = random_inputs(seed)
        mine = own(x)
        for name, number in PEERS[peer](x).items():
            theirs, found = (peer_rows.on_mask(name, of, x).double() for of in (number, mine[name]))
            worst[name] = max(worst.get(name, 0.0), float((found - theirs).abs().max()))
            size[name] = max(size.get(name, 0.0), float(theirs.abs().max()))
    title = f"{SEEDS} batches of {GROUPS * peer_rows.ROWS_OF_A_GROUP} rows of up to {TOKENS} tokens"
    rows = [[name, f"{worst[name]:.1e}", f"{size[name]:.3g}"] for name in worst]
    table(title, [f"{peer} {version(peer)}", "largest difference", "largest value"], rows)


PEERS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {"verl": verl_numbers, "trl": trl_numbers}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("verl", "trl"))
    parser.add_argument("record", nargs="?", choices=("record",), help="write the file of the tests")
    given = parser.parse_args()
    (record if given.record else compare)(given.peer)
