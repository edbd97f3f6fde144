"""Run as a script: fork ranks that save one checkpoint after another until they are killed.

    kill_worker.py ROOT WORLD_SIZE NBYTES

Each rank contributes its part of `w` from memory and the same bytes again, as `linked`, in a sealed file of its own.
Writes the ranks' process ids to ROOT/pids, and ROOT/ready once the first checkpoint is complete.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from zero_ckpt import CheckpointError, FileExtent, Interval, save_sharded
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


def train(group: PipeCoordinator, root: str, nbytes: int) -> None:
    begin = nbytes * group.rank // group.world_size
    end = nbytes * (group.rank + 1) // group.world_size
    for step in range(1, 10_000):
        data = content(step, nbytes)[begin:end]
        extent = seal(Path(f"{root}.store"), f"{group.rank}-{step}", data)
        mine = [
            Interval("w", "param", (nbytes,), "U8", begin, data),
            Interval("linked", "exp_avg", (nbytes,), "U8", begin, extent),
        ]
        tag = "same" if step % 3 == 0 else f"step{step}"
        save_sharded(root, tag, mine, step=step, coordinator=group, keep_last=3, client_state={"step": step})
        if step == 1 and group.rank == 0:
            Path(root, "ready").write_text("ready")
        Path(extent.path).unlink()


def seal(store: Path, name: str, data: bytes) -> FileExtent:
    """A file that lives until its save has returned."""
    store.mkdir(exist_ok=True)
    path = store / name
    path.write_bytes(data)
    path.chmod(0o444)
    return FileExtent(path, 0, len(data), checksum(data))


def main() -> None:
    root, world_size, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pairs = [Pipe() for _ in range(world_size - 1)]
    children = []
    for rank in range(1, world_size):
        pid = os.fork()
        if pid == 0:
            for index, (here, there) in enumerate(pairs):
                here.close()
                if index != rank - 1:
                    there.close()
            run(PipeCoordinator(rank, world_size, [pairs[rank - 1][1]]), root, nbytes)
        children.append(pid)
    for _, there in pairs:
        there.close()
    Path(root, "pids").write_text(" ".join(map(str, [os.getpid(), *children])))
    run(PipeCoordinator(0, world_size, [here for here, _ in pairs]), root, nbytes)


def run(group: PipeCoordinator, root: str, nbytes: int) -> None:
    try:
        train(group, root, nbytes)
    except (CheckpointError, EOFError, OSError):
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
