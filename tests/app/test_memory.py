"""A command that runs out of memory reports what it was doing and the limit."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from flowrl.app.memory import out_of_memory
from flowrl.errors import GraphError
from tests.support.command_line import Command, is_paragraph, write


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 3 GiB, as far as flowrl can tell; a real one would hold for the other tests, too."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (3 << 30, resource.RLIM_INFINITY))


@pytest.mark.usefixtures("limit")
def test_the_error_names_the_command_the_place_and_the_limit(command: Command) -> None:
    write(Path("large.py"), "graph = bytearray(1 << 60)\n")
    answer = command("show", "large.py:graph")
    assert answer.code == 2 and is_paragraph(answer) and "[cli.out-of-memory]" in answer.err
    assert "flowrl show ran out of memory (Cannot import 'large.py:graph': " in answer.err
    assert "3.00 GiB of address space (ulimit -v 3145728). Raise the limit: ulimit -v unlimited." in answer.err


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.usefixtures("limit")
def test_out_of_memory_errors_of_torch_and_other_libraries_are_recognized(error: Exception) -> None:
    try:
        raise GraphError("loading failed.", code="model.not-loadable") from error
    except GraphError as outer:
        found = out_of_memory(outer, "run")
    assert found is not None and found.code == "cli.out-of-memory" and found.facts["limit"] == 3 << 30
    assert "(loading failed)" in found.message


def test_without_a_limit_the_error_states_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for error, expected in (
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), False),
        (ValueError(), False),
    ):
        try:
            raise error
        except Exception as raised:
            found = out_of_memory(raised, "check")
        assert (found is not None) == expected
        assert found is None or (found.facts["limit"] is None and "This machine has" in found.message)
