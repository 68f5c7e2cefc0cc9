"""An episode of a row, turn by turn, for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from flowrl.app.printing import printable

_POLICY, _ENVIRONMENT = (">", "bold green"), ("|", "cyan")
"""Mark and color of lines: sampled ones, and all others."""

_ENDED = {
    "done": "ended by its environment",
    "turns": "out of turns",
    "context": "out of context",
    "segments": "out of segments",
    "failed": "failed",
}


def turns(episode: Mapping[str, Any]) -> Text:
    """An episode as lines for a terminal."""
    text = Text()
    for message in episode["messages"]:
        sampled = message.get("sampled")
        mark, style = _ENVIRONMENT if sampled is None else _POLICY
        name = f" {message['name']}" if message.get("name") else ""
        header = f"{message['role']}{name}" if sampled is None else _turn(sampled)
        text.append(f"{printable(header)}\n", style="dim")
        for line in printable(_content(message)).split("\n"):
            text.append(f"{mark} {line}\n", style=style)
    tries = f", attempt {episode['tries']}" if episode["tries"] > 1 else ""
    calls = f", {episode['tool_calls']} tool calls" if episode["tool_calls"] else ""
    wrong = f" ({episode['tool_errors']} invalid)" if episode["tool_errors"] else ""
    text.append(f"{_ENDED[episode['ended']]} after {turns_of(episode)} turns{tries}{calls}{wrong}", style="bold")
    if episode["fault"] is not None:
        text.append(f"\n{printable(episode['fault'])}", style="red")
    for name in ("stdout", "stderr"):
        if written := (episode.get("program") or {}).get(name, "").strip():
            text.append(f"\n{name} of the program:\n", style="dim")
            text.append(printable(written))
    return text


def _turn(sampled: Mapping[str, Any]) -> str:
    reward = "" if sampled["reward"] is None else f", reward {sampled['reward']:g}"
    cut = ", truncated" if sampled["cut"] else ""
    segment = f" in segment {sampled['segment'] + 1}" if "segment" in sampled else ""
    return f"policy, turn {sampled['turn'] + 1}{segment}: {sampled['tokens']} tokens{reward}{cut}"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def about(episodes: Sequence[Mapping[str, Any]]) -> str:
    """How the episodes of rows ended, in one line."""
    ended = Counter(episode["ended"] for episode in episodes)
    how = ", ".join(f"{ended[why]} {_ENDED[why]}" for why in _ENDED if ended[why])
    return f"{sum(map(turns_of, episodes)) / len(episodes):.1f} turns: {how}"


def turns_of(episode: Mapping[str, Any]) -> int:
    """The number of the policy's turns."""
    return sum("sampled" in message for message in episode["messages"])
