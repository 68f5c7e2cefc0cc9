"""Columns over the axes of a batch, and two wires into a port."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "Two rows of prompt and response, the columns over them, and a port that refuses one of two wires",
    "prompt": "prompt",
    "response": "response",
    "row": "row",
    "each token": "one number for each token",
    "each sampled": "… of the response",
    "each row": "… for each row",
    "old": "log-prob of\nthe old policy",
    "rollout": "log-prob of\nthe rollout",
    "port": "reads: log-prob\nof the old policy",
    "accepted": "fits",
    "refused": "refused",
}
_CELL, _LEFT = 34, 200


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw columns with these texts."""
    sheet = Sheet(text["title"], 452)
    sheet.text(_LEFT + 1.5 * _CELL, 20, text["prompt"])
    sheet.text(_LEFT + 5.5 * _CELL, 20, text["response"])
    for row, kinds in enumerate(("-pprrrr", "ppprrr-")):
        y = 30 + 36 * row
        sheet.text(_LEFT - 14, y + 20, f"{text['row']} {row}", anchor="end")
        for place, kind in enumerate(kinds):
            shape, color = ("dashed" if kind == "-" else "box"), ("rollout" if kind == "r" else "")
            sheet.box(_LEFT + _CELL * place + 2, y, _CELL - 4, 30, color=color, shape=shape)
    spans = [("input_ids", 0, 7, "each token"), ("advantages", 3, 7, "each sampled")]
    for number, (column, first, last, what) in enumerate(spans):
        y = 128 + 50 * number
        sheet.text(16, y, Code(column), text[what], anchor="start")
        left, right = _LEFT + _CELL * first + 4, _LEFT + _CELL * last - 4
        sheet.line((left, y - 12), (left, y), (right, y), (right, y - 12))
    sheet.text(16, 228, Code("uid"), text["each row"], anchor="start")
    for row in range(2):
        sheet.box(_LEFT + 4 + 36 * row, 216, 30, 30)
    for y, node, what, kind in (
        (282, "old_log_probs", "old", "added"),
        (372, "rollout_log_probs", "rollout", "removed"),
    ):
        sheet.box(16, y, 164, 68, Code(node), text[what], color="actor" if what == "old" else "rollout")
        level = 340 if what == "old" else 366
        sheet.arrow((180, y + 34), (240, y + 34), (268, level), (292, level), kind=kind)
    sheet.text(220, 306, text["accepted"], color="#1a7f37")
    sheet.text(222, 426, text["refused"], color="#cf222e")
    sheet.box(294, 312, 170, 84, Code("update_actor"), text["port"], color="actor", shape="writes")
    return sheet
