"""Row summaries: a table with one row per sampled row of a step, whatever becomes of it.

Columns of the graph are found by kind and axes, so those of a user's operators count like built-in ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from torch import Tensor

from flowrl.columns import Entropies, parse
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import trained_on
from flowrl.core.operators.symbols import Edge, EdgeType
from flowrl.data.keys import Key, node_key
from flowrl.data.proto.column_math import numbers_of_groups
from flowrl.protocols.protocols import Trainer
from flowrl.rules.rule import writers
from flowrl.run.recording.row_maps import Columns, Rows, axis_before, maker_of, row_axis, rows_before
from flowrl.run.recording.statistics import WEIGHTED

SCHEMA = {
    "step": pa.int64(),
    "round": pa.int64(),
    "row": pa.int64(),
    "row_id": pa.string(),
    "uid": pa.string(),
    "prompt": pa.int64(),
    "data_source": pa.string(),
    "score": pa.float64(),
    "prompt_tokens": pa.int64(),
    "response_tokens": pa.int64(),
    "truncated": pa.bool_(),
    "version_min": pa.int64(),
    "version_max": pa.int64(),
    "advantage": pa.float64(),
    "advantage_max": pa.float64(),
    "kl": pa.float64(),
    "mismatch": pa.float64(),
    "optimizer_step": pa.int64(),
    "loss_weight": pa.float64(),
    "entropy": pa.float64(),
    "clipped": pa.float64(),
    "group_size": pa.int64(),
    "group_spread": pa.float64(),
    "fate": pa.string(),
}
"""The columns of a summary; further ones are the numbers that reward functions returned, by their metric, and the terms
of weighed rewards."""

_KINDS = {
    "advantage": "advantage",
    "score": "score",
    "old": "log-prob of the old policy",
    "ref": "log-prob of the reference",
    "rollout": "log-prob of the rollout",
    "version": "version",
    "token_version": "version of a token",
}


@runtime_checkable
class UpdatesByRows(Protocol):
    """An operator whose optimizer steps are over mini-batches of rows.

    It may report numbers of its rows: ``metrics.row(f"{name}/{column}", number, value)`` for each of `row_columns`,
    with the number of the row in the step.
    """

    @property
    def row_columns(self) -> Collection[str]:
        """The columns of a summary that it reports."""
        ...

    def row_weights(self, response_mask: Tensor, key: Key, uid: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """The first optimizer step of each row, counted from 0, int64 ``[rows]``, and the sum of its token weights over
        all optimizer steps, float32 ``[rows]``."""
        ...


@runtime_checkable
class WeighsRewards(Protocol):
    """An operator that adds up several rewards."""

    def weighted(self, **inputs: Any) -> Mapping[str, Tensor]:
        """By the input of each term, what it adds to the score at each token, float32 ``[rows response]``.

        Args:
            inputs: the columns that the node reads, by the name of their port.
        """
        ...


@dataclass(frozen=True)
class RowSummaries:
    """The summaries of a graph's steps.

    Args:
        graph: before fusing.
        seed: of the run.
    """

    graph: Graph
    seed: int

    @cached_property
    def axis(self) -> str | None:
        """The row axis of the sampled rows, or of the demonstrations that are trained on; None without rows."""
        graph = self.graph
        texts = [edge for edge in graph.types if edge.output == "response_text" and not graph[edge.node].is_input]
        trained = {node.name for update in self._updates for node in trained_on(graph, update.name)}
        of_trained = [edge for edge in texts if edge.node in trained]
        scored = [edge for edge in texts if any(self._of_response(edge.node, "score"))]
        masks = [e for node in self._updates for e in node.inputs.values() if self._kind(e) == "mask"]
        found = [*of_trained, *scored, *texts, *masks]
        return row_axis(graph, found[0]) if found else None

    @cached_property
    def edges(self) -> dict[str, Edge]:
        """The columns that a summary reads, by what they are."""
        if self.axis is None:
            return {}
        found = {what: edge for what, kind in _KINDS.items() if (edge := self._pick(kind)) is not None}
        named = ("row_id", "uid", "data_source", "prompt_mask", "response_mask")
        found |= {name: edge for name in named if (edge := self._named(name)) is not None}
        for update in self._updates[:1]:
            for name in ("response_mask", "uid"):
                read = [edge for place, edge in update.inputs.items() if place.name == name]
                found |= {f"trained.{name}": edge for edge in read}
        return found

    @cached_property
    def reported(self) -> dict[Edge, EdgeType]:
        """The columns of tokens that updates may report with their metrics, which are no outputs of the graph."""
        found: dict[Edge, EdgeType] = {}
        entropies = parse(Entropies)
        for update in self._updates:
            masks = [edge for place, edge in update.inputs.items() if place.name == "response_mask"]
            if masks and entropies is not None and isinstance(update.initial_operator, UpdatesByRows):
                found[Edge(update.name, entropies.name)] = EdgeType(entropies, self.graph.types[masks[0]].axes)
        return found

    @cached_property
    def needed(self) -> frozenset[Edge]:
        """`edges`, the terms of rewards, and the columns that gates on the way read."""
        gates = (self.graph[maker_of(axis)] for axis in self._downstream)
        read = {edge for node in gates for place, edge in node.inputs.items() if place.port != "rows"}
        terms = {edge for node in self.weighing for edge in node.inputs.values()}
        return frozenset({*self.edges.values(), *terms, *(edge for edge in read if row_axis(self.graph, edge))})

    def table(
        self,
        step: int,
        columns: Columns,
        reported: Mapping[str, Mapping[str, float]],
        round_sizes: Mapping[str, Sequence[int]],
        skipped: Sequence[str] = (),
    ) -> pa.Table | None:
        """The summary of a step; None if no rows were sampled in it.

        Args:
            step: counted from 0.
            columns: the columns of the step, at least `needed`.
            reported: reported numbers of rows, by key and `row_id`; those of updates by number, see `UpdatesByRows`.
            round_sizes: the rows of each round, by node.
            skipped: the gates that skipped the update of the step.
        """
        mask = columns.get(self.edges.get("response_mask", Edge("", "")))
        if mask is None or self.axis is None:
            return None
        view = _View(self, step, columns, len(mask))
        found: dict[str, Any] = {"step": np.full(len(mask), step + 1), "row": np.arange(len(mask))}
        found |= view.names() | view.lengths(self._limit) | view.of_tokens() | view.of_groups()
        found |= view.of_update(reported, skipped)
        terms = view.of_terms()
        sizes = round_sizes.get(self.edges["response_mask"].node)
        found["round"] = None if sizes is None else np.repeat(np.arange(len(sizes)), sizes)
        ids = found.get("row_id")
        of_updates = {f"{update.name}/{name}" for update in self._updates for name in _columns_of(update)}
        named = {key: values for key, values in reported.items() if ids is not None and key not in of_updates}
        further = {key: [values.get(row) for row in ids or ()] for key, values in named.items()}
        arrays = {name: _array(found.get(name), kind, len(mask)) for name, kind in SCHEMA.items()}
        arrays |= {key: pa.array(values, pa.float64()) for key, values in further.items()}
        return pa.table(arrays | {name: _array(values, pa.float64(), len(mask)) for name, values in terms.items()})

    # ---- what a graph has

    @cached_property
    def weighing(self) -> list[Node]:
        """The nodes that add up several rewards."""
        return [node for node in self.graph.nodes.values() if isinstance(node.initial_operator, WeighsRewards)]

    @cached_property
    def _updates(self) -> list[Node]:
        return [node for node, _ in writers(self.graph, Trainer)]

    @cached_property
    def _limit(self) -> int | None:
        """The maximum response length of the node that samples, if it samples one response a row."""
        maker = self.graph[self.edges["response_mask"].node]
        limit = getattr(maker.initial_operator, "max_new_tokens", None)
        return limit if "episode" not in maker.signature.outputs else None

    @cached_property
    def _downstream(self) -> list[str]:
        """The row axes that gates made of the sampled rows, in order."""
        axes = dict.fromkeys(axis for edge in self.graph.types if (axis := row_axis(self.graph, edge)) is not None)
        found = [self.axis]
        for axis in axes:
            gate = isinstance(self.graph[maker_of(axis)].initial_operator, Gate)
            if axis not in found and gate and axis_before(self.graph, axis) in found:
                found.append(axis)
        return [axis for axis in found[1:] if axis is not None]

    @cached_property
    def _upstream(self) -> list[str]:
        """The row axes that the sampled rows come from, the nearest first."""
        found, axis = list[str](), self.axis
        while axis is not None and (axis := axis_before(self.graph, axis)) is not None:
            found.append(axis)
        return found

    def _kind(self, edge: Edge) -> str:
        return getattr(self.graph.types[edge].type, "kind", "")

    def _of_response(self, maker: str, kind: str) -> list[Edge]:
        types = self.graph.types.items()
        return [edge for edge, typed in types if self._kind(edge) == kind and f"response@{maker}" in typed.axes]

    def _pick(self, kind: str) -> Edge | None:
        """The column of a kind that the policy's update reads, else the last one on these rows."""
        axes = {self.axis, *self._downstream}
        read = [edge for node in self._updates for edge in node.inputs.values() if self._kind(edge) == kind]
        written = [edge for edge in self.graph.types if self._kind(edge) == kind]
        if kind == "score":
            written = [edge for edge in written if not isinstance(self.graph[edge.node].initial_operator, Gate)]
            read = []
        found = [edge for edge in (*read, *reversed(written)) if row_axis(self.graph, edge) in axes]
        return next(iter(found), None)

    def _named(self, name: str) -> Edge | None:
        """The column of this name on the sampled rows, else on rows that they come from."""
        for axis in (self.axis, *self._upstream):
            found = [edge for edge in self.graph.types if edge.output == name and row_axis(self.graph, edge) == axis]
            if found:
                return found[-1]
        return None


