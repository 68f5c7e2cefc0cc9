"""Changes of a target by options: ``--set``, ``--engine``, ``--epochs`` and arguments of its function."""
