"""What flows: `DataProto` and its columns, prompts from files, tokens, keys, metrics."""
