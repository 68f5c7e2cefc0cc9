"""`summarize`: an episode as plain data, which a run writes and `flowrl rows` shows."""

from __future__ import annotations

from typing import Any

from flowrl.episodes.play import EpisodeResult


def summarize(played: EpisodeResult) -> dict[str, Any]:
    """The messages of an episode, with what the policy sampled, and how the episode ended.

    Returns:
        JSON-able data. ``ended`` is ``"done"``, ``"turns"``, ``"context"`` or ``"failed"``; ``fault`` is the error or
        None; ``tries`` is how often the episode was started; ``tool_calls``, ``tool_errors`` and all else are of its
        last try. In ``messages``, each message that the policy sampled has an entry ``sampled``: its ``turn`` from 0,
        its number of ``tokens``, the ``reward`` that the environment gave for it (None if the environment gave none in
        the episode), whether its length ``cut`` it, and the ``version`` of the weights that sampled its first token.
        Messages without that entry came from the data or the environment and are masked; of an episode that failed,
        everything is.
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
