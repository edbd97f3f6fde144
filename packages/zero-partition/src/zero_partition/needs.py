"""Find out whether an optimizer works on fragments, or needs full parameters or the full model.

A probe runs steps of a copy of the optimizer on small tensors, made up here.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zero_comm import Group

from .errors import PartitionError
from .norm import GRID

_ELEMENTWISE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
_CLOSURE = "it needs a closure, which computes loss and gradients again inside a step"
_IMPOSSIBLE = {
    torch.optim.LBFGS: f"{_CLOSURE}, and the whole model's gradient",
    torch.optim.SparseAdam: "it needs sparse gradients",
}

_INSTEAD = {
    False: "that optimizer, built over the model's parameters",
    True: "one optimizer over the model's parameters, with a param group for each",
}
_CPU = torch.device("cpu")
_REPEATS = 400  # grid blocks: several times what torch gives one thread

PartialNorms = Sequence[tuple[torch.Tensor, tuple[float, ...]]]
"""For each of the optimizer's tensors, one or more sums of squares over its elements."""


class Need(enum.Enum):
    """The smallest thing on which an optimizer computes correctly: any elements (fragments of parameters), full
    parameters, or the full model."""

    ELEMENTS = enum.auto()
    PARAMETERS = enum.auto()
    MODEL = enum.auto()


@runtime_checkable
class NormOptimizer(Protocol):
    """An optimizer that is elementwise except for norms of full parameters (LAMB).

    On every rank `step` calls ``reduce_norms`` once with the partial norms of its tensors, and gets the norms of the
    full parameters in the same order. The engine sets ``reduce_norms``.
    """

    reduce_norms: ReduceNorms


@runtime_checkable
class PositionedOptimizer(Protocol):
    """An optimizer whose random rounding depends on an element's position (low-precision masters or states).

    ``positions``: by tensor, the position of its first element among the elements of all parameters, a multiple of
    `GRID`. The engine sets it.
    """

    positions: Mapping[torch.Tensor, int]


class ReduceNorms(Protocol):
    """Adds up partial norms over the ranks that hold fragments of a parameter. Named as what a LAMB asks for."""

    def __call__(self, partial: PartialNorms, /) -> list[tuple[float, ...]]:
        """Return the squared norms of the full parameters in the order of ``partial``, as many for each as it has.
        Collective."""


@runtime_checkable
class AveragingOptimizer(Protocol):
    """An optimizer that averages over the ranks by itself in some of its steps (1-bit Adam and its relatives).

    It runs at stage 0, on full parameters, and has to make the same decisions on every rank.
    """

    @property
    def wants_own_gradients(self) -> bool:
        """Return whether the next step takes this rank's own gradients instead of the ranks' average."""

    def connect(self, group: Group) -> None:
        """Have the optimizer average over the ranks of ``group`` from now on; called once, before the first step."""

    def synchronise(self) -> bool:
        """Make weights equal on all ranks after steps that each rank took alone; return whether the weights were
        changed. Collective."""


def refuse_unusable(optimizer: Optimizer) -> None:
    """Raise `PartitionError` for an optimizer that no engine can run, at any stage: LBFGS, SparseAdam and classes
    derived from them, one whose ``step`` cannot be called without arguments (a closure), and one that calls other
    optimizers."""
    why = next((reason for kind, reason in _IMPOSSIBLE.items() if isinstance(optimizer, kind)), None)
    if why is None and _requires_closure(optimizer):
        why = _CLOSURE
    if why is not None:
        raise PartitionError(f"{type(optimizer).__name__} cannot run in an engine: {why}. Use AdamW, for example.")
    if not isinstance(optimizer, (NormOptimizer, AveragingOptimizer)):
        _refuse_wrapper(optimizer)


def refuse_on_tier(optimizer: Optimizer) -> None:
    """Raise `PartitionError` for an optimizer that a tier (offload_optimizer) cannot run, as it has to see more than
    fragments of parameters: full ones, norms of them, or the whole model; and for one that no engine can run."""
    refuse_unusable(optimizer)
    kind = type(optimizer).__name__
    if need_of(optimizer) is not Need.ELEMENTS or isinstance(optimizer, NormOptimizer):
        raise PartitionError(
            f"zero_optimization.offload_optimizer: {kind} looks at full parameters (factored states, norms, "
            "orthogonalisation), but the host updates fragments of them, whose results would differ. Set "
            'offload_optimizer.device to "none", where each full parameter has one rank that updates it, or use Adam, '
            f"AdamW, Adagrad, Lion, SGD or another elementwise optimizer; if {kind} is one, its class has to say so: "
            "elementwise = True."
        )


