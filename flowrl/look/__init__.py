"""Look into runs: read what a run folder holds, without a lock and without writing to it."""
