"""For every suite: the garbage collector passes over what is there before the first test, and `read_terminal`.

What is there before is pytest, torch and the test files, half a million objects that stay. They are made without the
collector, and neither a collection during the tests nor the interpreter's end looks through them, nor the latter
through what tests import.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable

import pytest

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()


@pytest.fixture
def read_terminal() -> Callable[[int], bytes]:
    """Return a function that reads all that a pseudo-terminal of `os.openpty` shows, and closes it.

    The function takes our end, and returns once all processes have closed the other end, here too.
    """

    def read(ours: int) -> bytes:
        shown = bytearray()
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError as error:  # Linux reports the end of a terminal so
            assert error.errno == errno.EIO
        os.close(ours)
        return bytes(shown)

    return read
