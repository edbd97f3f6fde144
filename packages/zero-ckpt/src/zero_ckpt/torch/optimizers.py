"""Optimizer state by parameter name, independent of the order of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import MismatchError
from ..plain import to_plain
from ..reader import Checkpoint
from ..types import MODEL_KINDS, state_key, state_kind
from .buffers import torch_dtype
from .fill import Filler
from .tree import decode, encode

_IMPLEMENTATION = frozenset({"params", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"})


def named_parameters(
    optimizer: torch.optim.Optimizer, names: dict[int, str], key: str, stored: Sequence[Sequence[str]] = ()
) -> list[list[tuple[str, Any]]]:
    """Return, for each param group of an optimizer, its parameters as (name, parameter). `names` has the names of the
    modules' parameters by `id`.

    A parameter that is in no module is named by its position: as in `stored`, a checkpoint's names per group, when the
    group has as many members there, and otherwise `<key>.<group>.<position>`.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        members = group["params"]
        known = stored[number] if number < len(stored) and len(stored[number]) == len(members) else None
        places = known or [f"{key}.{number}.{index}" for index in range(len(members))]
        found.append([(names.get(id(p), place), p) for p, place in zip(members, places, strict=True)])
    return found


def describe_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], key: str
) -> tuple[dict[str, Any], list[tuple[str, str, torch.Tensor]]]:
    """Return (plain part of an optimizer's state, its tensors as (parameter name, kind, tensor)).

    The tensors are the optimizer's own, not copies. `names` and `key` are those of `named_parameters`. The plain part
    is `{"$optimizer": {"groups": ..., "state": ...}}`: options and parameter names per group, and by parameter name the
    kinds of tensors and all other values. Raises NotPlainDataError for what is neither tensor nor plain data.
    """
    groups, state, tensors = [], {}, []
    for options, members in zip(optimizer.param_groups, named_parameters(optimizer, names, key), strict=True):
        plain = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        found: dict[str, torch.Tensor] = {}
        encoded = encode(plain, f"{key}.param_groups", found)
        inline = {name: tensor.item() for name, tensor in found.items()}  # such as a learning rate kept in a tensor
        groups.append({"options": _inline_scalars(encoded, inline), "params": [name for name, _ in members]})
        for name, parameter in members:
            kinds, values = [], {}
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    kinds.append(state_kind(kind))
                    tensors.append((name, state_kind(kind), value))
                else:
                    values[kind] = to_plain(value, f"{key}.state[{name!r}][{kind!r}]")
            state[name] = {"kinds": kinds, "values": values}
    return {"$optimizer": {"groups": groups, "state": state}}, tensors


def _inline_scalars(value: Any, tensors: dict[str, Any]) -> Any:
    """Return data of `tree.encode` with each tensor's place, `{"$tensor": name}`, replaced by `{"$scalar": value}`;
    `tensors` has the values by name."""
    if isinstance(value, dict) and "$tensor" in value:
        return {"$scalar": tensors[value["$tensor"]]}
    if isinstance(value, dict):
        return {key: _inline_scalars(item, tensors) for key, item in value.items()}
    return [_inline_scalars(item, tensors) for item in value] if isinstance(value, list) else value


