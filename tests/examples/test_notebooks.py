"""The notebooks of examples/ run, and their pictures need no scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import ROOT
from tests.draw.test_notebook import Parsed
from tests.repository.test_packaging import built as built  # a fixture

NOTEBOOKS = ROOT / "examples" / "notebooks"


def shown(name: str, folder: Path) -> list[dict[str, Any]]:
    """What the cells of a notebook show, executed in a folder."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    return [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("WARM_UP", "20")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


@pytest.mark.runs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client
def test_the_first_algorithm_shows_its_graph_the_edit_and_the_run(fast: Path) -> None:
    found = shown("first_algorithm", fast)
    assert sum("image/svg+xml" in data for data in found) == 2
    assert "'score': 1.0" in found[0]["text/plain"]
    assert [data["text/plain"] for data in found if data["text/plain"] == "[]"] == ["[]"]  # of check


@pytest.mark.runs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client
def test_a_look_into_a_run_shows_steps_rows_and_reasons_without_scripts(fast: Path) -> None:
    found = shown("looking_into_a_run", fast)
    html = [data["text/html"] for data in found if "text/html" in data]
    assert len(html) == 3  # the run, a step, a row
    tags = {tag for text in html for tag in Parsed(text).tags}
    assert {"table", "span", "svg"} <= tags and not tags & {"script", "iframe", "link"}
    assert "group_advantage" in found[-1]["text/plain"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_notebooks_run_as_printed_in_a_new_environment_with_the_wheel(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """In a virtual environment with nothing but the wheel and Jupyter's kernel."""
    python = tmp_path / "env" / "bin" / "python"
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STEPS", "WARM_UP")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    wheel = [str(built["wheel from the sdist"]), "ipykernel", "nbclient"]
    subprocess.run([python, "-m", "pip", "install", "-qq", *pins, *wheel], check=True, env=given)
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        code = (
            "import sys, nbformat, nbclient\n"
            "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
            "nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3').execute()\n"
        )
        folder = tmp_path / notebook.stem
        folder.mkdir()
        done = subprocess.run([python, "-c", code, notebook], cwd=folder, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
