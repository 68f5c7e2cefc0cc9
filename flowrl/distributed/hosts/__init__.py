"""Host processes: one for each rank, and how columns travel between them."""
