"""`code`: programs that pass tests, which a sandbox runs."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.errors import DataError
from flowrl.rewards.reward_function import RewardFunction
from flowrl.rewards.sandboxes.sandbox import Sandbox


class Case(NamedTuple):
    """A program to run, and whether its output passes."""

    program: str
    stdin: str
    passes: Callable[[str], bool]


class Code(RewardFunction):
    """The last Python block of the response passes the tests of the ground truth.

    The ground truth is a dict, or its JSON, in one of these forms:

    - ``{"inputs": [...], "outputs": [...]}``: texts for stdin and stdout (APPS, TACO, CodeContests);
    - the same with ``"fn_name"``: arguments and result of that function, or method of ``Solution``;
    - ``{"assert_case": [...]}``, a list, or one text: Python code that runs after the program (MBPP, HumanEval).

    Reports ``reward/passed``, the share of tests that pass. After a test that runs out of time, the others count as
    failed.

    Args:
        sandbox: where programs run; see `flowrl.rewards.Sandbox`. There is no default: you decide what may happen.
        continuous: the score is the share of tests that pass; else 1 if all do.
    """

    sandbox: Sandbox
    continuous: bool = False

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
        """The score, and the share of tests that pass."""
        program = last_block(solution_str)
        tests = list(tests_of(program or "", ground_truth))
        passed = 0
        for test in tests if program is not None else ():
            done = self.sandbox.run(test.program, test.stdin)
            ok = done.exit_code == 0 and test.passes(done.stdout)
            passed += ok
            if done.exit_code is None or (not ok and not self.continuous):
                break
        share = passed / len(tests)
        return {"score": share if self.continuous else float(passed == len(tests)), "passed": share}


code = Code


def last_block(text: str) -> str | None:
    """The last fenced block of Python, or without a language."""
    found = re.findall(r"^[ \t]*```(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    return found[-1] if found else None


def tests_of(program: str, ground_truth: Any) -> Iterator[Case]:
    """The tests of a ground truth, for a program."""
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise _invalid(ground_truth, f"it is not JSON ({error})") from None
    asserts = truth.get("assert_case") if isinstance(truth, Mapping) else truth
    if asserts:
        for text in [asserts] if isinstance(asserts, str) else asserts:
            yield _assertion(program, text)
        return
    inputs, outputs = (truth.get("inputs"), truth.get("outputs")) if isinstance(truth, Mapping) else (None, None)
    if not inputs or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise _invalid(ground_truth, "it has no tests, or not as many inputs as outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        if truth.get("fn_name"):
            yield _call(program, truth["fn_name"], given, expected)
        else:
            yield Case(program, _joined(given), _prints(_joined(expected)))


def _prints(expected: str) -> Callable[[str], bool]:
    return lambda found: _lines(found) == _lines(expected)


def _assertion(program: str, text: str) -> Case:
    """Code that must run to its end after the program, which an exit before it does not."""
    end = secrets.token_hex(8)
    return Case(f"{program}\n\n{text}\n\nprint({end!r})\n", "", lambda found: found.rstrip().endswith(end))


_CALL = """

import json as _json, sys as _sys

_found = globals().get({name!r})
_result = (_found if _found is not None else getattr(Solution(), {name!r}))(*_json.loads(_sys.stdin.read()))
print("\\n" + {end!r} + _json.dumps(_result))
"""


def _call(program: str, name: str, given: Any, expected: Any) -> Case:
    """A call of a function of the program, whose result equals what is expected, as JSON."""
    end = secrets.token_hex(8)
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    right = _of_json(expected)

    def passes(found: str) -> bool:
        _, marked, result = found.rpartition(end)
        value = _of_json(result) if marked else None
        return bool(marked) and (value == right or [value] == right)

    return Case(program + _CALL.format(name=name, end=end), json.dumps(arguments), passes)


def _of_json(text: Any) -> Any:
    """The value of a text that is JSON; anything else as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text.strip()


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _lines(text: str) -> list[str]:
    """The lines, without spaces at their ends and empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _invalid(ground_truth: Any, why: str) -> DataError:
    return DataError(
        f"The ground truth {str(ground_truth)[:200]!r} cannot test a program: {why}. Expected 'inputs' and 'outputs' "
        f"of equal length, 'assert_case', or Python code that asserts.",
        code="reward.invalid-ground-truth",
        found=str(ground_truth)[:200],
    )
