"""Tests of `lazy.py`."""

from __future__ import annotations

import enum
import logging

import pytest

import flowrl  # hides the messages

assert flowrl


def test_only_what_torchao_logs_as_it_is_imported_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    class Own(enum.Enum):
        A = 1

    class Theirs(enum.Enum):
        A = 1

    Theirs.__module__ = "torchao.quantization.quantize_.common.kernel_preference"
    theirs, trees = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    theirs.warning("Failed to load /site-packages/torchao/_C_mxfp8.so: libcudart.so: no such file")
    theirs.warning("Skipping import of cpp extensions")
    for one in (Own, Theirs):
        trees.warning("%s is an Enum subclass", one)
    assert [record.getMessage() for record in caplog.records] == [
        "Skipping import of cpp extensions",
        "<enum 'Own'> is an Enum subclass",
    ]
