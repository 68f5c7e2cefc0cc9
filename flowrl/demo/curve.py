"""The learning curve of ``flowrl demo --quick`` as terminal text and as SVG, without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from flowrl.draw.colors import INK, STROKES, colors

Points = Sequence[tuple[int, float]]
"""(step, share of right answers), by step."""

_WIDTH, _HEIGHT = 640, 260  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 40, 44  # margins around the axes
_BAR = 40  # characters per share of 1
_FONT = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"


def bars(points: Points) -> str:
    """One line per point: the step, a bar, and the share."""
    width = max(len(str(step)) for step, _ in points)
    return "\n".join(
        f"step {step:>{width}}  {'█' * round(_BAR * share):<{_BAR}}  {share:.2f}" for step, share in points
    )


def svg(title: str, series: Mapping[str, Points]) -> str:
    """Shares between 0 and 1 over steps: one line per name, as a stand-alone SVG document."""
    last = max(1, *(points[-1][0] for points in series.values()))

    def at(step: float, share: float) -> tuple[float, float]:
        across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * step / last, _TOP + down * (1 - share)

    grid = [(share, at(0, share)[1]) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    ticks = sorted({round(last * i / 4) for i in range(5)})
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="{_FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#d0d7de" stroke-width="1"/>' for _, y in grid),
            *(_text(_LEFT - 8, y + 4, f"{share:.0%}", "end") for share, y in grid),
            *(_text(at(step, 0)[0], _HEIGHT - _BOTTOM + 18, str(step), "middle") for step in ticks),
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "training step", "middle"),
            *(part for i, name in enumerate(series) for part in _line(i, name, [at(*p) for p in series[name]])),
            "</svg>",
            "",
        ]
    )


def _line(number: int, name: str, places: Sequence[tuple[float, float]]) -> list[str]:
    """A series with a dot at every point, and its entry in the legend above the axes."""
    color, x = colors(number)[1], _LEFT + 210 * number
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return [
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places),
        f'<path d="M{x} 18H{x + 20}" stroke="{color}" stroke-width="2"/>',
        _text(x + 28, 22, name, "start", INK),
    ]


def _text(x: float, y: float, text: str, anchor: str, color: str = STROKES["data"]) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
