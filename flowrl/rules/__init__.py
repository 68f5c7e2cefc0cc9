"""Rules: the mistakes that a graph is checked for before it runs."""
