"""What flowrl warns of in another process is said in this one."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from flowrl.distributed.worker_logs import Said, heard, say


def test_warnings_of_flowrl_are_heard_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with heard() as said:
        logging.getLogger("flowrl.operators.reward.operator").warning("%d rows, 100%% of them", 3)
        logging.getLogger("flowrl").error("worse")
        logging.getLogger("flowrl").info("nothing of note")
        logging.getLogger("transformers").warning("not ours")
        other = threading.Thread(target=logging.getLogger("flowrl").warning, args=["of another node"])
        other.start()
        other.join()
    logging.getLogger("flowrl").warning("afterwards")
    expected = [
        Said("flowrl.operators.reward.operator", logging.WARNING, "3 rows, 100% of them"),
        Said("flowrl", logging.ERROR, "worse"),
    ]
    assert said == expected
    caplog.clear()
    say(pickle.loads(pickle.dumps([*said, *said])))
    assert [Said(r.name, r.levelno, r.getMessage()) for r in caplog.records] == expected


def test_an_ear_is_taken_off_where_the_block_raises() -> None:
    before = list(logging.getLogger("flowrl").handlers)
    with pytest.raises(ValueError, match="no"), heard():
        raise ValueError("no")
    assert logging.getLogger("flowrl").handlers == before
