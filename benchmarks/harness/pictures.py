"""Pictures for the docs: panels in one style, as reproducible SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def panels(rows: int, columns: int, height: float = 3.0, **shared: Any) -> tuple[Any, Any]:
    """Create a figure; return it and its axes by row and column.

    Args:
        rows, columns: number of panels, each 4 inches wide.
        height: height of a panel, in inches.
        shared: shared axes: ``sharex``, ``sharey``.
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
    """Write a figure as SVG, with text as text and without a date."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flowrl", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
