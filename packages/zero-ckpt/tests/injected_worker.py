"""Run as a script: for each line `ROOT STORE NOTES HOW NBYTES` fork a process that saves, and print its id.

The process saves step 1, stops itself, saves step 2, stops itself, and saves step 3. How each save ended is written to
the file NOTES through memory, since system calls may be made to fail between the stops. The last byte of NOTES is the
step that may be saved: a debugger that lets go of a process can lose its stop, which must not let it continue.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from pathlib import Path

from kill_worker import content, seal

from zero_ckpt import AsyncSaver, CheckpointError, Interval, save_sharded


class Saves:
    """The saves of one process."""

    def __init__(self, root: str, store: str, notes: str, how: str, nbytes: str) -> None:
        self.root, self.store, self.how, self.nbytes = Path(root), Path(store), how, int(nbytes)
        with open(notes, "r+b") as file:
            self.notes = mmap.mmap(file.fileno(), 0)

    def intervals(self, step: int) -> list[Interval]:
        data = content(step, self.nbytes)
        extent = seal(self.store / str(step), data)
        return [
            Interval("w", "param", (self.nbytes,), "U8", 0, data),
            Interval("linked", "exp_avg", (self.nbytes,), "U8", 0, extent),
        ]

    def run(self) -> None:
        behind = AsyncSaver() if self.how == "behind" else None
        made = {step: self.intervals(step) for step in (1, 2, 3)}  # now, as calls between the stops may fail
        for step, intervals in made.items():
            if step > 1:
                self.stop_until_allowed(step)
            try:
                options = {"step": step, "client_state": {"step": step}}
                if behind is None:
                    save_sharded(self.root, f"step{step}", intervals, **options)  # type: ignore[arg-type]
                else:
                    behind.save(self.root, f"step{step}", intervals, **options)
                    behind.wait()
                outcome = "saved"
            except CheckpointError as error:
                outcome = f"refused: {error}"
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            self.note(step, outcome)
        self.stop_until_allowed(4)

    def stop_until_allowed(self, step: int) -> None:
        while self.notes[-1] < step:
            os.kill(os.getpid(), signal.SIGSTOP)

    def note(self, step: int, outcome: str) -> None:
        text = f"{step} {outcome}".encode()[: len(self.notes) - 2]
        self.notes[: len(text) + 1] = text + b"\0"


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            Saves(*line.split()).run()
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
