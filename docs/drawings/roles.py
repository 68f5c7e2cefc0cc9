"""Roles of a graph, the backends that they are bound to, and the places of a job."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "Each role of a graph is bound to a backend; a place says where they run",
    "role": "role: operators use it",
    "backend": "backend: computes",
    "swap": "one line",
    "place": "place: where they run",
    "one process": "one process",
}
_ROLES = {
    "rollout": ("Generate", "TorchRollout"),
    "actor": ("OldLogProb UpdateActor", "TorchTrainer"),
    "ref": ("RefLogProb", "TorchScorer"),
    "critic": ("Value UpdateCritic", "TorchCritic"),
}


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw roles with these texts."""
    sheet = Sheet(text["title"], 450)
    sheet.text(16, 22, text["role"], anchor="start")
    sheet.text(464, 22, text["backend"], anchor="end")
    y = 36
    for role, (operators, backend) in _ROLES.items():
        sheet.box(16, y, 206, 52, Code(role), Code(operators), color=role)
        sheet.box(324, y + 6, 140, 40, Code(backend), color=role)
        sheet.arrow((222, y + 26), (322, y + 26))
        sheet.text(272, y + 20, Code("bind"))
        if role == "rollout":
            y += 62
            sheet.box(324, y - 6, 140, 40, Code("VLLM"), color=role, shape="dashed")
            sheet.arrow((222, y - 22), (240, y - 22), (284, y + 14), (322, y + 14), kind="added")
            sheet.text(244, y + 30, text["swap"], color="#1a7f37")
        y += 68 if role != "rollout" else 50
    sheet.line((16, y), (464, y))
    sheet.text(16, y + 24, text["place"], anchor="start")
    sheet.box(16, y + 38, 126, 40, text["one process"])
    sheet.box(154, y + 38, 150, 40, Code("Colocate(gpus=2)"))
    sheet.box(316, y + 38, 148, 40, Code("Split(1, 1)"))
    return sheet
