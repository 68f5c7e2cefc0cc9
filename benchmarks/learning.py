"""How well methods learn: one task, one model, and the same number of sampled answers and optimizer steps.

    python benchmarks/learning.py                                       # all methods, three seeds: about an hour
    python benchmarks/learning.py --methods grpo,dapo --seeds 0 --steps 20

The task is addition of three digits (see `flowrl.demo`), from a warm start that seldom thinks and often makes mistakes.
Results are stored in ``<folder>/<method>-<seed>.json``; runs with a stored result of the same settings are skipped, so
an interrupted benchmark resumes, and the beginning of a longer run serves as well. At the end it prints a table and
writes ``<folder>/learning.svg``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.curves import accuracy_table, draw
from harness.kept import Result, kept_result, parsed, parser_of
from transformers.utils import logging

from flowrl import INJECTED, After, Graph, Key, Operator, PromptData, Training, Validation
from flowrl.backends import AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.graphs import cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce_plus_plus, rloo
from flowrl.operators.reward.operator import place_scores
from flowrl.schedules import Constant

ROWS = 256  # sampled answers per step
GROUP = 8
MINI_BATCH = 32  # rows per optimizer step
STEPS = 24
EVERY = 8  # steps between validations
LEARNING_RATE, CRITIC_RATE, WARM_UP = 2e-4, 1e-3, 10
START = {"digits": 3, "steps": 260, "direct": 0.9}  # warm-up of the model: see `build`
LONGEST = 32  # tokens: an answer with every carry has 31
SETTINGS = {"max_new_tokens": 36, "mini_batch": MINI_BATCH, "kl_coef": 0.0}


class Shuffled(Operator):
    """Control: every answer gets the score of another one, so there is nothing to learn."""

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, key: Key = INJECTED
    ) -> TokenLevelScores:
        order = torch.randperm(len(token_level_scores), generator=key.generator())
        return place_scores(token_level_scores.sum(-1)[order], response_mask)


def methods() -> dict[str, Graph]:
    """The graph of each method, by name.

    DAPO samples as many prompts per step as the others, and more if fewer than half give a gradient. It trains on half
    as many rows, in mini-batches of half the size, so all methods take the same number of optimizer steps.
    """
    settings: dict[str, Any] = {**SETTINGS, "n": GROUP}
    group = grpo(score_and_thinking, **settings)
    halved = {**settings, "mini_batch": MINI_BATCH // 2}
    halved["overlong_buffer"] = SETTINGS["max_new_tokens"] - LONGEST
    whole = dapo(score_and_thinking, groups=ROWS // GROUP // 2, **halved).edit(set={"collect.on_underfill": "repeat"})
    all_groups = whole.edit(drop=["collect"], set={"update_actor.mini_batch": MINI_BATCH})
    return {
        "ppo": ppo(score_and_thinking, **SETTINGS),  # type: ignore[arg-type]
        "reinforce_plus_plus": reinforce_plus_plus(score_and_thinking, **SETTINGS),
        "grpo": group,
        "dr_grpo": dr_grpo(score_and_thinking, **settings),
        "rloo": rloo(score_and_thinking, **settings),
        "gspo": gspo(score_and_thinking, **settings),
        "cispo": cispo(score_and_thinking, **settings),
        "dapo": whole,
        "dapo_without_clip_higher": whole.edit(set={"update_actor.loss.clip_high": None}),
        "dapo_without_dynamic_sampling": all_groups,
        "dapo_without_token_mean": whole.edit(set={"update_actor.aggregation": "seq-mean-token-mean"}),
        "grpo_on_shuffled_rewards": group.edit(insert={"shuffled": After("reward", Shuffled())}),
    }


def training(graph: Graph, model: Path, data: Path, folder: Path, steps: int, seed: int) -> Training:
    """The training of one method: `ROWS` answers per step; held-out accuracy at temperature 1, two answers each."""
    betas = (0.9, 0.95)
    engines: dict[str, Any] = {
        "actor": TorchTrainer(str(model), AdamW(lr=LEARNING_RATE, betas=betas), Constant(1.0, warmup=WARM_UP)),
        "ref": TorchScorer(str(model)),
        "critic": TorchCritic(str(model), AdamW(lr=CRITIC_RATE, betas=betas)),
        "rollout": TorchRollout(),
    }
    held_out = PromptData(data / "heldout.jsonl")
    return Training(
        graph.bind(**{role: engines[role] for role in graph.roles()}),
        PromptData(data / "train.jsonl"),
        steps=steps,
        prompts=ROWS // graph["repeat"].rows_factor,
        seed=seed,
        validation=Validation(held_out, every=EVERY, changes={"repeat.n": 2}, batch=500),
        folder=str(folder),
        save_model=False,
    )


def settings_of(graph: Graph, seed: int) -> dict[str, Any]:
    """Everything that determines a run except its length, as JSON."""
    run = {"rows": ROWS, "every": EVERY, "rates": [LEARNING_RATE, CRITIC_RATE], "warm_up": WARM_UP, "start": START}
    return {"seed": seed, "graph": graph.fingerprint(), **run}


def result_of(method: str, graph: Graph, base: Path, seed: int, steps: int) -> Result:
    """The result of a method, stored or new."""

    def run(folder: Path) -> list[dict[str, Any]]:
        model = build(base / f"model-seed{seed}", seed, **START)
        found = training(graph, model, base / "data", folder, steps, seed).run()
        offered = [GROUP * step["collect/offered"] if "collect/offered" in step else ROWS for step in found.metrics]
        return [
            {
                "step": int(point["step"]),
                "answers": int(sum(offered[: int(point["step"])])),
                "accuracy": point["val/reward/mean"],
                "thinks": point["val/reward/thinks"],
                "length": point["val/response_length/mean"],
            }
            for point in found.validations
        ]

    return kept_result(base / f"{method}-{seed}.json", {"method": method}, settings_of(graph, seed), steps, run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has no stored result, then print the table and draw the curves."""
    graphs = methods()
    options = parsed(parser_of(__doc__, graphs, STEPS, EVERY, "runs/learning"), arguments, graphs, EVERY)
    torch.set_num_threads(1)  # more threads are slower at this size
    logging.disable_progress_bar()
    if not (options.folder / "data" / "heldout.jsonl").exists():
        write_dataset(options.folder / "data", digits=int(START["digits"]))
    results = []
    for seed in options.seeds:
        for method in options.methods:
            results.append(result := result_of(method, graphs[method], options.folder, seed, options.steps))
            curve = " ".join(f"{point['accuracy']:.3f}" for point in result["points"])
            print(f"{method}, seed {seed}: {curve}", flush=True)
    print("\n" + accuracy_table(results, against="grpo"))
    draw(results, options.folder / "learning.svg", against="grpo")


if __name__ == "__main__":
    main()
