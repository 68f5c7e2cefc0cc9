"""What flows: `DataProto` and its columns, sources of data and the order in which they are drawn, tokens, keys, metrics."""
