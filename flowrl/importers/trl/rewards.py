"""The reward functions of TRL's configurations: those of TRL by name, those of a script, and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.importers.plan import Function, GraphPlan, Name, call
from flowrl.importers.settings import Settings
from flowrl.importers.trl.functions import Copies, NotCopied, columns_of, reference
from flowrl.importers.trl.script import Script
from flowrl.importers.trl.values import Local, Made, Named

_COLUMNS = {"accuracy_reward": ["solution"], "reasoning_accuracy_reward": ["solution"], "think_format_reward": []}
"""TRL's own functions with the columns that they read."""
_OVERLONG = "get_soft_overlong_punishment"


@dataclass
class Rewards:
    """The terms of the reward, by name."""

    settings: Settings
    script: Script | None
    copies: Copies | None
    terms: dict[str, Any] = field(default_factory=dict)
    """What `from_trl` gets: a reference, or a function of the written file."""
    weights: dict[str, float] = field(default_factory=dict)
    penalties: list[Any] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    model: str | None = None

    def read(self, functions: Sequence[Any]) -> None:
        """Take all reward functions, each with its weight."""
        weights = self.settings.get("reward_weights") or [1.0] * len(functions)
        if len(weights) != len(functions):
            self.settings.refuse("reward_weights", f"{len(functions)} reward functions need as many weights")
            weights = [1.0] * len(functions)
        for function, weight in zip(functions, weights, strict=True):
            self._add(function, float(weight))

    def _add(self, function: Any, weight: float) -> None:
        match function:
            case Named():
                module, _, name = function.name.rpartition(".")
                self._term(name, f"{module}:{name}", _COLUMNS.get(name) if "trl" in module else None, weight)
            case Local():
                self._of_script(function, weight)
            case Made(kind="get_soft_overlong_punishment"):
                self._penalty(function, weight)
            case Made(kind="from_pretrained") if function.args and isinstance(function.args[0], str):
                self._model(function.args[0], weight)
            case str() if not function.isidentifier() and ("/" in function or "." not in function):
                self._model(function, weight)
            case str():
                self._by_name(function, weight)
            case _:
                what = function.why if hasattr(function, "why") else getattr(function, "kind", str(function))
                self.settings.refuse("reward_funcs", f"{what}: define a function that calls it")

    def _by_name(self, name: str, weight: float) -> None:
        """A function that a flag names: one of TRL's, or the path of an import."""
        if name == _OVERLONG:  # with the numbers of TRL's script
            self._penalty(Made(name, [1280, 256], {}, 0), weight)
        elif name in _COLUMNS:
            self._term(name, f"trl.rewards:{name}", _COLUMNS[name], weight)
        elif "." in name:
            module, _, last = name.rpartition(".")
            self._term(last, f"{module}:{last}", None, weight)
        else:
            self.settings.refuse("reward_funcs", f"TRL has no reward function {name!r}")

    def _of_script(self, function: Local, weight: float) -> None:
        assert self.script is not None and self.copies is not None
        name = function.name or f"reward_{len(self.terms) + 1}"
        own: Any = reference(self.script, function)
        if own is None:
            try:
                own = Name(self.copies.add(function))
            except NotCopied as error:
                self.settings.refuse("reward_funcs", f"{error}; put it into a module of its own")
                own = f"{self.script.path}:{name}"
        self._term(name, own, columns_of(function.node), weight)

    def _term(self, name: str, function: Any, columns: Sequence[str] | None, weight: float) -> None:
        if columns is None:
            self.settings.differ("reward_funcs", f"{name} gets the column solution; pass others that it reads")
            columns = ["solution"]
        self.columns = list(dict.fromkeys([*self.columns, *columns]))
        if name in ("generate", "reward", *self.terms):
            name = f"{name}_{len(self.terms) + 1}"
        self.terms[name], self.weights[name] = function, weight

    def _penalty(self, made: Made, weight: float) -> None:
        given = dict(zip(("max_completion_len", "soft_punish_cache"), made.args, strict=False)) | made.kwargs
        most, buffer = (given.get(name) for name in ("max_completion_len", "soft_punish_cache"))
        if not isinstance(most, int) or not isinstance(buffer, int) or not 0 < buffer <= most or weight <= 0:
            self.settings.refuse("reward_funcs", f"{_OVERLONG} needs two numbers and a positive weight")
            return
        self.penalties.append(call("OverlongPenalty", most, buffer, weight=weight))

    def _model(self, model: str, weight: float) -> None:
        if self.model or weight != 1.0:
            self.settings.refuse("reward_funcs", "combine several models by `WeighRewards`")
        self.model = model

    def add_to(self, plan: GraphPlan, conversational: bool) -> None:
        """Let a graph compute the reward: one function, a weighted sum, or a model."""
        scored = {name: self._scored(function, conversational) for name, function in self.terms.items()}
        if self.model is not None:
            plan.replace["reward"] = call("TextModelReward")
            plan.bound["reward_model"] = call("TorchRewardModel", self.model, dtype="bfloat16")
            if scored:
                self.settings.refuse("reward_funcs", "combine a model and functions by `WeighRewards`")
        elif not scored:
            self.settings.refuse("reward_funcs", "no reward function: pass --reward_funcs NAME")
        elif plan.algorithm == "gdpo":
            first, *others = scored
            plan.reward = scored[first]
            plan.settings["others"] = {name: scored[name] for name in others}
            plan.settings["weights"] = {"reward": self.weights[first], **{name: self.weights[name] for name in others}}
        elif [*self.weights.values()] == [1.0]:
            plan.reward = next(iter(scored.values()))
        else:
            self._weigh(plan, scored)
        for number, penalty in enumerate(self.penalties):
            if plan.algorithm == "gdpo":
                self.settings.refuse("reward_funcs", f"normalize_then_sum needs a function for {_OVERLONG}")
            name = "overlong_penalty" + (f"_{number + 1}" if number else "")
            plan.insert[name] = call("After", "reward", penalty)

    def _scored(self, function: Any, conversational: bool) -> Function:
        truth = truth_of(self.columns)
        more = {"ground_truth": truth} if truth != "solution" else {}
        return Function(call("from_trl", function, **more, **({} if conversational else {"conversational": False})))

    def _weigh(self, plan: GraphPlan, scored: dict[str, Function]) -> None:
        """Insert the weighted sum; the first term is the node of the algorithm."""
        first, *others = scored
        plan.reward = scored[first]
        plan.wanted["reward.log"] = f"reward/{first}"
        for name in others:
            plan.insert[name] = call("After", "generate", call("Reward", scored[name], log=f"reward/{name}"))
        plan.insert["weigh_rewards"] = call("After", "reward", call("WeighRewards", self.weights))
        plan.wire |= {
            f"weigh_rewards.{name}": f"{name if name in others else 'reward'}.token_level_scores" for name in scored
        }


def truth_of(columns: Sequence[str]) -> str:
    """Of the columns that rewards read, the one that is the ground truth: TRL's name, if they read it."""
    return "solution" if "solution" in columns or not columns else columns[0]
