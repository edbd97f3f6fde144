"""Visits of a micro-batch to a module: its forward, of which only the inputs are kept, and its backward, which runs it
again.

The code of a micro-batch runs in a thread of its own; the driver, in the thread that trains, runs the visits that the
threads wait for (see [Note: unit by unit] in unit_by_unit.py). Plain data are numbers, strings, bytes, None, enums,
dtypes and the like, which no run of a module can change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from .errors import PartitionError
from .micro_batch_threads import GeneratorStates, MicroBatchThread
from .unit import Unit
from .visit_buffers import WatchedBuffers, statistics_kept

_LOOP = "use the ordinary loop of engine(batch), engine.backward and engine.step"
_WROTE_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"  # as torch says it
_WROTE_AN_INPUT = "modified by an inplace operation"  # torch, and the tiers of activations
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, enum.Enum)


@dataclass(frozen=True)
class Place:
    """A module whose calls are visits. ``name``: in the model. ``units``: those that its call uses. ``call``: calls the
    module itself."""

    name: str
    module: nn.Module
    units: tuple[Unit, ...]
    call: Callable[..., Any]

    @property
    def trains(self) -> bool:
        """True if one of the units is trained."""
        return any(unit.plan.trainable for unit in self.units)

    def members(self, unit: Unit) -> list[str]:
        """Return the names of those members of ``unit`` (modules whose forward uses it) that lie inside this module,
        and so have run when it has."""
        return [name for name in unit.plan.members if name.startswith(f"{self.name}.")]


class Asked(NamedTuple):
    """A request of a micro-batch to the driver: run the forward of a ``visit``, or its backward if ``gradients`` is not
    None.

    ``tensors``: the visit's input tensors. ``gradients``: of its output tensors, None where there is none.
    """

    visit: Visit
    tensors: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...] | None


class VisitOutputs(NamedTuple):
    """The output tensors of a visit's forward, detached, and for each whether it requires a gradient."""

    tensors: list[torch.Tensor]
    require: list[bool]


