"""State dicts of the user's optimizer: full states of plain torch are sharded, states on a tier are found there."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import PartitionError
from .fragment_states import FragmentStates
from .tier import StateTier
from .tier_states import TierStates
from .updates import OwnedFragment

StateDict = dict[str, Any]
_FRAGMENTS = "zero_fragments"  # in a state dict of fragments: by parameter, its elements


@dataclass(frozen=True)
class ListedParameter:
    """A parameter as the user listed it in a param group: ``tensor`` is there now, with what this rank updates of it,
    ``owned``; without that it is empty."""

    name: str
    shape: torch.Size
    owned: OwnedFragment | None
    tensor: nn.Parameter


class OptimizerStates:
    """Takes the place of ``state``, and hooks into `state_dict` and `load_state_dict`, of an optimizer whose groups
    hold this rank's fragments.

    ``listed``: by group, the parameters as the user listed them. ``name_of``: the name of a parameter of the model,
    "" for anything else; ``await_readers`` returns when states may be used. `load_state_dict` takes what this
    optimizer's `state_dict` gave on this rank, and what plain torch's gave for the full parameters in the same order,
    as `state_dict` does at stage 0: of that every rank keeps its part. Anything else is refused by name. Weights and
    masters are not touched. Nothing communicates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        listed: list[list[ListedParameter]],
        tier: StateTier | None,
        name_of: Callable[[nn.Parameter], str],
        await_readers: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._listed = listed
        self._tier, self._name_of, self._await_readers = tier, name_of, await_readers
        self._on_tier: TierStates | None = None
        self.take()
        optimizer.register_state_dict_post_hook(self._complete)
        optimizer.register_load_state_dict_pre_hook(self._shard)
        optimizer.register_load_state_dict_post_hook(self.take)

    def take(self, _optimizer: Optimizer | None = None) -> None:
        """Have ``optimizer.state`` refuse what would not count, and where a tier keeps the states, read and write
        there. Do it again where somebody has set another dict: its states count, and fragments that it has nothing of
        begin anew.

        Raises `PartitionError` where that has an entry of the model's parameters.
        """
        entries = self._optimizer.state
        if isinstance(entries, TierStates) and entries is not self._on_tier:
            raise PartitionError(
                "optimizer.state was set to the mapping that it was before another one: that shows what the tier has "
                "now (offload_optimizer), not what it had then. Keep copy.deepcopy(optimizer.state) and set that."
            )
        if self._on_tier is not None and entries is self._on_tier:
            self._on_tier.take_assigned()
        if type(entries) not in (dict, defaultdict):  # a save that still reads the states has a mapping of its own
            return
        if self._tier is None:
            self._optimizer.state = FragmentStates(entries, self._name_of)
            return
        if self._on_tier is not None:
            self._on_tier.detach()
        states = TierStates(self._tier, self._fragments(), self._name_of, self._await_readers)
        self._move_to_tier(entries, self._tier)
        states.update((key, value) for key, value in entries.items() if not isinstance(key, torch.Tensor))
        self._optimizer.state = self._on_tier = states  # type: ignore[assignment]

    def give_back(self) -> None:
        """Give the optimizer a plain dict of the states that it keeps itself."""
        if isinstance(self._optimizer.state, FragmentStates):
            self._optimizer.state = self._optimizer.state.copy()
        elif isinstance(self._optimizer.state, TierStates):
            self._optimizer.state = defaultdict(dict)

    def held_by_optimizer(self, owned: OwnedFragment) -> Mapping[str, Any]:
        """The state of a fragment that the optimizer itself holds: nothing where a tier keeps the states."""
        return {} if self._tier is not None else self._optimizer.state.get(owned.tensor, {})

    def _move_to_tier(self, entries: Mapping[Any, Any], tier: StateTier) -> None:
        fresh: dict[str, dict[str, Any]] = {}
        anew: list[str] = []
        for owned in self._fragments():
            name = owned.fragment.entry.name
            known = {k: v for k, v in entries.get(owned.tensor, {}).items() if v is not None}
            if known:
                fresh[name] = {"step": 1, **known}  # torch's SGD has moments and counts no steps
            if known or tier.held(name)[0]:
                anew.append(name)
        if anew:
            self._await_readers()
            tier.restart(anew)
        if fresh:
            tier.write(fresh)

    def _fragments(self) -> list[OwnedFragment]:
        return [listed.owned for group in self._listed for listed in group if listed.owned is not None]

    def _complete(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """`state_dict` says which fragments its states are of, has none of what other ranks update, which torch's
        optimizers would miss a count of steps in, and has the tier's moments; 8-bit ones, which torch's format has no
        room for, are left out."""
        elsewhere = {number for number, one in enumerate(chain.from_iterable(self._listed)) if one.owned is None}
        kept = {number: state for number, state in state_dict["state"].items() if number not in elsewhere}
        state_dict = {**state_dict, "state": kept}
        if any(parameter.tensor.shape != parameter.shape for parameter in chain.from_iterable(self._listed)):
            state_dict = {**state_dict, _FRAGMENTS: self._ranges()}
        if self._tier is None:
            return state_dict
        listed = chain.from_iterable(self._listed)
        number = {parameter.name: index for index, parameter in enumerate(listed) if parameter.owned is not None}
        state = {}
        for name, kept in self._tier.states(list(number)):
            moments = {kind: value for kind, value in kept.items() if kind != "master"}
            if moments.keys() != {"step"} and not any(kind.endswith("_scale") for kind in moments):
                state[number[name]] = self._on_tier.of(name).shown(moments) if self._on_tier is not None else moments
        return {**state_dict, "state": state}

    def _shard(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict | None:
        saved, states = [list(group["params"]) for group in state_dict["param_groups"]], state_dict["state"]
        if _counts(saved) != _counts(self._listed):
            raise PartitionError(
                f"optimizer.load_state_dict: expected param groups of {_counts(self._listed)} parameters, as the "
                f"optimizer was made with, got {_counts(saved)}. Nothing was changed."
            )
        self._check_fragments(state_dict.get(_FRAGMENTS))
        numbered = list(zip(chain.from_iterable(saved), chain.from_iterable(self._listed), strict=True))
        if all(_fits(parameter, states.get(number, {})) for number, parameter in numbered):
            self._refuse_left_out(states)
            return None
        sharded = {
            number: sharded_state(states[number], parameter.name, parameter.shape, parameter.owned)
            for number, parameter in numbered
            if parameter.owned is not None and states.get(number)
        }
        return {**state_dict, "state": sharded}

    def _ranges(self) -> dict[str, list[int]]:
        """By parameter, the elements of it that this rank updates: the first one, and the first one behind."""
        fragments = [owned.fragment for owned in self._fragments()]
        return {f.entry.name: [f.param_offset, f.param_offset + f.length] for f in fragments}

    def _check_fragments(self, saved: dict[str, list[int]] | None) -> None:
        """Refuse states of fragments that are not this rank's."""
        here = self._ranges()
        if saved is None or saved == here:
            return
        name = next(name for name in (*here, *saved) if here.get(name) != saved.get(name))
        raise PartitionError(
            f"optimizer.load_state_dict: the states are of other fragments than this rank's: of '{name}' it updates "
            f"{_described(here.get(name))}, the state dict has {_described(saved.get(name))}. At stages 1 to 3 "
            "optimizer.state_dict() is of one rank: load it on the rank that saved it, or use engine.save_checkpoint "
            "and engine.load_checkpoint, which load at any number of ranks and stage. Nothing was changed."
        )

    def _refuse_left_out(self, states: Mapping[Any, Any]) -> None:
        """A state dict without the moments that are 8-bit on the tier would silently reset them."""
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
    """The part of a full parameter's optimizer state that belongs to a fragment. Raises `PartitionError`."""
    start, end = owned.fragment.param_offset, owned.fragment.param_offset + owned.fragment.length
    whole = owned.fragment.length == shape.numel()
    part: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
            part[key] = value.flatten()[start:end].clone().view(owned.tensor.shape)
        elif isinstance(value, torch.Tensor) and value.numel() > 1 and not whole:
            raise PartitionError(
                f"the optimizer's state '{key}' of parameter '{name}': expected shape {tuple(shape)}, got "
                f"{tuple(value.shape)}"
            )
        else:
            part[key] = copy.deepcopy(value)
    return defaultdict(dict, part) if isinstance(state, defaultdict) else part


def _described(elements: list[int] | None) -> str:
    return "nothing" if elements is None else f"elements {elements[0]} to {elements[1] - 1}"


def _fits(parameter: ListedParameter, state: Mapping[str, Any]) -> bool:
    """Return whether a state is of what this rank updates of a parameter; one of a full parameter may have shapes of
    the optimizer's own."""
    shape = parameter.tensor.shape
    return not any(
        isinstance(value, torch.Tensor)
        and value.dim()
        and value.shape != shape
        and (shape != parameter.shape or value.numel() == shape.numel())
        for value in state.values()
    )


def _counts(groups: Sequence[Sequence[Any]]) -> list[int]:
    return [len(group) for group in groups]
