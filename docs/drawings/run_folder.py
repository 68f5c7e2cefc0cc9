"""The files of a run folder, by what they are for."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import LINE, Code, Sheet

TEXTS = {
    "title": "The files of a run folder: identity, numbers, rows, time, checkpoints and the trained model",
    "identity": "what ran: graph, data, seed,\nstarting model, status",
    "metrics": "a line for each step\nand each validation",
    "rows": "every sampled row;\nthe exact columns of\nrecent and chosen steps",
    "time": "when each node ran;\nfor Perfetto",
    "checkpoints": "weights, optimizer, state,\nrows in flight",
    "model": "the trained model",
    "resume": "resume checks the identity",
}
_FILES = {
    "identity": ("run.json",),
    "metrics": ("metrics.jsonl",),
    "rows": ("rows/ texts/", "columns/", "predictions.jsonl"),
    "time": ("trace.json", "spans.jsonl"),
    "checkpoints": ("checkpoints/",),
    "model": ("actor/",),
}
_COLORS = {"rows": "rollout", "checkpoints": "actor", "model": "actor"}


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw a run folder with these texts."""
    sheet = Sheet(text["title"], 460)
    sheet.text(40, 24, Code("runs/grpo-001/"), anchor="start")
    y, middles = 36.0, {}
    for what, files in _FILES.items():
        lines = max(len(files), text[what].count("\n") + 1)
        high = LINE * lines + 14
        sheet.box(40, y, 176, high, *map(Code, files), color=_COLORS.get(what, ""))
        middles[what] = y + high / 2
        sheet.text(232, middles[what] - text[what].count("\n") * LINE / 2 + 5, text[what], anchor="start")
        y += high + 10
    sheet.arrow(
        (40, middles["checkpoints"]),
        (18, middles["checkpoints"]),
        (18, middles["identity"]),
        (38, middles["identity"]),
        kind="back",
    )
    sheet.text(18, y + 14, text["resume"], anchor="start", color="#8250df")
    return sheet
