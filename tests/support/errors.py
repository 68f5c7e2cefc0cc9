"""Expect errors by code and facts, independent of their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.errors import FlowrlError


@contextmanager
def raises(code: str, **facts: object) -> Iterator[pytest.ExceptionInfo[FlowrlError]]:
    """Expect a `FlowrlError` with this code, and these facts among its own."""
    with pytest.raises(FlowrlError) as caught:
        yield caught
    found = {name: caught.value.facts.get(name, "no such fact") for name in facts}
    assert (caught.value.code, found) == (code, facts), caught.value
