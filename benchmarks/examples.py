"""Curves and tables of the docs' examples, from the results in docs/curves; and the runs that produce these.

    python benchmarks/examples.py                          # redraw and rewrite all: seconds
    python benchmarks/examples.py --run triage             # train it with three seeds, and store the results
    python benchmarks/examples.py --run engines --arm VLLM --seeds 0 --python .venv-engines/bin/python

``docs/curves/NAME.json`` defines what to show of an example, and stores the results of its runs:

    {"example": "triage.py",                               # in examples/; reads SEED from the environment
     "page": "evidence/examples.md",                      # in docs/, with a marker for the table
     "along": {"step": "steps of training"},               # horizontal axis: a key of metrics.jsonl, and its label
     "shown": {"val/reward/mean": "right answers"},        # one panel each
     "compared": {"val/reward/mean": {"random": 0.0}},     # reference lines, by panel
     "arms": {"": {                                        # by name; a single one may be unnamed
         "with": {"ENGINE": "torch"},                      # further environment variables
         "seeds": {"0": [{"step": 0, "val/reward/mean": 0.3}, ...]}}}}

The script writes ``docs/curves/NAME.svg`` and the table after ``<!-- NAME -->`` in the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.pictures import panels, save

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CURVES = DOCS / "curves"

Curve = Mapping[str, Any]


def points_of(curve: Curve, metrics: Path) -> list[dict[str, float]]:
    """The points of a run: the lines of its metrics that have all shown keys."""
    keys = [*curve["along"], *curve["shown"]]
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [{key: round(line[key], 6) for key in keys} for line in lines if all(key in line for key in keys)]


def run(curve: Curve, arm: str, seed: str, folder: Path, python: str = sys.executable) -> list[dict[str, float]]:
    """Train an example in a new folder; return its points."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [python, str(ROOT / "examples" / curve["example"])]
    given = {**os.environ, **curve["arms"][arm]["with"], "SEED": seed}
    subprocess.run(command, cwd=folder, env=given, check=True)
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return points_of(curve, metrics)


def table(curve: Curve) -> str:
    """Markdown table: a row per run, first to last point; then the reference values."""
    [(along, what)] = curve["along"].items()
    rows = [["seed", *curve["shown"].values(), what], ["---"] * (len(curve["shown"]) + 2)]
    for arm, runs in curve["arms"].items():
        for seed, points in runs["seeds"].items():
            changes = [f"{points[0][key]:.3f} → {points[-1][key]:.3f}" for key in curve["shown"]]
            rows.append([f"{arm}, {seed}" if arm else seed, *changes, f"{points[-1][along]:,.0f}"])
    others = {name: None for by_name in curve["compared"].values() for name in by_name}
    for name in others:
        values = [curve["compared"].get(key, {}).get(name) for key in curve["shown"]]
        rows.append([name, *("" if value is None else f"{value:.3f}" for value in values), ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(curve: Curve, path: Path) -> None:
    """Draw a panel per shown number: a line per run, and dashed reference lines.

    With several arms, runs have the color of their arm; else each has its own.
    """
    [(along, what)] = curve["along"].items()
    figure, axes = panels(1, len(curve["shown"]), height=2.6)
    dashes = ("--", ":", "-.", (0, (6, 1)))
    for one, (key, title) in zip(axes[0], curve["shown"].items(), strict=True):
        several = len(curve["arms"]) > 1
        for a, (arm, runs) in enumerate(curve["arms"].items()):
            for i, (seed, points) in enumerate(runs["seeds"].items()):
                label = f"seed {seed}" if not several else arm if i == 0 else None
                places, values = ([point[of] for point in points] for of in (along, key))
                one.plot(places, values, color=f"C{a if several else i}", linewidth=1.4, label=label)
        for i, (name, value) in enumerate(curve["compared"].get(key, {}).items()):
            one.axhline(value, color="grey", linewidth=0.9, linestyle=dashes[i % len(dashes)], label=name)
        one.set_title(title, fontsize=10)
        one.set_xlabel(what, fontsize=8)
        one.legend(fontsize=7, framealpha=0.9, edgecolor="none")
    save(figure, path)


def written(page: str, name: str, text: str) -> str:
    """The page with this table after its marker."""
    mark = f"<!-- {name} -->"
    if page.count(mark) != 1:
        sys.exit(
            f"the page has {mark} {page.count(mark)} times; expected it once, where the table of {name!r} belongs."
        )
    before, _, after = page.partition(mark)
    rest = re.sub(r"\A\n*(\|.*\n)*\n*", "", after)
    return f"{before}{mark}\n\n{text}\n" + (f"\n{rest}" if rest else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen example, if any; then draw every curve and write every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in CURVES.glob("*.json"))
    parser.add_argument("--run", choices=names, help="example to train")
    parser.add_argument("--arm", help="arm of the example (default: all)")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the engine (default: this one)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated integers (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/examples"), help="output folder (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    for name in names:
        file = CURVES / f"{name}.json"
        curve = json.loads(file.read_text(encoding="utf-8"))
        if name == options.run:
            for arm in curve["arms"] if options.arm is None else [options.arm]:
                for seed in options.seeds.split(","):
                    folder = options.folder / "-".join(filter(None, (name, *arm.split(), seed)))
                    keep(curve, arm, seed, run(curve, arm, seed, folder, os.path.abspath(options.python)))
                    file.write_text(json.dumps(curve, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(curve, CURVES / f"{name}.svg")
        page = DOCS / curve["page"]
        page.write_text(written(page.read_text(encoding="utf-8"), name, table(curve)), encoding="utf-8")


def keep(curve: Curve, arm: str, seed: str, points: Sequence[Mapping[str, float]]) -> None:
    """Insert the points of a run, in the order of seeds."""
    runs = curve["arms"][arm]
    runs["seeds"] = dict(sorted({**runs["seeds"], seed: points}.items()))


if __name__ == "__main__":
    main()