class OptimizerLoader:
    """Fills `optimizer` from a checkpoint that this package or a ZeRO engine wrote: call `request`, run the filler,
    then `commit`.

    `names` has parameter names by `id`; `key` is the optimizer's key in the state, and `described` is what
    `describe_optimizer` stored for it, None if nothing.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[int, str], key: str, described: Any, checkpoint: Checkpoint
    ) -> None:
        self._optimizer, self._key, self._checkpoint = optimizer, key, checkpoint
        self._described = described["$optimizer"] if isinstance(described, dict) else None
        stored = [group["params"] for group in self._described["groups"]] if self._described else []
        self._members = named_parameters(optimizer, names, key, stored)
        client = checkpoint.client_state
        self._plain_groups = client.get("param_groups") if isinstance(client, dict) else None
        self._states: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def has_groups(self) -> bool:
        """Return whether the checkpoint holds hyperparameters for this optimizer."""
        return self._described is not None or isinstance(self._plain_groups, list)

    def kinds_of(self, name: str, by_name: dict[str, list[str]]) -> Iterable[str]:
        """Return the kinds of state that the checkpoint holds of the parameter `name` and that belong to this
        optimizer.

        `by_name` lists the kinds of all optimizers' states in the checkpoint, by parameter name.
        """
        if self._described is None:
            return by_name.get(name, [])
        return self._described["state"].get(name, {}).get("kinds", [])  # type: ignore[no-any-return]

    def request(self, filler: Filler, by_name: dict[str, list[str]], found: list[tuple[str, str]]) -> list[str]:
        """Create or reuse state tensors, request their values from `filler`, and append the (name, kind) of each to
        `found`. Returns the names of parameters that the checkpoint does not know.

        `by_name` lists the kinds of optimizer state in the checkpoint, by parameter name. The optimizer is changed by
        `commit` only, apart from reused tensors, which `filler` fills. Raises MismatchError when the param groups
        cannot be matched.
        """
        unknown = []
        self._read_hyperparameters()
        for group, members in zip(self._optimizer.param_groups, self._members, strict=True):
            for name, parameter in members:
                values = {} if self._described is None else self._described["state"].get(name, {}).get("values", {})
                kinds = list(self.kinds_of(name, by_name))
                if not (kinds or self._was_saved(name, by_name)):
                    unknown.append(name)
                    continue
                state: dict[str, Any] = dict(values)
                old = self._optimizer.state.get(parameter, {})
                for kind in kinds:
                    entry, key = self._checkpoint.entry(name, kind), state_key(kind)
                    state[key] = _state_tensor(old.get(key), parameter, key, entry.shape, entry.dtype, group)
                    filler.add(entry, state[key], f"{name} ({kind})")
                    found.append((entry.name, kind))
                if state or parameter in self._optimizer.state:
                    self._states.append((parameter, state))
        return unknown

    def commit(self) -> None:
        """Give the optimizer the states that `request` has created, and the stored hyperparameters."""
        for parameter, state in self._states:
            self._optimizer.state[parameter] = state
        for options, name, value in self._options:
            if isinstance(value, _Scalar):
                options[name].fill_(value.number)
            else:
                options[name] = value

    def _was_saved(self, name: str, by_name: dict[str, list[str]]) -> bool:
        """Return whether parameter `name` was in the saved optimizer, though perhaps without state, as it had no
        gradient yet. `by_name` lists the kinds of optimizer state in the checkpoint, by parameter name."""
        if self._described is not None:
            return name in self._described["state"]
        return bool(by_name) and any((name, kind) in self._checkpoint.tensors for kind in MODEL_KINDS)

    def _read_hyperparameters(self) -> None:
        """Read the stored options of the optimizer's param groups, for `commit` to set; does nothing where the
        checkpoint holds none.

        Raises MismatchError for another number of groups.
        """
        if not self.has_groups:
            return
        plain = [{"options": group} for group in self._plain_groups or []]
        groups = plain if self._described is None else self._described["groups"]
        if len(groups) != len(self._optimizer.param_groups):
            raise MismatchError(
                f"{self._key!r} has {len(self._optimizer.param_groups)} param groups, the checkpoint has {len(groups)}"
            )
        for options, stored in zip(self._optimizer.param_groups, groups, strict=True):
            values = stored["options"] if self._described is not None else _matching_options(stored["options"], options)
            for name, value in values.items():
                scalar = isinstance(value, dict) and "$scalar" in value
                read = value["$scalar"] if scalar else decode(value, _refuse_tensor)
                in_place = scalar and isinstance(options.get(name), torch.Tensor)
                self._options.append((options, name, _Scalar(read) if in_place else read))


class _Scalar(NamedTuple):
    """A stored number for an option that the optimizer holds as a tensor; the number is written into that tensor."""

    number: float


def _matching_options(stored: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those options of a param group that a ZeRO engine `stored` and that `options`, the group's own, have too.
    Options that say how the optimizer computes (`foreach`, `fused`, …) are left out; lists are marked as tuples."""
    known = {key: value for key, value in stored.items() if key in options and key not in _IMPLEMENTATION}
    return {key: {"$tuple": value} if isinstance(value, list) else value for key, value in known.items()}


def _refuse_tensor(name: str) -> torch.Tensor:
    """Raise MismatchError naming the tensor `name`: a `read` function of `decode` for data without tensors."""
    raise MismatchError(f"a param group cannot hold the tensor {name!r}")


def _state_tensor(
    old: Any, parameter: torch.Tensor, kind: str, shape: tuple[int, ...], dtype: str, group: dict[str, Any]
) -> torch.Tensor:
    """Return the tensor to fill with a parameter's state `kind`: `old` if that is a tensor of this shape and dtype,
    otherwise a new one on the device where the optimizer expects it.

    That is the parameter's device, but the CPU for a `step`, unless the param `group` is capturable or fused. `dtype`
    is a safetensors name.
    """
    wanted = torch_dtype(dtype)
    if isinstance(old, torch.Tensor) and tuple(old.shape) == shape and old.dtype == wanted:
        return old
    if shape == tuple(parameter.shape) and kind != "step":
        return torch.empty_like(parameter, dtype=wanted, requires_grad=False)
    on_device = kind != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=wanted, device=parameter.device if on_device else "cpu")
