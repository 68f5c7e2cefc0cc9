"""The engine of a run: schedule, steps in flight, runners, and traces."""
