"""The optimizer's ``state``, by fragment: refuses what user code looks up by the model's parameters.

An entry of a parameter that is not a fragment would be read as absent, or be kept and never used. Where a tier keeps
the states, the dict is empty, and iterating over it would do nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .errors import PartitionError

_Entries = defaultdict[Any, Any]
# Who may find the dict empty: state_dict, to which hooks give what the tier has; the engine and its kernels; frameworks
# that move every state to the device of its parameter.
_MAY_WALK = ("torch.optim.optimizer", "zero_", "lightning", "pytorch_lightning", "accelerate")


class FragmentStates(_Entries):
    """A ``defaultdict(dict)`` by fragment. Pickles and deep copies of it are plain ones.

    ``name_of``: the name of a parameter of the model, "" for anything else; ``elsewhere``: whether a tier holds states.
    """

    def __init__(
        self, entries: dict[Any, Any], name_of: Callable[[nn.Parameter], str], elsewhere: Callable[[], bool]
    ) -> None:
        super().__init__(dict)
        self._name_of, self._elsewhere = name_of, elsewhere
        for key, value in entries.items():
            self[key] = value

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict; a parameter of the model is refused by name."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dict; a parameter of the model is refused by name."""
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dict; a parameter of the model is refused by name."""
        self._check(key)
        return super().setdefault(key, default)

    def items(self) -> Any:
        """As of a dict, where the states are here."""
        self._check_here()
        return super().items()

    def values(self) -> Any:
        """As of a dict, where the states are here."""
        self._check_here()
        return super().values()

    def keys(self) -> Any:
        """As of a dict, where the states are here."""
        self._check_here()
        return super().keys()

    def __iter__(self) -> Iterator[Any]:
        self._check_here()
        return super().__iter__()

    def __len__(self) -> int:
        self._check_here()
        return super().__len__()

    def clear(self) -> None:
        """As of a dict, where the states are here."""
        self._check_here()
        super().clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(dict.items(self))

    def _check(self, key: object) -> None:
        name = self._name_of(key) if isinstance(key, nn.Parameter) else ""
        if name:
            raise PartitionError(
                f"optimizer.state was asked for parameter '{name}': it has the states of this rank's fragments, by the "
                "tensors in optimizer.param_groups. Read engine.full_state(p, 'exp_avg'), write engine.set_full_state; "
                "change all states alike through optimizer.state.values(). Nothing was changed."
            )

    def _check_here(self) -> None:
        if self._elsewhere() and not str(sys._getframe(2).f_globals.get("__name__")).startswith(_MAY_WALK):
            raise PartitionError(
                "optimizer.state is empty, as a tier keeps the states (offload_optimizer): a loop over it would do "
                "nothing. Read engine.full_state(p, 'exp_avg'), write engine.set_full_state. Nothing was changed."
            )


def guard_states(optimizer: Optimizer, name_of: Callable[[nn.Parameter], str], elsewhere: Callable[[], bool]) -> None:
    """Have ``optimizer.state`` refuse what would not count; do it again where somebody has set another dict.

    Raises `PartitionError` where that has an entry of the model's parameters.
    """
    if type(optimizer.state) in (dict, defaultdict):  # a save that still reads the states has a mapping of its own
        optimizer.state = FragmentStates(optimizer.state, name_of, elsewhere)


def unguard_states(optimizer: Optimizer) -> None:
    """Give the optimizer a plain dict of states again."""
    if isinstance(optimizer.state, FragmentStates):
        optimizer.state = defaultdict(dict, dict.items(optimizer.state))
