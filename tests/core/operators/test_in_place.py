"""An operator that writes into its inputs is an error that names it and the column."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flowrl import Operator, PromptBatch, algorithm
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.in_place import guarded
from flowrl.core.operators.ports import PortField
from flowrl.data.proto.column_math import objects
from flowrl.errors import InPlaceError, NodeError
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of
from tests.support.runs import walk


class Zeroes(Operator):
    """Writes zeros into its inputs, in one of several ways."""

    way: str = "zero_"

    def __call__(self, old_log_probs: c.OldLogProbs, response_mask: c.ResponseMask) -> c.OldLogProbs:
        match self.way:
            case "zero_":
                old_log_probs.zero_()
            case "view":
                old_log_probs[:, 1:] -= 1
            case "detached":
                old_log_probs.detach().add_(1)
            case "no_grad":
                with torch.no_grad():
                    old_log_probs.view(-1)[0] = 5
            case "mask":
                response_mask.logical_not_()
            case "both":
                old_log_probs.zero_()
                response_mask.zero_()
            case "transposed":
                old_log_probs.t().clamp_(max=0)
            case "out":
                torch.add(old_log_probs, 1, out=old_log_probs)
        return old_log_probs.clone()


WAYS = ["zero_", "view", "detached", "no_grad", "transposed", "out"]


@pytest.mark.parametrize("way", WAYS)
def test_a_write_in_a_run_is_named(tiny: str, way: str) -> None:
    job = job_of("grpo", tiny).edit(insert={"zeroes": After("old_log_prob", Zeroes(way))})
    with job.open() as steps:
        steps.sync()
        with pytest.raises(
            NodeError, match=r"zeroes failed in step \d: InPlaceError: zeroes wrote into its input old_log_probs"
        ) as e:
            steps.step(PROMPTS, 0)
    cause = e.value.__cause__
    assert isinstance(cause, InPlaceError)
    assert (cause.code, cause.facts["column"]) == ("operator.wrote-input", ("old_log_probs",))


@pytest.mark.parametrize(
    ("way", "columns"),
    [(way, ("old_log_probs",)) for way in WAYS]
    + [("mask", ("response_mask",)), ("both", ("old_log_probs", "response_mask"))],
)
def test_a_write_in_a_direct_call_is_named(way: str, columns: tuple[str, ...]) -> None:
    with raises("operator.wrote-input", node="zeroes", port=columns, column=columns):
        Zeroes(way)(torch.ones(2, 3), torch.ones(2, 3).bool())


def test_reading_is_no_write() -> None:
    assert Zeroes("not at all")(torch.ones(2, 3), torch.ones(2, 3).bool()).tolist() == torch.ones(2, 3).tolist()


def test_tensors_without_a_write_counter_may_be_read() -> None:
    with torch.inference_mode():
        column = torch.ones(2, 3)
    assert Zeroes("not at all")(column, torch.ones(2, 3).bool()).sum() == 6


class Renames(Operator):
    """Writes into objects, or returns them."""

    write: bool = True

    def __call__(self, uid: c.Uid) -> c.Uid:
        if self.write:
            uid[0] = "another"
        return uid


class Two(NamedTuple):
    """Objects within a record."""

    uid: c.Uid
    row_id: c.RowId


class RenamesOfRecord(Operator):
    """Writes into the objects of a record."""

    def __call__(self, batch: Two) -> c.Uid:
        batch.uid[:] = "another"
        return batch.uid


@pytest.mark.parametrize("operator", [Renames(), RenamesOfRecord()])
def test_a_write_into_an_array_of_objects_is_refused(operator: Any) -> None:
    @algorithm
    def renaming(batch: PromptBatch) -> Any:
        return operator(batch if isinstance(operator, RenamesOfRecord) else batch.uid)

    with pytest.raises(NodeError, match=r"renames\w* failed in step .*read-only(?s:.*)test_in_place\.py:\d+"):
        walk(renaming()).step(PROMPTS, 0)
    own = objects("ab")
    with pytest.raises(ValueError, match="read-only"):
        Renames()(own)
    assert Renames(write=False)(own).tolist() == ["a", "b"]
    own[0] = "c"  # the caller's array is still writable


def test_only_arrays_are_guarded() -> None:
    assert guarded(3) == 3
    tensor, array = torch.ones(1), np.ones(1, dtype=object)
    assert guarded(tensor) is tensor
    view = guarded(array)
    assert not view.flags.writeable and array.flags.writeable and guarded(view) is view


def test_tensors_of_inference_mode_are_ignored() -> None:
    """They have no write counter; the other inputs are still checked."""
    with torch.inference_mode():
        uncounted = torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    given = {PortField("old_log_probs"): uncounted, PortField("response_mask"): mask}
    with torch.inference_mode():
        assert Zeroes("zero_").run(given).sum() == 0
    with raises("operator.wrote-input", column=("response_mask",)):
        Zeroes("mask").run(given)
