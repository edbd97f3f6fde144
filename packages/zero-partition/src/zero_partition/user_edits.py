"""Apply changes that user code makes to parameters, if all ranks make the same ones, or refuse them on every rank."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from zero_comm import Tag

from .errors import EditRefusedError
from .host_facts import are_set_to, dtypes, untouched
from .live import UnitState
from .ownership import owner_references
from .replaced_memory import copy_pending, find_tied
from .unit import Unit
from .unit_edits import compare_checksums, without_torch_function

Found = dict[str, str]
"""By ``"unit.number"`` of a parameter: a digest of its new values, after ``"="`` if they are in its own view already;
or ``"!"`` and the reason of a refusal."""
Answers = dict[str, list[str | None]]
"""By ``"unit.number"``: the entry of each rank's `Found`, None for ranks that found nothing."""
Broadcast = Callable[[torch.Tensor, int, Tag], None]
"""Copies a contiguous tensor of a rank to every rank, and waits, as `zero_comm.EngineGroups.broadcast` does."""

_PENDING, _REFUSED = operator.attrgetter("edits.pending"), operator.attrgetter("edits.refused")
_LOOKS_AWAY = frozenset(["end", "backward", "norms", "flush", "learning"])


class UserEdits:
    """Finds parameters whose storage or values user code has changed (edits), and updates shards and masters.

    Call order: `forward_begins` and `forward_ends` around a forward pass; `report` before a message to the other ranks,
    and `settle` with the reports of all; `published` after a step; `settle_masters` before a save. Reports travel with
    messages that the ranks send anyway. See [Note: edits wait for all ranks] in unit_edits.py.

    Units are either releasable or stay gathered. A write leaves no trace if only checksums of the values show it.
    ``units``: all units, by index. ``world_size``: number of ranks that report. ``broadcast``: sends a refused value.
    """

    def __init__(self, units: Sequence[Unit], world_size: int, broadcast: Broadcast) -> None:
        self._units = list(units)
        self._world_size = world_size
        self._broadcast = broadcast
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
        self._placeholders = [view for unit in self._releasable for p in unit.placeholders for view in p.views]
        self._placeholder_dtypes = dtypes(self._placeholders)
        self._all = [parameter for unit in self._units for parameter in unit.parameters]
        self._references: list[object] = []
        self._compares = False
        self._cast_outside: set[tuple[int, int]] = set()
        self._cast_inside: set[tuple[int, int]] = set()
        self._passes: dict[str, int] = {}
        self._steps = 0
        self._record_before_step()

    def watch_for_swaps(self) -> None:
        """Find and refuse swapped parameters (`torch.utils.swap_tensors`) from now on, by each one's reference to its
        partition, which a swap moves to another parameter. Called once every parameter has such a reference."""
        self._references = owner_references(self._all)

    def forward_begins(self, key: str) -> None:
        """Record casts made since the last pass, and choose whether gathers of this pass take checksums.

        ``key``: the kind of forward pass; those numbered 1, 2, 4, 8, … of each kind take checksums, as these read every
        element.
        """
        self._cast_outside |= self._find_casts() - self._cast_inside
        self._passes[key] = number = self._passes.get(key, 0) + 1
        compares = _is_power_of_two(number)
        if compares is not self._compares:
            self._compares = compares
            for unit in self._releasable:
                unit.edits.compares = compares

    def forward_ends(self) -> None:
        """Record which parameters were cast to another dtype inside the forward pass; the step undoes such casts
        instead of refusing them."""
        self._cast_inside |= self._find_casts() - self._cast_outside

    @without_torch_function
    def report(self, kind: str, *, in_pass: bool) -> Found:
        """Return the edits that this rank has found and that await the other ranks; empty inside a pass, and with a
        message of the kind "changes in gathered".

        ``kind``: of the message that carries the report. Messages "end", "backward", "norms", "flush" and "learning"
        report only what was found before; for all others this looks for new edits first. ``in_pass``: a pass that
        gathers runs.
        """
        if in_pass or kind == "changes in gathered":
            return {}
        if kind not in _LOOKS_AWAY:
            self._find_edits(kind)
        if not any(map(_PENDING, self._units)) and not any(map(_REFUSED, self._units)):
            return {}
        found: Found = {}
        for unit in self._units:
            for number, reason in unit.edits.refused.items():
                found[f"{unit.index}.{number}"] = "!" + reason
            for number, values in unit.edits.pending.items():
                given, mark = (unit.views[number], _IN_VIEW) if values is None else (values, "")
                found.setdefault(f"{unit.index}.{number}", mark + self._digest(given))
        return found

    @without_torch_function
    def settle(self, found: Sequence[Found], kind: str) -> None:
        """Apply the edits of which every rank found the same; undo others and raise `EditRefusedError` on every rank.

        ``found``: the `report` of each rank, in rank order. ``kind``: of the message that carried them. "step" also
        ends the tolerance for casts made inside forward, and writes units that stay gathered back to shards and masters
        if writes without a trace were found in them before. Collective if any rank found an edit.
        """
        if any(found):
            self._settle_found(found, kind)
        if kind == "step":
            for unit in self._staying:
                if unit.edits.writes_unseen and unit.keeps_masters:
                    unit.write_back()
            self._cast_inside.clear()

    def published(self) -> None:
        """Count a step whose weights were published.

        Before steps 1, 2, 4, 8, … checksums are taken of parameters that stay gathered and have separate masters;
        before others they are dropped.
        """
        self._steps += 1
        self._record_before_step()

    def settle_masters(self, units: Sequence[Unit] | None = None) -> None:
        """Update the masters of ``units`` (None: of all), here or on a tier, from their weights now, where these were
        changed, as the next step would. Waits for readers of the masters."""
        for unit in self._units if units is None else units:
            if not unit.releasable and unit.keeps_masters and unit.states is None:
                unit.write_back()
            unit.settle_masters()

    def note_ties(self) -> None:
        """Refuse, in its unit's `UnitEdits.refused`, the first parameter that user code has put over the memory of
        another one; do nothing if there is none."""
        if (tied := find_tied(self._units)) is not None:
            unit, number, problem = tied
            unit.edits.refused[number] = f"{problem}. It was"

    def _settle_found(self, found: Sequence[Found], kind: str) -> None:
        """Apply the edits that all ranks share, undo the others, and raise `EditRefusedError` if there are others.

        ``found``: every rank's report, in rank order. ``kind``: of the message that carried them. Units that had
        checksums get new ones. Collective.
        """
        keys = dict.fromkeys(key for answer in found for key in answer)
        answers: Answers = {key: [answer.get(key) for answer in found] for key in keys}
        refused = {key: why for key, by_rank in answers.items() if (why := _disagreement_reason(by_rank))}
        copy_pending(self._units)
        overwritten = self._restore_values({key: answers[key] for key in refused})
        restored = {self._parameter_of_key(key)[0] for key in refused}
        for unit in self._units:
            edits = unit.edits
            if not edits.pending and unit not in restored:
                continue
            recorded = edits.has_checksums and unit.state is UnitState.GATHERED
            adopted = {n: v for n, v in edits.pending.items() if f"{unit.index}.{n}" not in refused}
            adopted |= dict.fromkeys(
                number for owner, number in map(self._parameter_of_key, overwritten) if owner is unit
            )
            if adopted:
                unit.adopt_values(adopted)
            else:
                unit.restore_views()
            edits.mark_clean()
            if recorded:
                edits.record_checksums(unit.views)
        self._note_versions()
        if refused:
            self._cast_outside.clear()
            raise EditRefusedError(self._refusal_text(refused, overwritten, kind))

    def _restore_values(self, answers: Answers) -> list[str]:
        """Give each refused parameter that stays gathered its former value, from a rank that did not write into its
        view; if all ranks wrote there, give it rank 0's value. Return the keys of the latter parameters. Collective.

        ``answers``: what each rank found of the refused parameters.
        """
        overwritten: list[str] = []
        for key, by_rank in answers.items():
            unit, number = self._parameter_of_key(key)
            intact = [rank for rank, text in enumerate(by_rank) if text is None or text[:1] != _IN_VIEW]
            if unit.releasable or len(intact) == len(by_rank):
                continue
            if not intact:
                overwritten.append(key)
            view = unit.views[number]
            sent = view.contiguous()
            self._broadcast(sent, intact[0] if intact else 0, Tag("broadcast", unit.names[number]))
            if sent is not view:
                view.copy_(sent)
        return overwritten

    def _parameter_of_key(self, key: str) -> tuple[Unit, int]:
        """Return (unit, index in the unit) of the parameter that ``key``, a key of `Found`, stands for."""
        index, _, number = key.partition(".")
        return self._units[int(index)], int(number)

    def _refusal_text(self, refused: Mapping[str, str], overwritten: Sequence[str], kind: str) -> str:
        """Return the error text for ``refused`` parameters: by key of `Found`, the rest of a sentence about each.

        ``overwritten``: keys of those whose former value is lost. ``kind``: of the message that carried the reports.
        """
        first, *others = refused
        unit, number = self._parameter_of_key(first)
        if refused[first].startswith(_SWAPPED):
            return f"parameter '{unit.names[number]}' {refused[first]}. {_AFTER_SWAP}"
        value = (
            "All ranks wrote into its memory, so its former value is gone: every rank has rank 0's"
            if first in overwritten
            else "It has its former value on every rank"
        )
        more = f" ({len(others)} more parameters were refused with it)" if others else ""
        advice = _ADVICE + _STEP_KEPT if kind == "step" else _ADVICE
        return f"parameter '{unit.names[number]}' {refused[first]}{more}. {value}. {advice}"

    def _record_before_step(self) -> None:
        """Prepare to find writes without a trace before the next step: if its number is 1, 2, 4, 8, …, take checksums
        of weights that stay gathered and have separate masters; else drop the checksums."""
        compares = _is_power_of_two(self._steps + 1)
        for unit in self._staying:
            unit.edits.forget_checksums()
            if compares and unit.keeps_masters and not unit.edits.writes_unseen:
                unit.edits.record_checksums(unit.views)

    @without_torch_function
    def _find_casts(self) -> set[tuple[int, int]]:
        """Return (unit index, index in the unit) of each parameter that stays gathered and has another dtype than its
        unit now."""
        if dtypes(self._parameters) == self._dtypes:
            return set()
        return {(unit.index, number) for parameter, dtype, unit, number in self._kept if parameter.dtype is not dtype}

    def _note_versions(self) -> None:
        """Copy the version counters that the units keep of parameters that stay gathered into one list, which
        `_are_as_left` compares with the present ones at once."""
        self._versions = [version for unit in self._staying for version in unit.edits.versions]

    def _find_edits(self, kind: str) -> None:
        """Look for edits of user code in all units, which keep what is found (`UnitEdits.pending`, `refused`).

        ``kind``: of the message that is about to be sent; "forward" leaves out units that stay gathered, "close" the
        search for swapped parameters. Without an edit this is one loop in C over the parameters.
        """
        if self._references and kind != "close":
            self._refuse_swapped()
        released = are_set_to(self._may_go, self._placeholders)
        if not released or dtypes(self._may_go) != self._placeholder_dtypes:
            self.note_ties()
            for unit in self._releasable:
                self._look_at_releasable(unit)
        if kind == "forward" or self._are_as_left():
            return
        if not are_set_to(self._parameters, self._views):
            self.note_ties()
        compare_checksums([(unit.edits, unit.views) for unit in self._staying if not unit.hidden])
        for unit in self._staying:
            self._look_at_staying(unit, kind)
        self._note_versions()

    def _refuse_swapped(self) -> None:
        """Refuse parameters whose reference to their owner is another parameter's: they were swapped, so that their
        hooks, and all else that torch keeps of them, moved to another tensor."""
        present = owner_references(self._all)
        if present == self._references:
            return
        places = ((unit, number) for unit in self._units for number in range(len(unit.parameters)))
        for (unit, number), now, own in zip(places, present, self._references, strict=True):
            if now is not own:
                unit.edits.refused[number] = _SWAPPED

    def _are_as_left(self) -> bool:
        """Return whether parameters that stay gathered are unchanged; False also where only a comparison of values
        could tell."""
        if any(unit.edits.needs_full_check for unit in self._staying):
            return False
        return untouched(self._parameters, self._views, self._dtypes, self._versions)

    def _look_at_releasable(self, unit: Unit) -> None:
        """Find edits of the parameters of ``unit``, which is releasable, and keep them in ``unit.edits``; do nothing
        while its gather is in flight."""
        if unit.state is UnitState.RELEASED:
            unit.collect_placeholder_edits()
        elif unit.state is UnitState.GATHERED:
            unit.collect_gathered_edits()

    def _look_at_staying(self, unit: Unit, kind: str) -> None:
        """Find edits of the parameters of ``unit``, which stays gathered, and keep them in ``unit.edits``. Do nothing
        while the unit is hidden (`Unit.hidden`), as its parameters read NaN then.

        ``kind``: of the message that is about to be sent; "step" undoes casts that forward has made.
        """
        if unit.hidden:
            return
        for number in unit.edits.find_changed(unit.views):
            was_cast = (unit.index, number) in self._cast_inside
            unit.edits.note_in_views(number, unit.views[number], was_cast=was_cast)
            if was_cast and kind == "step" and number not in unit.edits.pending:
                unit.parameters[number].data = unit.views[number]

    def _digest(self, values: torch.Tensor) -> str:
        """Return a hash of ``values``, to compare them between ranks; "" with a single rank."""
        if self._world_size == 1:
            return ""
        plain = values.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()


