"""Full weights when a rank fails, stops or goes on in another way: every rank says so by name, and none waits."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import batch, build, config, outcome, start, train

import zero_core
from zero_comm import WeightSender, run_ranks


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have no piece of 32 MiB inside the block, neither a new one nor one that was freed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), before[1]))
    taken = []
    try:
        with suppress(RuntimeError):
            while True:
                taken.append(torch.empty(32 << 20, dtype=torch.uint8))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def names(engine: zero_core.Engine) -> int:
    return len([name for bucket in engine.iter_full_weights(1) for name, _ in bucket])


def without_memory(stage: int, when: str) -> dict[str, Any]:
    """The last rank has no memory for what comes ``when``: a weight of 64 MiB, which is always fresh memory."""
    engine = start(stage, build(torch.float32, blocks=1, width=4096), data_types={"param_dtype": "fp32"})
    last = dist.get_rank() == dist.get_world_size() - 1

    def loop() -> None:
        if when == "begin":
            with little_memory() if last else nullcontext():
                names(engine)
            return
        if when == "copy":
            for number, _ in enumerate(engine.full_weights()):
                if last and number == 0:
                    block.enter_context(little_memory())
            return
        for bucket in engine.iter_full_weights(1):
            if last and bucket.number == 0:
                block.enter_context(little_memory())

    with ExitStack() as block:
        said = outcome(loop)
    engine.zero_grad()
    return {"said": said, "names": names(engine)}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to bound a process's memory")
@pytest.mark.parametrize(
    ("stage", "ranks", "when"), [(0, 2, "begin"), (3, 3, "begin"), (3, 2, "gather"), (3, 2, "copy"), (1, 2, "copy")]
)
def test_a_rank_without_memory_is_named_on_every_rank_and_the_engine_goes_on(stage: int, ranks: int, when: str) -> None:
    results = run_ranks(without_memory, ranks, stage, when)
    for told in results:
        assert "allocate memory" in told["said"] and told["names"] == 6, told
    for told in results[:-1]:
        assert f"rank {ranks - 1}" in told["said"]


def gathers_without_memory() -> dict[str, Any]:
    engine = start(3, build(torch.float32, blocks=1, width=4096), data_types={"param_dtype": "fp32"})

    def block() -> None:
        with engine.gathered(list(engine.module.parameters())):
            pass

    with little_memory() if dist.get_rank() == 1 else nullcontext():
        said = outcome(block)
    engine.zero_grad()
    return {"said": said, "names": names(engine)}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to bound a process's memory")
def test_a_rank_without_memory_in_gathered_is_named_on_the_others_too() -> None:
    first, second = run_ranks(gathers_without_memory, 2)
    assert "PeerError" in first["said"] and "rank 1" in first["said"] and "allocate memory" in first["said"]
    assert "allocate memory" in second["said"] and first["names"] == second["names"] == 6


def two_at_once(stage: int) -> list[Any]:
    engine = start(stage)
    train(engine, 0, 1)
    first, second = engine.iter_full_weights(1), engine.iter_full_weights(1)
    next(first), next(first)
    kept = next(second)
    held = engine.partition.memory()["gathered parameters"]
    said = outcome(lambda: next(first))
    rest = [bucket.number for bucket in second]
    left = engine.partition.memory()["gathered parameters"]
    return [said, kept.number, rest, held <= largest(engine), left == persistent(engine), train(engine, 1, 3)]


def largest(engine: zero_core.Engine) -> int:
    return persistent(engine) + 8 * max(u.layout.numel for u in engine.partition.units)


def persistent(engine: zero_core.Engine) -> int:
    return 8 * sum(u.layout.numel for u in engine.partition.units if not u.releasable)


def undisturbed(stage: int) -> list[float]:
    engine = start(stage)
    train(engine, 0, 1)
    return train(engine, 1, 3)


@pytest.mark.parametrize(("stage", "ranks"), [(3, 2), (0, 2), (3, 1)])
def test_a_further_pass_ends_the_one_that_is_open_by_name(stage: int, ranks: int) -> None:
    expected = run_ranks(undisturbed, ranks, stage)
    for told, losses in zip(run_ranks(two_at_once, ranks, stage), expected, strict=True):
        said, first, rest, bounded, released, after = told
        assert said == (
            "PartitionError: full weights: a further pass has begun after bucket 2 of 8, which ends the pass. "
            "Iterate to the end first."
        )
        assert first == 0 and rest == list(range(1, 8)) and bounded and released and after == losses


def kept_over_steps(stage: int, tier: str) -> list[Any]:
    """An iterator is abandoned, but held, with a bucket; training goes on."""
    engine = start(stage, **tiered(tier))
    train(engine, 0, 1)
    held = engine.iter_full_weights(1)
    bucket = [next(held) for _ in range(3)][-1]
    before = bucket.memory.clone()
    losses = train(engine, 1, 2)
    left = engine.partition.memory()["gathered parameters"] == persistent(engine)
    same = torch.equal(before, bucket.memory)
    losses += train(engine, 2, 3)
    said = outcome(lambda: next(held))
    after = outcome(lambda: next(held))
    return [said, after, left and same, losses, names(engine)]


def tiered(tier: str) -> dict[str, Any]:
    if tier == "device":
        return {}
    zero = config(3)["zero_optimization"]
    return {"zero_optimization": {**zero, "offload_optimizer": {"device": tier}, "offload_param": {"device": tier}}}


@pytest.mark.parametrize(("stage", "ranks", "tier"), [(0, 2, "device"), (3, 2, "device"), (3, 1, "cpu")])
def test_a_step_ends_a_pass_that_a_script_keeps_and_releases_its_unit(stage: int, ranks: int, tier: str) -> None:
    expected = run_ranks(undisturbed, ranks, stage)
    for told, losses in zip(run_ranks(kept_over_steps, ranks, stage, tier), expected, strict=True):
        said, after, fine, trained, count = told
        assert said.startswith("PartitionError: full weights: the optimizer has stepped after bucket 3 of 8")
        assert "StopIteration" in after and fine and trained == losses and count == 8


class Failing:
    """A server whose call ``route`` fails; the ranks of the server are none."""

    def __init__(self, route: str) -> None:
        self._route = route

    def __getattr__(self, route: str) -> Any:
        raise KeyError(route)


def told_why(stage: int, at: int) -> list[str]:
    """The first rank's consumer throws what failed into the iterator, after bucket ``at``."""
    engine = start(stage)
    iterator: Any = engine.iter_full_weights(1)

    def loop() -> None:
        for bucket in iterator:
            if dist.get_rank() == 0 and bucket.number == at:
                iterator.throw(KeyError("the server's reason"))

    said = outcome(loop)
    train(engine, 0, 1)
    return [said, str(names(engine))]


