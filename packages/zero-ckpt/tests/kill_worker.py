"""Run as a script: fork ranks that save one checkpoint after another until they are killed.

    kill_worker.py ROOT STORE NOTES WORLD_SIZE NBYTES HOW

Each rank contributes its part of `w` from memory and the same bytes again, as `linked`, in a sealed file of its own
in the folder STORE.
HOW is `now` (every save is waited for) or `behind` (saves run behind, and the memory changes as soon as it may).
NOTES is a folder, which may be on another file system: `pids` holds the ranks' process ids, and `saved` gets a line
with the step of each save that has returned.
"""

from __future__ import annotations

import itertools
import os
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from zero_ckpt import AsyncSaver, CheckpointError, FileExtent, Interval, save_sharded
from zero_ckpt.checksum import checksum
from zero_ckpt.plain import pack, unpack


class PipeCoordinator:
    """Rank 0 collects and answers; a rank that died is an EOFError for all."""

    def __init__(self, rank: int, world_size: int, pipes: list[Connection]) -> None:
        self.rank, self.world_size, self._pipes = rank, world_size, pipes

    def all_gather_object(self, obj: Any) -> list[Any]:
        if self.rank:
            self._pipes[0].send_bytes(pack(obj))
            return list(unpack(self._pipes[0].recv_bytes()))
        gathered = [obj, *(unpack(pipe.recv_bytes()) for pipe in self._pipes)]
        for pipe in self._pipes:
            pipe.send_bytes(pack(gathered))
        return gathered

    def barrier(self) -> None:
        self.all_gather_object(None)


def content(step: int, nbytes: int) -> bytes:
    """What tensor `w` holds at a step."""
    return bytes([step % 251]) * nbytes


class Rank:
    """One rank of the job."""

    def __init__(self, group: PipeCoordinator, root: str, store: str, notes: str, nbytes: int) -> None:
        self.group, self.root, self.store, self.notes, self.nbytes = group, root, Path(store), Path(notes), nbytes
        self.begin = nbytes * group.rank // group.world_size
        self.end = nbytes * (group.rank + 1) // group.world_size
        self.memory = bytearray(self.end - self.begin)

    def intervals(self, step: int) -> list[Interval]:
        self.memory[:] = content(step, self.nbytes)[self.begin : self.end]
        extent = seal(self.sealed(step), bytes(self.memory))
        return [
            Interval("w", "param", (self.nbytes,), "U8", self.begin, self.memory, version=lambda: step),
            Interval("linked", "exp_avg", (self.nbytes,), "U8", self.begin, extent),
        ]

    def sealed(self, step: int) -> Path:
        return self.store / f"{self.group.rank}-{step}"

    def saved(self, step: int) -> None:
        """The save of a step has returned."""
        if self.group.rank == 0:
            with (self.notes / "saved").open("a") as file:
                file.write(f"{step}\n")
        self.sealed(step).unlink()

    def train(self, how: str) -> None:
        steps = itertools.count(1)
        behind = AsyncSaver(self.group, then=lambda path: self.saved(next(steps))) if how == "behind" else None
        for step in range(1, 10_000):
            mine = self.intervals(step)
            tag = "same" if step % 3 == 0 else f"step{step}"
            options: dict[str, Any] = {"step": step, "keep_last": 3, "client_state": {"step": step}}
            if behind is None:
                save_sharded(self.root, tag, mine, coordinator=self.group, **options)
                self.saved(step)
            else:
                behind.save(self.root, tag, mine, **options)
                behind.copied()
            self.memory[:] = b"\xff" * len(self.memory)


def seal(path: Path, data: bytes) -> FileExtent:
    """A file that lives until its save has returned."""
    path.write_bytes(data)
    path.chmod(0o444)
    return FileExtent(path, 0, len(data), checksum(data))


def main() -> None:
    *folders, count, nbytes, how = sys.argv[1:]
    world_size = int(count)
    pairs = [Pipe() for _ in range(world_size - 1)]
    children = []
    for rank in range(1, world_size):
        pid = os.fork()
        if pid == 0:
            for index, (here, there) in enumerate(pairs):
                here.close()
                if index != rank - 1:
                    there.close()
            run(Rank(PipeCoordinator(rank, world_size, [pairs[rank - 1][1]]), *folders, int(nbytes)), how)
        children.append(pid)
    for _, there in pairs:
        there.close()
    (Path(folders[2]) / "pids").write_text(" ".join(map(str, [os.getpid(), *children])))
    run(Rank(PipeCoordinator(0, world_size, [here for here, _ in pairs]), *folders, int(nbytes)), how)


def run(rank: Rank, how: str) -> None:
    try:
        rank.train(how)
    except (CheckpointError, EOFError, OSError):
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
