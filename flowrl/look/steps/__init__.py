"""Ask a recorded step: where a number comes from (`why`), the same bits again (`replay`), and what if."""
