"""Make ``state`` and state dicts of the user's optimizer work with fragments, and with states on a tier.

The state of a fragment is a dict from kind ("exp_avg", "step") to value; ``state`` has it by the fragment's tensor.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .errors import PartitionError
from .fragment_states import FragmentStates, StateElsewhere
from .guarded_tensors import GuardedTensor, plain
from .tier import StateTier
from .tier_states import TierStates
from .updates import OwnedFragment

StateDict = dict[str, Any]
_UNGUARDED = frozenset([torch.Tensor, bool, int, float, type(None)])
_FRAGMENTS = "zero_fragments"  # in a state dict of fragments: by parameter, the range of elements


@dataclass(frozen=True)
class ListedParameter:
    """A parameter that the user listed in a param group.

    ``shape``: of the full parameter. ``owned``: this rank's fragment of it, None for none. ``tensor``: stands in the
    param group instead of the parameter; it is empty without a fragment.
    """

    name: str
    shape: torch.Size
    owned: OwnedFragment | None
    tensor: nn.Parameter

    @property
    def held_shape(self) -> torch.Size:
        """Return the shape of this rank's fragment; (0,) without one."""
        return torch.Size([0]) if self.owned is None else self.owned.shape


class OptimizerStates:
    """Replaces ``state``, and hooks into `state_dict` and `load_state_dict`, of an optimizer whose groups hold this
    rank's fragments.

    ``listed``: by group, the parameters as the user listed them. ``tier``: keeps the states, None if the optimizer
    does. ``name_of``: returns the name of a parameter of the model, "" for anything else. ``await_readers``: waits
    until states may be used. ``tell``: publishes why this rank fails, for ranks that wait for it. `load_state_dict`
    accepts the `state_dict` of this optimizer on this rank, and that of plain torch for the full parameters in the same
    order (as at stage 0), of which every rank keeps its part. It refuses anything else with a `PartitionError`. Weights
    and masters are not touched. Nothing communicates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        listed: list[list[ListedParameter]],
        tier: StateTier | None,
        name_of: Callable[[nn.Parameter], str],
        await_readers: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._optimizer = optimizer
        self._listed = listed
        self._tier, self._name_of, self._await_readers, self._tell = tier, name_of, await_readers, tell
        self._on_tier: TierStates | None = None
        self._held: FragmentStates | None = None
        self._read: Callable[[], None] | None = None
        self.install_mapping()
        optimizer.register_state_dict_pre_hook(self._unwatch_for_state_dict)
        optimizer.register_state_dict_post_hook(self._complete_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._shard_state_dict)
        optimizer.register_load_state_dict_post_hook(self.install_mapping)

    def install_mapping(self, _optimizer: Optimizer | None = None) -> None:
        """Replace ``optimizer.state``, if it is a plain dict, by a mapping that refuses entries that would have no
        effect: those by parameters of the model. A hook, so it gets the optimizer.

        If a tier keeps the states, the mapping reads and writes them there, and those of the dict move to the tier;
        fragments without any in the dict lose those that the tier has. Called at construction, after `load_state_dict`
        and before each step, as user code may have set another dict. Raises `PartitionError` if that dict has an entry
        for one of the model's own parameters, or is a mapping on the tier that the optimizer had earlier.
        """
        entries = self._optimizer.state
        if isinstance(entries, TierStates) and entries is not self._on_tier:
            raise PartitionError(
                "optimizer.state was set to a mapping that it had earlier: that shows what the tier has now "
                "(offload_optimizer), not what it had then. Keep copy.deepcopy(optimizer.state) and set that."
            )
        if self._on_tier is not None and entries is self._on_tier:
            self._on_tier.store_assigned()
        if type(entries) not in (dict, defaultdict):  # a save that still reads the states has a mapping of its own
            return
        if self._tier is None:
            self._optimizer.state = self._held = FragmentStates(entries, self._name_of)
            if self._read is not None:
                self._held.watch(self._read)
            return
        if self._on_tier is not None:
            self._on_tier.detach()
        listed = chain.from_iterable(self._listed)
        trained = {one.tensor: one.owned for one in listed if one.owned is not None or one.tensor.requires_grad}
        states = TierStates(self._tier, trained, self._name_of, self._await_readers, self._tell)
        self._move_to_tier(entries, self._tier)
        states.update((key, value) for key, value in entries.items() if not isinstance(key, torch.Tensor))
        self._optimizer.state = self._on_tier = states  # type: ignore[assignment]

    def restore_plain_state(self) -> None:
        """Make ``optimizer.state`` a plain dict again, with the states that the optimizer itself holds; it is empty if
        a tier keeps them."""
        if isinstance(self._optimizer.state, FragmentStates):
            self._optimizer.state = FragmentStates.copy(self._optimizer.state)
        elif isinstance(self._optimizer.state, TierStates):
            self._optimizer.state = defaultdict(dict)

    def state_of(self, owned: OwnedFragment) -> Mapping[str, Any]:
        """Return the state of the fragment ``owned`` that the optimizer itself holds, with plain tensors in the states'
        memory; empty without one, or if a tier keeps the states."""
        if self._tier is not None:
            return {}
        states = self._optimizer.state
        kept = dict.get(states, owned.tensor) if isinstance(states, FragmentStates) else states.get(owned.tensor)
        return _plain_state(kept) if kept else {}

    def replace_state(self, owned: OwnedFragment, state: dict[str, Any] | None) -> None:
        """Set the state of the fragment ``owned`` that the optimizer itself holds to ``state``; None removes it, if
        there is one."""
        states: Any = self._optimizer.state
        if state is not None:
            states[owned.tensor] = state
        elif owned.tensor in states:
            del states[owned.tensor]

    def watch(self, read: Callable[[], None]) -> None:
        """Have ``read`` called before code next reads states that the optimizer holds, and again at the first read
        after each state dict or new mapping, until `unwatch`."""
        self._read = read
        if self._held is not None:
            self._held.watch(read)

    def unwatch(self) -> None:
        """Stop calling the function that `watch` was given; do nothing without one."""
        self._read = None
        if self._held is not None:
            self._held.unwatch()

    def list_all(self) -> Iterable[tuple[Any, Any]]:
        """Return `entries`, sorted as the param groups are, after adding a `StateElsewhere` for every trained parameter
        without a fragment here, so that all ranks see the same keys. Adds nothing if there are no entries yet."""
        held = self._held
        if held:
            known = dict(dict.items(held))
            held.clear()
            for parameter in chain.from_iterable(self._listed):
                if parameter.tensor in known:
                    dict.__setitem__(held, parameter.tensor, known.pop(parameter.tensor))
                elif parameter.owned is None and parameter.tensor.requires_grad:
                    dict.__setitem__(held, parameter.tensor, StateElsewhere(parameter.tensor, self._step_of_any))
            dict.update(held, known)
        return self.entries()

    def _step_of_any(self) -> Any:
        """Return a copy of the value ``step`` of the first state on this rank that has one, usually a tensor; a tensor
        0 if none has."""
        counted = (kept["step"] for _, kept in self.entries() if isinstance(kept, dict) and "step" in kept)
        return copy.deepcopy(next(counted, torch.zeros(())))

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Return (tensor, state) for each fragment whose state the optimizer itself holds; empty if a tier keeps
        them."""
        return () if self._held is None else dict.items(self._held)

    def _unwatch_for_state_dict(self, _optimizer: Optimizer) -> None:
        """Stop watching reads while torch builds a state dict; `_complete_state_dict` watches again. A pre-hook of
        `state_dict`."""
        if self._held is not None:
            self._held.unwatch()

    def _move_to_tier(self, entries: Mapping[Any, Any], tier: StateTier) -> None:
        """Replace the states on ``tier`` by those in ``entries`` (by tensor). Fragments without an entry lose their
        state, and a state without ``step`` gets 1. Waits for readers if any state changes."""
        fresh: dict[str, dict[str, Any]] = {}
        again: list[str] = []
        for owned in self._fragments():
            name = owned.fragment.entry.name
            given = {kind: plain(value) for kind, value in entries.get(owned.tensor, {}).items() if value is not None}
            known = {
                kind: value.flatten() if isinstance(value, torch.Tensor) and value.shape == owned.shape else value
                for kind, value in given.items()
            }
            if known:
                fresh[name] = {"step": 1, **known}  # torch's SGD has moments and counts no steps
            if known or tier.held(name)[0]:
                again.append(name)
        if again:
            self._await_readers()
            tier.restart(again)
        if fresh:
            tier.write(fresh)

    def _fragments(self) -> list[OwnedFragment]:
        """Return this rank's fragments in the order of the param groups."""
        return [listed.owned for group in self._listed for listed in group if listed.owned is not None]

    def _complete_state_dict(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """Return ``state_dict`` with the ranges of its fragments and the tier's moments, and watch reads again: a
        post-hook of the optimizer's `state_dict`.

        Entries of parameters that other ranks update are removed, as torch's optimizers would miss ``step`` in them.
        8-bit moments are left out, as torch's format has no room for their scales.
        """
        if self._held is not None and self._read is not None:
            self._held.watch(self._read)
        elsewhere = {number for number, one in enumerate(chain.from_iterable(self._listed)) if one.owned is None}
        kept = {number: _plain_state(state) for number, state in state_dict["state"].items() if number not in elsewhere}
        state_dict = {**state_dict, "state": kept}
        if any(parameter.held_shape != parameter.shape for parameter in chain.from_iterable(self._listed)):
            state_dict = {**state_dict, _FRAGMENTS: self._ranges()}
        if self._tier is None:
            return state_dict
        listed = chain.from_iterable(self._listed)
        number = {parameter.name: index for index, parameter in enumerate(listed) if parameter.owned is not None}
        state = {}
        for name, kept in self._tier.states(list(number)):
            moments = {kind: value for kind, value in kept.items() if kind != "master"}
            if moments.keys() != {"step"} and not any(kind.endswith("_scale") for kind in moments):
                on_tier = self._on_tier
                state[number[name]] = moments if on_tier is None else on_tier.state_of(name).shown(moments)
        return {**state_dict, "state": state}

    def _shard_state_dict(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict | None:
        """Return ``state_dict``, if it has full states, with this rank's part of them; None (take it as it is) if its
        states are of fragments already. A pre-hook of the optimizer's `load_state_dict`.

        Raises `PartitionError`, changing nothing, if ``state_dict`` does not fit the optimizer.
        """
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        states = {number: _plain_state(state) for number, state in state_dict["state"].items()}
        if _group_sizes(saved) != _group_sizes(self._listed):
            raise PartitionError(
                f"optimizer.load_state_dict: expected param groups of {_group_sizes(self._listed)} parameters, as the "
                f"optimizer was made with, got {_group_sizes(saved)}. Nothing was changed."
            )
        self._check_fragments(state_dict.get(_FRAGMENTS))
        numbered = list(zip(chain.from_iterable(saved), chain.from_iterable(self._listed), strict=True))
        if all(_fits_fragment(parameter, states.get(number, {})) for number, parameter in numbered):
            self._refuse_left_out(states)
            return None
        sharded = {
            number: sharded_state(states[number], parameter.name, parameter.shape, parameter.owned)
            for number, parameter in numbered
            if parameter.owned is not None and states.get(number)
        }
        return {**state_dict, "state": sharded}

    def _ranges(self) -> dict[str, list[int]]:
        """Return, by parameter name, the range of its elements that this rank updates: [first element, end]."""
        fragments = [owned.fragment for owned in self._fragments()]
        return {f.entry.name: [f.param_offset, f.param_offset + f.length] for f in fragments}

    def _check_fragments(self, saved: dict[str, list[int]] | None) -> None:
        """Raise `PartitionError` if ``saved``, the ranges in a state dict (as of `_ranges`), are not this rank's. None,
        which stands for full states, passes."""
        here = self._ranges()
        if saved is None or saved == here:
            return
        name = next(name for name in (*here, *saved) if here.get(name) != saved.get(name))
        raise PartitionError(
            f"optimizer.load_state_dict: the states are of other fragments than this rank's: of '{name}' it updates "
            f"{_describe_range(here.get(name))}, the state dict has {_describe_range(saved.get(name))}. At stages 1 to "
            "3 optimizer.state_dict() is of one rank: load it on the rank that saved it, or use engine.save_checkpoint "
            "and engine.load_checkpoint, which load at any number of ranks and stage. Nothing was changed."
        )

    def _refuse_left_out(self, states: Mapping[Any, Any]) -> None:
        """Raise `PartitionError` if a state dict without any states is loaded while the tier has 8-bit moments, which
        state dicts leave out and loading would reset. ``states``: those of the state dict, by number of the
        parameter."""
        if self._tier is None or states:
            return
        for owned in self._fragments():
            step, held = self._tier.held(owned.fragment.entry.name)
            if step and any(kind.endswith("_scale") for kind in held):
                raise PartitionError(
                    f"optimizer.load_state_dict: the states of '{owned.fragment.entry.name}' are 8-bit and not in "
                    "optimizer.state_dict(); use engine.save_checkpoint and engine.load_checkpoint"
                )


def sharded_state(state: Mapping[str, Any], name: str, shape: torch.Size, owned: OwnedFragment) -> dict[str, Any]:
    """Return the part of ``state``, the state of a full parameter, that belongs to the fragment ``owned``. Tensors of
    the parameter's ``shape`` are sliced, also in lists and tuples, others copied.

    ``name``: the parameter's. Raises `PartitionError` for a tensor of another shape unless the fragment is the full
    parameter.
    """
    start, end = owned.fragment.param_offset, owned.fragment.param_offset + owned.fragment.length
    whole = owned.fragment.length == shape.numel()

    def part_of(key: str, value: Any) -> Any:
        """Return a copy of ``value`` with each tensor of the parameter's shape, in lists and tuples too, replaced by
        this rank's fragment of it. ``key``: names the value in the error."""
        if isinstance(value, (list, tuple)):
            return type(value)(part_of(f"{key}[{number}]", one) for number, one in enumerate(value))
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
            return value.flatten()[start:end].clone().view(owned.shape)
        if isinstance(value, torch.Tensor) and value.numel() > 1 and not whole:
            raise PartitionError(
                f"the optimizer's state '{key}' of parameter '{name}': expected shape {tuple(shape)}, got "
                f"{tuple(value.shape)}"
            )
        return copy.deepcopy(value)

    part = {key: part_of(str(key), value) for key, value in state.items()}
    return defaultdict(dict, part) if isinstance(state, defaultdict) else part


def number_device(group: Mapping[str, Any], owned: OwnedFragment) -> torch.device:
    """Return the device on which an optimizer keeps numbers of the state of the fragment ``owned``, ``step`` for
    example: the fragment's where the param ``group`` says fused or capturable, as in torch's `load_state_dict`, else
    the CPU."""
    return owned.tensor.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def moved_state(state: dict[str, Any], group: Mapping[str, Any], owned: OwnedFragment) -> dict[str, Any]:
    """Return ``state`` of the fragment ``owned``, in the param ``group``, with its tensors on the fragment's device,
    and numbers (0-D) where `number_device` says; ``state`` itself for a fragment on the CPU."""
    if owned.tensor.device.type == "cpu":
        return state
    numbers = number_device(group, owned)

    def moved(value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` on the fragment's device, or, if it is 0-D, on that of the numbers."""
        return value.to(owned.tensor.device if value.dim() else numbers)

    return cast(dict[str, Any], tree_map_only(torch.Tensor, moved, state))


def _plain_state(state: Any) -> Any:
    """Return ``state`` with plain tensors of the same memory in place of guarded ones; ``state`` itself if it has
    none."""
    if isinstance(state, dict) and _UNGUARDED.issuperset(map(type, state.values())):
        return state
    return tree_map(plain, state) if any(isinstance(leaf, GuardedTensor) for leaf in tree_leaves(state)) else state


def _describe_range(elements: list[int] | None) -> str:
    """Return words, for an error, about the range ``elements`` = [first element, end): "elements 0 to 7"; "nothing" for
    None."""
    return "nothing" if elements is None else f"elements {elements[0]} to {elements[1] - 1}"


def _fits_fragment(parameter: ListedParameter, state: Mapping[str, Any]) -> bool:
    """Return whether the tensors in ``state``, except 0-D ones, have the shape of this rank's fragment of
    ``parameter``.

    If the fragment is the full parameter, tensors of any other number of elements fit too, as optimizers may keep such.
    """
    shape = parameter.held_shape
    return not any(
        isinstance(value, torch.Tensor)
        and value.dim()
        and value.shape != shape
        and (shape != parameter.shape or value.numel() == shape.numel())
        for value in tree_leaves(dict(state))
    )


def _group_sizes(groups: Sequence[Sequence[Any]]) -> list[int]:
    """Return the number of parameters in each of ``groups``."""
    return [len(group) for group in groups]
