"""Apply changes that user code makes to parameters, if all ranks make the same ones, or refuse them on every rank."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence

import torch

from .errors import EditRefusedError
from .host_facts import are_set_to, dtypes, untouched
from .live import UnitState
from .ownership import all_owned
from .unit import Unit
from .unit_edits import without_torch_function

Found = dict[str, str]
"""By ``"unit.number"`` of a parameter: a digest of its new values, or ``"!"`` and the reason of a refusal."""

_PENDING, _REFUSED = operator.attrgetter("edits.pending"), operator.attrgetter("edits.refused")
_LOOKS_AWAY = frozenset(["end", "backward", "norms", "flush", "learning"])


class UserEdits:
    """Finds parameters whose storage or values user code has changed, and updates shards and masters.

    Call order: `forward_begins` and `forward_ends` around a forward pass; `report` before a message to the other ranks,
    and `settle` with the reports of all; `published` after a step; `settle_masters` before a save. Reports travel with
    messages that the ranks send anyway. See [Note: edits wait for all ranks] in unit_edits.py.
    """

    def __init__(self, units: Sequence[Unit], world_size: int) -> None:
        self._units = list(units)
        self._world_size = world_size
        self._staying = [unit for unit in units if not unit.releasable]
        self._releasable = [unit for unit in units if unit.releasable]
        self._kept = [
            (parameter, unit.plan.dtype, unit, number)
            for unit in self._staying
            for number, parameter in enumerate(unit.parameters)
        ]
        self._parameters = [parameter for parameter, _, _, _ in self._kept]
        self._dtypes = [dtype for _, dtype, _, _ in self._kept]
        self._views = [view for unit in self._staying for view in unit.views]
        self._note_versions()
        self._may_go = [parameter for unit in self._releasable for parameter in unit.parameters]
        self._placeholders = [view for unit in self._releasable for view in unit.placeholder_views()]
        self._placeholder_dtypes = dtypes(self._placeholders)
        self._all = [parameter for unit in self._units for parameter in unit.parameters]
        self._is_owned = False
        self._compares = False
        self._cast_outside: set[tuple[int, int]] = set()
        self._cast_inside: set[tuple[int, int]] = set()
        self._passes: dict[str, int] = {}
        self._steps = 0
        self._record_before_step()

    def owned(self) -> None:
        """Start refusing parameters without an owner: all have been given one, so such a parameter was swapped for
        another tensor."""
        self._is_owned = True

    def forward_begins(self, key: str) -> None:
        """Note casts made since the last pass, and choose whether gathers of this pass take checksums.

        ``key``: the kind of forward pass; those numbered 1, 2, 4, 8, … of each kind take checksums.
        """
        self._cast_outside |= self._casts() - self._cast_inside
        self._passes[key] = number = self._passes.get(key, 0) + 1
        compares = _is_power_of_two(number)
        if compares is not self._compares:
            self._compares = compares
            for unit in self._releasable:
                unit.edits.compares = compares

    def forward_ends(self) -> None:
        """Note which parameters were cast inside the forward pass: such casts are undone with the step, not refused."""
        self._cast_inside |= self._casts() - self._cast_outside

    @without_torch_function
    def report(self, kind: str, *, in_pass: bool) -> Found:
        """Return the edits that this rank has found and that await the other ranks; empty inside a pass.

        ``kind``: of the message that carries the report; most kinds have the parameters looked at first.
        """
        if in_pass or kind == "changes in gathered":
            return {}
        if kind not in _LOOKS_AWAY:
            self._look(kind)
        if not any(map(_PENDING, self._units)) and not any(map(_REFUSED, self._units)):
            return {}
        found: Found = {}
        for unit in self._units:
            for number, reason in unit.edits.refused.items():
                found[f"{unit.index}.{number}"] = "!" + reason
            for number, values in unit.edits.pending.items():
                given = unit.views[number] if values is None else values
                found.setdefault(f"{unit.index}.{number}", self._digest(given))
        return found

    @without_torch_function
    def settle(self, found: Sequence[Found], kind: str) -> None:
        """Apply the edits if every rank found the same ones. Raises `EditRefusedError` on every rank if not.

        ``found``: the `report` of each rank, in rank order. ``kind``: of the message that carried them.
        """
        if any(found):
            self._settle_found(found)
        if kind == "step":
            for unit in self._staying:
                if unit.edits.writes_unseen and unit.keeps_masters:
                    unit.write_back()
            self._cast_inside.clear()

    def published(self) -> None:
        """Count a step whose weights were published, and renew or drop checksums of parameters that stay gathered."""
        self._steps += 1
        self._record_before_step()

    def settle_masters(self, units: Sequence[Unit] | None = None) -> None:
        """Update the masters of ``units`` (default: all) from their weights now, as the next step would."""
        for unit in self._units if units is None else units:
            if not unit.releasable and unit.keeps_masters and unit.states is None:
                unit.write_back()
            unit.settle_masters()

    def _settle_found(self, found: Sequence[Found]) -> None:
        """Apply all pending edits, or undo all and raise `EditRefusedError`; take checksums again where there were
        any."""
        refusal = self._refusal(found)
        for unit in self._units:
            edits = unit.edits
            if not edits.pending and not edits.refused:
                continue
            recorded = edits.has_checksums and unit.state is UnitState.GATHERED
            if refusal:
                unit.restore_views()
            else:
                unit.adopt_values(dict(edits.pending))
            edits.mark_clean()
            if recorded:
                edits.record_checksums(unit.views)
        self._note_versions()
        if refusal:
            self._cast_outside.clear()
            raise EditRefusedError(refusal)

    def _record_before_step(self) -> None:
        """Before steps 1, 2, 4, 8, … take checksums of weights with separate masters, to find writes without a trace;
        before others drop the checksums."""
        compares = _is_power_of_two(self._steps + 1)
        for unit in self._staying:
            unit.edits.forget_checksums()
            if compares and unit.keeps_masters and not unit.edits.writes_unseen:
                unit.edits.record_checksums(unit.views)

    @without_torch_function
    def _casts(self) -> set[tuple[int, int]]:
        """Return (unit, number) of the parameters that stay gathered and do not have their unit's dtype now."""
        if dtypes(self._parameters) == self._dtypes:
            return set()
        return {(unit.index, number) for parameter, dtype, unit, number in self._kept if parameter.dtype is not dtype}

    def _note_versions(self) -> None:
        """Copy the version counters of parameters that stay gathered from their units, for one comparison of all."""
        self._versions = [version for unit in self._staying for version in unit.edits.versions]

    def _look(self, kind: str) -> None:
        """Find edits in all units and keep them there (`UnitEdits.pending`, `refused`).

        ``kind``: of the message that is about to be sent; "forward" leaves out units that stay gathered. Without an
        edit this is one loop in C over the parameters.
        """
        if self._is_owned and kind != "close" and not all_owned(self._all):
            self._refuse_swapped()
        released = are_set_to(self._may_go, self._placeholders)
        if not released or dtypes(self._may_go) != self._placeholder_dtypes:
            for unit in self._releasable:
                self._look_at_releasable(unit)
        if kind == "forward" or self._are_as_left():
            return
        for unit in self._staying:
            self._look_at_staying(unit, kind)
        self._note_versions()

    def _refuse_swapped(self) -> None:
        """Refuse parameters that were swapped: their hooks, and all else that torch keeps of them, moved to another
        tensor."""
        for unit in self._units:
            for number, parameter in enumerate(unit.parameters):
                if not all_owned([parameter]):
                    unit.edits.refused[number] = _SWAPPED

    def _are_as_left(self) -> bool:
        """Return whether parameters that stay gathered are unchanged; False where that takes a comparison of values."""
        if any(unit.edits.needs_full_check for unit in self._staying):
            return False
        return untouched(self._parameters, self._views, self._dtypes, self._versions)

    def _look_at_releasable(self, unit: Unit) -> None:
        """Have a unit keep edits of its placeholders or gathered parameters."""
        if unit.state is UnitState.RELEASED:
            unit.collect_placeholder_edits()
        elif unit.state is UnitState.GATHERED:
            unit.collect_gathered_edits()

    def _look_at_staying(self, unit: Unit, kind: str) -> None:
        """Have a unit that stays gathered keep its edits; at a step undo casts that forward has made."""
        if unit.hidden:
            return
        for number in unit.edits.find_changed(unit.views):
            was_cast = (unit.index, number) in self._cast_inside
            unit.edits.note_in_views(number, unit.views[number], was_cast=was_cast)
            if was_cast and kind == "step" and number not in unit.edits.pending:
                unit.parameters[number].data = unit.views[number]

    def _digest(self, values: torch.Tensor) -> str:
        """Return a hash of the values, to compare ranks by; empty with a single rank."""
        if self._world_size == 1:
            return ""
        plain = values.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()

    def _refusal(self, found: Sequence[Found]) -> str:
        """Return the error text for the first edit that cannot be applied; empty if all can."""
        for key in dict.fromkeys(key for answer in found for key in answer):
            index, _, number = key.partition(".")
            name = self._units[int(index)].names[int(number)]
            by_rank = [answer.get(key) for answer in found]
            refused = [(rank, text[1:]) for rank, text in enumerate(by_rank) if text is not None and text[:1] == "!"]
            if refused:
                rank, reason = refused[0]
                return f"parameter '{name}' {reason} on rank {rank}. {_ADVICE}"
            if len(set(by_rank)) > 1:
                wrote = [rank for rank, digest in enumerate(by_rank) if digest is not None]
                how = (
                    "ranks wrote different values into it"
                    if len(wrote) == len(by_rank)
                    else f"only rank{'s' * (len(wrote) > 1)} {', '.join(map(str, wrote))} wrote it"
                )
                return f"parameter '{name}' was changed outside the optimizer, and {how}. {_ADVICE}"
        return ""


_SWAPPED = (
    "was swapped for another tensor (torch.utils.swap_tensors, as module.to() does under "
    "torch.__future__.set_swap_module_params_on_conversion(True)), so the engine's hooks on it are gone: call "
    "engine.destroy() and initialize again. It was"
)
_ADVICE = (
    "Nothing was taken over. Write the same values on every rank, or write inside "
    "`engine.gathered([parameter], modifier_rank=0)`, which gives rank 0's to all; keep the dtype and the shape."
)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
