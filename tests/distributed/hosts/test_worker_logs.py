"""Warnings of flowrl in a worker process are logged in the driver."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from flowrl.distributed.hosts.worker_logs import Warned, collect_warnings, relay_warnings


def test_warnings_of_flowrl_are_collected_and_relayed_once(caplog: pytest.LogCaptureFixture) -> None:
    with collect_warnings() as collected:
        logging.getLogger("flowrl.operators.reward.operator").warning("%d rows, 100%% of them", 3)
        logging.getLogger("flowrl").error("worse")
        logging.getLogger("flowrl").info("nothing of note")
        logging.getLogger("transformers").warning("not of flowrl")
        thread = threading.Thread(target=logging.getLogger("flowrl").warning, args=["of another node"])
        thread.start()
        thread.join()
    logging.getLogger("flowrl").warning("afterwards")
    expected = [
        Warned("flowrl.operators.reward.operator", logging.WARNING, "3 rows, 100% of them"),
        Warned("flowrl", logging.ERROR, "worse"),
    ]
    assert collected == expected
    caplog.clear()
    relay_warnings(pickle.loads(pickle.dumps([*collected, *collected])))
    assert [Warned(r.name, r.levelno, r.getMessage()) for r in caplog.records] == expected


def test_the_handler_is_removed_if_the_block_raises() -> None:
    before = list(logging.getLogger("flowrl").handlers)
    with pytest.raises(ValueError, match="no"), collect_warnings():
        raise ValueError("no")
    assert logging.getLogger("flowrl").handlers == before
