"""The data of a run: a source for each input of its graph, and their streams during the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import input_of
from flowrl.core.operators.effects import Effect
from flowrl.data.keys import Key
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.demos import DemoData, PreferenceData, UnpairedData
from flowrl.data.sources.prompts import PromptData, PromptStream
from flowrl.data.sources.source import Source, Stream
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, DataError, ParameterError, offer
from flowrl.hub.repositories import Commits
from flowrl.record_types import record_columns
from flowrl.records import rows_per_item
from flowrl.run.engine.steps import folder_of_trained, writers_of_tokens
from flowrl.run.training.job import tokenizer_of
from flowrl.run.training.prompt_lengths import refuse_long_prompts
from flowrl.spec import parameters

logger = logging.getLogger(__name__)

Data = Source | Mapping[str, Source]
"""The source of each input, by its name; or, of a graph with one input, that alone."""


def refuse_no_source(data: Any) -> Any:
    """`data` itself; raises ValueError for a path in place of a source."""
    for one in data.values() if isinstance(data, Mapping) else [data]:
        if isinstance(one, str | Path):
            raise ValueError(f"expected PromptData({str(one)!r})")
    return data


def by_input(graph: Graph, data: Data, call: str) -> dict[str, Source]:
    """The source of each input, in the order of the inputs."""
    inputs = list(graph.inputs)
    named = ", ".join(f"{name!r}: ..." for name in inputs)
    if isinstance(data, Source):
        if len(inputs) > 1:
            raise ParameterError(
                f"data is a single {type(data).__name__}, but {graph.name} has the inputs "
                f"{', '.join(map(repr, inputs))}. Pass a source for each: {call}(..., data={{{named}}}).",
                code="run.data-columns",
                graph=graph.name,
                expected=inputs,
                found=type(data).__name__,
            )
        data = dict.fromkeys(inputs, data)
    if unknown := [name for name in data if name not in inputs]:
        raise ParameterError(
            f"data names {unknown[0]!r}, which is not an input of {graph.name}; {offer(unknown[0], inputs)} Pass "
            f"{call}(..., data={{{named}}}).",
            code="run.data-columns",
            graph=graph.name,
            expected=inputs,
            found=unknown[0],
        )
    if missing := [name for name in inputs if name not in data]:
        raise ParameterError(
            f"data has no source for the input {missing[0]!r} of {graph.name}. Pass a source for each input: "
            f"{call}(..., data={{{named}}}).",
            code="run.data-columns",
            graph=graph.name,
            expected=inputs,
            missing=missing[0],
        )
    for name in inputs:
        _refuse_other_columns(graph, name, data[name])
    _refuse_other_templates(graph, data)
    return {name: data[name] for name in inputs}


def pinned_data(data: Data, commits: Commits) -> Data:
    """`data` with its repositories resolved."""
    if isinstance(data, Source):
        return data.pinned(commits)
    return {name: source.pinned(commits) for name, source in data.items()}


def gives_tokens(source: Source) -> bool:
    """Whether a source writes tokens, for which it needs a tokenizer."""
    return any(getattr(typed, "kind", None) == "tokens" for typed in record_columns(source.record).values())


def refuse_no_tokenizer(graph: Graph, sources: Mapping[str, Source]) -> None:
    """Refuse a graph without a model whose tokenizer could encode the data."""
    of_tokens = any(map(gives_tokens, sources.values()))
    if of_tokens and not writers_of_tokens(graph) and folder_of_trained(graph) is None:
        raise BindError(
            f"{graph.name} has no rollout engine and trains no model of a folder, so there is no tokenizer to "
            f"encode the data. Add a Generate()(prompts) to the graph, or an update.",
            code="run.no-tokenizer",
            graph=graph.name,
        )


def refuse_no_feedback(graph: Graph, sources: Mapping[str, Source]) -> None:
    """Refuse a source that learns from scores which no node reports."""
    for name, source in sources.items():
        if source.learns and not feedback_nodes(graph, name):
            raise ParameterError(
                f"The source of the input {name!r} learns from the scores of its rows, but no node of {graph.name} "
                f"reports them. Insert a Feedback after the reward: "
                f"edit(insert={{'feedback': After('reward', Feedback())}}).",
                code="run.no-feedback",
                graph=graph.name,
                input=name,
            )


def _refuse_other_templates(graph: Graph, sources: Mapping[str, Source]) -> None:
    """Refuse a node whose chat template arguments differ from its source's; its ``tools`` do not count."""
    for node in graph.nodes.values():
        given = parameters(node.initial_operator).get("chat_template_kwargs")
        source = None if given is None else sources.get(input_of(graph, node.name) or "")
        theirs = getattr(source, "chat_template_kwargs", None)
        if given is None or theirs is None:
            continue
        ours, data = ({k: v for k, v in kwargs.items() if k != "tools"} for kwargs in (given, theirs))
        if ours != data:
            fix = f"edit(set={{'{node.name}.chat_template_kwargs': {data}}})"
            raise ParameterError(
                f"{node.name} applies the chat template with {ours or 'no arguments'}, and "
                f"{type(source).__name__} with {data or 'none'}, so the policy would see other prompts than those "
                f"whose length the data checks. Pass the same arguments: {fix}, or {type(source).__name__}(..., "
                f"chat_template_kwargs={ours}).",
                code="run.chat-template",
                node=node.name,
                expected=data,
                found=ours,
            )


