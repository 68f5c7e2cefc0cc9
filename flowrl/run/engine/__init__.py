"""The engine of a run: execution graph, steps in flight, runners, and traces."""
