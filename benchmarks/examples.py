"""The curves and tables of the docs' examples, from what is kept in docs/curves; and the runs that are kept there.

    python benchmarks/examples.py                          # draw and write all anew: seconds
    python benchmarks/examples.py --run triage             # train it with three seeds, and keep the results
    python benchmarks/examples.py --run engines --arm VLLM --seeds 0 --python .venv-engines/bin/python

``docs/curves/NAME.json`` says of an example what is shown of it, and keeps what its runs measured:

    {"example": "triage.py",                               # in examples/; it takes SEED from the environment
     "page": "examples.md",                                # in docs/, with a mark for the table
     "along": {"step": "steps of training"},               # the horizontal axis: a key of metrics.jsonl, and what it is
     "shown": {"val/reward/mean": "right answers"},        # a panel each
     "compared": {"val/reward/mean": {"nobody": 0.0}},     # lines to compare with, by panel
     "arms": {"": {                                        # by name, which one alone need not have
         "with": {"ENGINE": "torch"},                      # what else it takes from the environment
         "seeds": {"0": [{"step": 0, "val/reward/mean": 0.3}, ...]}}}}

From it come ``docs/curves/NAME.svg`` and the table behind ``<!-- NAME -->`` in the page.
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
    """What is shown of a run, from the lines of its metrics that have all of it."""
    keys = [*curve["along"], *curve["shown"]]
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [{key: round(line[key], 6) for key in keys} for line in lines if all(key in line for key in keys)]


def run(curve: Curve, arm: str, seed: str, folder: Path, python: str = sys.executable) -> list[dict[str, float]]:
    """Train an example in a folder of its own, and give what is shown of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [python, str(ROOT / "examples" / curve["example"])]
    given = {**os.environ, **curve["arms"][arm]["with"], "SEED": seed}
    subprocess.run(command, cwd=folder, env=given, check=True)
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return points_of(curve, metrics)


def table(curve: Curve) -> str:
    """A row a run, in Markdown, from the first point to the last; then what they are compared with."""
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
    """Draw a panel for each number that is shown: a line a run, and dashed what they are compared with.

    Runs of several arms have the colors of these, else each its own.
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
    """A page with this table behind its mark."""
    mark = f"<!-- {name} -->"
    if page.count(mark) != 1:
        sys.exit(
            f"the page has {mark} {page.count(mark)} times; expected it once, where the table of {name!r} belongs."
        )
    before, _, behind = page.partition(mark)
    rest = re.sub(r"\A\n*(\|.*\n)*\n*", "", behind)
    return f"{before}{mark}\n\n{text}\n" + (f"\n{rest}" if rest else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; then draw every curve and write every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in CURVES.glob("*.json"))
    parser.add_argument("--run", choices=names, help="which example to train")
    parser.add_argument("--arm", help="which of its arms (default: all)")
    parser.add_argument("--python", default=sys.executable, help="whose environment has its engine (default: this one)")
    parser.add_argument("--seeds", default="0,1,2", help="whole numbers, with commas (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/examples"), help="of the runs (default: %(default)s)")
    asked = parser.parse_args(arguments)
    for name in names:
        kept = CURVES / f"{name}.json"
        curve = json.loads(kept.read_text(encoding="utf-8"))
        if name == asked.run:
            for arm in curve["arms"] if asked.arm is None else [asked.arm]:
                for seed in asked.seeds.split(","):
                    folder = asked.folder / "-".join(filter(None, (name, *arm.split(), seed)))
                    keep(curve, arm, seed, run(curve, arm, seed, folder, os.path.abspath(asked.python)))
                    kept.write_text(json.dumps(curve, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(curve, CURVES / f"{name}.svg")
        page = DOCS / curve["page"]
        page.write_text(written(page.read_text(encoding="utf-8"), name, table(curve)), encoding="utf-8")


def keep(curve: Curve, arm: str, seed: str, points: Sequence[Mapping[str, float]]) -> None:
    """Put what a run measured among the others, in the order of their seeds."""
    runs = curve["arms"][arm]
    runs["seeds"] = dict(sorted({**runs["seeds"], seed: points}.items()))


if __name__ == "__main__":
    main()