def _refuse_rows_of_other_templates(graph: Graph, streams: Mapping[str, Stream]) -> None:
    """Refuse rows with chat template arguments that the node which applies the template lacks."""
    for node in graph.nodes.values():
        given = parameters(node.initial_operator).get("chat_template_kwargs")
        stream = None if given is None else streams.get(input_of(graph, node.name) or "")
        if given is None or not isinstance(stream, PromptStream):
            continue
        for row, own in stream.template_arguments():
            if odd := [name for name, value in own.items() if name not in given or given[name] != value]:
                raise DataError(
                    f"Row {row} of the data has its own chat_template_kwargs, {dict(own)!r}, but {node.name} applies "
                    f"the chat template to all prompts with {dict(given) or 'no arguments'}, so the policy would see "
                    f"this one without its {odd[0]!r}. Remove the rows with other arguments, and pass the common ones "
                    f"to both: PromptData(..., chat_template_kwargs=...) and "
                    f"edit(set={{'{node.name}.chat_template_kwargs': ...}}).",
                    code="run.chat-template",
                    node=node.name,
                    row=row,
                    expected=dict(given),
                    found=dict(own),
                )


def _refuse_other_columns(graph: Graph, name: str, source: Source) -> None:
    """Refuse a source that lacks columns of an input, or has columns of other types under their names."""
    has, kind = record_columns(source.record), type(source).__name__
    expected = graph[name].signature.outputs
    if missing := [column for column, typed in expected.items() if has.get(column) != typed]:
        record = f" (of {source.record.__name__})" if set(expected) & set(has) else ""
        raise ParameterError(
            f"The input {name!r} of {graph.name} needs the columns {', '.join(missing)}, but {kind} has "
            f"{', '.join(has)}{record}. {_fitting(graph, name)} the input with {source.record.__name__} and "
            f"compute the other columns in the graph, or write a Source that has them.",
            code="run.data-columns",
            graph=graph.name,
            input=name,
            source=kind,
            missing=missing,
            found=list(has),
        )
    rows, factor = graph[name].operator.rows_factor, rows_per_item(source.record)
    if rows != factor:
        raise ParameterError(
            f"The input {name!r} of {graph.name} has {rows} row(s) per draw, but {kind} has {factor}. "
            f"{_fitting(graph, name)} the input with {source.record.__name__}.",
            code="run.data-columns",
            graph=graph.name,
            input=name,
            source=kind,
            expected=rows,
            found=factor,
        )


def _fitting(graph: Graph, name: str) -> str:
    """The beginning of a fix: to pass flowrl's own source that fits an input, if one does."""
    node = graph[name]
    for kind in (PromptData, DemoData, UnpairedData, PreferenceData):
        has = record_columns(kind.record)
        fits = all(has.get(column) == typed for column, typed in node.signature.outputs.items())
        if fits and rows_per_item(kind.record) == node.operator.rows_factor:
            return f"Pass {kind.__name__}(...), or annotate"
    return "Annotate"


def feedback_nodes(graph: Graph, name: str) -> list[str]:
    """The nodes that report the scores of an input's rows."""
    return [
        n.name for n in graph.nodes.values() if Effect.SAMPLER_FEEDBACK in n.effects and input_of(graph, n.name) == name
    ]


def identities(sources: Mapping[str, Source], of: Callable[[Source], Any]) -> Any:
    """`of` each source, by input; the bare value for a graph with a single input."""
    found = {name: of(source) for name, source in sources.items()}
    return found if len(found) > 1 else next(iter(found.values()))


