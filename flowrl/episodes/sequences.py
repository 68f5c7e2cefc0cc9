"""The tokens of an episode as one row: its segments one after another, each after all that the policy read in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from flowrl.data.text.transcript import Message, SampledSpan, Transcript
from flowrl.episodes.environment import Row
from flowrl.episodes.play import EpisodeResult
from flowrl.episodes.summary import said, summarize
from flowrl.errors import DataError


class RowRecord(NamedTuple):
    """The columns of one row; of an episode that failed or has no response, the prompt only.

    A token that was sampled is on the mask in the segment in which it was sampled, and nowhere else: a later segment
    repeats it as context.

    Args:
        starts: where segments after the first begin in `ids`.
        versions: of the sampled tokens.
        rewards: by the index of the last token of their turn.
    """

    prompt: Sequence[int]
    ids: Sequence[int] = ()
    starts: Sequence[int] = ()
    sampled: Sequence[bool] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()
    rewards: Mapping[int, float] = MappingProxyType({})
    text: str = ""
    conversation: Sequence[Message] = ()

    @classmethod
    def of(cls, row: Row, result: EpisodeResult, filler: int) -> Self:
        """The row of an episode; `filler` is the prompt of one that has none."""
        chat = result.chat
        if result.ended == "context" and not chat.answers and chat.exhausted is None:
            _refuse_long_prompt(row, chat.transcript, chat.limits.context)
        if not chat.segments:
            return cls([filler], rewards={})
        first = chat.segments[0]
        prompt = first.ids[: first.prompt_length]
        if not chat.answers or result.fault is not None:
            return cls(prompt, rewards={})
        ids, starts, spans = list[int](), list[int](), list[tuple[int, SampledSpan]]()
        for segment in (one for one in chat.segments if one.own):
            skipped = first.prompt_length if segment is first else 0
            if segment is not first:
                starts.append(len(ids))
            offset, last = len(ids) - skipped, segment.own[-1]
            ids += segment.ids[skipped : last.start + len(last.ids)]  # a final reply without a response is not context
            spans += [(offset + span.start, span) for span in segment.own]
        sampled, log_probs = [False] * len(ids), [0.0] * len(ids)
        for start, span in spans:
            sampled[start : start + len(span.ids)] = [True] * len(span.ids)
            log_probs[start : start + len(span.ids)] = span.log_probs
        ends = [start + len(span.ids) - 1 for start, span in spans]
        versions = list(itertools.chain.from_iterable(chat.versions))
        rewards = dict(zip(ends, chat.rewards, strict=True))
        return cls(prompt, ids, starts, sampled, log_probs, versions, rewards, spans[-1][1].text, said(chat)[0])


class OtherSide(NamedTuple):
    """An episode as one of its other engines saw it.

    Args:
        summary: see `flowrl.episodes.summary`.
        temperature: of its sampling.
        version: of its weights, for an episode in which it sampled nothing.
    """

    record: RowRecord
    summary: Mapping[str, Any]
    temperature: float
    version: int

    @classmethod
    def all(cls, row: Row, result: EpisodeResult, versions: Mapping[str, int]) -> dict[str, Self]:
        """The sides of all other engines, by name, given the versions of their weights."""
        found = {}
        for name, chat in result.chat.others.items():
            own = result._replace(chat=chat, ended="done" if result.fault is None else "failed")
            record = RowRecord.of(row, own, chat.broker.tokenizer.eos_id)
            found[name] = cls(record, summarize(own), chat.broker.sampling.temperature, versions[name])
        return found


def _refuse_long_prompt(row: Row, prompt: Transcript | None, context: int) -> None:
    length = f"has {len(prompt.ids)} tokens, which" if prompt else "alone"
    raise DataError(
        f"The prompt of row {row.row_id!r} {length} leaves no room for a response within context={context}. Raise "
        f"context, or drop long prompts.",
        code="episode.long-prompt",
        row=row.row_id,
        expected=context,
        found=len(prompt.ids) if prompt else None,
    )