@dataclass
class Visit:
    """One call of the module at ``place`` by the micro-batch of ``thread``.

    `call` asks the driver for the forward; the driver calls `forward`, and later `backward`. ``grad``: gradients are
    enabled around the call. ``autocast``: the autocast state of each device there, as arguments of `torch.autocast`.
    """

    place: Place
    thread: MicroBatchThread
    grad: bool = field(default_factory=torch.is_grad_enabled)
    autocast: list[tuple[str, torch.dtype, bool, bool]] = field(default_factory=lambda: _autocast_states())
    _spec: TreeSpec | None = None
    _leaves: list[Any] = field(default_factory=list)
    _outputs: list[Any] = field(default_factory=list)
    _output_spec: TreeSpec | None = None
    _generators: GeneratorStates | None = None
    _graph: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Sequence[Callable[[], Any]]) -> Any:
        """Return the module's output for ``args`` and ``kwargs``. Autograd keeps only the tensors among these, not the
        module's graph; it saves them inside the contexts that the functions ``around`` return.

        Raises `PartitionError` in a backward pass, and for an argument that is neither a tensor nor plain data, as the
        second run might find it changed.
        """
        if self.thread.backpropagates:
            raise PartitionError(
                f"train_batch: module '{self.place.name}' is called again in backward, as activation checkpointing "
                "around it does. train_batch keeps the inputs of units only, as such checkpoints do: switch them off, "
                "as with model.gradient_checkpointing_disable(), or use them inside the units."
            )
        leaves, self._spec = tree_flatten((args, kwargs))
        self._refuse_changeable(args, kwargs)
        numbers: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
        self._leaves = [_Input(numbers[id(x)]) if isinstance(x, torch.Tensor) else x for x in leaves]
        anchor = torch.empty(0, requires_grad=self.grad and self.place.trains)
        with ExitStack() as stack:
            for enter in around:
                stack.enter_context(enter())
            made = _VisitNode.apply(self, anchor, *tensors)  # type: ignore[no-untyped-call]
        outputs = iter(made)
        return tree_unflatten([next(outputs) if x is _TENSOR else x for x in self._outputs], self._output_spec)  # type: ignore[arg-type]

    def forward(self, tensors: Sequence[torch.Tensor], *, is_new: bool) -> VisitOutputs:
        """Run the module with ``tensors`` as its input tensors and return its output tensors; keep its graph until
        `drop_graph`.

        ``is_new``: the module was not visited before; values of its buffers are compared too. Raises `PartitionError`
        for an output that is neither tensor nor plain data, and for a module that changes a buffer, an argument or
        keeps a tensor, as its second run would find that.
        """
        self._generators = self.thread.generators.copy()
        buffers = WatchedBuffers(self.place.module, by_value=is_new)
        inputs, output = self._run_module(tensors)
        self._refuse_kept(buffers)
        leaves, self._output_spec = tree_flatten(output)
        foreign = next((x for x in leaves if not isinstance(x, (torch.Tensor, *_PLAIN))), None)
        if foreign is not None:
            raise PartitionError(
                f"train_batch: module '{self.place.name}' returned a {type(foreign).__name__}, in which autograd "
                "cannot follow tensors from unit to unit. Return tensors in tuples, lists, dicts or ModelOutput, or "
                f"{_LOOP}."
            )
        self._outputs = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self.grad:
            self._graph = (inputs, outputs)
        return VisitOutputs([x.detach() for x in outputs], [x.requires_grad for x in outputs])

    def drop_graph(self) -> None:
        """Free the graph that `forward` has kept; `backward` then runs the module again."""
        self._graph = None

    def backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Backpropagate ``gradients``, those of the output tensors, through the module; run it again unless its graph
        is kept.

        Return the gradients of ``tensors``, the input tensors; parameters get theirs as in any backward pass.
        Statistics that the module writes in the second run are restored.
        """
        graph, self._graph = self._graph, None
        if graph is not None:
            return _backpropagate(*graph, gradients)
        with statistics_kept(self.place.module):
            with cast(GeneratorStates, self._generators).copy().in_force():
                inputs, output = self._run_module(tensors)
            outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
            return _backpropagate(inputs, outputs, gradients)

    def _run_module(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Call the module as the micro-batch did, but with new leaves of the graph (views of them) in place of the
        input ``tensors``. Return (leaves, output). Raises `PartitionError` if the module has changed one of its
        arguments."""
        starts = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad():  # autocast would keep casts of leaves, and sum their gradients in another dtype
            inputs = [x.view_as(x) if x.requires_grad and x.layout == torch.strided else x for x in starts]
        leaves = [inputs[x.number] if isinstance(x, _Input) else x for x in self._leaves]
        args, kwargs = tree_unflatten(leaves, cast(TreeSpec, self._spec))
        with ExitStack() as stack:
            for device, dtype, enabled, cached in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cached))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            versions = [t._version for t in tensors]
            try:
                output = self.place.call(*args, **kwargs)
            except RuntimeError as failure:
                if _WROTE_A_LEAF in str(failure):
                    raise self._in_place_error("an argument that requires gradients, or a parameter") from failure
                raise
        for number, tensor in enumerate(tensors):
            if tensor._version != versions[number]:
                place = next(path for path, leaf in tree_flatten_with_path((args, kwargs))[0] if leaf is inputs[number])
                raise self._in_place_error(f"argument {keystr(place[1:])}, a tensor of shape {list(tensor.shape)},")
        after, spec = tree_flatten((args, kwargs))
        if spec != self._spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise PartitionError(
                f"train_batch: module '{self.place.name}' changed a list or a dict among its arguments. Its forward "
                "runs twice for each micro-batch, so it has to leave its arguments alone: use the ordinary loop of "
                "engine(batch), engine.backward and engine.step."
            )
        return starts, output

    def _in_place_error(self, what: str) -> PartitionError:
        """Return the error for a module that has written in place to ``what``, a phrase for an argument or
        parameter."""
        return PartitionError(
            f"train_batch: module '{self.place.name}' changed {what} in place, and its forward runs twice for each "
            f"micro-batch, the second time with what it left: write x = x * 2, not x *= 2, in it, or {_LOOP}."
        )

    def _refuse_kept(self, buffers: WatchedBuffers) -> None:
        """Raise `PartitionError`, naming the buffer or attribute, if the module's forward has changed one of
        ``buffers`` or has kept a tensor with a graph as an attribute."""
        changed = buffers.changed()
        if changed is not None:
            raise PartitionError(
                f"train_batch: module '{self.place.name}' changed its buffer '{changed}', and its forward runs twice "
                f"for each micro-batch: {_LOOP}."
            )
        for module in self.place.module.modules():
            for name, kept in vars(module).items():
                if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
                    raise PartitionError(
                        f"train_batch: module '{self.place.name}' has kept a tensor of its forward as '{name}', "
                        f"through which a loss would not reach the units before: {_LOOP}."
                    )

    def _refuse_changeable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `PartitionError`, naming the argument, if one of ``args`` and ``kwargs`` is neither a tensor nor plain
        data."""
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                advice = "pass use_cache=False" if "cache" in type(leaf).__name__.lower() else "use the ordinary loop"
                raise PartitionError(
                    f"train_batch: argument {keystr(path[1:])} of module '{self.place.name}' is a "
                    f"{type(leaf).__name__}. The module's forward runs twice for each micro-batch, and may find it "
                    f"changed the second time: {advice}."
                )


class _Input(NamedTuple):
    """Stands, among a visit's arguments, for its input tensor with index ``number``."""

    number: int


