"""Counts how often tensors are hashed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from flowrl.sync import digest


@contextmanager
def hashes() -> Iterator[Counter[tuple[str, str]]]:
    """Count how often this process hashes each tensor within the block, by names of thread and tensor."""
    counts: Counter[tuple[str, str]] = Counter()

    def counted(head: bytes) -> Any:
        counts[threading.current_thread().name.partition("_")[0], head.decode().partition("\n")[0]] += 1
        return xxhash.xxh3_128(head)

    library = SimpleNamespace(xxh3_128=counted, xxh3_128_hexdigest=xxhash.xxh3_128_hexdigest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "xxhash", library)
        yield counts
