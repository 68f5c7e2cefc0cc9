"""Pictures of graphs and diffs, made offline: Mermaid, SVG, HTML."""
