"""`DataProto`, the batch of columns, and its formats."""
