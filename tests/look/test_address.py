"""Addresses of parts of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.look.address import Address, address_of
from tests.support.errors import raises


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("17", Address(step=17)),
        ("17/gae", Address(step=17, node="gae")),
        ("17/gae.advantages", Address(step=17, node="gae", column="advantages")),
        ("17[0/516/0#1]", Address(step=17, row="0/516/0#1")),
        ("17/gae.advantages[0/516/0#1]", Address(None, 17, "gae", "advantages", "0/516/0#1")),
        ("runs/a@b@17/gae", Address("runs/a@b", 17, "gae")),
        ("runs/a@", Address("runs/a")),
        ("17/filter.gae.advantages", Address(step=17, node="filter", column="gae.advantages")),
    ],
)
def test_an_address_has_run_step_node_column_and_row(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(
    st.none() | NAMES, st.integers(0, 10**6), st.none() | NAMES, NAMES, st.none() | st.sampled_from(["0/5/0#1", "a[b]"])
)
def test_an_address_survives_its_text(
    run: str | None, step: int, node: str | None, column: str, row: str | None
) -> None:
    address = Address(run, step, node, None if node is None else column, row)
    assert Address.parse(str(address)) == address
    assert address_of(str(address)) == address


@pytest.mark.parametrize("text", ["", "gae.advantages", "/gae", "17/", "17/gae.", "@"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with raises("look.invalid-address", found=text):
        Address.parse(text)


def test_a_step_is_an_address() -> None:
    assert address_of(17) == Address(step=17)
