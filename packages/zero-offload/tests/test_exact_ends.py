"""The exact update where it is cut short, closed, or written beside."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from exact_updates import backward, computed, exact_of
from shards import GROUPS, NUMELS, Lender, plans, same_states, states_of, update_of

from zero_offload import ExactUpdate, OffloadedUpdate, OffloadError, Trace
from zero_offload.ends import HostUse, tier_ends
from zero_offload.update._journal import Journal
from zero_offload.update._tiers import HostTier


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the ``line``-th line that this thread executes in the update's files; yields a list
    that has an entry once that has happened.
    """
    left, happened = [line], []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "zero_offload" not in frame.f_code.co_filename or happened:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                happened.append(line)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield happened
    finally:
        sys.settrace(before)


class Patient(Lender):
    """Weights that may be given back twice, as by an interrupt between giving them back and taking note of that."""

    def give_back(self, name: str, *, dirty: bool) -> None:
        self.held.discard(name)


@pytest.mark.parametrize(("dtype", "in_place"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_step_that_is_interrupted_anywhere_is_whole_or_refused(dtype: torch.dtype, in_place: bool) -> None:
    outcomes: dict[str, int] = {"before": 0, "after": 0, "refused": 0}
    for line in range(10_000):
        lender, plain_lender = Patient(dtype), Lender(dtype)
        update = exact_of(lender, dtype, in_place=in_place)
        plain = update_of(plain_lender, plans(dtype, in_place=in_place))
        for one in (update, plain):
            backward(one, 0)
            one.step()
            one.clear_gradients()
        before = states_of(update), lender.flat()
        for one in (update, plain):
            backward(one, 1)
        computed(update)
        plain.step()
        after = states_of(plain), plain_lender.flat()
        with interrupted_at(line) as happened:
            try:
                update.step()
            except KeyboardInterrupt:
                assert happened
        try:
            states = states_of(update)
        except OffloadError as error:
            assert "failed in the middle" in str(error)
            outcomes["refused"] += 1
            with pytest.raises(OffloadError, match="failed in the middle"):
                update.step()
            with pytest.raises(OffloadError, match="failed in the middle"):
                update.seal()
            update.reset()
            for name, values in before[0].items():  # a checkpoint is loaded
                update.write({name: values})
            for shard, weights in zip(NUMELS, before[1].split(list(NUMELS.values())), strict=True):
                lender.tensors[shard].copy_(weights)
            states = states_of(update)
            assert same_states(states, before[0])
        if same_states(states, before[0]):
            outcomes["before"] += 1
            assert torch.equal(lender.flat(), before[1])
            if not update.has_gradient("first"):
                backward(update, 1)
            update.step()
            states = states_of(update)
        else:
            outcomes["after"] += 1
        assert same_states(states, after[0]), line
        assert torch.equal(lender.flat(), after[1]), line
        update.close()
        plain.close()
        assert not lender.held
        if not happened:
            break
    assert all(outcomes.values()), outcomes


def test_a_reset_after_an_interrupt_between_both_halves_of_an_exchange_parts_states_and_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = torch.bfloat16
    lender, plain_lender = Patient(dtype), Lender(dtype)
    update, plain = exact_of(lender, dtype), update_of(plain_lender, plans(dtype))
    for one in (update, plain):
        backward(one, 0)
        one.step()
        one.clear_gradients()
    saved, weights = states_of(update), lender.flat()
    backward(update, 1)
    computed(update)
    exchange, calls = HostTier.exchange, list[int]()

    def cut_short(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return exchange(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostTier, "exchange", cut_short)
        update.step()
    update.reset()
    update.clear_gradients()
    update.write(saved)
    for shard, values in zip(NUMELS, weights.split(list(NUMELS.values())), strict=True):
        lender.tensors[shard].copy_(values)
    for step in (1, 2):
        for one in (update, plain):
            backward(one, step)
        computed(update)
        for one in (update, plain):
            one.step(grad_scale=0.5)  # clipped, so what was computed beforehand is dropped
            one.clear_gradients()
    assert same_states(states_of(update), states_of(plain))
    assert torch.equal(lender.flat(), plain_lender.flat())
    update.close()
    plain.close()


def test_memory_that_cannot_be_provided_is_told_once_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(journal: Journal) -> None:
        raise MemoryError("no pages left")

    lender, plain_lender = Lender(torch.bfloat16), Lender(torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "touch", refused)
        update = exact_of(lender, torch.bfloat16)
    plain = update_of(plain_lender, plans(torch.bfloat16))
    for one in (update, plain):
        backward(one, 0)
    update._thread.submit(int).result()  # what was submitted before has ended
    with pytest.raises(OffloadError, match="could not be provided: no pages left"):
        update.step()
    for one in (update, plain):
        one.step()
    assert same_states(states_of(update), states_of(plain))
    update.close()
    plain.close()


def test_a_journal_that_is_to_close_asks_for_no_more_memory() -> None:
    update = exact_of(Lender(torch.bfloat16), torch.bfloat16)
    update._thread.submit(int).result()
    mirror = update._journal._weights.borrow("first")
    mirror.fill_(1.0)
    update._journal.stop_touching()
    update._journal.touch()
    assert bool((mirror == 1.0).all())
    update.close()


class Counted:
    """Memory of which it is known when it is freed."""

    def __init__(self) -> None:
        self.blocks: list[weakref.ref[Any]] = []

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        memory = bytearray(nbytes + 64)
        own = memoryview(memory)
        tensor = torch.frombuffer(own, dtype=torch.uint8)
        tensor = tensor[-tensor.data_ptr() % 64 :][:nbytes]
        self.blocks.append(weakref.ref(own))
        return tensor

    def io_engine(self, given: Any) -> Any:
        return given


def test_closing_frees_all_memory_while_the_update_is_still_known() -> None:
    counted = Counted()
    with tier_ends(counted):
        update = exact_of(Lender(torch.bfloat16), torch.bfloat16)
    for step in range(2):
        backward(update, step)
        computed(update)
        update.step()
        update.clear_gradients()
    backward(update, 2)
    assert sum(block() is not None for block in counted.blocks) >= 4
    update.close()
    gc.collect()
    assert [block() for block in counted.blocks if block() is not None] == []
    assert set(update.memory().values()) == {0}


def test_a_gradient_is_changed_after_the_update_that_reads_it() -> None:
    """The thread is held in the update of the first shard until the gradient was written, or for a moment."""
    written, at_work = threading.Event(), threading.Event()

    def hold(hop: str, name: str, *_: Any) -> None:
        if hop == "compute" and name == "first" and armed:
            at_work.set()
            written.wait(0.5)

    armed: list[int] = []
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, trace=Trace(sink=hold, keep=False))
    update.rate.is_on = False
    with update_of(theirs, plans(torch.bfloat16)) as plain:
        for one in (update, plain):
            backward(one, 0)
        armed.append(1)
        plain.step()
        update.step()
        assert at_work.wait(60)
        with update.gradient("second", dirty=True) as tensor:
            tensor.fill_(1e3)
            written.set()
        assert same_states(states_of(update), states_of(plain))
        assert torch.equal(ours.flat(), theirs.flat())
    update.close()


def test_options_that_are_changed_in_a_list_are_those_in_force() -> None:
    groups: list[dict[str, Any]] = [{**group, "betas": list(group["betas"])} for group in GROUPS]
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, groups=groups)
    plain = OffloadedUpdate(plans(torch.bfloat16), "AdamW", lambda: groups, theirs, device="cpu")
    for step in range(4):
        for one in (update, plain):
            groups[0]["betas"][0] = 0.9
            backward(one, step)
            if isinstance(one, ExactUpdate):
                computed(one)
            groups[0]["betas"][0] = 0.5 + step / 10
            one.step()
            if isinstance(one, ExactUpdate) and step % 2:
                groups[0]["betas"][0] = 0.1  # while the update may still run
                one.finish()
            one.clear_gradients()
        assert same_states(states_of(update), states_of(plain)), step
        assert torch.equal(ours.flat(), theirs.flat()), step
    update.close()
    plain.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("when", ["before the gradient is there", "before the step"])
@pytest.mark.parametrize("how", ["numpy", "data", "a view from before"])
def test_weights_updated_in_place_that_are_written_past_torch_count(dtype: torch.dtype, when: str, how: str) -> None:
    grads = torch.float64 if dtype == torch.float64 else torch.float32
    ours, theirs = Lender(dtype), Lender(dtype)
    update = exact_of(ours, dtype, in_place=True)
    views = {id(lender): lender.tensors["first"].data[17:23] for lender in (ours, theirs)}

    def write(lender: Lender, step: int) -> None:
        tensor = lender.tensors["first"]
        if how == "numpy":
            tensor.numpy()[-4:] *= -1.0
        elif how == "data":
            tensor.data[step].fill_(0.25)
        else:
            views[id(lender)].copy_(views[id(lender)].flip(0))

    with update_of(theirs, plans(dtype, in_place=True)) as plain:
        for step in range(6):
            for one, lender in ((update, ours), (plain, theirs)):
                update.finish()
                if when == "before the gradient is there" and step % 2:
                    write(lender, step)
                backward(one, step, grads)
                if isinstance(one, ExactUpdate):
                    computed(one)
                if when == "before the step" and step % 2:
                    write(lender, step)
                one.step()
                one.clear_gradients()
            assert same_states(states_of(update), states_of(plain)), step
            assert torch.equal(ours.flat(), theirs.flat()), step
    assert update.rate.redone == (3 if when == "before the step" else 0)
    assert update.rate.committed == 10 - update.rate.redone
    update.close()
