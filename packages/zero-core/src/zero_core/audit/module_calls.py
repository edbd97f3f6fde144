"""Record calls of modules so that one of them can be repeated, and find the reasons why a call cannot be repeated."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from zero_ckpt.torch import RngState
from zero_partition import Unit

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OURS = ("zero_core.", "zero_partition.")
_LONG = 64


@dataclass(frozen=True)
class AuditedUnit:
    """A unit whose parameters are exactly the trained parameters of one module's subtree."""

    unit: Unit
    module: nn.Module

    def obstacle(self) -> str | None:
        """Return a message if no call of the module can be repeated now (frozen weights, hooks and so on); else
        None."""
        if not all(p.requires_grad for p in self.unit.parameters):
            return "some of its weights are frozen now"
        if any(_has_hooks(p) for p in self.unit.parameters):
            return "its weights have gradient hooks"
        if any(_global_hooks()):
            return "there are hooks for all modules"
        for module in self.module.modules():
            if not all(map(_is_ours, _hooks_of(module))):
                return "its module, or one inside, has hooks"
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                return "its module, or one inside, keeps running statistics"
            if module._compiled_call_impl is not None or "_orig_mod" in dict(module.named_children()):
                return "its module, or one inside, is compiled"
        return None


def _has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks of the user, which may change values, are active now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    return not str(getattr(inspect.unwrap(hooks[0]), "__module__", "")).startswith((*_OURS, "torch."))


def _has_other_weights(module: nn.Module, unit: Unit) -> bool:
    """Return whether ``module`` has other tensors in the place of the unit's parameters, as torch.func puts there."""
    held = {id(value) for inside in module.modules() for value in inside._parameters.values()}
    return not all(id(parameter) in held for parameter in unit.parameters)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether the user has registered hooks on the gradient of ``parameter``; hooks of this project do not
    count."""
    with torch._C.DisableTorchFunctionSubclass():
        later = parameter._post_accumulate_grad_hooks or {}
        return bool(parameter._backward_hooks) or any(not _is_ours(hook) for hook in later.values())


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the forward and backward hooks of ``module``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        yield from hooks.values()
    for hooks in (module._backward_pre_hooks, module._backward_hooks):
        yield from hooks.values()


def _global_hooks() -> Iterator[Any]:
    """Yield torch's four dicts of forward and backward hooks that are registered for all modules."""
    kinds = nn.modules.module
    yield from (kinds._global_forward_pre_hooks, kinds._global_forward_hooks)
    yield from (kinds._global_backward_pre_hooks, kinds._global_backward_hooks)


def _is_ours(hook: Callable[..., Any]) -> bool:
    """Return whether ``hook`` is one of this project's: a module of zero-core or zero-partition defines it."""
    return str(getattr(hook, "__module__", "")).startswith(_OURS)


@dataclass(frozen=True)
class Surroundings:
    """The global settings of torch that change what a module computes. ``autocast``: (device type, enabled, dtype);
    ``cached_casts``: autocast keeps cast weights; ``others``: default dtype, threads, backends, active modes."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached_casts: bool
    others: tuple[Any, ...]

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """Return the settings in force now, for a model on ``device``."""
        kinds = dict.fromkeys((device.type, "cpu"))
        attention = torch.backends.cuda
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            (
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.enabled,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.deterministic,
                attention.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
                attention.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
                attention.math_sdp_enabled(),  # type: ignore[no-untyped-call]
                attention.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
                torch._C._len_torch_function_stack(),
                torch._C._len_torch_dispatch_stack(),
            ),
        )

    @contextmanager
    def casts(self) -> Iterator[None]:
        """Use autocast inside the block as it was when these settings were taken."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                cached = self.cached_casts
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield


