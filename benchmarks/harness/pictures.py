"""Pictures for the docs: panels of one look, as SVG that is the same whenever it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def panels(rows: int, columns: int, height: float = 3.0, **shared: Any) -> tuple[Any, Any]:
    """A figure, and its axes by row and column.

    Args:
        rows, columns: of panels, each 4 inches wide.
        height: of each, in inches.
        shared: which axes are shared: ``sharex``, ``sharey``.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * columns, height * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for one in figure.axes:
        one.tick_params(labelsize=8)
        one.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG: text stays text, and nothing in the file depends on when it was drawn."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flowrl", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
