"""State dicts of the user's optimizer: full states of plain torch are sharded, states on a tier are found there."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import PartitionError
from .tier import StateTier
from .updates import OwnedFragment

StateDict = dict[str, Any]


@dataclass(frozen=True)
class ListedParameter:
    """A parameter as the user listed it in a param group: its ``fragments`` are what this rank updates of it."""

    name: str
    shape: torch.Size
    fragments: tuple[OwnedFragment, ...]


class OptimizerStates:
    """Hooks into `state_dict` and `load_state_dict` of an optimizer whose groups hold this rank's fragments.

    ``listed``: by group, the parameters as the user listed them. `load_state_dict` takes what this optimizer's
    `state_dict` gave on this rank, and what plain torch's gave for the full parameters in the same order: of that every
    rank keeps its part. Anything else is refused by name. Weights and masters are not touched. Nothing communicates.
    """

    def __init__(self, optimizer: Optimizer, listed: list[list[ListedParameter]], tier: StateTier | None) -> None:
        self._optimizer = optimizer
        self._listed = listed
        self._tier = tier
        optimizer.register_state_dict_post_hook(self._read_tier)
        optimizer.register_load_state_dict_pre_hook(self._shard)
        optimizer.register_load_state_dict_post_hook(self.move_to_tier)

    def move_to_tier(self, _optimizer: Optimizer | None = None) -> None:
        """Put what the optimizer holds where the tier keeps states, if there is one; fragments that it holds nothing of
        begin anew."""
        if self._tier is None:
            return
        fresh = {}
        for owned in self._fragments():
            name = owned.fragment.entry.name
            known = {k: v for k, v in self._optimizer.state.get(owned.tensor, {}).items() if v is not None}
            if known or self._tier.held(name)[0]:
                moments = [kind for kind in self._tier.kinds(name) if kind != "master" and not kind.endswith("_scale")]
                anew = {kind: torch.zeros(owned.fragment.length) for kind in moments if kind not in known}
                fresh[name] = {
                    "step": 1 if known else 0,
                    **anew,
                    **known,
                }  # torch's SGD has moments and counts no steps
        if fresh:
            self._tier.write(fresh)
        dict.clear(self._optimizer.state)

    def on_tier(self) -> bool:
        """Return whether a tier keeps the states of this rank's fragments."""
        return self._tier is not None

    def _fragments(self) -> list[OwnedFragment]:
        return [owned for group in self._listed for parameter in group for owned in parameter.fragments]

    def _read_tier(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict | None:
        """`state_dict` has the tier's moments; 8-bit ones, which torch's format has no room for, are left out."""
        if self._tier is None:
            return None
        number = {owned.fragment.entry.name: index for index, owned in enumerate(self._fragments())}
        state = {}
        for name, kept in self._tier.states(list(number)):
            moments = {kind: value for kind, value in kept.items() if kind != "master"}
            if moments.keys() != {"step"} and not any(kind.endswith("_scale") for kind in moments):
                state[number[name]] = moments
        return {**state_dict, "state": state}

    def _shard(self, _optimizer: Optimizer, state_dict: StateDict) -> StateDict | None:
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        states = state_dict["state"]
        fragments = [[owned for parameter in group for owned in parameter.fragments] for group in self._listed]
        if len(saved) != len(fragments):
            raise PartitionError(
                f"optimizer.load_state_dict: expected {len(fragments)} param group(s), got {len(saved)}"
            )
        if _counts(saved) == _counts(fragments) and self._fit_fragments(saved, fragments, states):
            self._refuse_left_out(states)
            return None
        if _counts(saved) != _counts(self._listed):
            raise PartitionError(
                f"optimizer.load_state_dict: expected groups of {_counts(self._listed)} full parameters, as plain "
                f"torch saves them, or of {_counts(fragments)} fragments, as this rank's state_dict() gives them; got "
                f"{_counts(saved)}. engine.load_checkpoint loads at any number of ranks and stage"
            )
        return self._sharded(state_dict, saved, states)

    def _sharded(self, state_dict: StateDict, saved: list[list[Any]], states: Mapping[Any, Any]) -> StateDict:
        groups, sharded, index = [], {}, 0
        for group, numbers, listed in zip(state_dict["param_groups"], saved, self._listed, strict=True):
            first = index
            for number, parameter in zip(numbers, listed, strict=True):
                for owned in parameter.fragments:
                    if states.get(number):
                        sharded[index] = sharded_state(states[number], parameter.name, parameter.shape, owned)
                    index += 1
            groups.append({**group, "params": list(range(first, index))})
        return {**state_dict, "state": sharded, "param_groups": groups}

    def _fit_fragments(
        self, saved: list[list[Any]], fragments: Sequence[Sequence[OwnedFragment]], states: Mapping[Any, Any]
    ) -> bool:
        """Return whether states have the fragments' shapes; those of full parameters may have the optimizer's own."""
        for numbers, owned_ones in zip(saved, fragments, strict=True):
            for number, owned in zip(numbers, owned_ones, strict=True):
                full = owned.tensor.shape == torch.Size(owned.fragment.entry.shape)
                for value in states.get(number, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape != owned.tensor.shape:
                        if not full or value.numel() == owned.tensor.numel():
                            return False
        return True

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


def _counts(groups: Sequence[Sequence[Any]]) -> list[int]:
    return [len(group) for group in groups]
