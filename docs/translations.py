"""Bring the catalogs in docs/locales up to date with the pages that must be translated: ``make translations``.

New and changed texts appear without a translation, or marked as fuzzy with the former one; texts that are gone go.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from sphinx_intl import basic

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))

from languages import TRANSLATED  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sphinx", "--quiet", "-b", "gettext", str(DOCS), folder]
        subprocess.run(command, check=True)
        for template in Path(folder).rglob("*.pot"):
            if not template.relative_to(folder).as_posix().startswith(TRANSLATED):
                template.unlink()
        basic.update(str(DOCS / "locales"), folder, ["zh_CN"], line_width=-1, ignore_obsolete=True)


if __name__ == "__main__":
    main()
