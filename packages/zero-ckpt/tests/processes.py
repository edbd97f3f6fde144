"""Ranks as processes, forked from one server that has torch imported already."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "zero_ckpt.torch"])


def run_ranks(body: Callable[..., Any], world_size: int, root: Path, *args: Any) -> list[Any]:
    """Run `body(rank, *args)` in a gloo group of `world_size` processes; returns what each returned, in rank order."""
    root.mkdir(parents=True, exist_ok=True)
    pipes, workers = [], []
    for rank in range(world_size):
        here, there = _context.Pipe()
        worker = _context.Process(target=_work, args=(there, body, rank, world_size, str(root), args))
        worker.start()
        there.close()
        pipes.append(here)
        workers.append(worker)
    answers = [_answer(pipe) for pipe in pipes]
    for worker in workers:
        worker.join(2)
        worker.kill()
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]
    if problems:
        raise RuntimeError("\n".join(problems))
    return [result for result, _ in answers]


def _answer(pipe: Connection) -> tuple[Any, str | None]:
    try:
        answer: tuple[Any, str | None] = pipe.recv() if pipe.poll(50) else (None, "no answer in 50 s")
    except EOFError:
        return None, "ended without an answer"
    return answer


def _work(
    pipe: Connection, body: Callable[..., Any], rank: int, world_size: int, root: str, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{root}/store-{body.__name__}-{world_size}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        pipe.send((body(rank, *args), None))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))
