"""The way of a version: sent, received, compared, sampled with, trained on."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "Weights go to the engine, a receipt comes back, and rows carry its version to the update",
    "trainer": "trainer\nversion 8",
    "weights": "weights",
    "engine": "engine\nreceives",
    "receipt": "receipt",
    "compare": "equal to what\nthe trainer sent?",
    "yes": "yes",
    "no": "no",
    "generate": "the engine samples",
    "rows": "rows",
    "window": "lag 0: version 8\nlag 1: 7 or 8",
    "other": "other",
}


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw versions with these texts."""
    sheet = Sheet(text["title"], 442)
    sheet.box(16, 16, 176, 56, text["trainer"], color="actor", shape="writes")
    sheet.arrow((192, 44), (292, 44), kind="back")
    sheet.text(240, 34, Code("Sync"), color="#8250df")
    sheet.text(240, 64, text["weights"], color="#8250df")
    sheet.box(294, 16, 170, 56, text["engine"], color="rollout")
    sheet.arrow((379, 72), (379, 104))
    sheet.box(294, 106, 170, 78, text["receipt"], Code("version=8"), Code("digest=43d4…"), color="rollout")
    sheet.arrow((294, 145), (194, 145))
    sheet.box(16, 115, 176, 60, text["compare"])
    sheet.arrow((104, 175), (104, 220), kind="added")
    sheet.text(94, 203, text["yes"], anchor="end", color="#1a7f37")
    sheet.arrow((150, 175), (150, 196), (240, 241), (292, 241), kind="removed")
    sheet.text(208, 208, text["no"], anchor="start", color="#cf222e")
    sheet.box(294, 222, 170, 38, Code("SyncError"), color="removed")
    sheet.box(16, 222, 176, 38, text["generate"], color="rollout")
    sheet.arrow((104, 260), (104, 296))
    sheet.box(16, 298, 176, 60, text["rows"], Code("policy_version=8"), color="rollout")
    sheet.arrow((192, 328), (276, 328))
    sheet.box(278, 284, 186, 88, Code("UpdateActor"), text["window"], color="actor", shape="writes")
    sheet.arrow((371, 372), (371, 402), kind="removed")
    sheet.text(382, 392, text["other"], anchor="start", color="#cf222e")
    sheet.box(286, 404, 170, 32, Code("StalePolicyError"), color="removed")
    return sheet
