"""The notebook of examples/ runs, and its pictures need no scripts."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import ROOT
from tests.draw.test_notebook import Parsed

pytestmark = pytest.mark.runs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client
def test_the_notebook_runs_and_shows_graphs_runs_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("WARM_UP", "20")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("image/svg+xml" in data for data in shown) == 2
    html = [data["text/html"] for data in shown if "text/html" in data]
    assert len(html) == 4  # the run as it ended and as it is opened, a step, a row
    tags = {tag for text in html for tag in Parsed(text).tags}
    assert {"table", "span", "svg"} <= tags and not tags & {"script", "iframe", "link"}
    assert "group_advantage" in shown[-1]["text/plain"]
