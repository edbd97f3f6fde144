"""What becomes of scripts that are run without and with `audit_every`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import audit_more_scripts
import audit_scripts
import torch
from audit_trainer import SCRIPTS, Trainer

FIRST = [name for name, one in SCRIPTS.items() if one.__module__ == audit_scripts.__name__]
MORE = [name for name, one in SCRIPTS.items() if one.__module__ == audit_more_scripts.__name__]


class NoWarnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    handler, logger = NoWarnings(), logging.getLogger("zero_core")
    logger.addHandler(handler)
    try:
        yield handler.said
    finally:
        logger.removeHandler(handler)


def run(name: str, audited: bool, stage: int, dtype: str, tier: str) -> Trainer | str:
    """Run one script; return what it has left, or what it raised."""
    trainer = Trainer(audited, stage, dtype, tier)
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if dtype == "fp64" else torch.float32)
    try:
        SCRIPTS[name](trainer)
        trainer.close()
        return trainer
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    finally:
        torch.set_default_dtype(default)


def outcomes(
    cases: list[tuple[str, int, str, str]], compared: Collection[str] = ()
) -> list[tuple[str | None, list[str | None], list[str]]]:
    """For each case: what was wrong, which units were repeated, and what was logged.

    ``compared``: scripts that must end with the weights that they have without audits.
    """
    found = []
    for name, stage, dtype, tier in cases:
        with listening() as said:
            audited = run(name, True, stage, dtype, tier)
        if isinstance(audited, str):
            found.append((audited, [], said))
            continue
        wrong = None
        if name in compared:
            plain = run(name, False, stage, dtype, tier)
            assert isinstance(plain, Trainer), plain
            same = all(torch.equal(a, b) for a, b in zip(plain.ends, audited.ends, strict=True))
            wrong = None if same else "other weights"
        found.append((wrong, audited.repeated, said))
    return found
