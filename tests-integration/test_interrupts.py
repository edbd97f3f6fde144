"""Ctrl-C inside a call of the engine: every rank is free at once, and knows why."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

WAIT = 0.5  # seconds that the interrupted rank is in its call before the other one comes


def interrupted(stage: int, call: str) -> tuple[str, float, float]:
    """Rank 0 gets SIGINT while it waits for rank 1 in ``call``: its error, and the seconds to it and to the end of
    `destroy` from the moment in which rank 1 comes."""
    engine = training.start(Run(), stage)
    training.train(engine, Run(), 0, 1)
    rank = dist.get_rank()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def here(name: str) -> None:
        if name != call.replace("loss.backward", "backward"):
            return
        if rank == 0:
            threading.Timer(WAIT / 2, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(WAIT)

    plain = "loss" in call
    engine.module.embedding.weight.register_hook(lambda _gradient: here("end of backward"))
    began, error = time.monotonic(), ""
    try:
        for step in range(1, 4):
            here("forward")
            losses = engine(*zoo.batch(step, 0, rank, 2))
            here("backward")
            sum(losses).backward() if plain else engine.backward(sum(losses))  # type: ignore[union-attr]
            here("step")
            engine.step()
            call = ""
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        signal.signal(signal.SIGINT, before)
    raised = time.monotonic() - began
    try:
        engine.destroy(unshard=False)
    except Exception as failure:
        error += f"; destroy: {failure}"
    return error, raised - WAIT, time.monotonic() - began - WAIT


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("call", ["forward", "backward", "loss.backward", "end of loss.backward", "step"])
def test_an_interrupt_inside_a_call_frees_every_rank_with_its_cause(stage: int, call: str) -> None:
    if (stage, call) == (0, "forward"):
        pytest.skip("no rank waits for another in a forward of stage 0")
    answers: Any = run_ranks(interrupted, 2, stage, call)
    assert all("KeyboardInterrupt" in error for error, _, _ in answers), answers
    assert max(seconds for _, *both in answers for seconds in both) < 5.0, answers