def need_of(optimizer: Optimizer, device: torch.device = _CPU) -> Need:
    """Return the smallest thing on which ``optimizer`` computes correctly.

    torch's own elementwise optimizers, `NormOptimizer` and `AveragingOptimizer` are known. Any other is run on small
    matrices, together and apart, with the hyperparameters of each group, and needs at least full parameters, as the
    probe does not show what it does with larger ones or in later steps. A class that defines ``elementwise = True``
    beside its arithmetic needs only elements, unless the probe disproves that. ``device``: where it will step, and is
    probed. Raises `PartitionError` if the probe fails.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return Need.ELEMENTS
    if isinstance(optimizer, NormOptimizer):
        return Need.ELEMENTS
    if isinstance(optimizer, AveragingOptimizer):
        return Need.MODEL
    with torch._C._DisableTorchDispatch():  # the probe computes with values, also where the script's tensors are fake
        found = [_probe(optimizer, group, device) for group in optimizer.param_groups]
    return next((need for need in (Need.MODEL, Need.PARAMETERS) if need in found), Need.ELEMENTS)


def _is_declared(kind: type) -> bool:
    """Return whether the optimizer class ``kind`` declares ``elementwise = True`` for the arithmetic that it runs: in
    the class itself, or in the parent whose ``step`` and ``update`` it inherits unchanged."""
    steps = [_without_hooks(parent.__dict__["step"]) if "step" in parent.__dict__ else None for parent in kind.__mro__]
    for number, parent in enumerate(kind.__mro__):
        if "elementwise" in parent.__dict__:
            return parent.__dict__["elementwise"] is True
        is_inherited = steps[number] in (None, *steps[number + 1 :])  # torch puts a hooked one into every class
        if "update" in parent.__dict__ or not is_inherited:
            return False
    return False


def check_repeats(optimizer: Optimizer, need: Need, device: torch.device = _CPU) -> None:
    """Raise `PartitionError` for an optimizer whose results, bit by bit, depend on how its parameters are sharded.

    An elementwise one is tested on a vector that torch spreads over several threads, once in one piece and once split
    at multiples of `GRID`; one that needs full parameters passes. A `NormOptimizer` and an `AveragingOptimizer` always
    raise. ``need``: the result of `need_of` for ``device``, where it will step.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, (NormOptimizer, AveragingOptimizer)):
        raise PartitionError(
            f"{kind} adds up over the ranks by itself, in an order that depends on their number: it cannot run under "
            "deterministic.across_world_sizes. Use AdamW, for example."
        )
    if need is not Need.ELEMENTS:
        return
    with torch._C._DisableTorchDispatch():  # as in `need_of`
        repeats = all(_is_independent_of_shards(optimizer, group, device) for group in optimizer.param_groups)
    if not repeats:
        raise PartitionError(
            f"{kind} gives other bits when a parameter is sharded, so they would depend on the number of ranks: it "
            "cannot run under deterministic.across_world_sizes. Use the optimizer that the configuration names "
            '("optimizer": {"type": "AdamW"}), or torch.optim.AdamW(foreach=False).'
        )


