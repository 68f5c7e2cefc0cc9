"""Runs of every algorithm of the shelf with all columns recorded, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl import DemoData, PreferenceData, PromptData, Recording, Training, UnpairedData, graphs
from flowrl.backends import TorchRewardTrainer, TorchScorer
from flowrl.graph import Graph
from tests.support.jobs import bind_tiny, write_prompts
from tests.support.rewards import asks_for_digits, digits
from tests.support.rows.prompt_files import write_jsonl

ALGORITHMS = tuple(sorted(graphs.__all__))
_SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {"groups": 2, "max_new_tokens": 16},
    "gdpo": {"others": {"digits": digits}},
    "pass_at_k": {"k": 2},
    "vapo": {"critic_warmup": 1},
    "distill_top": {"k": 4},
}
_OF_PAIRS = ("dpo", "ipo", "orpo", "reward_model", "simpo")
_OF_DATA = ("sft", "kto", *_OF_PAIRS)


def arguments_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an algorithm of the shelf, with several responses per prompt where it samples."""
    if name in _OF_DATA:
        return (), {"mini_batch": 2}
    rewards = () if name.startswith("distill") else (asks_for_digits,)
    return rewards, {"n": 4, "max_new_tokens": 8} | _SETTINGS.get(name, {})


def graph_of(name: str) -> Graph:
    """An algorithm of the shelf, by name."""
    rewards, settings = arguments_of(name)
    found: Graph = getattr(graphs, name)(*rewards, **settings)
    return found


def data_of(name: str, folder: Path) -> Any:
    """Data for an algorithm, written to a folder."""
    prompts = PromptData(write_prompts(folder / "prompts.jsonl"))
    demos = [{"prompt": f"q{i}", "response": "12" * (1 + i % 3)} for i in range(6)]
    pairs = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "abc"} for i in range(6)]
    labeled = [{"prompt": f"q{i}", "completion": "12" * (1 + i % 3), "label": i % 2 == 0} for i in range(6)]
    match name:
        case "sft":
            return DemoData(write_jsonl(folder / "demos.jsonl", demos))
        case "kto":
            return UnpairedData(write_jsonl(folder / "labeled.jsonl", labeled))
        case _ if name in _OF_PAIRS:
            return PreferenceData(write_jsonl(folder / "pairs.jsonl", pairs))
        case "grpo_sft":
            return {"batch": prompts, "demos": DemoData(write_jsonl(folder / "demos.jsonl", demos))}
    return prompts


def record(graph: Graph, folder: Path, model: str, data: Any, **settings: Any) -> Path:
    """Run a graph with all columns recorded, by default for 3 steps of 4 prompts; returns the run folder."""
    teacher, trainer = TorchScorer(model, device="cpu"), TorchRewardTrainer(model, device="cpu")
    job = bind_tiny(graph, model, teacher=teacher, reward_model=trainer)
    settings = {"steps": 3, "prompts": 4, "save_model": False, "recording": Recording(columns="all")} | settings
    return Training(job, data, folder=str(folder), **settings).run().folder


def record_algorithm(name: str, folder: Path, model: str, **settings: Any) -> Path:
    """`record` of an algorithm of the shelf; the data is next to the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return record(graph_of(name), folder / name, model, data_of(name, folder), **settings)
