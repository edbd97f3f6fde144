"""Run a user's script in this process, for tools that follow what it does."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run_as_main(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run the script at the path ``target`` (with ``module``: the module of that name) as ``__main__``, with
    ``arguments`` as its command line; restore ``sys.argv`` and ``sys.path`` after it. Its exceptions propagate."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
