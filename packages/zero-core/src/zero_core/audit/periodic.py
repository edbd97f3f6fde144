"""The auditor that looks every so many steps, and what ranks tell one another then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..errors import AuditError
from ..state import TrainingState
from .digests import digest_of, odd_ranks
from .holdings import Buffers, Held, held_alike
from .module_calls import NotedCalls
from .recomputation import Recomputation, RepeatedReductions, candidates, repeatable
from .rest import AtRest, tier_digests, unpublished

_SHOWN = 10
logger = logging.getLogger("zero_core")


class PeriodicAuditor:
    """Audits every ``every``-th step before its update.

    [Note: audits] The step before an audited one leaves digests of this rank's masters, moments and weights: they must
    be the same when the audited step begins its update (nothing but the optimizer writes them; what torch's operations
    wrote since then is not compared). In the first micro-batch of the audited step, one unit, another one each time,
    computes its gradient again; in all of them one unit's reductions are done again. Before the update ranks then
    exchange one message: a digest of all that they must hold alike, and what each has found for itself; only when
    digests differ, a second one says of what.
    """

    def __init__(self, state: TrainingState, every: int) -> None:
        self._state = state
        self._every = every
        self._buffers = Buffers(state.module)
        self._candidates = {one.unit.index: one for one in candidates(state)}
        self._at_rest: AtRest | None = None
        self._reductions: RepeatedReductions | None = None
        self._noted: NotedCalls | None = None
        self._chosen: Recomputation | None = None
        self._seen = False
        self._passed_over: set[int] = set()
        self._told = False
        self._fruitless = 0
        self._gradients: list[str] = []

    @property
    def repeated(self) -> str | None:
        """The unit whose gradient was computed again since the last step; None when there is none."""
        return None if self._chosen is None or self._chosen.obstacle is not None else self._chosen.unit.name

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note the calls of modules before the first backward pass of an audited step."""
        noted = self._is_due() and not self._seen and self._candidates and not self._state.compiled
        if not noted or not torch.is_grad_enabled():
            yield
            return
        if self._noted is None:
            self._noted = NotedCalls(self._candidates, self._order(), self._state.device)
        with self._noted.forward():
            yield

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Compare one unit's gradient with what its module computes again."""
        if not self._is_due():
            yield
            return
        first, self._seen = not self._seen, True
        chosen = self._chosen = self._choose(loss) if first else self._chosen
        followed = chosen.backward() if first and chosen is not None else nullcontext()
        with self._repeated().backward(self._state.counters.global_steps), followed:
            yield
        if first and chosen is not None:
            self._gradients = chosen.differences()

    def before_step(self) -> None:
        """All comparisons."""
        if not self._is_due():
            return
        state, parts = self._state, self._state.partition
        wrong = list(unpublished(state))
        on_tier = tier_digests(state, wrong)
        held = {one.key: one for one in held_alike(state, self._buffers)}
        mine = [] if self._at_rest is None else list(self._at_rest.changed(state, on_tier))
        mine += [f"weight '{name}' is not what its master rounds to" for name in wrong]
        mine += [f"gradient of '{name}' is another when it is computed again" for name in self._gradients]
        if self._reductions is not None:
            repeated = self._reductions.differences
            mine += [f"averaged gradient of '{name}' is another when it is reduced again" for name in repeated]
        digests = {key: one.digest for key, one in held.items()}
        refused = []
        if self._chosen is not None and self._chosen.obstacle is not None and self._noted is not None:
            refused = [self._chosen.unit.index]
            self._noted.modules[refused[0]].refuse(self._chosen.obstacle)
        answers = parts.runtime.agree("audit", "", [digest_of(digests), mine[:_SHOWN], wrong, refused])
        self._passed_over.update(unit for answer in answers for unit in answer[3])
        self._tell_of_none()
        found = [f"rank {rank}: {problem}" for rank, answer in enumerate(answers) for problem in answer[1]]
        if len({answer[0] for answer in answers}) > 1:
            found += self._odd(held, [answer[2] for answer in answers])
        if found:
            shown = "\n  ".join(found[:_SHOWN])
            raise AuditError(
                f"the audit of step {state.counters.global_steps} found {len(found)} difference(s) between what ranks "
                f"hold and what they must hold; the weights were not changed by this step:\n  {shown}\nSuspect the "
                "memory or the network of the ranks named, or code that writes to them; go on from the last checkpoint."
            )

    def after_step(self) -> None:
        """Remember what must rest until the audited step that follows."""
        self.step_begins()
        self._at_rest = AtRest(self._state) if self._is_due() else None

    def step_begins(self) -> None:
        """Forget what micro-batches of this step have shown: ranks may have seen different ones."""
        self._seen, self._gradients, self._noted, self._chosen, self._reductions = False, [], None, None, None

    def forget(self) -> None:
        """Take note that resting masters and states were written on purpose."""
        self._at_rest = None

    def _odd(self, held: dict[str, Held], unpublished: list[list[str]]) -> list[str]:
        """Return which rank differs in what; ``unpublished``: by rank, weights it found wrong itself. Collective."""
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
        """The candidates, those first whose turn it is, and those last that could not be repeated."""
        turns = [unit for unit in self._candidates if unit not in self._passed_over] or list(self._candidates)
        first = self._state.counters.global_steps // self._every % len(turns)
        return list(dict.fromkeys([*turns[first:], *turns[:first], *self._candidates]))

    def _choose(self, loss: torch.Tensor) -> Recomputation | None:
        """Return the recomputation that every rank can do, of the unit that comes first. Collective."""
        if not self._candidates:
            return None
        noted, found = self._noted, {} if self._noted is None else repeatable(self._noted, loss, self._state)
        refused = [] if noted is None else [u for u, module in noted.modules.items() if module.obstacle is not None]
        answers = self._state.partition.runtime.agree("audit", "calls", [list(found), refused])
        chosen = next((unit for unit in self._order() if all(unit in answer[0] for answer in answers)), None)
        self._passed_over.update(unit for answer in answers for unit in answer[1])
        return None if chosen is None else found[chosen]

    def _tell_of_none(self) -> None:
        """Say, once, that no gradient can be computed again, and why."""
        self._fruitless = 0 if self.repeated is not None else self._fruitless + 1
        if self._told or not self._fruitless:
            return
        modules = [] if self._noted is None else list(self._noted.modules.values())
        untried = any(one.is_untried and one.candidate.unit.index not in self._passed_over for one in modules)
        if untried and self._fruitless <= len(self._candidates):
            return
        self._told = True
        if not self._candidates:
            reasons = ["No unit is one module below the model itself"]
        elif self._state.compiled:
            reasons = ["The model is compiled"]
        elif not modules or not self._seen:
            reasons = ["The step had no engine.backward after a forward pass of the engine"]
        else:
            reasons = [f"'{module.candidate.unit.name}': {module.why_not()}" for module in modules]
        if self._state.reports:
            logger.warning(
                "audit_every: the audit of step %d compares everything but gradients with what is computed again. %s",
                self._state.counters.global_steps,
                "; ".join(reasons[:_SHOWN]),
            )

    def _is_due(self) -> bool:
        """Return True in a step that is audited."""
        return (self._state.counters.global_steps + 1) % self._every == 0

    def _repeated(self) -> RepeatedReductions:
        """Return the object that repeats the reductions of this step's unit."""
        if self._reductions is None:
            parts = self._state.partition
            units = list(parts.runtime.gradients)
            chosen = units[self._state.counters.global_steps // self._every % len(units)]
            self._reductions = RepeatedReductions(parts.runtime.gradients[chosen], parts)
        return self._reductions
