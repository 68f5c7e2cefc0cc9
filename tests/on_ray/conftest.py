"""One Ray for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray for the session, with more logical CPUs than there are."""
    ray.init("local", num_cpus=12, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()
