"""`summarize`: an episode as plain data, which a run writes and `flowrl rows` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.data.text.transcript import Message
from flowrl.episodes.chat import Chat
from flowrl.episodes.play import EpisodeResult


def said(chat: Chat) -> tuple[Sequence[Message], Sequence[int]]:
    """All messages of an episode, without those that a segment repeats from the one before it, and the index of each
    answer."""
    messages, answers, before = list[Message](), list[int](), list[Message]()
    for segment in chat.segments:
        start = segment.own[0].message if segment.own else len(segment.messages)
        pairs = enumerate(zip(segment.messages[:start], before, strict=False))
        repeated = next((i for i, (one, other) in pairs if one != other), min(start, len(before)))
        answers += [len(messages) - repeated + span.message for span in segment.own]
        messages += segment.messages[repeated:]
        before = segment.messages
    return messages or chat.messages, answers


def summarize(played: EpisodeResult) -> dict[str, Any]:
    """The messages of an episode, with what the policy sampled, and how the episode ended.

    Returns:
        JSON-able data. ``ended`` is ``"done"``, ``"turns"``, ``"context"``, ``"segments"`` or ``"failed"``; ``fault``
        is the error or None; ``tries`` is how often the episode was started; ``tool_calls``, ``tool_errors`` and all
        else are of its last try. In ``messages``, each message that the policy sampled has an entry ``sampled``: its
        ``turn`` from 0, its number of ``tokens``, the ``reward`` that the environment gave for it (None if the
        environment gave none in the episode), whether its length ``cut`` it, and the ``version`` of the weights that
        sampled its first token; with ``rewrites="segment"``, also its ``segment`` from 0.
        Messages without that entry came from the data or the environment and are masked; of an episode that failed,
        everything is. Of an episode that a program played at an `Endpoint`, ``program`` has its exit ``status``, None
        if it was killed, and the ends of its ``stdout`` and ``stderr``.
        With other engines, ``others`` has their summaries, by name.
    """
    chat = played.chat
    conversation, answers = said(chat)
    messages = [{key: value for key, value in message.items() if key != "sampled"} for message in conversation]
    segments = [number for number, segment in enumerate(chat.segments) for _ in segment.own]
    for turn, (answered, index) in enumerate(zip(chat.answers, answers, strict=True)):
        messages[index]["sampled"] = {
            "turn": turn,
            "tokens": len(answered.ids),
            "reward": chat.rewards[turn] if chat.rewarded else None,
            "cut": chat.cuts[turn],
            "version": chat.versions[turn][0],
        }
        if chat.limits.rewrites == "segment":
            messages[index]["sampled"]["segment"] = segments[turn]
    others = {name: summarize(played._replace(chat=other)) for name, other in chat.others.items()}
    summary = {
        "ended": played.ended,
        "fault": None if played.fault is None else str(played.fault),
        "tries": played.tries,
        "tool_calls": chat.tool_calls,
        "tool_errors": chat.tool_errors,
        "messages": messages,
        **({"others": others} if others else {}),
    }
    return summary if chat.program is None else {**summary, "program": chat.program}
