"""For every suite: the garbage collector passes over what is there before the first test.

That is pytest, torch and the test files, half a million objects that stay. They are made without the collector, and
neither a collection during the tests nor the interpreter's end looks through them, nor the latter through what tests
import.
"""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()
