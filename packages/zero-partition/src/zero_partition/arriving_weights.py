"""Wait for published weights at their first use, not in the step that publishes them.

[Note: weights that arrive] At stages 1 and 2, and for persistent units at stage 3, a step ends by all-gathering the new
weights in place. It returns when the all-gathers are issued. Until a unit's weights have arrived, its parameters read
NaN, and have a subclass of their own class, made once for the unit, whose ``__torch_function__`` waits for them before
torch computes anything with such a parameter; then the parameters are their views of the weights again, have their own
class and cost nothing. C++ code that does not ask the class thus meets NaN, never half a step. The hooks of modules
that use the unit wait first, so forward does not meet that class. The engine's own code waits in `Unit.flat`,
`Unit.views` and `Unit.acquire_shard`. Waiting concerns this rank only, so any thread may wait at any time.

What no class shows is excluded: a step waits at once for a unit of which somebody holds an alias (`p.detach()`, an
array, a view in a graph), found by counting the references to its memory; for a unit with parameters in torch.jit
modules, which read them in C++; and for all units once torch.compile or a graph capture has traced the model, as
their code reads memory without asking. They are waited for before this process is forked, too, as the child has none of
the threads that receive them. A forward without gradients waits for all units at its first module, as torch
chooses other kernels there for parameters with such a class. On an accelerator the wait orders the stream that uses
the weights, and the stream of the step behind it; a third stream has to be ordered behind one of these after that use.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_comm import Work

from .dispatch_modes import outside_modes
from .host_facts import exchange_classes, install
from .torch_calls import attribute_of, name_of

_ARRIVAL = "_zero_arrival"  # attribute of a class of arriving parameters: the `WeightArrival` of their unit
_ARRIVED = "_zero_arrived_class"  # the same: the class that they have once the weights are there
_DISABLED = torch._C._disabled_torch_function_impl
_FACTS = frozenset(["__hash__", "dim", "nelement", "numel", "size"])
_FACT_ATTRIBUTES = frozenset(["grad", "is_leaf", "ndim", "requires_grad", "shape"])


class WeightArrivals:
    """The units of one engine whose published weights are arriving; see [Note: weights that arrive].

    ``device``: of the weights.

    Attributes:
        open: the arrivals that nobody has waited for yet, in the order in which they were issued.
        failure: what weights failed to arrive by; every later wait raises it. None while nothing failed.
        captures: returns whether a CUDA graph is being captured; None where there are none.
        lock: held while a thread waits, as a message must not be waited for twice.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.open: dict[WeightArrival, None] = {}
        self.failure: BaseException | None = None
        self._blanks: dict[torch.dtype, torch.Tensor] = {}
        self.lock = threading.RLock()
        self.device = torch.device("cpu") if device is None else device
        self.captures = torch.cuda.is_current_stream_capturing if self.device.type == "cuda" else None
        self._deferring = True
        self._writing: weakref.WeakMethod[Callable[[str], AbstractContextManager[None]]] | None = None
        self._failed: weakref.WeakMethod[Callable[[BaseException], object]] | None = None
        _before_forks().add(self)

    @property
    def may_defer(self) -> bool:
        """Return whether weights may be waited for after the step; False after `stop_deferring`."""
        return self._deferring

    def report_to(
        self, writing: Callable[[str], AbstractContextManager[None]], failed: Callable[[BaseException], object]
    ) -> None:
        """Wait inside ``writing("the step")``, and call ``failed`` with what a wait raised. Both are methods, of
        objects that are not kept alive."""
        self._writing, self._failed = weakref.WeakMethod(writing), weakref.WeakMethod(failed)

    def blank(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a NaN of ``dtype`` (0-dimensional), which parameters read while their weights are arriving; always the
        same one."""
        if dtype not in self._blanks:
            self._blanks[dtype] = torch.full((), torch.nan, dtype=dtype, device=self.device)
        return self._blanks[dtype]

    def blanks(self) -> list[torch.Tensor]:
        """Return what `blank` has made."""
        return list(self._blanks.values())

    def stop_deferring(self) -> None:
        """Have every later step wait itself, as code reads the weights that no class of theirs shows to; wait now."""
        self._deferring = False
        self.wait()

    def before_forward(self, arrivals: Sequence[WeightArrival]) -> None:
        """Wait for ``arrivals``, whose weights a module is about to use; for all without gradients."""
        if not torch.is_grad_enabled():
            self.wait()
        for arrival in arrivals:
            if arrival.is_open:
                arrival.wait()

    def wait(self) -> None:
        """Wait for all weights that are arriving. Raises as `WeightArrival.wait` does."""
        for arrival in list(self.open):
            arrival.wait()

    def wait_briefly(self, seconds: float) -> None:
        """Wait for all weights, at most ``seconds``, as the engine is about to end; `failure` says if they do not
        come."""
        end = time.monotonic() + seconds
        for arrival in list(self.open):
            try:
                arrival.complete(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except Exception:
                return

    def abandon(self) -> None:
        """Give all parameters their own classes again without waiting: the engine has failed, and their values are a
        mixture of two steps."""
        for arrival in list(self.open):
            arrival.abandon()

    def writing(self) -> AbstractContextManager[None]:
        """Return the context in which weights are waited for: what fails inside leaves them half written."""
        writing = None if self._writing is None else self._writing()
        return nullcontext() if writing is None else writing("the step")

    def report(self, failure: BaseException) -> None:
        """Report ``failure``, by which weights did not arrive, to the engine, unless that is gone."""
        failed = None if self._failed is None else self._failed()
        if failed is not None:
            failed(failure)


class WeightArrival:
    """Waits for one unit's published weights at their first use; see [Note: weights that arrive].

    ``parameters``: the unit's. ``together``: the arrivals of all units of the engine.

    Attributes:
        is_open: weights are arriving.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], together: WeightArrivals) -> None:
        self.is_open = False
        self._parameters = parameters
        self._together = together
        self._work: Work | None = None
        self._stream: torch.Stream | None = None
        self._classes: dict[type, type] = {}
        self._views: Sequence[torch.Tensor] = ()
        self._blanks: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Make what the parameters read while weights are arriving; called once, before `begin`."""
        self._blanks = [self._together.blank(p.dtype).expand(p.shape) for p in self._parameters]

    def begin(self, work: Work, views: Sequence[torch.Tensor]) -> None:
        """Have the first use of the parameters wait for ``work``, which writes their ``views``; they read NaN until
        then. They are of classes that `can_wait_at_use` allows, and no weights are arriving."""
        device = self._together.device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._work, self.is_open = work, True
        self._together.open[self] = None
        self._views = views
        exchange_classes(self._parameters, self._arriving_class)
        with torch._C.DisableTorchFunctionSubclass():
            install(self._parameters, self._blanks)

    def wait(self) -> None:
        """Wait until the weights are there (on an accelerator: order streams) and give the parameters their own classes
        again; do nothing if none are arriving.

        Raises `PeerError`, which names the unit and the step, if they will not arrive; so does every later wait.
        """
        if not self.is_open:
            return
        try:
            with self._together.writing():
                self.complete(None)
        except BaseException as failure:
            self._together.report(failure)
            raise

    @outside_modes
    def complete(self, patience: timedelta | None) -> None:
        """Do what `wait` does, for at most ``patience`` (None: the group's own timeout), and report no failure."""
        with self._together.lock:
            if self._work is None:
                return
            if self._together.failure is not None:  # the groups may be gone, and a wait would not end
                raise self._together.failure
            try:
                self._work.wait(patience)
            except BaseException as failure:
                self._together.failure = failure
                raise
            if self._stream is not None:
                here = torch.accelerator.current_stream(self._together.device)
                if here != self._stream:
                    self._stream.wait_stream(here)
            self._end()

    def abandon(self) -> None:
        """Give the parameters their own classes again without waiting; do nothing if no weights are arriving."""
        with self._together.lock:
            if self.is_open:
                self._end()

    def _end(self) -> None:
        """Forget the work, and give the parameters their weights and their own classes again."""
        with torch._C.DisableTorchFunctionSubclass():
            install(self._parameters, self._views)
        exchange_classes(self._parameters, arrived_class)
        self._work, self._stream, self._views = None, None, ()
        self._together.open.pop(self, None)
        self.is_open = False

    def _arriving_class(self, kind: type) -> type:
        """Return the class that this unit's parameters of class ``kind`` have while their weights are arriving."""
        made = self._classes.get(kind)
        if made is None:
            body = {
                "__torch_function__": classmethod(_call),
                "__deepcopy__": _copy,
                "__reduce_ex__": _reduce,
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
                _ARRIVAL: self,
                _ARRIVED: kind,
            }
            metaclass: Any = type(kind)
            made = self._classes[kind] = metaclass(kind.__name__, (kind,), body)
        return made


@functools.cache
def _before_forks() -> weakref.WeakSet[WeightArrivals]:
    """Return the set, always the same one, of what is waited for before this process is forked; it holds its members
    weakly. What fails then is raised by the next use of the weights."""
    found: weakref.WeakSet[WeightArrivals] = weakref.WeakSet()

    def wait() -> None:
        """Wait for the weights of all engines."""
        for arrivals in list(found):
            with suppress(Exception):
                arrivals.wait()

    os.register_at_fork(before=wait)
    return found


def can_wait_at_use(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether all ``parameters`` have classes whose torch functions do nothing of their own."""
    kinds: set[Any] = set(map(type, parameters))
    return all(kind.__torch_function__ is _DISABLED for kind in kinds)


def arrived_class(kind: type) -> type:
    """Return the class that parameters of class ``kind`` have once their weights are there; ``kind`` itself unless they
    are arriving."""
    arrived: type = getattr(kind, _ARRIVED, kind)
    return arrived


def await_weights(parameter: torch.Tensor) -> None:
    """Wait until the weights of ``parameter`` are there and it has its own class; do nothing unless they are arriving.
    Raises as `WeightArrival.wait` does."""
    arrival: WeightArrival | None = getattr(type(parameter), _ARRIVAL, None)
    if arrival is not None:
        arrival.wait()
        if hasattr(type(parameter), _ARRIVAL):  # user code has made it of the class of an arriving parameter
            parameter.__class__ = arrived_class(type(parameter))


def _call(_class: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Wait for the weights of the parameters among the arguments, unless torch function ``func`` only asks for facts
    that a step leaves as they are, then run it: ``__torch_function__`` of arriving parameters."""
    keywords = kwargs or {}
    if name_of(func) in _FACTS or attribute_of(func) in _FACT_ATTRIBUTES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **keywords)
    for leaf in tree_leaves((args, keywords)):
        if isinstance(leaf, torch.Tensor):
            await_weights(leaf)
    for kind in types:  # of parameters in containers that only torch looks into
        if (arrival := getattr(kind, _ARRIVAL, None)) is not None:
            arrival.wait()
    return func(*args, **keywords)


def _copy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
    """Wait for the weights and return a deep copy of ``parameter``: ``__deepcopy__`` of arriving parameters."""
    await_weights(parameter)
    return copy.deepcopy(parameter, memo)


def _reduce(parameter: nn.Parameter, protocol: Any) -> Any:
    """Wait for the weights and return what pickle writes of ``parameter``: ``__reduce_ex__`` of arriving parameters."""
    await_weights(parameter)
    return parameter.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
