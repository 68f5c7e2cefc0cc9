"""Host processes, one per rank, and how they exchange columns."""
