"""`Trial`: a graph in a task, run often enough to know its expected update.

The graph's own nodes run as in training (`flowrl.run`); only the engines are tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.auditing.draws import Draws
from flowrl.auditing.engines import RecordedUpdate, TabularCritic, TabularRollout, TabularScorer, TabularTrainer
from flowrl.auditing.objective import StatedObjective, without_gates
from flowrl.auditing.rewards import RewardTables, Tables
from flowrl.auditing.task import AuditTask
from flowrl.auditing.truth import TrueGradient
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import Plan
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import AuditError, NodeError
from flowrl.protocols.backend import members
from flowrl.protocols.protocols import Critic, Rollout, Scorer
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.timeline import Timeline

Values = str | Mapping[tuple[int, tuple[int, ...]], float]


@dataclass(frozen=True, eq=False)
class Runs:
    """The recorded updates of many runs.

    Args:
        exact: whether these are all possible runs; otherwise they were sampled.
        weight: float64 ``[runs]``, the probability of each; they add up to 1.
        whole: float64 ``[runs prompts states tokens]``, the gradient of each.
        parts: the same for each part; see `RecordedUpdate`.
        spread: float64 ``[runs prompts]``, the standard deviation of the rewards of a prompt's responses.
        rows: of the update in the first run.
    """

    exact: bool
    weight: Tensor
    whole: Tensor
    parts: Mapping[str, Tensor]
    spread: Tensor
    rows: int

    def mean(self, of: Tensor) -> Tensor:
        """The expectation over runs."""
        found: Tensor = torch.tensordot(self.weight, of, 1)
        return found


class Trial:
    """A graph in a task, both fitted; `critic` has the table of each critic, as in `audit`."""

    def __init__(self, graph: Graph, stated: StatedObjective, task: AuditTask, critic: Values) -> None:
        self.graph, self.stated, self.task, self._critic = graph, stated, task, critic
        self.draws = Draws(task.seed)
        self.tables = Tables(task)
        self._position = 0  # in the stream of prompts, which continues from run to run, as it does from step to step
        self.policy, self.now = task.policy, task.near("age", task.age)
        self.trainer = TabularTrainer(task, self.policy, self.now)
        self.engines = {role: self._engine(role) for role in graph.roles()}
        references = {role: engine.policy for role, engine in self.engines.items() if type(engine) is TabularScorer}
        self.truth = TrueGradient(stated, self._rewards(), references)
        for engine in self.engines.values():
            if isinstance(engine, TabularCritic):
                engine.table = self._values()
        self._steps = local_steps(Plan(graph), self.engines, task.seed)
        self._steps.sync()

    @property
    def _zeros(self) -> Tensor:
        """A value for each state."""
        return torch.zeros(self.task.prompts, self.task.responses.number, dtype=torch.float64)

    def _engine(self, role: str) -> Any:
        """A table that serves the protocols of a role."""
        task, uses = self.task, self.graph.roles()[role]
        if role == self.stated.role:
            found: Any = self.trainer
        elif all(use.protocol is RewardTables for use in uses):
            found = self.tables
        elif any(use.goes_through(Rollout) for use in uses):
            found = TabularRollout(task, task.near(f"engine {role}", task.mismatch), self.draws)
        elif any(use.goes_through(Critic) for use in uses):
            found = TabularCritic(task, self._zeros)
        else:
            found = TabularScorer(task, task.near(f"scorer {role}", task.reference))
        for use in uses:
            if missing := sorted(name for name in members(use.protocol) if not hasattr(found, name)):
                raise AuditError(
                    f"{use.node} needs {', '.join(missing)} ({use.protocol.__name__}) of the role {role!r}, which no "
                    f"table of an audit has; expected roles that are {Scorer.__name__}, Trainer, Critic or Rollout.",
                    code="audit.unsupported-graph",
                    node=use.node,
                    role=role,
                    missing=missing,
                )
        return found

    # ---- tables

    def _rewards(self) -> Tensor:
        """The scores of the tokens of every response: each in turn, in uniform and in mixed groups."""
        part = without_gates(self.graph, [edge.node for edge in self.stated.scores])
        steps = local_steps(Plan(part), self.engines, self.task.seed)
        for engine in self.engines.values():
            if isinstance(engine, TabularRollout):
                engine.sync(self.trainer)
        responses = self.task.responses
        known = torch.full((self.task.prompts, len(responses), self.task.steps), torch.nan, dtype=torch.float64)
        for start, stride in itertools.product(range(len(responses)), (0, 1)):
            self.draws.begin_with(_in_turns(start, stride))
            nodes = [self.stated.generator, *(edge.node for edge in self.stated.scores)]
            columns = steps.step(self.task.batch(), self.stated.step, return_nodes=nodes).columns
            rows: Any = columns[self.stated.generator].columns
            number = responses.number_of(rows["responses"], rows["response_mask"]).tolist()
            prompt = self.task.number_of(rows["prompts"]).tolist()
            scored = [cast(Tensor, columns[edge.node].columns[edge.output]).double() for edge in self.stated.scores]
            for x, y, scores in zip(prompt, number, torch.stack(scored).sum(0), strict=True):
                self._enter(known[x, y], torch.nn.functional.pad(scores, (0, self.task.steps - len(scores))))
        return known.nan_to_num()

    def _enter(self, known: Tensor, scores: Tensor) -> None:
        if not known.isnan().any() and not torch.allclose(known, scores, atol=1e-6):
            raise AuditError(
                f"{self.stated.scores[0]} scores a response differently in different groups, so {self.graph.name} has "
                f"no expected reward; expected scores that depend on the prompt and the response alone. Compare "
                f"responses in the advantage instead.",
                code="audit.unsupported-graph",
                graph=self.graph.name,
                node=self.stated.scores[0].node,
            )
        known.copy_(scores)

    def _values(self) -> Tensor:
        if self._critic == "exact":
            return self.truth.values(self.policy)
        table = self._zeros
        if isinstance(self._critic, str):
            if self._critic != "zero":
                raise AuditError(
                    f"critic={self._critic!r} is not a table of values; expected 'exact', 'zero', or values.",
                    code="audit.bad-argument",
                    parameter="critic",
                    found=self._critic,
                )
            return table
        responses = self.task.responses
        for (prompt, prefix), value in self._critic.items():
            found = next((y for y in responses.index if y[: len(prefix)] == prefix and len(y) > len(prefix)), None)
            if found is None or not 0 <= prompt < self.task.prompts:
                raise AuditError(
                    f"critic={{({prompt}, {prefix}): ...}} names no state of this task; expected a prompt below "
                    f"{self.task.prompts} and the first tokens of a response.",
                    code="audit.bad-argument",
                    parameter="critic",
                    found=(prompt, prefix),
                )
            table[prompt, responses.states[responses.index[found], len(prefix)]] = value
        return table

    # ---- runs

    def run(self, limit: int, samples: int) -> Runs:
        """All runs if there are at most `limit`; otherwise `samples` sampled ones."""
        taken: list[Sequence[RecordedUpdate]] = []
        weight: list[float] = []
        script: list[int] | None = [] if Plan(self.graph).collector is None else None
        while script is not None:
            taken.append(self._one(0, script))
            weight.append(self.draws.probability)
            script = self.draws.next() if self.draws.runs <= limit else None
        if exact := len(taken) > 0 and self.draws.runs <= limit:
            return self._runs(exact, weight, taken)
        taken = [self._one(number, None) for number in range(samples)]
        return self._runs(exact, [1 / samples] * samples, taken)

    def _one(self, number: int, script: Sequence[int] | None) -> Sequence[RecordedUpdate]:
        """The mini-batches of one run."""
        self.trainer.taken = []
        self._steps.state, self._steps.timeline, self._steps.seed = {}, Timeline(), self.task.seed + number
        self.draws.begin(script)
        draw = itertools.count()

        def sample(rows: int) -> DataProto:
            start, self._position = self._position, self._position + rows
            return self.task.batch(rows, next(draw), start)

        try:
            steps = range(self.stated.step, self.stated.step + 1)
            [_] = self._steps.run(lambda _: sample(self.task.prompts), steps, more=sample)
        except NodeError as error:
            raise AuditError(
                f"{self.graph.name} cannot be run on the rows of this task: {error.message}",
                code="audit.node-failed",
                **{**error.facts, "graph": self.graph.name},
            ) from error
        return self.trainer.taken

    def _runs(self, exact: bool, weight: Sequence[float], taken: Sequence[Sequence[RecordedUpdate]]) -> Runs:
        rewards, taken = self.truth.rewards.sum(-1), self._with_skipped(taken)
        spread = torch.stack([_spread(run, rewards) for run in taken])
        whole = torch.stack([torch.stack([one.whole for one in run]).mean(0) for run in taken])
        names = taken[0][0].parts
        parts = {n: torch.stack([torch.stack([one.parts[n] for one in run]).mean(0) for run in taken]) for n in names}
        return Runs(exact, torch.tensor(weight, dtype=torch.float64), whole, parts, spread, taken[0][0].offered)

    def _with_skipped(self, taken: Sequence[Sequence[RecordedUpdate]]) -> Sequence[Sequence[RecordedUpdate]]:
        """The same runs, with an update of 0 in those that a gate skipped."""
        usual = next((run[0] for run in taken if run), None)
        if usual is None:
            raise AuditError(
                f"{self.graph.name} skips the update in all {len(taken)} runs on the rows of this task, so there is "
                f"none to audit. Sample more responses (n=), or drop the gate that skips.",
                code="audit.node-failed",
                graph=self.graph.name,
            )
        parts = {name: torch.zeros_like(part) for name, part in usual.parts.items()}
        rows = usual.prompt[:0], usual.response[:0]
        none = RecordedUpdate(torch.zeros_like(usual.whole), parts, *rows, usual.offered)
        return [run or [none] for run in taken]


def _in_turns(start: int, stride: int) -> Callable[[int], int]:
    """Choose `start`, then `start + stride`, and so on, modulo the number of options."""
    turns = itertools.count(start, stride)
    return lambda possible: next(turns) % possible


def _spread(taken: Sequence[RecordedUpdate], rewards: Tensor) -> Tensor:
    """The standard deviation of the rewards of each prompt's responses in a run, ``[prompts]``; of all rows if a prompt
    has one response."""
    prompt, response = (torch.cat([getattr(one, name) for one in taken]) for name in ("prompt", "response"))
    paid = rewards[prompt, response]
    groups = [paid[prompt == x] for x in range(len(rewards))]
    several = [group if len(group) > 1 else paid for group in groups]
    return torch.stack([group.std() if len(group) > 1 else group.new_ones(()) for group in several])
