"""Generation and training over time, without and with a lag, and a response whose tokens have two versions."""

from __future__ import annotations

from collections.abc import Mapping

from drawings.sheet import Code, Sheet

TEXTS = {
    "title": "Lanes of engine and trainer over time: with lag 1 both work at once",
    "lag 0": "lag 0: one waits for the other",
    "lag 1": "lag 1: both work; rows are one update old",
    "engine": "engine",
    "trainer": "trainer",
    "step": "step",
    "spans": "spans: a sync inside one response",
}
_LEFT, _SLOT, _HIGH = 84, 97, 46


def draw(text: Mapping[str, str]) -> Sheet:
    """Draw a lag with these texts."""
    sheet = Sheet(text["title"], 498)
    _lanes(sheet, text, 14, "lag 0", {0: (1, 0), 2: (2, 1)}, {1: 1, 3: 2})
    _lanes(sheet, text, 200, "lag 1", {0: (1, 0), 1: (2, 0), 2: (3, 1), 3: (4, 2)}, {1: 1, 2: 2, 3: 3})
    sheet.line((16, 388), (464, 388))
    sheet.text(16, 414, text["spans"], anchor="start")
    for token in range(8):
        x = _LEFT + 48 * token - 60 + (20 if token > 3 else 0)
        sheet.box(x, 442, 42, 34, Code("v1" if token < 4 else "v2"), color="rollout")
    x = _LEFT + 48 * 4 - 60 + 7
    sheet.arrow((x, 428), (x, 486), kind="back")
    return sheet


def _lanes(
    sheet: Sheet,
    text: Mapping[str, str],
    y: float,
    lag: str,
    sampled: Mapping[int, tuple[int, int]],
    trained: Mapping[int, int],
) -> None:
    """The lanes of engine and trainer; by slot, the step and version that it samples with, and the step it trains."""
    sheet.text(16, y + 12, text[lag], anchor="start")
    upper, lower = y + 26, y + 26 + _HIGH + 34
    sheet.text(16, upper + 28, text["engine"], anchor="start")
    sheet.text(16, lower + 28, text["trainer"], anchor="start")
    for slot, (step, version) in sampled.items():
        sheet.box(
            _LEFT + _SLOT * slot,
            upper,
            _SLOT - 7,
            _HIGH,
            f"{text['step']} {step}",
            Code(f"v{version}"),
            color="rollout",
        )
    for slot, step in trained.items():
        x = _LEFT + _SLOT * slot
        texts = f"{text['step']} {step}", Code(f"v{step - 1}→v{step}")
        sheet.box(x, lower, _SLOT - 7, _HIGH, *texts, color="actor", shape="writes")
        if slot + 1 in sampled:
            sheet.arrow((x + _SLOT - 20, lower), (x + _SLOT + 8, upper + _HIGH + 2), kind="back")
        if (slot - 1) in sampled:
            sheet.arrow((x - 18, upper + _HIGH), (x + 12, lower - 1))
