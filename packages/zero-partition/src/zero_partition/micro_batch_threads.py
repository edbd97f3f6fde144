"""Threads for the micro-batches of a step, of which one runs at a time, when the driver says so."""

from __future__ import annotations

import contextvars
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Cancelled(BaseException):
    """Unwinds the code of a micro-batch whose step has failed elsewhere."""


class MicroBatchThread(threading.Thread):
    """Runs ``body``, the code of one micro-batch, in turns with the thread that made it, the driver: from `advance`
    until the code calls `ask`, or ends.

    ``number``: of the micro-batch, for the thread's name. ``device``: current in the thread.

    Attributes:
        request: what the code asked for last; None once it has ended.
        generators: states of the random generators in which the code goes on (see `GeneratorStates`).
        backpropagates: the code has come to the backward pass of its loss.
    """

    def __init__(self, number: int, body: Callable[[], None], device: torch.device) -> None:
        super().__init__(name=f"micro-batch {number}", daemon=True)
        self.request: Any = None
        self.generators = GeneratorStates(device)
        self.backpropagates = False
        self._device = device
        self._body = body
        self._context = contextvars.copy_context()
        self._stream = torch.accelerator.current_stream(device) if device.type != "cpu" else None
        self._turn = threading.Condition()
        self._is_mine = False  # under _turn, as the next three
        self._cancelled = False
        self._let_go = False
        self._ended = False
        self._answer: Any = None
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run ``body`` from the driver's first `advance` on; what it raises is kept, and `advance` raises it. The
        thread's function."""
        try:
            self._await_turn()
            if self._stream is not None:
                torch.accelerator.set_device_index(self._device.index)
                torch.accelerator.set_stream(self._stream)
            self._context.run(self._body)
        except _Cancelled:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self.request = None
            with self._turn:
                self._ended, self._is_mine = True, False
                self._turn.notify_all()

    def ask(self, request: Any) -> Any:
        """Hand ``request`` to the driver, wait until it lets the code go on, and return its answer. Only the code of
        the micro-batch calls it. If the thread is to end, an exception unwinds the code here."""
        self.request = request
        with self._turn:
            self._is_mine = False
            self._turn.notify_all()
        self._await_turn()
        answer, self._answer = self._answer, None
        return answer

    def advance(self, answer: Any = None) -> None:
        """Let the code go on, with ``answer`` to its last request, until it asks again or ends. Only the driver calls
        it. Raises what the code has raised."""
        self._answer = answer
        with self.generators.in_force(), self._turn:
            self._is_mine = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._is_mine)
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Unwind the code of the thread if it has not ended yet, and join the thread. Only the driver calls it. Does
        nothing if the thread has ended."""
        if not self.is_alive():
            return
        with self._turn:
            self._cancelled = True
            while not self._ended:
                self._turn.wait_for(lambda: self._ended or not self._is_mine)
                self._is_mine = not self._ended
                self._turn.notify_all()
        self.join()

    def let_go(self) -> None:
        """Have the thread unwind its code and end by itself, from where it waits next. Returns at once."""
        with self._turn:
            self._let_go = self._cancelled = True
            self._turn.notify_all()

    def _await_turn(self) -> None:
        """Wait until the driver lets this thread go on. Raises `_Cancelled` if the thread is to end."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_mine or self._let_go)
            if self._cancelled:
                raise _Cancelled


def end_all(threads: Sequence[MicroBatchThread]) -> None:
    """End all ``threads``, one after the other. If that is interrupted, those that are left unwind by themselves."""
    try:
        for thread in threads:
            thread.end()
    except BaseException:
        for thread in threads:
            thread.let_go()
        raise


class GeneratorStates:
    """States of the random generators of torch (CPU and ``device``), Python and NumPy (where it is imported): the
    random numbers that one micro-batch draws. A new object has the present states."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._present()

    def copy(self) -> GeneratorStates:
        """Return the same states as another object."""
        other = GeneratorStates.__new__(GeneratorStates)
        other._device, other._states = self._device, list(self._states)
        return other

    def fork(self, number: int) -> None:
        """Replace the states by those of generators with another seed, which is made of ``number`` and of what the
        present states would draw next. The present states do not advance."""
        with self.copy().in_force():
            seed = int(torch.randint(2**62, (1,)))
        with self.in_force():
            torch.manual_seed((seed + number) % 2**63)
            random.seed(seed + number)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed((seed + number) % 2**32)

    def install(self) -> None:
        """Set the generators to these states."""
        self._set(self._states)

    def in_force(self) -> _InForce:
        """Return a context in which the generators have these states, and what is drawn advances the states. At its end
        the generators get the states from before."""
        return _InForce(self)

    def _present(self) -> list[Any]:
        """Return the states that the generators have now, for `_set`."""
        numpy = sys.modules.get("numpy")
        states = [torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set(self, states: Sequence[Any]) -> None:
        """Set the generators to ``states``, as `_present` returned them."""
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if states[2] is not None:
            sys.modules["numpy"].random.set_state(states[2])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[3], self._device)


class _InForce:
    """The context of `GeneratorStates.in_force`."""

    def __init__(self, states: GeneratorStates) -> None:
        self._of = states
        self._before: list[Any] = []

    def __enter__(self) -> None:
        """Set the generators to the states, and keep those from before."""
        self._before = self._of._present()
        self._of._set(self._of._states)

    def __exit__(self, *_: object) -> None:
        """Store how far the states have advanced, and set the generators to those from before."""
        self._of._states = self._of._present()
        self._of._set(self._before)
