"""Graphs: nodes and edges, type inference, lineage, lag, and plans."""
