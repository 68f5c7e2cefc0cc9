"""What flows: `DataProto` and its columns; sources of data, and samplers; tokens, keys, metrics."""
