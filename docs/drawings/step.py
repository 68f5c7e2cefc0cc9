"""A step: from a function to a graph, its checks, and the plan that runs."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "A function is traced into a graph, which is edited, checked and planned; or it runs eagerly on tensors",
    "function": "a function: a line\nfor each operator",
    "trace": "trace",
    "eager": "eager",
    "tensors": "runs on tensors,\nline by line",
    "graph": "graph",
    "edit": "edit",
    "changed": "changed copy",
    "check": "check",
    "rules": "rules",
    "bind": "bind, plan",
    "plan": "execution plan: each node once its inputs are there",
    "fused": "one pass for both",
}


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw a step with these texts."""
    sheet = Sheet(text["title"], 444)
    sheet.box(16, 16, 190, 56, text["function"])
    sheet.arrow((206, 44), (292, 44))
    sheet.text(249, 36, text["eager"])
    sheet.box(294, 16, 170, 56, text["tensors"], shape="dashed")
    sheet.arrow((111, 72), (111, 112))
    sheet.text(122, 97, text["trace"], anchor="start")
    sheet.box(56, 114, 110, 40, text["graph"])
    sheet.arrow((166, 134), (292, 134))
    sheet.text(229, 126, text["edit"])
    sheet.box(294, 114, 170, 40, text["changed"])
    sheet.arrow((379, 154), (379, 194))
    sheet.text(390, 179, text["check"], anchor="start")
    sheet.arrow((111, 154), (111, 214), (292, 214))
    sheet.text(122, 206, text["check"], anchor="start")
    sheet.box(294, 196, 170, 36, text["rules"], color="added")
    sheet.arrow((379, 232), (379, 272))
    sheet.text(368, 257, text["bind"], anchor="end")
    sheet.box(8, 274, 464, 160)
    sheet.text(20, 296, text["plan"], anchor="start")
    sheet.box(20, 342, 88, 40, Code("generate"), color="rollout")
    sheet.arrow((108, 352), (128, 332))
    sheet.arrow((108, 372), (128, 394))
    sheet.box(130, 312, 124, 40, Code("ref_log_prob"), color="ref")
    sheet.box(130, 374, 124, 40, Code("reward"))
    sheet.arrow((254, 332), (276, 352))
    sheet.arrow((254, 394), (276, 374))
    sheet.box(274, 330, 128, 64, Code("old_log_prob"), Code("update_actor"), color="actor", shape="writes")
    sheet.text(338, 414, text["fused"])
    sheet.arrow((402, 362), (418, 362))
    sheet.box(420, 342, 46, 40, Code("sync"), color="rollout")
    return sheet
