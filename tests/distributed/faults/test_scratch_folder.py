"""A temporary folder that is removed when its process ends, even if it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flowrl.distributed.faults.scratch_folder import scratch_folder
from tests.operators.reward.test_pool import wait_until


def test_the_folder_exists_only_within_the_block() -> None:
    with scratch_folder() as folder:
        (folder / "state").mkdir()
        (folder / "state" / "w").write_text("weights")
        assert folder.parent == Path(tempfile.gettempdir())
    assert not folder.exists()
    with pytest.raises(KeyError), scratch_folder() as folder:
        raise KeyError
    assert not folder.exists()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "_exit"])
def test_the_folder_is_removed_when_the_process_is_killed(how: str, tmp_path: Path) -> None:
    end = "os._exit(1)" if how == "_exit" else f"os.kill(os.getpid(), signal.{how})"
    source = f"""if True:
        import os, signal
        from flowrl.distributed.faults.scratch_folder import scratch_folder
        with scratch_folder() as folder:
            (folder / "w").write_text("weights")
            print(folder, flush=True)
            {end}
    """
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == (1 if how == "_exit" else -getattr(signal, how))
    folder = Path(done.stdout.strip())
    wait_until(lambda: not folder.exists())
    folder.mkdir()  # as a worker process that briefly outlives the driver may do
    (folder / "more").write_text("weights")
    wait_until(lambda: not folder.exists())