class Attributes:
    """The attributes and buffers of a module and its submodules at one time. Those of two times are equal if nothing
    was replaced or written in between, as far as version counters and the items of containers (up to 64) show."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = {
            (number, name): (value, _state_of(value))
            for number, inner in enumerate(module.modules())
            for name, value in _attributes(inner)
        }

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is of the same module, and nothing in it was replaced or written in between."""
        if not isinstance(other, Attributes) or self._kept.keys() != other._kept.keys():
            return False
        pairs = zip(self._kept.values(), other._kept.values(), strict=True)
        return all(_is_same(ours, theirs) for ours, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def has_generator(self) -> bool:
        """Return whether an attribute is a generator of random numbers."""
        return any(_is_generator(value) for value, _ in self._kept.values())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the attributes of ``module`` that not all modules have, and for its buffers, as
    ``_buffers.name``."""
    for name, value in vars(module).items():
        if name not in _OF_MODULES:
            yield name, value
    for name, buffer in module._buffers.items():
        yield f"_buffers.{name}", buffer


def _state_of(value: Any) -> Any:
    """Return data that are another if ``value`` is written in place: of a tensor its version counter, of a container
    its length and, if these are up to 64, its items; None for anything else."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, (list, tuple, deque, set, dict)):
        items = [*value, *(value.values() if isinstance(value, dict) else ())] if len(value) <= _LONG else []
        return len(value), items
    return None


def _is_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    """Return whether an attribute was neither replaced nor written between two times; each argument is its value then
    and the `_state_of` of that."""
    (value, state), (other, later) = ours, theirs
    if isinstance(value, _PLAIN):
        return type(value) is type(other) and bool(value == other)
    if isinstance(state, tuple):
        kept = isinstance(value, tuple) or value is other
        pairs = zip(state[1], later[1], strict=True) if isinstance(later, tuple) and state[0] == later[0] else None
        return kept and type(value) is type(other) and pairs is not None and all(_is_same_item(*pair) for pair in pairs)
    return value is other and state == later


def _is_same_item(ours: Any, theirs: Any) -> bool:
    """Return whether two items of a container are one object, or equal plain values."""
    return ours is theirs or (isinstance(ours, _PLAIN) and type(ours) is type(theirs) and bool(ours == theirs))


def _is_generator(value: Any) -> bool:
    """Return whether ``value`` is a generator of random numbers, of torch, Python or NumPy."""
    return isinstance(value, (torch.Generator, random.Random)) or type(value).__module__.startswith("numpy.random")


@dataclass
class ModuleCall:
    """One call of a module: its arguments, its settings, and the autograd nodes where its graph begins and ends.

    Attributes:
        arguments: the positional and the keyword arguments, as a pair.
        versions: the tensors among the arguments, with their version counters at the call.
        random: the state of the random generators at the call.
        surroundings, attributes: torch's settings and the module's attributes at the call.
        inputs: nodes that computed its arguments.
        outputs: the index of each returned tensor among the leaves of the output, by (node, output number)."""

    arguments: Any
    versions: list[tuple[torch.Tensor, int]]
    random: dict[str, Any]
    surroundings: Surroundings
    attributes: Attributes
    inputs: set[Node]
    outputs: dict[tuple[Node, int], int] = field(default_factory=dict)

    def changed(self, module: nn.Module) -> str | None:
        """Return a message if a repetition would differ: arguments, attributes or buffers were written; else None."""
        if any(tensor._version != version for tensor, version in self.versions):
            return "what its module got was written in place"
        if self.attributes != Attributes(module):
            return "its module writes buffers or attributes"
        return None

    def repeat(self, module: nn.Module, device: torch.device) -> dict[int, torch.Tensor] | str:
        """Call the module again with gradients enabled. Return the leaves of its output, by index, or a message if
        torch's settings are now others. Sets the random generators, which the caller restores. What the module raises
        propagates."""
        with torch.enable_grad(), self.surroundings.casts():
            if Surroundings.now(device) != self.surroundings:
                return "its module ran under other settings of torch than backward"
            RngState().load_state_dict(self.random)
            arguments, keywords = tree_map(_detached, self.arguments)
            return dict(enumerate(tree_leaves(module(*arguments, **keywords))))


def _detached(leaf: Any) -> Any:
    """Return a tensor as a new leaf of autograd over the same memory, which requires gradients if it does; anything
    else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


class ModuleRecorder:
    """Records the calls of one module in a micro-batch. If there is only one, it can be repeated.

    ``wanted``: returns whether to keep the call of the recorder that it gets, as a call holds its arguments in memory.

    Attributes:
        call: the only call; None if there is none that can be repeated, or it is not wanted.
        obstacle: why no call can be repeated; None if nothing is known to forbid it."""

    def __init__(self, candidate: AuditedUnit, device: torch.device, wanted: Callable[[ModuleRecorder], bool]) -> None:
        self.candidate = candidate
        self.call: ModuleCall | None = None
        self.obstacle = candidate.obstacle()
        self._device = device
        self._wanted = wanted
        self._calls = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the calls of the module inside the block, by hooks; do nothing if there is an `obstacle`."""
        if self.obstacle is not None:
            yield
            return
        module = self.candidate.module
        before = module.register_forward_pre_hook(self._before, with_kwargs=True)
        after = module.register_forward_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @property
    def is_untried(self) -> bool:
        """Return whether the module was called exactly once and nothing known forbids repeating that call, kept or
        not."""
        return self.obstacle is None and self._calls == 1

    def why_not(self) -> str:
        """Return, for a log message, why no call of the module was repeated."""
        if self.obstacle is None and not self._calls:
            return "its module recorded no graph in forward (torch's reentrant checkpoints do not)"
        return self.obstacle or "not tried this time"

    def refuse(self, obstacle: str) -> None:
        """Drop the recorded call, as it cannot be repeated, and keep the reason as `obstacle`."""
        self.call, self.obstacle = None, obstacle

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep a call of the module if it is the first, can be repeated and is wanted. If it cannot, or is not the
        first, refuse with the reason. Does nothing while gradients are disabled or torch.compile traces. The forward
        pre-hook."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._calls += 1
        if self._calls > 1:
            self.refuse("its module was called several times")
            return
        leaves = tree_leaves((arguments, keywords))
        if not all(isinstance(leaf, _PLAIN) or _is_ordinary(leaf) for leaf in leaves):
            self.refuse("its module got objects, or tensors of other kinds")
        elif torch._C._len_torch_dispatch_stack():
            self.refuse("a dispatch mode is active")
        elif _has_saved_tensor_hooks():
            self.refuse("saved-tensor hooks are active")
        elif _has_other_weights(module, self.candidate.unit):
            self.refuse("its module computes with other tensors than its weights (torch.func.functional_call)")
        elif any(leaf is p for leaf in leaves for p in self.candidate.unit.parameters):
            self.refuse("its module got its own weights")
        elif (attributes := Attributes(module)).has_generator:
            self.refuse("its module has a generator of random numbers of its own")
        elif self._wanted(self):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.call = ModuleCall(
                (arguments, keywords),
                [(tensor, tensor._version) for tensor in tensors],
                RngState().state_dict(),
                Surroundings.now(self._device),
                attributes,
                {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None},
            )

    def _after(self, module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        """Add the autograd nodes of ``output`` to the kept call, or refuse it with the reason. The forward hook."""
        if torch.compiler.is_compiling() or self.call is None or self._calls != 1 or not torch.is_grad_enabled():
            return
        for place, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                if not _is_ordinary(leaf):
                    self.refuse("its module returned tensors of other kinds")
                    return
                self.call.outputs.setdefault((leaf.grad_fn, leaf.output_nr), place)
        if (changed := self.call.changed(module)) is not None:
            self.refuse(changed)


class CallRecorder:
    """Records the calls of audited modules in one micro-batch.

    ``candidates``: by unit index. ``order``: unit indices, most wanted first. Only the ``max_kept`` most wanted calls
    are kept, as their arguments stay in memory until backward is over.

    Attributes:
        modules: the recorder of each module, by unit index, in ``order``."""

    def __init__(
        self, candidates: Mapping[int, AuditedUnit], order: Sequence[int], device: torch.device, max_kept: int = 4
    ) -> None:
        self.modules = {unit: ModuleRecorder(candidates[unit], device, self._make_room) for unit in order}
        self._turns = {id(recorder): turn for turn, recorder in enumerate(self.modules.values())}
        self._max_kept = max_kept

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the calls of all audited modules inside the block, a forward pass."""
        with ExitStack() as stack:
            for recorder in self.modules.values():
                stack.enter_context(recorder.forward())
            yield

    def _make_room(self, asking: ModuleRecorder) -> bool:
        """Return whether the call that ``asking`` is recording may be kept. If as many calls as allowed are kept, drop
        the least wanted of them for one that is more wanted."""
        kept = [recorder for recorder in self.modules.values() if recorder.call is not None]
        if len(kept) < self._max_kept:
            return True
        if self._turns[id(asking)] > self._turns[id(kept[-1])]:
            return False
        kept[-1].call = None
        return True


def _is_ordinary(leaf: Any) -> bool:
    """Return whether ``leaf`` is a plain strided tensor with memory, which no transform of torch.func wraps."""
    if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout != torch.strided or leaf.is_inference():
        return False
    try:
        leaf.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True
