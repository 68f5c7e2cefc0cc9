"""`RecordedRun`: a run folder to look into, whether the run is in progress, finished, failed or killed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from flowrl.core.graphs.graph import Graph
from flowrl.core.operators.symbols import Edge
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, GraphError, ParameterError, offer
from flowrl.files.graph_io import graph_from_dict
from flowrl.hub.models import folder_of
from flowrl.look.address import Address, address_of
from flowrl.look.files import column_files, listed
from flowrl.look.row import RecordedRow, RecordedStep, row_of, step_of
from flowrl.look.run_files import RunFiles, open_files
from flowrl.look.steps import replay
from flowrl.look.steps.derivation import Derivation, why
from flowrl.look.steps.what_if import WhatIf, what_if
from flowrl.run.recording.tables import Column, read_columns


class RecordedRun(RunFiles):
    """What a run folder holds. It is read when it is asked for, so an open run in progress grows.

    Args:
        path: the run folder.
        imports: see `flowrl.open`.
        kind: the class of its `graph`.
    """

    def __init__(self, path: Path, imports: bool = False, kind: type[Graph] = Graph) -> None:
        super().__init__(path)
        self._imports, self._kind = imports, kind

    @cached_property
    def graph(self) -> Graph:
        """The graph, with its backends.

        Raises:
            GraphError: it names classes that the program has not imported; see ``flowrl.open(imports=)``.
        """
        data = self.description["graph"]
        if not self._imports:
            with suppress(GraphError):  # it names code that the program has not imported, or that has changed since
                return graph_from_dict(self._kind, data, None)
        return graph_from_dict(self._kind, data, self._imports)

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of a model of the run; None if no folder of one is there."""
        bindings = self.description.get("graph", {}).get("bindings", {}).values()
        named = [(str(b.get("model")), b.get("revision")) for b in bindings if isinstance(b, dict)]
        folders = [folder_of(model, revision) for model, revision in named]
        found = [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]
        return ChatTokenizer(str(found[0])) if found else None

    def row(self, address: str | Address) -> RecordedRow:
        """A row with its text and the numbers of its tokens: ``run.row("17[0/516/0#1]")``.

        Raises:
            DataError: the step has no such row, or no row summaries.
            ParameterError: the address names no row of a step.
        """
        place = address_of(address)
        if place.step is None or place.row is None:
            raise ParameterError(
                f"{str(place)!r} names no row of a step. Write STEP[ROW], such as 17[0/516/0#1].",
                code="look.invalid-address",
                found=str(place),
            )
        return row_of(self, place)

    def step(self, step: int) -> RecordedStep:
        """A step with its metrics and alarms.

        Raises:
            DataError: the run has no such step.
        """
        return step_of(self, step)

    # ---- columns

    def columns(self, step: int, edges: Sequence[Edge] | None = None) -> dict[Edge, Column]:
        """The recorded columns of a step: all, or those of these edges that are there. Updates add the ``entropies`` of
        their first pass, which are no column of the graph.

        Raises:
            DataError: the columns of the step are not recorded, or damaged.
        """
        files = column_files(self.path)
        if step not in files:
            raise DataError(
                f"The columns of step {step} of {self.path} are not recorded; those of {listed(list(files))} are. "
                f"Record every step with Training(recording=Recording(columns='all')).",
                code="look.not-recorded",
                path=self.path,
                step=step,
                known=list(files),
            )
        wanted = None if edges is None else {str(edge) for edge in edges}
        found: dict[Edge, Column] = {}
        for path in files[step].values():
            for name, column in read_columns(path, wanted).items():
                found[Edge.parse(name)] = column
        return found

    def column(self, address: str | Address) -> Column:
        """A recorded column, as it was: ``run.column("17/gae.advantages")``.

        Raises:
            DataError: the step or the column is not recorded.
            ParameterError: the address names no step and column.
        """
        place = address_of(address)
        if place.step is None or place.edge is None:
            raise ParameterError(
                f"{str(place)!r} names no column of a step. Write STEP/NODE.COLUMN, such as 17/gae.advantages.",
                code="look.invalid-address",
                found=str(place),
            )
        found = self.columns(place.step, [place.edge])
        if place.edge not in found:
            there = list(self.columns(place.step))
            own = [edge.output for edge in there if edge.node == place.node]
            nodes = sorted({edge.node for edge in there})
            near = offer(place.column, own, f"{place.node} has") if own else offer(place.node, nodes, "it has")
            raise DataError(
                f"{place.edge} is not recorded in step {place.step} of {self.path}: {near}",
                code="look.not-recorded",
                path=self.path,
                step=place.step,
                found=str(place.edge),
            )
        return found[place.edge]

    # ---- why, replay, what if

    def why(self, address: str | Address) -> Derivation:
        """Where a number comes from: ``run.why("17/update_actor.advantages[0/516/0#1]")``.

        Raises:
            DataError: the step is not recorded, or has no such row.
            ParameterError: the address names no step, node, column and row.
        """
        return why(self, address_of(address))

    def replayable(self, step: int) -> dict[str, str | None]:
        """What each node that ran in a step lacks to be recomputed; None for a node that can be."""
        return replay.replayable(self, step)

    @overload
    def replay(self, address: str | int | Address, *, from_checkpoint: bool = False) -> replay.Replay: ...
    @overload
    def replay(self, address: str | int | Address, **verbs: Any) -> WhatIf: ...
    def replay(
        self, address: str | int | Address, *, from_checkpoint: bool = False, **verbs: Any
    ) -> replay.Replay | WhatIf:
        """Recompute a node (``"17/gae"``) or all nodes without weights (``17``), and compare with what is recorded.

        With verbs of `Graph.edit`, such as ``set={"gae.lam": 0.5}``: the effect of that edit on the step.

        Args:
            from_checkpoint: also recompute nodes that read weights, such as log-probs and values. The weights at the
                start of a step are in the checkpoint after the step before; those of step 1 are the models that the run
                started from.

        Raises:
            DataError: the step is not recorded, the node cannot be recomputed, or there is no checkpoint.
            GraphError: the edit is not possible.
            ParameterError: an edit is given with `from_checkpoint`.
        """
        if verbs and from_checkpoint:
            raise ParameterError(
                "An edit is replayed without weights. Leave out the edit, or from_checkpoint (--from-checkpoint).",
                code="look.invalid-query",
                argument="from_checkpoint",
            )
        place = address_of(address)
        return what_if(self, place, verbs) if verbs else replay.replay(self, place, from_checkpoint)


def open_run(path: str | Path, imports: bool = False, kind: type[Graph] = Graph) -> RecordedRun:
    """See `flowrl.open`."""
    return RecordedRun(open_files(path).path, imports, kind)