class _Tensor:
    """Stands for a tensor among a visit's outputs."""


_TENSOR = _Tensor()


class _VisitNode(torch.autograd.Function):
    """The node of autograd's graph that stands for a visit."""

    @staticmethod
    def forward(ctx: Any, visit: Visit, _anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Ask the driver for the forward of ``visit`` with the inputs ``tensors``; return the output tensors.
        ``_anchor``: an empty tensor that requires gradients if the visit's parameters do, so that backward comes here.
        """
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        result: VisitOutputs = visit.thread.ask(Asked(visit, tensors, None))
        ctx.mark_non_differentiable(*[t for t, required in zip(*result, strict=True) if not required])
        return tuple(result.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Ask the driver for the visit's backward with ``gradients``, those of its output tensors; return those of the
        arguments of `forward`.

        Raises `PartitionError` before the backward pass of the loss, and if an input was changed in place since.
        """
        if not ctx.visit.thread.backpropagates:
            raise PartitionError(
                f"train_batch: autograd.grad went through module '{ctx.visit.place.name}' before the backward pass of "
                f"the loss: {_LOOP}."
            )
        try:
            tensors = ctx.saved_tensors
        except RuntimeError as failure:
            if _WROTE_AN_INPUT not in str(failure):
                raise
            raise PartitionError(
                f"train_batch: a tensor that module '{ctx.visit.place.name}' was called with has been changed in place "
                "since, and the module runs again from it in backward: write hidden = hidden + output, not hidden += "
                f"output, around it, or {_LOOP}."
            ) from failure
        return None, None, *ctx.visit.thread.ask(Asked(ctx.visit, tensors, gradients))


def _backpropagate(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Backpropagate ``gradients``, those of ``outputs`` (None where there is none), and return the gradients of
    ``inputs``, which are leaves of the graph."""
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad and g is not None]
    torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    return [x.grad for x in inputs]


def _autocast_states() -> list[tuple[str, torch.dtype, bool, bool]]:
    """Return the calling thread's autocast state for the CPU and for the accelerator, if there is one: for each the
    arguments of `torch.autocast`."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    cached = torch.is_autocast_cache_enabled()
    return [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d), cached) for d in devices]
