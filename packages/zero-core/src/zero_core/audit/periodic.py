"""The auditor that checks every few steps, and the messages that ranks exchange for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..errors import AuditError
from ..state import TrainingState
from .digests import digest_of_data, odd_ranks
from .holdings import Buffers, Held, replicated_data
from .module_calls import CallRecorder
from .recomputation import Recomputation, RepeatedReductions, auditable_units, repeatable
from .state_digests import StateDigests, tier_digests, unpublished

_SHOWN = 10
logger = logging.getLogger("zero_core")


class PeriodicAuditor:
    """An `Auditor` that audits each ``every``-th step before its update.

    [Note: audits] After the step before an audited one, each rank takes digests of its masters, moments and weights.
    Only the optimizer writes them, so they must be equal before the update of the audited step; tensors that torch
    operations have written since are not compared. In the first micro-batch of the audited step the gradient of one
    unit, another one each time, is computed again; in all micro-batches the reductions of one unit are repeated. Before
    the update the ranks exchange one message: a digest of all replicated data, and each rank's own findings. Only if
    the digests differ, a second message has the digest of each item."""

    def __init__(self, state: TrainingState, every: int) -> None:
        self._state = state
        self._every = every
        self._buffers = Buffers(state.module)
        self._candidates = {one.unit.index: one for one in auditable_units(state)}
        self._state_digests: StateDigests | None = None
        self._reductions: RepeatedReductions | None = None
        self._calls: CallRecorder | None = None
        self._chosen: Recomputation | None = None
        self._seen = False
        self._passed_over: set[int] = set()
        self._warned = False
        self._fruitless = 0
        self._gradients: list[str] = []

    @property
    def repeated(self) -> str | None:
        """Return the name of the unit whose gradient the current step has computed again; None if there is none."""
        return None if self._chosen is None or self._chosen.obstacle is not None else self._chosen.unit.name

    def forward(self) -> AbstractContextManager[None]:
        """Return a context that records calls of modules, one of which `backward` repeats. It does so before the first
        backward pass of an audited step; never if modules are compiled, gradients are disabled or no unit can be
        audited."""
        records = self._is_due() and not self._seen and self._candidates and not self._state.compiled
        if not records or not torch.is_grad_enabled():
            return nullcontext()
        if self._calls is None:
            self._calls = CallRecorder(self._candidates, self._order(), self._state.device)
        return self._calls.forward()

    @contextmanager
    def backward(self, loss: torch.Tensor | None) -> Iterator[None]:
        """If the step is audited, repeat the reductions of one unit after the block. After the first backward pass of
        the step also compute the gradient of one unit again, unless ``loss`` is None. `before_step` reports
        differences. Collective in an audited step."""
        if not self._is_due():
            yield
            return
        first, self._seen = not self._seen, True
        chosen = self._chosen = self._choose(loss) if first and loss is not None else self._chosen
        followed = chosen.backward() if first and chosen is not None else nullcontext()
        with self._repeated().backward(self._state.counters.global_steps), followed:
            yield
        if first and chosen is not None:
            self._gradients = chosen.differences()

    def before_step(self) -> None:
        """If the step is audited, make all comparisons and exchange their results. Raises `AuditError` on every rank if
        one of any rank fails. Collective in an audited step."""
        if not self._is_due():
            return
        state, parts = self._state, self._state.partition
        wrong = list(unpublished(state))
        on_tier = tier_digests(state, wrong)
        held = {one.key: one for one in replicated_data(state, self._buffers)}
        mine = [] if self._state_digests is None else list(self._state_digests.changed(state, on_tier))
        mine += [f"weight '{name}' is not what its master rounds to" for name in wrong]
        mine += [f"gradient of '{name}' is another when it is computed again" for name in self._gradients]
        if self._reductions is not None:
            repeated = self._reductions.differences
            mine += [f"averaged gradient of '{name}' is another when it is reduced again" for name in repeated]
        digests = {key: one.digest for key, one in held.items()}
        refused = []
        if self._chosen is not None and self._chosen.obstacle is not None and self._calls is not None:
            refused = [self._chosen.unit.index]
            self._calls.modules[refused[0]].refuse(self._chosen.obstacle)
        answers = parts.runtime.agree("audit", "", [digest_of_data(digests), mine[:_SHOWN], wrong, refused])
        self._passed_over.update(unit for answer in answers for unit in answer[3])
        self._warn_if_none_repeated()
        found = [f"rank {rank}: {problem}" for rank, answer in enumerate(answers) for problem in answer[1]]
        if len({answer[0] for answer in answers}) > 1:
            found += self._replicated_differences(held, [answer[2] for answer in answers])
        if found:
            shown = "\n  ".join(found[:_SHOWN])
            raise AuditError(
                f"the audit of step {state.counters.global_steps} found at least {len(found)} difference(s) between "
                "what ranks hold and what they must hold; the weights were not changed by this step:\n"
                f"  {shown}\nSuspect the memory or the network of the named ranks, or code writing to them; resume "
                "from the last checkpoint."
            )

    def after_step(self) -> None:
        """Discard what this step has shown. If the next step is audited, take the digests of this rank's states."""
        self.restart_step()
        self._state_digests = StateDigests(self._state) if self._is_due() else None

    def restart_step(self) -> None:
        """Discard what micro-batches of this step have shown, as ranks may have seen different ones."""
        self._seen, self._gradients, self._calls, self._chosen, self._reductions = False, [], None, None, None

    def forget_digests(self) -> None:
        """Discard the digests of this rank's states, as they are about to be written on purpose."""
        self._state_digests = None

    def _replicated_differences(self, held: dict[str, Held], unpublished: list[list[str]]) -> list[str]:
        """Compare all ranks' replicated data; return a message for each item that differs, naming the ranks whose copy
        is wrong. ``held``: this rank's data by key; ``unpublished``: by rank, the parameters whose weights differ from
        their masters. Collective."""
        digests = {key: one.digest for key, one in held.items()}
        tables = self._state.partition.runtime.agree("audit", "all digests", digests)
        found = []
        for key in dict.fromkeys(key for table in tables for key in table):
            theirs = [table.get(key) for table in tables]
            if len(set(theirs)) == 1:
                continue
            one = held.get(key)
            owner = one.shard if one is not None and one.checked else None
            if one is not None and owner is not None and one.name in unpublished[owner]:
                owner = None
            odd = odd_ranks(theirs, owner)
            names = " and ".join(f"rank {rank}" for rank in odd)
            found.append(f"{names}: {'differ in' if len(odd) == len(theirs) else 'other than the rest:'} {key}")
        return found

    def _order(self) -> list[int]:
        """Return the index of each unit whose gradient may be computed again, first choice first: a different one at
        each audit, those refused before last."""
        turns = [unit for unit in self._candidates if unit not in self._passed_over] or list(self._candidates)
        first = self._state.counters.global_steps // self._every % len(turns)
        return list(dict.fromkeys([*turns[first:], *turns[:first], *self._candidates]))

    def _choose(self, loss: torch.Tensor) -> Recomputation | None:
        """Return the recomputation of the first unit in `_order` whose forward call of this micro-batch every
        rank can repeat after backward of ``loss``; None if there is none. Later audits pass over units whose call some
        rank can never repeat. Collective if any unit can be audited."""
        if not self._candidates:
            return None
        calls, found = self._calls, {} if self._calls is None else repeatable(self._calls, loss, self._state)
        refused = [] if calls is None else [u for u, module in calls.modules.items() if module.obstacle is not None]
        answers = self._state.partition.runtime.agree("audit", "calls", [list(found), refused])
        chosen = next((unit for unit in self._order() if all(unit in answer[0] for answer in answers)), None)
        self._passed_over.update(unit for answer in answers for unit in answer[1])
        return None if chosen is None else found[chosen]

    def _warn_if_none_repeated(self) -> None:
        """Count the audits in a row that repeated no gradient. Once no untried unit is left, or they are more than the
        units that can be audited, log a warning with the reasons, on rank 0 and only once."""
        self._fruitless = 0 if self.repeated is not None else self._fruitless + 1
        if self._warned or not self._fruitless:
            return
        modules = [] if self._calls is None else list(self._calls.modules.values())
        untried = any(one.is_untried and one.candidate.unit.index not in self._passed_over for one in modules)
        if untried and self._fruitless <= len(self._candidates):
            return
        self._warned = True
        if not self._candidates:
            reasons = ["No unit is one module below the model itself"]
        elif self._state.compiled:
            reasons = ["The model is compiled"]
        elif not modules or not self._seen:
            reasons = ["The step had no engine.backward after a forward pass of the engine, as with train_batch"]
        else:
            reasons = [f"'{module.candidate.unit.name}': {module.why_not()}" for module in modules]
        if self._state.reports:
            logger.warning(
                "audit_every: the audit of step %d compares everything but gradients with what is computed again. %s",
                self._state.counters.global_steps,
                "; ".join(reasons[:_SHOWN]),
            )

    def _is_due(self) -> bool:
        """Return whether the current step is audited."""
        return (self._state.counters.global_steps + 1) % self._every == 0

    def _repeated(self) -> RepeatedReductions:
        """Return the object that repeats the reductions of this step's unit; the first call in a step makes it."""
        if self._reductions is None:
            parts = self._state.partition
            units = list(parts.runtime.gradients)
            chosen = units[self._state.counters.global_steps // self._every % len(units)]
            self._reductions = RepeatedReductions(parts.runtime.gradients[chosen], parts)
        return self._reductions
