"""Compare `flowrl.rewards` with verl's reward functions, on generated responses.

``pip download --no-deps verl==0.9.1``, unpack it, and run ``python benchmarks/rewards.py FOLDER``. It loads only verl's
files of reward functions, which need neither verl nor its dependencies. Prints the time of a call, and
the kinds of responses that are scored differently.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flowrl import rewards


class Case(NamedTuple):
    kind: str
    response: str
    truth: Any


def of_gsm8k(draw: random.Random) -> Case:
    number, other = draw.randint(-50, 5000), draw.randint(-50, 5000)
    forms = {
        "right": f"so it is {number}\n#### {number}",
        "wrong": f"#### {other}",
        "unmarked": f"The answer is {number}",
        "the last of two": f"#### {other}\n#### {number}",
        "comma": f"#### {number:,}",
        "dollar": f"#### ${number}",
        "decimals": f"#### {number}.00",
        "full stop": f"#### {number}.",
        "no space": f"####{number}",
        "long text after": f"#### {number}\n" + "Done. " * 100,
    }
    kind = draw.choice(list(forms))
    return Case(kind, forms[kind], str(number))


def of_search(draw: random.Random) -> Case:
    right, wrong = draw.choice(["Paris", "The Beatles", "Denver Broncos", "1976"]), "London"
    forms = {
        "right": f"<answer>{right}</answer>",
        "article, case": f"<answer> the {right.upper()}! </answer>",
        "wrong": f"<answer>{wrong}</answer>",
        "the last of two": f"<answer>{wrong}</answer> <answer>{right}</answer>",
        "untagged": right,
        "unclosed": f"<answer>{right}",
        "eleven tags": f"<answer>{wrong}</answer>" * 10 + f"<answer>{right}</answer>",
    }
    kind = draw.choice(list(forms))
    return Case(kind, forms[kind], {"target": [right, "no such answer"]})


def of_math(draw: random.Random) -> Case:
    a, b = draw.randint(1, 9), draw.randint(2, 9)
    truth = rf"\frac{{{a}}}{{{b}}}"
    forms = {
        "right": rf"So $x = \boxed{{{truth}}}$.",
        "short": rf"\boxed{{\frac{a}{b}}}",
        "dfrac": rf"\boxed{{\dfrac{{{a}}}{{{b}}}}}",
        "slash": rf"\boxed{{{a}/{b}}}",
        "not reduced": rf"\boxed{{\frac{{{2 * a}}}{{{2 * b}}}}}",
        "wrong": rf"\boxed{{\frac{{{a}}}{{{b + 1}}}}}",
        "unboxed": rf"So $x = {truth}$.",
        "the last of two": rf"\boxed{{0}} \boxed{{{truth}}}",
    }
    kind = draw.choice(list(forms))
    return Case(kind, forms[kind], truth)


def theirs(folder: Path, name: str) -> Any:
    """A module of verl's reward functions, loaded by itself."""
    path = folder / "verl" / "utils" / "reward_score" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(name: str, mine: Any, verls: Callable[..., Any], cases: list[Case]) -> str:
    """One row of the table."""
    different: set[str] = set()
    spent = [0.0, 0.0]
    for case in cases:
        scores = []
        for i, fn in enumerate((partial(mine, ""), verls)):
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):  # verl prints some rows
                scores.append(float(fn(case.response, case.truth)))
            spent[i] += time.perf_counter() - start
        if scores[0] != scores[1]:
            different.add(f"{case.kind} ({scores[0]:g}, verl {scores[1]:g})")
    kinds, us = len({case.kind for case in cases}), [f"{1e6 * seconds / len(cases):.0f}" for seconds in spent]
    equal = kinds - len({text.partition(" (")[0] for text in different})
    return f"| {name} | {equal} of {kinds} | {' and '.join(us)} | {', '.join(sorted(different)) or 'none'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel of verl is unpacked")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    gsm8k = theirs(args.folder, "gsm8k").compute_score
    search = theirs(args.folder, "search_r1_like_qa_em").compute_score
    boxed = theirs(args.folder, "math_reward").compute_score
    rows = [
        ("gsm8k", rewards.gsm8k, gsm8k, of_gsm8k),
        ("gsm8k, flexible", rewards.gsm8k(method="flexible"), lambda r, t: gsm8k(r, t, "flexible"), of_gsm8k),
        ("exact_match", rewards.exact_match(tag="answer"), search, of_search),
        ("math and math_reward", rewards.math(boxed=True), boxed, of_math),
    ]
    print(
        "| function | kinds of responses with equal scores | µs, flowrl and verl | scored differently |\n"
        "|---|---|---|---|"
    )
    for name, mine, verls, case in rows:
        print(compare(name, mine, verls, [case(draw) for _ in range(args.cases)]))


if __name__ == "__main__":
    main()