class Sources:
    """The streams of a run's inputs.

    Each input samples with a separate seed, the first with the run's, so that another input does not change its rows.

    Args:
        tokenizer: of the trained model; None for a job without one, whose sources write no tokens.
        again: the inputs that are sampled again within a step.
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
        refuse_long_prompts(graph, self.streams)
        self._learns = {name: feedback_nodes(graph, name) for name, source in sources.items() if source.learns}
        self._again = tuple(again)

    def warn_of_few(self, draws: int) -> None:
        """Warn if a step of this many draws repeats rows."""
        for name, stream in self.streams.items():
            if stream.size is not None and stream.size < draws:
                logger.warning(
                    "The data%s has %d prompts%s, but a step takes %d, so every step repeats some of them. Reduce "
                    "Training(..., prompts=%d), or pass more data.",
                    f" of {name!r}" if len(self.streams) > 1 else "",
                    stream.size,
                    f" ({stream.dropped} longer ones are dropped)" if stream.dropped else "",
                    draws,
                    stream.size,
                )

    def warn_of_shared_rows(self, name: str, training: Mapping[str, Stream]) -> None:
        """Warn if a training has prompts of these, which are those of the validation `name`."""
        for held_out in (one for one in self.streams.values() if isinstance(one, PromptStream)):
            for trained_on in (one for one in training.values() if isinstance(one, PromptStream)):
                if shared := held_out.shared_rows(trained_on):
                    logger.warning(
                        "%d of %d prompts of the validation %r are also trained on, so it does not measure what the "
                        "policy does with other prompts. Hold them out: remove them from the training data.",
                        shared,
                        held_out.size,
                        name,
                    )

    def steps_of(self, epochs: int, draws: int) -> int:
        """The steps of `draws` rows after which every row of the first input was drawn `epochs` times.

        Raises:
            DataError: the data is endless.
        """
        name, stream = next(iter(self.streams.items()))
        if stream.size is None:
            raise DataError(
                f"The source of the input {name!r} is endless, so epochs={epochs} has no end. Pass "
                f"Training(..., steps=...) instead.",
                code="prompts.endless-stream",
                input=name,
            )
        return math.ceil(epochs * stream.size / draws)

    def next(self, n: int) -> dict[str, DataProto]:
        """The batch of each input."""
        return {name: stream.next(n) for name, stream in self.streams.items()}

    def more(self, n: int) -> dict[str, DataProto]:
        """Another batch of each input that is sampled again within a step."""
        return {name: self.streams[name].next(n) for name in self._again}

    def batches(self, n: int) -> Iterator[dict[str, DataProto]]:
        """All rows once, for validation."""
        sizes = {name: stream.size for name, stream in self.streams.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
            raise DataError(
                f"A validation needs equally many rows of each input, but {counts}. Pass sources with the same number "
                f"of rows.",
                code="run.validation",
                found=list(sizes.values()),
            )
        every = [stream.batches(n) for stream in self.streams.values()]
        return (dict(zip(self.streams, batches, strict=True)) for batches in zip(*every, strict=True))

    def learn(self, step: int, scores: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Pass the sources that learn the scores of their rows.

        `step` is the completed one, counted from 1; `scores` are those of `StepResult`.
        """
        for name, nodes in self._learns.items():
            by_group: dict[str, list[float]] = {}
            for node in nodes:
                for uid, of_rows in scores.get(node, {}).items():
                    by_group.setdefault(uid, []).extend(of_rows)
            self.streams[name].learn(step, by_group)

    @property
    def last_scored_step(self) -> dict[str, float]:
        """As metrics: the last step whose scores each source that learns has received; its next draw uses these."""
        return {f"data/{name}/last_scored_step": float(self.streams[name].last_scored_step) for name in self._learns}

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each source's rows, under the name for warnings; see `Stream.digest`."""
        alone = len(self.streams) == 1
        return {"prompts" if alone else f"rows of {name!r}": s.digest() for name, s in self.streams.items()}

    @property
    def position(self) -> dict[str, Any]:
        """The position of each stream by input; the bare position of a single one."""
        found = {name: stream.position for name, stream in self.streams.items()}
        return found if len(found) > 1 else next(iter(found.values()))

    def seek(self, position: Mapping[str, Any], changed: bool = False) -> None:
        """Continue from `position`; in `changed` data with another number of rows, start over."""
        by_name = position if len(self.streams) > 1 else dict.fromkeys(self.streams, position)
        if by_name.keys() != self.streams.keys():
            raise DataError(
                f"The checkpoint has data positions of {', '.join(map(repr, by_name))}; expected those of "
                f"{', '.join(map(repr, self.streams))}. Resume with the sources that it was written with.",
                code="resume.unknown-state",
                found=list(by_name),
                expected=list(self.streams),
            )
        for name, stream in self.streams.items():
            try:
                stream.seek(by_name[name])
            except DataError:
                if not changed:
                    raise
                logger.warning("The rows of %r are others than in the checkpoint, so they start over.", name)


def sources_here(graph: Graph, sources: Mapping[str, Source], seed: int) -> Sources | None:
    """The data of a graph, read and tokenized; None if its model or data is not on this machine."""
    if any(source.missing_here() for source in sources.values()):
        return None
    found = (tokenizer_of(graph, role) for role in writers_of_tokens(graph) or graph.trained)
    if (tokenizer := next(filter(None, found), None)) or not any(map(gives_tokens, sources.values())):
        return Sources(sources, tokenizer, seed, graph, ())
    return None
