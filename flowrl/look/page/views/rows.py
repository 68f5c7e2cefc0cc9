"""The rows of a step as the page's table, and one row as a conversation with its tokens."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from flowrl.errors import DataError
from flowrl.look.page.plain import as_text, content, messages_of, prompt_text, short, shortened
from flowrl.look.page.views.tokens import row_tokens
from flowrl.look.page.watched import StepRows, WatchedRun
from flowrl.run.recording.summaries import RowSummaries

CHARACTERS = 1_000_000
"""The most characters of responses in one answer; longer ones are cut alike."""
TABLE = (
    "row_id",
    "uid",
    "score",
    "advantage",
    "response_tokens",
    "kl",
    "mismatch",
    "entropy",
    "clipped",
    "truncated",
    "group_spread",
    "fate",
    "data_source",
)
"""Columns of the table."""


def rows(of: StepRows) -> dict[str, Any]:
    """All rows of a step: their numbers in columns, groups of one prompt, and responses."""
    step, table, texts = of.step, of.table, of.texts
    reward = list[str]()
    for name in table.column_names:
        if name.startswith("reward/") and not any(_same(table, name, other) for other in ("score", *reward)):
            reward.append(name)
    data = {name: shortened(table[name].to_pylist()) for name in (*TABLE, *reward) if _known(table, name)}
    ids = list(of.rows)
    said = [texts.get(row, {}).get("response") for row in ids]
    limit = max(120, CHARACTERS // max(len(ids), 1))
    groups: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(ids):
        uid = data["uid"][i] if "uid" in data else row
        prompt = prompt_text(texts.get(row, {}).get("prompt"))[:2000]
        groups.setdefault(uid, {"uid": uid, "prompt": prompt, "rows": []})["rows"].append(i)
    return {
        "step": step,
        "count": len(table),
        "data": data,
        "reward": [name for name in reward if name in data],
        "groups": list(groups.values()),
        "responses": [text and text[:limit] for text in said] if texts else None,
        "clipped": limit if any(len(text or "") > limit for text in said) else None,
        "note": None if texts else of.no_texts,
    }


def _same(table: pa.Table, one: str, other: str) -> bool:
    return other in table.column_names and bool(table[one].equals(table[other]))


def _known(table: pa.Table, name: str) -> bool:
    return name in table.column_names and table[name].null_count < len(table)


def row(run: WatchedRun, step: int, row_id: str) -> dict[str, Any]:
    """One row: its numbers, its conversation, its tokens if columns were recorded, and the rows of its group."""
    of = run.rows(step)
    texts = of.texts
    if row_id not in of.rows:
        raise LookupError(f"Step {step} has no row {row_id}.")
    found, text = of.rows[row_id], texts.get(row_id, {})
    tokens, note = None, None
    try:
        tokens = row_tokens(of.columns, row_id, run.decode) if run.graph is not None else None
    except DataError as error:
        note = str(error)
    group = [one for one in of.rows.values() if one.get("uid") == found.get("uid")] if found.get("uid") else [found]
    address = _explained(run, step, row_id)
    skipped = {"row_id", "step", "row", "uid"}
    return {
        "row_id": row_id,
        "step": step,
        "address": address,
        "numbers": [[name, short(value)] for name, value in found.items() if value is not None and name not in skipped],
        "messages": _conversation(text, tokens),
        "tokens": tokens,
        "note": note if text or tokens else of.no_texts,
        "ground_truth": as_text(text["ground_truth"]) if text.get("ground_truth") is not None else None,
        "group": [
            {
                "row_id": one["row_id"],
                "score": short(one.get("score")),
                "advantage": short(one.get("advantage")),
                "response": (texts.get(one["row_id"], {}).get("response") or "")[:400] if texts else None,
            }
            for one in group
        ],
        "commands": [
            *([] if address is None else [shlex.join(["flowrl", "why", str(run.path), address])]),
            shlex.join(["flowrl", "replay", str(run.path), f"--step={step}"]),
        ],
    }


def _explained(run: WatchedRun, step: int, row_id: str) -> str | None:
    """The address of the row's advantage, or of its score, which `why` follows back."""
    edges = {} if run.graph is None else RowSummaries(run.graph, 0).edges
    edge = edges.get("advantage") or edges.get("score")
    return None if edge is None else f"{step}/{edge}[{row_id}]"


def why(run: WatchedRun, address: str) -> dict[str, str]:
    """Where a number comes from, as text."""
    return {"text": str(run.run.why(address))}


def replay(run: WatchedRun, step: int) -> dict[str, str]:
    """Which nodes of a step replay with the same bits, as text."""
    return {"text": str(run.run.replay(step))}


def _conversation(text: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The prompt's messages and the response; of an episode, its turns."""
    if episode := text.get("episode"):
        turns = [_turn(message) for message in episode["messages"]]
        own = {"role": "all tokens of the row", "sampled": True, "tokens": [0, len(tokens["text"])]} if tokens else None
        return [*turns, own] if own else turns
    found = messages_of(text.get("prompt"))
    if tokens is not None or text.get("response") is not None:
        said = {"role": "assistant", "text": text.get("response"), "sampled": True}
        found.append(said if tokens is None else {**said, "tokens": [0, len(tokens["text"])]})
    return found


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    sampled = message.get("sampled")
    name = f"{message['role']} {message['name']}" if message.get("name") else str(message["role"])
    found = {"role": name, "text": content(message), "sampled": sampled is not None}
    if sampled is not None:
        reward = "" if sampled.get("reward") is None else f", reward {sampled['reward']:g}"
        cut = ", truncated" if sampled.get("cut") else ""
        segment = f" in segment {sampled['segment'] + 1}" if "segment" in sampled else ""
        found["about"] = f"turn {sampled['turn'] + 1}{segment}, {sampled['tokens']} tokens{reward}{cut}"
    return found