class _View:
    """The columns of a step on the sampled rows."""

    def __init__(self, summaries: RowSummaries, step: int, columns: Columns, rows: int) -> None:
        self.graph, self.edges, self.step, self.rows = summaries.graph, summaries.edges, step, rows
        self.columns, self.seed = columns, summaries.seed
        self.updates, self.weighing = summaries._updates, summaries.weighing
        self.width = columns[self.edges["response_mask"]].shape[1]
        self.passed: dict[str, Rows | None] = {str(summaries.axis): np.arange(rows)}
        self.downstream = summaries._downstream
        for axis in self.downstream:
            before = self.passed.get(str(axis_before(self.graph, axis)))
            found = rows_before(self.graph, axis, step, columns)
            self.passed[axis] = before[found] if before is not None and found is not None else None
        self.source, child = dict[str, Rows | None](), str(summaries.axis)
        taken: Rows | None = np.arange(rows)
        for axis in summaries._upstream:
            found = rows_before(self.graph, child, step, columns)
            taken = found[taken] if found is not None and taken is not None else None
            self.source[axis], child = taken, axis

    def get(self, what: str) -> Any:
        """A column on the sampled rows: NaN or None in rows that it does not have; None if it cannot be mapped."""
        edge = self.edges.get(what)
        return None if edge is None or edge not in self.columns else self._on_rows(edge, self.columns[edge])

    def _on_rows(self, edge: Edge, column: Any) -> Any:
        axis = str(row_axis(self.graph, edge))
        column = column.detach().cpu().numpy() if isinstance(column, Tensor) else column
        if axis in self.source:
            return None if self.source[axis] is None else column[self.source[axis]]
        rows = self.passed.get(axis)
        if rows is None or len(rows) != len(column):
            return None
        # what a gate collects in rounds may have another width than the rows of all rounds
        of_tokens = self.graph.types[edge].axes[1:2] and self.graph.types[edge].axes[1].startswith("response@")
        return _scattered(_fitted(column, self.width) if of_tokens else column, rows, self.rows)

    def names(self) -> dict[str, Any]:
        """Ids, group, source, and the position of the prompt in its source."""
        ids = self.get("row_id")
        found = {name: self.get(name) for name in ("uid", "data_source")} | {"row_id": ids}
        if ids is not None:
            places = [re.match(r"\d+/(\d+)/\d+", str(row)) for row in ids]
            found["prompt"] = [int(place[1]) if place else None for place in places]
        return {name: None if v is None else [x if x is None else _plain(x) for x in v] for name, v in found.items()}

    def lengths(self, limit: int | None) -> dict[str, Any]:
        """Tokens of prompt and response."""
        mask, prompt = self.get("response_mask"), self.get("prompt_mask")
        tokens = mask.sum(1)
        return {
            "response_tokens": tokens,
            "prompt_tokens": None if prompt is None else prompt.sum(1),
            "truncated": None if limit is None else tokens >= limit,
        }

    def of_tokens(self) -> dict[str, Any]:
        """Sums, means and extremes over the tokens on the mask."""
        mask = self.get("response_mask")
        score, advantage, versions = self.get("score"), self.get("advantage"), self.get("token_version")
        old, ref, rollout = self.get("old"), self.get("ref"), self.get("rollout")
        found: dict[str, Any] = {}
        if score is not None:
            found["score"] = np.where(np.isnan(score), 0.0, score).sum(1, dtype=np.float64)
        if advantage is not None:
            on = mask & ~np.isnan(advantage)
            sums = np.where(on, advantage, 0.0).sum(1, dtype=np.float64)
            largest = np.abs(np.where(on, advantage, 0.0)).argmax(1) if mask.shape[1] else np.zeros(len(mask), int)
            with np.errstate(invalid="ignore"):
                found["advantage"] = sums / np.where(on.any(1), on.sum(1), np.nan)
            found["advantage_max"] = np.where(on.any(1), advantage[np.arange(len(mask)), largest], np.nan)
        if old is not None and ref is not None:
            found["kl"] = _over(mask, old.astype(np.float64) - ref, "sum")
        if old is not None and rollout is not None:
            found["mismatch"] = _over(mask, np.abs(rollout.astype(np.float64) - old), "max")
        if versions is not None:
            low = np.where(mask, versions, np.iinfo(np.int64).max).min(1, initial=np.iinfo(np.int64).max)
            high = np.where(mask, versions, np.iinfo(np.int64).min).max(1, initial=np.iinfo(np.int64).min)
            found["version_min"], found["version_max"] = (np.where(mask.any(1), end, -1) for end in (low, high))
        elif (version := self.get("version")) is not None:
            found["version_min"] = found["version_max"] = version
        return found

    def of_terms(self) -> dict[str, Any]:
        """The score of each term of a weighed reward, and what it adds to the reward."""
        found: dict[str, Any] = {}
        for node in self.weighing:
            operator, edges = node.in_step(self.step).operator, {p.name: edge for p, edge in node.inputs.items()}
            if not isinstance(operator, WeighsRewards) or any(edge not in self.columns for edge in edges.values()):
                continue
            read = {name: self.columns[edge] for name, edge in edges.items()}
            for name, weighted in operator.weighted(**read).items():
                for key, column in ((f"reward/{name}", read[name]), (f"reward/{name}{WEIGHTED}", weighted)):
                    on_rows = self._on_rows(edges[name], column)
                    found[key] = None if on_rows is None else np.nan_to_num(on_rows).sum(1, dtype=np.float64)
        return found

    def of_groups(self) -> dict[str, Any]:
        """Size and spread of each row's group."""
        uid, score, mask = self.get("uid"), self.get("score"), self.get("response_mask")
        if uid is None:
            return {}
        group, names = numbers_of_groups(uid)
        found: dict[str, Any] = {"group_size": np.bincount(group, minlength=len(names))[group]}
        if score is not None:
            totals, live = np.nan_to_num(score).sum(1, dtype=np.float64), mask.any(1)
            counts = np.bincount(group, live, len(names))
            with np.errstate(invalid="ignore", divide="ignore"):  # groups of empty responses have no spread
                means = np.bincount(group, totals * live, len(names)) / counts
                deviations = np.where(live, totals - means[group], 0.0)
                spread = np.sqrt(np.bincount(group, deviations**2, len(names)) / counts)
            found["group_spread"] = spread[group]
        return found

    def of_update(self, reported: Mapping[str, Mapping[str, float]], skipped: Sequence[str]) -> dict[str, Any]:
        """What the policy's first update does with each row, and which gate dropped the others, or skipped it."""
        fate = np.full(self.rows, "trained" if self.updates else "", dtype=object)
        trained: Rows | None = np.arange(self.rows)
        for axis in self.downstream:
            before, after = self.passed[str(axis_before(self.graph, axis))], self.passed[axis]
            if before is None or after is None:
                fate[:] = None
                break
            fate[np.setdiff1d(before, after, assume_unique=True)] = maker_of(axis)
        found: dict[str, Any] = {"fate": fate}
        if skipped:
            fate[fate == "trained"] = skipped[0]
            return found
        for update in self.updates[:1]:
            edge = self.edges.get("trained.response_mask")
            mask = None if edge is None else self.columns.get(edge)
            trained = None if edge is None else self.passed.get(str(row_axis(self.graph, edge)))
            operator = update.in_step(self.step).operator
            if mask is None or trained is None or not isinstance(operator, UpdatesByRows):
                continue
            uid = self.columns.get(self.edges.get("trained.uid", Edge("", "")))
            steps, weights = operator.row_weights(mask, node_key(self.seed, self.step, update.name), uid)
            found["optimizer_step"] = _scattered(steps.numpy(), trained, self.rows)
            found["loss_weight"] = _scattered(weights.double().numpy(), trained, self.rows)
            for name in operator.row_columns:
                column, values = np.full(len(mask), np.nan), reported.get(f"{update.name}/{name}", {})
                column[[int(number) for number in values]] = list(values.values())
                found[name] = _scattered(column, trained, self.rows)
        return found