@pytest.mark.parametrize("at", (0, 3, 7))
@pytest.mark.parametrize("stage", (0, 3))
def test_what_is_thrown_into_the_iterator_is_the_reason_on_the_others(stage: int, at: int) -> None:
    first, *others = run_ranks(told_why, 2, stage, at)
    assert first == ['KeyError: "the server\'s reason"', "8"]
    for said, count in others:
        assert count == "8" and f"rank 0 stopped iterating after bucket {at + 1} of 8 and this rank went on" in said
        assert 'KeyError: "the server\'s reason"' in said


class Bar:
    """Iterates over what it keeps, as a progress bar does."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from map(Bar.shown, self._inner)

    @staticmethod
    def shown(bucket: Any) -> Any:
        return bucket


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda buckets: buckets,
    "map": lambda buckets: map(Bar.shown, buckets),
    "chain": lambda buckets: itertools.chain(buckets, ()),
    "bar": Bar,
}


def connected_in_vain(stage: int, wrapper: str) -> tuple[str, list[int]]:
    engine = start(stage)
    held = [engine.partition.memory()["gathered parameters"]]
    sender = WeightSender(Failing("init"), ranks=1, is_sender=dist.get_rank() == 0)  # type: ignore[arg-type]
    kept = WRAPPERS[wrapper](engine.iter_full_weights(1))
    said = outcome(lambda: sender.send(kept))
    held.append(engine.partition.memory()["gathered parameters"])
    train(engine, 0, 1)  # while the script keeps the iterator
    return said, held


@pytest.mark.parametrize(
    ("stage", "wrapper"), [(0, "nothing"), (3, "nothing"), (0, "map"), (3, "map"), (3, "chain"), (3, "bar")]
)
def test_a_sender_that_cannot_connect_does_not_leave_the_others_waiting(stage: int, wrapper: str) -> None:
    (first, held), (second, others) = run_ranks(connected_in_vain, 2, stage, wrapper)
    assert first.startswith("KeyError") and "rank 0 stopped" in second and "KeyError" in second
    assert held[0] == held[1] and others[0] == others[1]


def in_a_fork() -> list[str]:
    """Return the errors that a process forked from a rank gets."""
    engine = start(3)
    train(engine, 0, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        calls = (
            lambda: engine.full_weights().metadata(),
            lambda: engine.iter_full_weights(),
            lambda: engine(*batch(1)),
            lambda: engine.step(),
            lambda: engine.full_param(engine.module.head.bias),
            lambda: engine.save_checkpoint("nowhere"),
        )
        try:
            os.write(writing, "\n".join(outcome(call) for call in calls).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        said = told.read().splitlines()
    os.waitpid(child, 0)
    train(engine, 1, 2)
    return said


@pytest.mark.parametrize("ranks", (1, 2))
def test_an_engine_in_a_forked_process_says_where_it_can_be_used(ranks: int) -> None:
    for said in run_ranks(in_a_fork, ranks):
        assert len(said) == 6
        for line in said:
            assert line.startswith("UsageError: engine.") and "was forked from the engine's; call it there" in line, (
                line
            )