def _is_independent_of_shards(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Return whether two steps of ``optimizer`` on a long vector on ``device``, with the hyperparameters of the param
    group ``group``, give the same bits in one piece and split at multiples of `GRID`."""
    whole = torch.randn(_REPEATS * GRID + 77, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [part.clone() for part in whole.tensor_split([GRID, 4 * GRID, _REPEATS // 2 * GRID])]
    together, apart = (torch.cat(_two_steps(optimizer, group, parts)) for parts in ([whole], pieces))
    return torch.equal(together.view(torch.int32), apart.view(torch.int32))


def _probe(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> Need:
    """Return the need of ``optimizer``, found by steps on small matrices on ``device`` with the hyperparameters of the
    param group ``group``.

    It is MODEL if two matrices together get other values than apart, ELEMENTS if the class declares itself elementwise
    and two fragments get the values of the full matrix, else PARAMETERS. Raises `PartitionError` if the optimizer fails
    on matrices.
    """
    first, second = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        whole = _two_steps(optimizer, group, [first])
        together = _two_steps(optimizer, group, [first, second])
        apart = [*whole, *_two_steps(optimizer, group, [second])]
    except Exception as error:
        raise _probe_error(optimizer, "matrices of 6 x 4", error) from error
    if not _nearly_equal(together, apart):
        return Need.MODEL
    if not _is_declared(type(optimizer)):
        return Need.PARAMETERS
    fragments = list(torch.split(first.flatten(), [9, 15]))
    try:
        split = _two_steps(optimizer, group, fragments)
    except Exception as error:
        _check_that_matrices_run(optimizer, group, fragments, error)
        return Need.PARAMETERS
    return Need.ELEMENTS if _nearly_equal(split, whole) else Need.PARAMETERS


def _check_that_matrices_run(
    optimizer: Optimizer, group: dict[str, Any], fragments: list[torch.Tensor], failure: Exception
) -> None:
    """Raise `PartitionError` with ``failure`` unless the optimizer runs on the elements of ``fragments`` (1-D) as
    matrices. If it does, it failed only because they are 1-D, so it needs full parameters.

    ``group``: the param group whose hyperparameters are used. ``failure``: what the optimizer raised for ``fragments``.
    """
    try:
        _two_steps(optimizer, group, [fragment.view(-1, 3) for fragment in fragments])
    except Exception as error:
        raise _probe_error(optimizer, "two tensors of 9 and 15 elements, also as matrices", failure) from error


def _refuse_wrapper(optimizer: Optimizer) -> None:
    """Raise `PartitionError` if ``optimizer`` has other optimizers as attributes, also in a list, tuple or dict, and so
    calls them (Lookahead, several in one)."""
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        inner = [type(one).__name__ for one in several if isinstance(one, Optimizer)]
        if inner:
            raise PartitionError(
                f"{kind} wraps {' and '.join(inner)} as '{name}', and what it keeps of the parameters would be of "
                f"those before they are sharded. Give initialize {_INSTEAD[len(inner) > 1]}, and write what {kind} "
                "adds as optimizer.register_step_post_hook(hook): inside hook(optimizer, args, kwargs) the tensors in "
                "optimizer.param_groups may be read and written, and optimizer.state[p] keeps values for them."
            )


def _requires_closure(optimizer: Optimizer) -> bool:
    """Return whether the ``step`` of the class of ``optimizer`` cannot be called without arguments."""
    try:
        inspect.signature(_without_hooks(type(optimizer).step)).bind(optimizer)
    except ValueError:  # compiled code without a signature
        return False
    except TypeError:
        return True
    return False


def _probe_error(optimizer: Optimizer, on: str, error: Exception) -> PartitionError:
    """Return the error for a probe of ``optimizer`` that failed with ``error``. ``on``: describes the probe's
    tensors."""
    return PartitionError(
        f"{type(optimizer).__name__} failed on a small probe, {on}: {error}. At stages 1 to 3 the engine gives an "
        "optimizer other tensors than it was made with: have step() make what it keeps of a parameter p at first use, "
        "in self.state[p], or use stage 0."
    )


def _two_steps(optimizer: Optimizer, group: dict[str, Any], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each of ``values``, flattened, after two steps of ``optimizer`` with the hyperparameters of the param
    group ``group``.

    A copy of the optimizer without its hooks and states steps, on copies of ``values``; the made-up gradients of a
    value depend on that value alone.
    """
    probe = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # torch copies none of an optimizer's own attributes
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            probe.__dict__.setdefault(name, copy.copy(value))
    probe.state = defaultdict(dict)
    hyperparameters = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    pieces = [nn.Parameter(value.clone()) for value in values]
    probe.param_groups = [{**hyperparameters, "params": pieces}]
    if isinstance(probe, PositionedOptimizer):
        ends = accumulate((-(-piece.numel() // GRID) * GRID for piece in pieces), initial=0)
        probe.positions = dict(zip(pieces, ends, strict=False))
    for turn in range(2):
        for piece, value in zip(pieces, values, strict=True):
            piece.grad = (value * (3.0 + turn)).sin()
        _without_hooks(type(probe).step)(probe)
    return [piece.detach().flatten() for piece in pieces]


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``step`` of an optimizer class without the call of hooks that torch wraps around it, which
    would take a probe for a step of training."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _nearly_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Return whether the tensors of ``left``, one after the other, equal those of ``right`` up to rounding; all are
    1-D."""
    return bool(torch.allclose(torch.cat(left), torch.cat(right), rtol=1e-6, atol=1e-7))
