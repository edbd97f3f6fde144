"""The launcher's orders to running ranks, and their answers: files in a folder that the ranks of one host share.

[Note: orders] The launcher writes a word into the file `order`. Ranks that train with zero-core look at it once a step
and agree, so that all leave after the same step: at the next checkpoint (`regroup`), or after saving one at once
(`end`). A rank that leaves writes the word into `left.RANK` and ends with `LEFT_STATUS`. Ranks that know nothing of
this are not disturbed. Only jobs that can be asked, `--requeue` and `--elastic` on several hosts, have the folder: in
others a step makes no attempt to open a file.
"""

from __future__ import annotations

import os
from pathlib import Path

ORDERS_VARIABLE = "ZERO_LAUNCH_ORDERS"
REGROUP, END = "regroup", "end"
LEFT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
_MOST_BYTES = 64


class Orders:
    """The orders to the ranks of one attempt on one host, and the ranks' answers, as files in ``folder``, which `open`
    and `give` make. See [Note: orders].
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> dict[str, str]:
        """Make the folder, and return the environment variable (name -> value) that names it to the ranks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {ORDERS_VARIABLE: str(self.folder)}

    def give(self, order: str) -> None:
        """Order the ranks to leave, by writing the file `order`. ``order``: `REGROUP`, at their next checkpoint, or
        `END`, after saving one at once; `REGROUP` never replaces an earlier order."""
        self.open()
        path, part = self.folder / "order", self.folder / "order.part"
        if order == REGROUP and path.exists():
            return
        part.write_text(order, encoding="ascii")
        os.replace(part, path)

    def answer(self, rank: int) -> str | None:
        """Return the order on which the rank has left, `REGROUP` or `END`; None if the rank has not left on one, or
        died while it wrote its answer."""
        try:
            with open(self.folder / f"left.{rank}", "rb") as file:
                said = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return None
        return next((order for order in (REGROUP, END) if said == order.encode()), None)