def _columns_of(update: Node) -> Collection[str]:
    operator = update.initial_operator
    return operator.row_columns if isinstance(operator, UpdatesByRows) else ()


def _over(mask: Any, values: Any, how: str) -> Any:
    """The sum or the largest of the values on the mask; NaN in rows without one."""
    on = mask & ~np.isnan(values)
    filled = np.where(on, values, 0.0 if how == "sum" else -np.inf)
    found = filled.sum(1) if how == "sum" else filled.max(1, initial=-np.inf)
    return np.where(on.any(1), found, np.nan)


def _fitted(column: Any, width: int) -> Any:
    """A column of responses, with so many tokens."""
    more = width - column.shape[1]
    return column[:, :width] if more <= 0 else np.pad(column, ((0, 0), (0, more)))


def _scattered(column: Any, rows: Rows, count: int) -> Any:
    """A column on more rows: NaN or None in those that it does not have."""
    if len(rows) == count and (rows == np.arange(count)).all():
        return column
    if column.dtype == object:
        found = np.full(count, None, dtype=object)
    else:
        found = np.full((count, *column.shape[1:]), np.nan)
    found[rows] = column
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else str(value)


def _array(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        missing = np.isnan(values)
        if not missing.any():
            return pa.array(values).cast(kind)
        return pa.array(values if kind == pa.float64() else np.where(missing, 0, values), mask=missing).cast(kind)
    return pa.array(values, kind)
