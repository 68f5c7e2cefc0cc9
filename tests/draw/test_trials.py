"""The picture of a sweep: a panel for each setting, and a point for each trial, on the scale of its values."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from flowrl.draw.trials import Point, svg

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def circles(texts: list[str], values: list[float], spread: float = 0.0) -> list[tuple[float, float]]:
    """Where the points of one panel are."""
    points = [Point({"lr": t}, v, (v - spread, v + spread)) for t, v in zip(texts, values, strict=True)]
    root = ElementTree.fromstring(svg("val/reward/mean", ["lr"], points, best=0))
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.findall(".//svg:circle", NAMES)]


def test_numbers_over_orders_of_magnitude_are_on_a_logarithmic_axis() -> None:
    (a, _), (b, _), (c, _) = circles(["1e-7", "1e-6", "1e-5"], [0.1, 0.2, 0.3])
    assert b - a == pytest.approx(c - b, abs=0.2)
    (a, _), (b, _), (c, _) = circles(["1", "2", "4"], [0.1, 0.2, 0.3])
    assert c - b == pytest.approx(2 * (b - a), abs=0.3)


def test_larger_values_are_higher_and_texts_are_in_their_order() -> None:
    (a, low), (b, high), (again, _) = circles(["PPOClip()", "GSPO()", "PPOClip()"], [0.1, 0.9, 0.5])
    assert a == again < b and high < low


def test_one_trial_equal_values_and_markup_in_names_make_a_valid_picture() -> None:
    assert len(circles(["1e-6"], [0.5])) == 1
    assert len(circles(["<&>", "'\""], [0.5, 0.5], spread=0.1)) == 2
    root = ElementTree.fromstring(svg("a<b", [], [Point({}, 1.0, (1.0,))], best=0))
    assert "a<b" in "".join(root.itertext())
