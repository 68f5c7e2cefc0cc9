"""Scripts are read as bash would run them, and nothing of them runs; tests shell.py and words.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flowrl.importers import shell
from tests.support.errors import raises

SCRIPT = r"""
set -x
NAME=${NAME:-"two words"}
SIZE=$((1024 * 2 + 1))
FILE=/data/train.tar.gz
LIST=(
    a="$NAME"   # a comment
    'b=$HOME' "c=[1, 'x']"
)
LIST+=(d=$SIZE)
read -r -d '' MORE <<EOF
--x ${FILE##*/} \
--y ${FILE%%.*}
EOF
case "$NAME" in
    one | 1) KIND=first ;;
    two*) KIND=second ;;
    *) exit 1 ;;
esac
if [ "$SIZE" -gt 2048 ] && [[ $NAME != one ]]; then KIND+=_large; else exit 1; fi
show() { probe "$1" "${KIND^^}"; }
for i in 1 2; do show $i; done
EMPTY=()
LAUNCH=(probe -m)
"${LAUNCH[@]}" "${LIST[@]}" "${EMPTY[@]}" $MORE e=${UNSET:-none} f="${KIND}" \
    g=a\ b "$@"
"""


def _texts(text: str, *arguments: str, **environment: str) -> list[list[str]]:
    commands = shell.read(text, "run.sh", environment, arguments).commands
    return [[word.text for word in command] for command in commands]


@pytest.mark.parametrize("environment", [{}, {"NAME": "two"}], ids=["defaults", "environment"])
def test_commands_are_those_that_bash_starts(environment: dict[str, str], tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_text("#!/bin/bash\nprintf '%s\\0' probe \"$@\" && printf '\\n'\n")
    probe.chmod(0o755)
    (tmp_path / "run.sh").write_text(SCRIPT)
    bash = ["bash", str(tmp_path / "run.sh"), "last one", "h=1"]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "~", **environment}
    printed = subprocess.run(bash, capture_output=True, text=True, env=path, check=True).stdout
    expected = [line.split("\0")[:-1] for line in printed.splitlines()]
    assert _texts(SCRIPT, "last one", "h=1", **environment) == expected


def test_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "a=$(touch one)\nb=`touch two`\ncat <(touch three)\nif touch four; then :; fi\n"
    text += "train x=$a y=$b z=$(touch five)\n"
    (tmp_path / "run.sh").write_text(text)
    script = shell.read(text, "run.sh", {})
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]
    *_, train = script.commands
    unknown = [why for word in train for why in word.unknown]
    assert [why.partition(":")[0] for why in unknown] == ["line 1", "line 2", "line 5"]
    assert "touch one" in unknown[0] and "touch two" in unknown[1]
    assert any("line 4" in note and "touch four" in note for note in script.notes)


def test_a_probe_counts_as_failed_and_is_noted() -> None:
    script = shell.read("D=$(nvidia-smi && echo gpu || echo cpu)\ntrain $D\n", "run.sh", {})
    assert [word.text for word in script.commands[0]] == ["train", "cpu"]
    assert any("line 1" in note and "nvidia-smi" in note for note in script.notes)


def test_an_exit_before_any_command_is_an_error() -> None:
    with raises("import.script-exits", line=2):
        shell.read("A=1\nif [ $A = 1 ]; then exit 3; fi\ntrain\n", "run.sh", {})
