"""Trainings of TRL with tools or environments, as an agent."""

from __future__ import annotations

import ast
from typing import Any

from flowrl.importers.plan import Function, GraphPlan, Name, call
from flowrl.importers.settings import Settings
from flowrl.importers.trl.functions import columns_of, reference
from flowrl.importers.trl.rewards import Rewards, truth_of
from flowrl.importers.trl.script import Script
from flowrl.importers.trl.values import Local
from flowrl.importers.writer import written

_AGENT = '''async def agent(chat, row):
    """An episode as {script} plays it."""
    return await play_as_trl(
        chat,
        row,
{arguments}
    )
'''
_EVER = 1000
"""Turns of an episode that only its length ends."""


class Agent:
    """Episodes of a script: ``tools=[...]`` or ``environment_factory=``.

    Args:
        settings: the configuration.
        script: its trainer has tools or an environment.
        rewards: the reward functions, which the agent calls.
    """

    def __init__(self, settings: Settings, script: Script, rewards: Rewards) -> None:
        self._settings, self._script, self._rewards = settings, script, rewards
        given = script.trainers[-1].kwargs
        tools = given.get("tools") or []
        self._tools = [self._named("tools", tool) for tool in (tools if isinstance(tools, list | tuple) else [tools])]
        factory = given.get("environment_factory")
        self._environment = None if factory is None else self._named("environment_factory", factory)
        if isinstance(factory, Local) and isinstance(factory.node, ast.ClassDef):
            resets = [one for one in factory.node.body if isinstance(one, ast.FunctionDef) and one.name == "reset"]
            columns = [name for one in resets for name in columns_of(one) if name != "self"]
            rewards.columns = list(dict.fromkeys([*rewards.columns, *columns]))
        settings.read |= {"tools", "environment_factory"}

    @staticmethod
    def is_of(script: Script | None) -> bool:
        """Whether the trainer of a script plays episodes."""
        given = {} if script is None else script.trainers[-1].kwargs
        return bool(given.get("tools") or given.get("environment_factory"))

    def _named(self, key: str, function: Any) -> str:
        """A reference to a function or class of the script."""
        if isinstance(function, Local):
            if (found := reference(self._script, function)) is not None:
                return found
            why = 'define it at the top level, and make the trainer below `if __name__ == "__main__":`'
        elif getattr(function, "statement", ""):
            module, _, name = str(function).rpartition(".")
            return f"{module}:{name}"
        else:
            why = "only a function or class with a name is read"
        self._settings.refuse(key, f"{getattr(function, 'name', function)}: {why}")
        return f"{self._script.path}:{getattr(function, 'name', key)}"

    def source(self) -> str:
        """The agent."""
        rewards = {str(ref): self._rewards.weights[name] for name, ref in self._rewards.terms.items()}
        truth = truth_of(self._rewards.columns)
        given = {
            "rewards": rewards,
            **({"tools": self._tools} if self._tools else {}),
            **({"environment": self._environment} if self._environment else {}),
            **({"ground_truth": truth} if truth != "solution" else {}),
        }
        lines = [f"        {name}={written(value, 8)}," for name, value in given.items()]
        return _AGENT.format(script=self._script.path.name, arguments="\n".join(lines))

    def add_to(self, plan: GraphPlan) -> None:
        """Let a graph play episodes in place of single responses."""
        settings, get = self._settings, self._settings.get
        if any(not isinstance(one, str) for one in self._rewards.terms.values()) or self._rewards.penalties:
            settings.refuse("reward_funcs", "with tools, only functions at the top level of a module are read")
        if self._rewards.model or get("mask_truncated_completions") or get("scale_rewards") == "batch":
            settings.refuse("tools", "reward models, masked completions and scales of the batch need single responses")
        if plan.algorithm != "grpo":
            settings.refuse("multi_objective_aggregation", "an agent returns the sum of its rewards")
        most, longest = plan.settings["max_new_tokens"], get("vllm_max_model_length")
        context = int(longest or max(4096, 2 * most))
        settings.differ(
            "max_completion_length",
            f"the limit of a response; an episode has up to {context} tokens with its prompt",
        )
        turns = get("max_tool_calling_iterations")
        template = settings.entries("chat_template_kwargs")
        interact = call(
            "Interact",
            Function(Name("agent"), is_agent=True),
            max_turns=_EVER if turns is None else int(turns) + 1,
            context=context,
            temperature=plan.settings["temperature"],
            max_new_tokens=most,
            **({"chat_template_kwargs": template} if template else {}),
            **{path.partition(".")[2]: value for path, value in plan.wanted.items() if path.startswith("generate.")},
        )
        plan.replace["generate"] = interact
        plan.drop.append("reward")
        plan.settings.pop("max_new_tokens"), plan.settings.pop("temperature")
