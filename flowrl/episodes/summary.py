"""`summarize`: how an episode went, as plain data that a run writes and people read."""

from __future__ import annotations

from typing import Any

from flowrl.episodes.play import EpisodeResult


def summarize(played: EpisodeResult) -> dict[str, Any]:
    """What was said by whom, and what came of it.

    Returns:
        JSON-able data. ``ended`` is ``"done"``, ``"turns"``, ``"context"`` or ``"failed"``; ``fault`` says what failed,
        or is None; ``tries`` counts how often the episode was begun; ``tool_calls`` and ``tool_errors`` are of its last
        try, and so is all else. ``messages`` are those of the conversation. One that the policy sampled has an entry
        ``sampled``: its ``turn`` from 0, its number of ``tokens``, the ``reward`` that the environment gave for it
        (None where the environment gave none to any), whether its length ``cut`` it, and the ``version`` of the weights
        that
    began it. What has
        no such entry came from the data or the environment, and is masked; of an episode that failed, everything is.
    """
    chat = played.chat
    messages = [{key: value for key, value in message.items() if key != "sampled"} for message in chat.messages]
    for turn, answered in enumerate(chat.transcript.answers if chat.transcript is not None else ()):
        messages[answered.message]["sampled"] = {
            "turn": turn,
            "tokens": len(answered.ids),
            "reward": chat.rewards[turn] if chat.rewarded else None,
            "cut": chat.cuts[turn],
            "version": chat.versions[turn][0],
        }
    return {
        "ended": played.ended,
        "fault": None if played.fault is None else str(played.fault),
        "tries": played.tries,
        "tool_calls": chat.tool_calls,
        "tool_errors": chat.tool_errors,
        "messages": messages,
    }
