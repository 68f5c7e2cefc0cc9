"""On a machine with GPUs: run every test and print every figure that only a GPU can show, in under 30 minutes.

    python benchmarks/gpu.py              # all parts; writes docs/evidence/gpu.md
    python benchmarks/gpu.py --list       # the parts, their limits, and what this machine lacks
    python benchmarks/gpu.py meshes sync  # some parts
    python benchmarks/gpu.py --cpu        # tiny sizes on the CPU, to check that the parts run

Each part runs in a process of its own and has a limit. One that fails, overruns its limit or cannot run here is named,
with the command that installs what is missing, and the next one runs; the exit status is 1 if one failed or overran.
Results go into a page of the docs, or into ``--file``; those of some parts or of the CPU only into ``--file``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from on_gpu.parts import PARTS, Part, Target, child, load, run
from on_gpu.report import Outcome, page
from transformers.utils import logging

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "gpu.md"
MARK = "<!-- written by benchmarks/gpu.py -->\n"
"""What follows it on the page is replaced."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--list", action="store_true", help="list the parts and run none")
    parser.add_argument("--cpu", action="store_true", help="run tiny sizes on the CPU")
    parser.add_argument("--file", type=Path, help="Markdown file for the results")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"there is no part {unknown[0]!r}; expected some of {', '.join(names)}.")
    return options


def listed(parts: Sequence[Part], target: Target) -> None:
    """Print the parts."""
    for part in parts:
        lack = part.lacks(target)
        print(f"{part.name:10} {part.limit:4} s  {part.shows}{f'; skipped here: {lack}' if lack else ''}")
    print(f"{sum(part.limit for part in parts) / 60:.1f} minutes at most")


def run_all(parts: Sequence[Part], target: Target) -> list[Outcome]:
    """Run the parts in order."""
    outcomes = []
    for number, part in enumerate(parts, start=1):
        print(f"\n=== {number} of {len(parts)}, {part.name}: {part.shows}, at most {part.limit} s", flush=True)
        outcomes.append(run(part, target, number))
    return outcomes


def write(file: Path, text: str) -> None:
    """Write results into a file, on the page after its mark."""
    head = file.read_text(encoding="utf-8").partition(MARK)[0] + MARK if file == PAGE else ""
    file.write_text(head + ("\n" if head else "") + text, encoding="utf-8")
    print(f"\nWritten to {file}.")


def main(options: argparse.Namespace) -> int:
    """Run the parts and write the results; the exit status."""
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    if not options.cpu and not torch.cuda.is_available():
        print("torch finds no CUDA device, so nothing was measured; `python benchmarks/gpu.py --cpu` runs on the CPU.")
        return 0
    device, count = ("cpu", 2) if options.cpu else ("cuda", torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        target = Target(device, count, Path(folder))
        if options.list:
            listed(parts, target)
            return 0
        shown = subprocess.run(child("machine:show", device), capture_output=True, text=True, check=True).stdout
        machine: list[tuple[str, str]] = json.loads(shown)
        for name, value in machine:
            print(f"{name}: {value}")
        outcomes = run_all(parts, target)
    file = options.file or (None if options.cpu or options.parts else PAGE)
    if file is not None:
        write(file, page(machine, outcomes, datetime.date.today().isoformat()))
    unfit = [one for one in outcomes if not one.fine]
    for one in unfit:
        print(f"{one.name}: {one.status}{f', {one.why}' if one.why else ''}")
    return 1 if unfit else 0


if __name__ == "__main__":
    logging.disable_progress_bar()
    if sys.argv[1:2] == ["--child"]:
        load(sys.argv[2])(*sys.argv[3:])
    else:
        sys.exit(main(parsed()))
