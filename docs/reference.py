"""Build the API reference from the docstrings: ``make docs``, or ``python docs/reference.py FOLDER``.

It holds the public names of each module below, and every warning is an error.
"""

from __future__ import annotations

import importlib
import sys
import typing
import warnings
from pathlib import Path

MODULES = (
    "flowrl",
    "flowrl.operators",
    "flowrl.graphs",
    "flowrl.backends",
    "flowrl.columns",
    "flowrl.records",
    "flowrl.rewards",
    "flowrl.schedules",
    "flowrl.errors",
    "flowrl.protocols.protocols",
    "flowrl.protocols.scorers",
)


def build(folder: Path) -> None:
    """Write the reference into `folder`; its first page is ``index.html``."""
    import pdoc  # here, so that `MODULES` can be read without it

    for module in MODULES:
        _resolve_named_tuples(module)
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # networkx is generic only in its stubs, so this cannot be evaluated at run time.
        warnings.filterwarnings("ignore", r"Error parsing type annotation nx\.DiGraph\[str\]")
        pdoc.pdoc(*MODULES, output_directory=folder)


def _resolve_named_tuples(module: str) -> None:
    """Resolve the annotations of named tuples' constructors, which pdoc evaluates in another namespace."""
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = typing.get_type_hints(value)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"The reference is in {sys.argv[1]}/index.html.")
