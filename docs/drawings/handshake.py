"""The handshake: rows of one version go one way, weights of the next one the other way."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "Engine and trainer exchange rows and weights; what each row carries",
    "engine": "rollout engine\nversion 7",
    "trainer": "trainer\nversion 7 → 8",
    "rows": "rows",
    "weights": "version 8",
    "row": "Each row carries",
    "version": "the weights that sampled it;\nthe trainer must be at them",
    "mask": "the tokens that were sampled;\nonly these are trained on",
    "old": "computed by the trainer,\nwith the weights of version 7",
    "ref": "for the KL penalty, which\ncounts once",
    "stale": "a row of version 6",
}


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw the handshake with these texts."""
    sheet = Sheet(text["title"], 428)
    sheet.box(16, 20, 160, 60, text["engine"], color="rollout")
    sheet.box(304, 20, 160, 60, text["trainer"], color="actor", shape="writes")
    sheet.arrow((176, 36), (306, 36))
    sheet.text(240, 28, text["rows"])
    sheet.arrow((306, 64), (178, 64), kind="back")
    sheet.text(240, 86, Code("Sync"), text["weights"], color="#8250df")
    sheet.box(16, 124, 448, 236)
    sheet.text(32, 148, text["row"], anchor="start")
    columns = {"policy_version": "version", "response_mask": "mask", "old_log_probs": "old", "ref_log_prob": "ref"}
    for number, (column, what) in enumerate(columns.items()):
        y = 160 + 49 * number
        role = {
            "policy_version": "rollout",
            "response_mask": "rollout",
            "old_log_probs": "actor",
            "ref_log_prob": "ref",
        }
        sheet.box(32, y, 140, 40, Code(column), color=role[column])
        sheet.text(190, y + 15, text[what], anchor="start")
    sheet.box(16, 376, 172, 38, text["stale"])
    sheet.arrow((188, 395), (290, 395), kind="removed")
    sheet.box(292, 376, 172, 38, Code("StalePolicyError"), color="removed")
    return sheet