def _disagreement_reason(by_rank: Sequence[str | None]) -> str:
    """Return why an edit cannot be applied, as the rest of a sentence about the parameter; "" if it can.

    ``by_rank``: the parameter's entry in each rank's `Found`, None where it has none. An edit can be applied if all
    ranks have the same digest and none refuses it.
    """
    refused = [(rank, text[1:]) for rank, text in enumerate(by_rank) if text is not None and text[:1] == "!"]
    if refused:
        rank, reason = refused[0]
        return f"{reason} on rank {rank}"
    if len({text if text is None else text.removeprefix(_IN_VIEW) for text in by_rank}) == 1:
        return ""
    wrote = [rank for rank, text in enumerate(by_rank) if text is not None]
    how = (
        "ranks wrote different values into it"
        if len(wrote) == len(by_rank)
        else f"only rank{'s' * (len(wrote) > 1)} {', '.join(map(str, wrote))} wrote it"
    )
    return f"was changed outside the optimizer, and {how}"


_IN_VIEW = "="
_SWAPPED = (
    "was swapped for another tensor (torch.utils.swap_tensors, as module.to() does under "
    "torch.__future__.set_swap_module_params_on_conversion(True))"
)
_AFTER_SWAP = (
    "The engine's hooks on it went with it: call engine.destroy() and initialize again. To exchange values, write "
    "them: `a.data, b.data = b.data.clone(), a.data.clone()`."
)
_ADVICE = (
    "Write the same values on every rank, or write inside "
    "`engine.gathered([parameter], modifier_rank=0)`, which gives rank 0's to all; keep the dtype and the shape."
)
_STEP_KEPT = (
    " The gradients of this step are kept: call engine.zero_grad() on every rank and continue with the next batch, or, "
    "without gradient accumulation, engine.step() again."
)


def _is_power_of_two(number: int) -> bool:
    """Return whether ``number`` is a power of two; True for 0 as well."""
    return number & (number - 1) == 0
