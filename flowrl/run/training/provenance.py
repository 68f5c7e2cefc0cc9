"""Where a run comes from: its id, its starts, host, process, command and source revision."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from flowrl.run.training.resume import Found

FORMAT = 2
"""The format of a run folder; 1 had no rows, spans and state."""


def provenance(before: Mapping[str, Any] | None, found: Found | None) -> dict[str, Any]:
    """What ``run.json`` says of a start; a run that resumes keeps its id.

    Args:
        before: the ``run.json`` of the earlier start, if any.
        found: the checkpoint from which the run resumes.
    """
    now, same = time.time(), before if before is not None and found is not None else {}
    start = {"step": 0 if found is None else found[1]["step"], "time": now}
    return {
        "format": FORMAT,
        "id": same.get("id") or uuid.uuid4().hex,
        "started": same.get("started") or now,
        "ended": None,
        "starts": [*same.get("starts", ()), start],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": shlex.join(sys.orig_argv),
        "git": _git(),
    }


def _git() -> dict[str, Any] | None:
    """The commit of the working directory's repository, and whether files differ from it; None without one."""
    try:
        commit = _of_git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_of_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _of_git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5.0)
    return done.stdout.strip()
