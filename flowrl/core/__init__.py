"""The language: operators with typed ports, graphs, edits, diffs, rules, plans, and the Protocols of engines."""
