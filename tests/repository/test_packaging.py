"""The wheel and the sdist hold every module exactly once, under ``flowrl.``, and the wheel works from anywhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("operators", "graphs", "backends")
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile", "tests", "flowrl", *FOLDERS)


def expected_files() -> list[str]:
    """Expected modules and data of a wheel, from the real folders rather than the symlinks."""
    linked = tuple(f"flowrl/{folder}/" for folder in FOLDERS)
    paths = [path for folder in ("flowrl", *FOLDERS) for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts]
    real = [name for name in names if not name.startswith(linked)]
    return sorted(name if name.startswith("flowrl/") else f"flowrl/{name}" for name in real)


def expected_modules() -> list[str]:
    return [name for name in expected_files() if name.endswith(".py")]


def build(source: Path, into: Path, *targets: str) -> None:
    """Builds with the backend that is installed here, so that no network is needed."""
    command = [sys.executable, "-m", "build", "--no-isolation", *targets, "--outdir", str(into), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist, the wheel built from it, and the wheel built from the tree; of a copy, since a build leaves files."""
    base = tmp_path_factory.mktemp("packaging")
    tree = base / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, tree / name)
    build(tree, base / "both")  # by default the wheel is built from the sdist
    build(tree, base / "direct", "--wheel")
    return {
        "sdist": next((base / "both").glob("*.tar.gz")),
        "wheel from the sdist": next((base / "both").glob("*.whl")),
        "wheel from the tree": next((base / "direct").glob("*.whl")),
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_link_is_a_relative_symlink_in_the_tree_and_in_git(folder: str) -> None:
    link = ROOT / "flowrl" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert (ROOT / folder).is_dir() and not (ROOT / folder).is_symlink()
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so only the tree was looked at")
    command = ["git", "ls-files", "--stage", f"flowrl/{folder}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.startswith("120000 "), f"flowrl/{folder} is not committed as a symlink: {listed.stdout!r}"


@pytest.mark.parametrize("kind", ["wheel from the sdist", "wheel from the tree"])
def test_a_wheel_holds_every_module_once_and_nothing_else(built: dict[str, Path], kind: str) -> None:
    with zipfile.ZipFile(built[kind]) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read("flowrl-0.1.0.dist-info/entry_points.txt").decode()
    assert sorted(name for name in names if not name.startswith("flowrl-0.1.0.dist-info/")) == expected_files()
    assert "flowrl/py.typed" in names
    assert "flowrl-0.1.0.dist-info/licenses/LICENSE" in names
    assert "flowrl = flowrl.app.cli:main" in entry_points


def test_the_sdist_holds_every_module_once_as_a_file(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        members = sdist.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    inside = [member.name.partition("/")[2] for member in members if member.isfile()]
    assert sorted(name for name in inside if name.endswith(".py")) == expected_modules()
    assert sorted(name for name in inside if name.startswith("flowrl/")) == expected_files()


def test_every_module_imports_from_an_unpacked_wheel_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(built["wheel from the sdist"]) as wheel:
        wheel.extractall(site)
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in expected_modules()]
    if importlib.util.find_spec("vllm") is None:  # it extends a class of vLLM's, and only vLLM's workers import it
        modules.remove("flowrl.backends.vllm.worker")
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    file = importlib.import_module(name).__file__\n"
        "    assert file.startswith(sys.argv[1]), f'{name} came from {file}'\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, str(site), *modules]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
