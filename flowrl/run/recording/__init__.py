"""What a run records of its rows: summaries, texts and columns."""
