"""Predictions from measured costs: what nodes do, similar nodes, and what places of a machine cost."""
