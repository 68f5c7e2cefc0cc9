"""How a run reports to the terminal and to trackers."""
