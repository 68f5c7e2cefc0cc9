"""A `DataProto` that tests of data share."""

from __future__ import annotations

import pytest

from flowrl.data.proto.dataproto import DataProto
from tests.support.rows.protos import rollout


@pytest.fixture
def proto() -> DataProto:
    return rollout([[1, 2], [3], [4, 5, 6], [7]], [[8], [9, 10], [], [11, 12, 13]])
