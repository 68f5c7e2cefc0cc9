"""Settings of a run: as a file, and changed by paths."""
