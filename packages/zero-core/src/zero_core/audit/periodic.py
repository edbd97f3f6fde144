"""The auditor that looks every so many steps, and what ranks tell one another then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..errors import AuditError
from ..state import TrainingState
from .digests import digest_of, odd_ranks
from .holdings import Buffers, Held, held_alike
from .recomputation import Recomputation, RepeatedReductions, candidates
from .rest import AtRest, tier_digests, unpublished

_SHOWN = 10


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
        self._candidates = candidates(state)
        self._at_rest: AtRest | None = None
        self._reductions: RepeatedReductions | None = None
        self._watched: Recomputation | None = None
        self._seen = False
        self._gradients: list[str] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the first training pass of an audited step."""
        if self._is_due() and not self._seen and self._candidates and torch.is_grad_enabled():
            self._seen = True
            number = self._state.counters.global_steps // self._every % len(self._candidates)
            self._watched = Recomputation(self._candidates[number], self._state)
            with self._watched.forward():
                yield
        else:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Compare the watched unit's gradient with what its module computes again."""
        if not self._is_due():
            yield
            return
        watched, self._watched = self._watched, None
        recomputed = nullcontext() if watched is None else watched.backward()
        with self._repeated().backward(self._state.counters.global_steps), recomputed:
            yield
        if watched is not None:
            self._gradients = watched.differences()

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
        answers = parts.runtime.agree("audit", "", [digest_of(digests), mine[:_SHOWN], wrong])
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
        self._seen, self._gradients, self._watched, self._reductions = False, [], None, None
        self._at_rest = AtRest(self._state) if self._is_due() else None

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

    def _is_due(self) -> bool:
        """Return True in a step that is audited."""
        return (self._state.counters.global_steps + 1) % self._every == 0

    def _repeated(self) -> RepeatedReductions:
        """Return the object that repeats the reductions of this step's unit."""
        if self._reductions is None:
            parts = self._state.partition
            units = list(parts.runtime.gradients)
            chosen = units[self._state.counters.global_steps // self._every % len(units)]
            self._reductions = RepeatedReductions(parts.runtime.gradients[chosen], parts.rank)
        return self._reductions
