"""The data of a run: a source for each input of its graph, and their streams while it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import input_of
from flowrl.core.operators.effects import Effect
from flowrl.data.keys import Key
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.prompts import PromptStream
from flowrl.data.sources.source import Source, Stream
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError, offer
from flowrl.record_types import record_columns
from flowrl.records import rows_of_draw
from flowrl.spec import parameters

logger = logging.getLogger(__name__)

Data = Source | Mapping[str, Source]
"""The source of each input, by its name; or, of a graph with one input, that alone."""


def refuse_no_source(data: Any) -> Any:
    """What was given as data, if it may be some.

    Raises:
        ValueError: a path in the place of a source.
    """
    for one in data.values() if isinstance(data, Mapping) else [data]:
        if isinstance(one, str | Path):
            raise ValueError(f"expected PromptData({str(one)!r})")
    return data


def by_input(graph: Graph, data: Data, call: str) -> dict[str, Source]:
    """The source of each input, in their order.

    Args:
        graph: whose inputs.
        data: as it was given.
        call: that takes it, for messages: ``"Training"``.

    Raises:
        ParameterError: an input without a source, a name that no input has, one source for several inputs,
            one that lacks columns of its input, or one whose prompts a node writes by the chat template in another way.
    """
    inputs = list(graph.inputs)
    named = ", ".join(f"{name!r}: ..." for name in inputs)
    if isinstance(data, Source):
        if len(inputs) > 1:
            raise ParameterError(
                f"data is one source, a {type(data).__name__}, and {graph.name} has the inputs "
                f"{', '.join(map(repr, inputs))}; give each its own: {call}(..., data={{{named}}})."
            )
        data = dict.fromkeys(inputs, data)
    if unknown := [name for name in data if name not in inputs]:
        raise ParameterError(
            f"data names {unknown[0]!r}, which is no input of {graph.name}; {offer(unknown[0], inputs)} Give "
            f"{call}(..., data={{{named}}})."
        )
    if missing := [name for name in inputs if name not in data]:
        raise ParameterError(
            f"data has no source for the input {missing[0]!r} of {graph.name}; give each input one: "
            f"{call}(..., data={{{named}}})."
        )
    for name in inputs:
        _refuse_other_columns(graph, name, data[name])
    _refuse_other_templates(graph, data)
    return {name: data[name] for name in inputs}


def gives_tokens(source: Source) -> bool:
    """Whether a source makes tokens, for which it needs a tokeniser."""
    return any(getattr(typed, "kind", None) == "tokens" for typed in record_columns(source.record).values())


def refuse_untold(graph: Graph, sources: Mapping[str, Source]) -> None:
    """Refuse a source that would learn from scores that nothing tells it.

    Raises:
        ParameterError: naming its input.
    """
    for name, source in sources.items():
        if source.learns and not tellers(graph, name):
            raise ParameterError(
                f"the source of {name!r} learns from how its rows scored, and nothing in {graph.name} tells it; put a "
                f"Feedback behind the reward: edit(insert={{'feedback': After('reward', Feedback())}})."
            )


def _refuse_other_templates(graph: Graph, sources: Mapping[str, Source]) -> None:
    """Refuse a node that writes prompts by the chat template with other arguments than their source does.

    Its ``tools`` are its own, since a source knows of none.

    Raises:
        ParameterError: naming both.
    """
    for node in graph.nodes.values():
        given = parameters(node.initial_operator).get("chat_template_kwargs")
        source = None if given is None else sources.get(input_of(graph, node.name) or "")
        theirs = getattr(source, "chat_template_kwargs", None)
        if given is None or theirs is None:
            continue
        ours, data = ({k: v for k, v in said.items() if k != "tools"} for said in (given, theirs))
        if ours != data:
            raise ParameterError(
                f"{node.name} writes prompts by the chat template with {ours or 'no arguments'}, and "
                f"{type(source).__name__} does so with {data or 'none'}, so the policy would see other prompts than "
                f"those that the data is measured by; expected the same: "
                f"edit(set={{'{node.name}.chat_template_kwargs': {data}}}), or {type(source).__name__}(..., "
                f"chat_template_kwargs={ours})."
            )


def _refuse_rows_of_other_templates(graph: Graph, streams: Mapping[str, Stream]) -> None:
    """Refuse rows with arguments of the chat template that a node which writes prompts by it does not have.

    Raises:
        DataError: naming the first of them.
    """
    for node in graph.nodes.values():
        given = parameters(node.initial_operator).get("chat_template_kwargs")
        stream = None if given is None else streams.get(input_of(graph, node.name) or "")
        if given is None or not isinstance(stream, PromptStream):
            continue
        for row, own in stream.template_arguments():
            if odd := [name for name, value in own.items() if name not in given or given[name] != value]:
                raise DataError(
                    f"row {row} of the data has chat_template_kwargs of its own, {dict(own)!r}, and {node.name} writes "
                    f"all prompts by the chat template with {dict(given) or 'no arguments'}, so the policy would see "
                    f"this one without its {odd[0]}; expected the same for all rows: give them to both, "
                    f"PromptData(..., chat_template_kwargs=...) and "
                    f"edit(set={{'{node.name}.chat_template_kwargs': ...}}), and leave out the rows that have others."
                )


def _refuse_other_columns(graph: Graph, name: str, source: Source) -> None:
    """Refuse a source that lacks columns of an input, or has others under their names."""
    has, kind = record_columns(source.record), type(source).__name__
    wanted = graph[name].signature.outputs
    if missing := [column for column, typed in wanted.items() if has.get(column) != typed]:
        fitting = f", as {source.record.__name__} has them" if set(wanted) & set(has) else ""
        raise ParameterError(
            f"the input {name!r} of {graph.name} wants the columns {', '.join(missing)}, which {kind} does not have; "
            f"it gives {', '.join(has)}{fitting}: annotate the input with {source.record.__name__} and compute the "
            f"others in the graph, or write a Source that gives them."
        )
    rows, factor = graph[name].operator.rows_factor, rows_of_draw(source.record)
    if rows != factor:
        raise ParameterError(
            f"the input {name!r} of {graph.name} has {rows} row(s) a draw, and {kind} gives {factor}; annotate the "
            f"input with {source.record.__name__}."
        )


def tellers(graph: Graph, name: str) -> list[str]:
    """The nodes that tell how rows of an input scored."""
    telling = [node.name for node in graph.nodes.values() if Effect.TELLS_SCORES in node.effects]
    return [node for node in telling if input_of(graph, node) == name]


def identities(sources: Mapping[str, Source], of: Callable[[Source], Any]) -> Any:
    """What `of` says of each source, by input; of the one of a graph with a single input, that alone."""
    said = {name: of(source) for name, source in sources.items()}
    return said if len(said) > 1 else next(iter(said.values()))


class Sources:
    """The streams of a run's inputs.

    The first input draws by the run's own seed, so an input more does not change its rows; each other one by a seed
    that its name gives.

    Args:
        sources: by input.
        tokenizer: of the model that is trained; None of a job without one, whose sources give no tokens.
        seed: of the run.
        graph: whose inputs they are.
        again: the inputs that are drawn from again within a step.

    Raises:
        DataError: files that cannot be read; rows whose prompts a node would write by the chat template in another way.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        tokenizer: ChatTokenizer | None,
        seed: int,
        graph: Graph,
        again: Iterable[str],
    ) -> None:
        seeds = [seed, *(Key.of(seed).derive("source", name).bits for name in list(sources)[1:])]
        self.streams: dict[str, Stream] = {
            name: source.load(cast(ChatTokenizer, tokenizer), own)
            for (name, source), own in zip(sources.items(), seeds, strict=True)
        }
        _refuse_rows_of_other_templates(graph, self.streams)
        self._learns = {name: tellers(graph, name) for name, source in sources.items() if source.learns}
        self._again = tuple(again)

    def warn_of_few(self, draws: int) -> None:
        """Say where a step of so many draws holds some rows more than once."""
        for name, stream in self.streams.items():
            if stream.size is not None and stream.size < draws:
                logger.warning(
                    "the data%s has %d prompts%s and a step takes %d, so every step holds some of them more than once; "
                    "expected at least as many as a step takes: Training(..., prompts=%d), or more data.",
                    f" of {name!r}" if len(self.streams) > 1 else "",
                    stream.size,
                    f" ({stream.dropped} longer ones are left out)" if stream.dropped else "",
                    draws,
                    stream.size,
                )

    def next(self, n: int) -> dict[str, DataProto]:
        """The batch of each input."""
        return {name: stream.next(n) for name, stream in self.streams.items()}

    def more(self, n: int) -> dict[str, DataProto]:
        """A further batch of each input that is drawn from again."""
        return {name: self.streams[name].next(n) for name in self._again}

    def batches(self, n: int) -> Iterator[dict[str, DataProto]]:
        """Everything once, for validation.

        Raises:
            DataError: one has another number of rows than the others.
        """
        sizes = {name: stream.size for name, stream in self.streams.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{size} of {name!r}" for name, size in sizes.items())
            raise DataError(
                f"a validation takes as many rows of each input at a time, and there are {told}; even them."
            )
        every = [stream.batches(n) for stream in self.streams.values()]
        return (dict(zip(self.streams, batches, strict=True)) for batches in zip(*every, strict=True))

    def learn(self, step: int, scores: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Tell those that learn how their rows scored.

        Args:
            step: that is done, counted from 1.
            scores: by node, see `StepResult.scores`.
        """
        for name, nodes in self._learns.items():
            told: dict[str, list[float]] = {}
            for node in nodes:
                for uid, answers in scores.get(node, {}).items():
                    told.setdefault(uid, []).extend(answers)
            self.streams[name].learn(step, told)

    @property
    def heard(self) -> dict[str, float]:
        """As metrics: the step of whose scores each one that learns has heard last; what it draws now goes by these."""
        return {f"data/{name}/heard": float(self.streams[name].heard) for name in self._learns}

    @property
    def digests(self) -> dict[str, str]:
        """Of what each could give, by how a warning names it; see `Stream.digest`."""
        alone = len(self.streams) == 1
        return {"prompts" if alone else f"rows of {name!r}": s.digest() for name, s in self.streams.items()}

    @property
    def position(self) -> dict[str, Any]:
        """Where each is: by input, or of a single one that alone."""
        said = {name: stream.position for name, stream in self.streams.items()}
        return said if len(said) > 1 else next(iter(said.values()))

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`.

        Raises:
            DataError: it is none.
        """
        by_name = position if len(self.streams) > 1 else dict.fromkeys(self.streams, position)
        if by_name.keys() != self.streams.keys():
            raise DataError(
                f"the checkpoint holds positions of {', '.join(map(repr, by_name))}; expected those of "
                f"{', '.join(map(repr, self.streams))}: resume with the sources that it was made with."
            )
        for name, stream in self.streams.items():
            stream.seek(by_name[name])
