"""Error messages that name the line of the user's code."""

from __future__ import annotations

import os
import re
import site
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from ..errors import PlanError

_FOLDERS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {site.getusersitepackages(), *site.getsitepackages(), os.path.dirname(os.path.dirname(torch.__file__))}
_OTHERS = tuple(folder + os.sep for folder in _FOLDERS)
PROJECT = frozenset(
    f"zero_{name}"
    for name in "ckpt comm core deepspeed launch nvme_aio offload optim optim_kernels partition plan precision report "
    "sequence settings verify".split()
)
_HINTS = (
    (
        r"default process group twice",
        "leave torch.distributed to zero_core.initialize, or ask torch.distributed.is_initialized() first",
    ),
    (
        r"cuda|CUDA|NVIDIA",
        "a dry run computes on the CPU: take the device from engine.device, or ask torch.accelerator.is_available() "
        "first",
    ),
    (r"UntypedStorage", "a dry run reads no weights from files: build the model from its configuration alone"),
    (r"FakeTensor|tensor subclasses", "a dry run has shapes and no values: compute without them"),
)
"""Pattern in the text of one of torch's errors -> advice for the user."""


@contextmanager
def naming_the_line(part: str) -> Iterator[None]:
    """Raise `PlanError` for every error in the block. Its text names the innermost line of the user's code, or ``part``
    if the error was not raised there.
    """
    try:
        yield
    except Exception as error:
        raise PlanError(describe_error(error, part)) from error


def describe_error(error: BaseException, otherwise: str) -> str:
    """Return a text about ``error``: the innermost line of the user's code in its traceback (``otherwise`` if there is
    none), its type and text, and advice for known errors of torch. For a `PlanError` type and advice are left out.
    """
    kind = "" if isinstance(error, PlanError) else f"{type(error).__name__}: "
    place = user_line(error.__traceback__) or otherwise
    said = f"{place}: {kind}{error}".replace(f" ({place})", "")
    hints = [hint for words, hint in _HINTS if re.search(words, str(error)) and hint not in said]
    return f"{said}. {hints[0]}" if hints and kind else said


def user_line(passed: TracebackType | None) -> str | None:
    """Return file and line of the innermost frame of a traceback that is in the user's code: neither in an installed
    package nor in one of this project's. None if there is none.

    ``passed``: the traceback; None gives None.
    """
    found = None
    while passed is not None:
        code, module = passed.tb_frame.f_code, str(passed.tb_frame.f_globals.get("__name__", ""))
        if not code.co_filename.startswith((*_OTHERS, "<")) and module.partition(".")[0] not in PROJECT:
            found = f"{code.co_filename}, line {passed.tb_lineno}"
        passed = passed.tb_next
    return found
