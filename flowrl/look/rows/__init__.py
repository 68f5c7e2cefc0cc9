"""What is asked of the rows of a run: their texts, and their shares in a metric."""
