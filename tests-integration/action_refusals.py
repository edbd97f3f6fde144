"""The refusals that random sequences may meet, and the check that an exception is one of them.

Each is written out in full, with the sentence of docs/things-that-bite.md that tells users of it. Any other exception
is an error of the engine, unless plain torch raises one of the same type for the same action.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import zero_core
from zero_partition import EditRefusedError, PartitionError, ReleasedParameterError

PAGE = Path(__file__).parents[1] / "docs" / "things-that-bite.md"

DROPPED = (
    "The weights were not changed, and the gradients of this step are dropped: call engine.zero_grad() on every rank "
    "and continue with the next batch."
)


@dataclass(frozen=True)
class Refusal:
    """An action that the engine refuses though plain torch does it.

    ``text``: the whole message, where ``{name}`` is a parameter's name and ``{word}`` an identifier or a number.
    ``told``: the part of it that says what to write instead. ``documented``: words of docs/things-that-bite.md, line
    breaks apart.
    """

    kind: str
    error: type[Exception]
    text: str
    told: str
    documented: str

    def matches(self, failure: Exception, names: Collection[str]) -> bool:
        """Return whether ``failure`` is this refusal and names one of ``names``."""
        pattern = re.escape(self.text).replace(r"\{name\}", "(?P<name>[^']+)").replace(r"\{word\}", r"[\w.-]+")
        found = re.fullmatch(pattern, str(failure))
        if type(failure) is not self.error or found is None:
            return False
        return "{name}" not in self.text or found["name"] in names


CLIPPED = Refusal(
    "torch's clipping",
    PartitionError,
    "torch.nn.utils.clip_grad_* found no gradient of parameter '{name}': from stage 1 on, and inside an accumulation, "
    "the engine holds them, so nothing would be clipped. Call engine.clip_grad_norm_(max_norm) instead, or set "
    '"gradient_clipping" in the configuration.',
    "Call engine.clip_grad_norm_(max_norm) instead",
    "torch's clipping functions",
)
CLIPPED_ALONE = Refusal(
    "torch's clipping of a parameter in no group",
    PartitionError,
    "torch.nn.utils.clip_grad_* was given parameter '{name}', which requires gradients but is in no param group: its "
    "gradient is this rank's alone, so ranks would clip differently. Call engine.clip_grad_norm_(max_norm), or "
    "requires_grad_(False) on it. Nothing was clipped.",
    "Call engine.clip_grad_norm_(max_norm)",
    "parameters that require gradients and are in no param group",
)
GRADIENT_READ = Refusal(
    "p.grad read",
    PartitionError,
    "p.grad of parameter '{name}' was read in {word} and is not there: from stage 1 on, and inside an accumulation, "
    "the engine holds the gradients, averaged and sharded. Code that continues without them would change nothing. Read "
    "engine.full_grad(p), write engine.set_full_grad(p, value) or p.grad = value, clip with engine.clip_grad_norm_, "
    "step with engine.step and zero with engine.zero_grad. The weights were not changed.",
    "Read engine.full_grad(p), write engine.set_full_grad(p, value)",
    "Code that reads it there is refused by name",
)
WRITTEN_RELEASED = Refusal(
    "write of a released parameter",
    ReleasedParameterError,
    "{word}() would write parameter '{name}' while it is released, and the value would be lost. Change it on every "
    "rank inside `with gathered([parameter], modifier_rank=0)`.",
    "Change it on every rank inside `with gathered([parameter], modifier_rank=0)`",
    "always noticed; refused by name where `p` is released",
)
GROUP_ADDED = Refusal(
    "add_param_group",
    PartitionError,
    "optimizer.add_param_group: parameter '{name}' had no master, no gradient buffer and no state when the engine was "
    "made, and gets none now. Give all parameters that will be trained to the optimizer before initialize, while they "
    "require gradients, and call requires_grad_(False) on those whose turn comes later: until requires_grad_(True) "
    "they have no decay and no change of state, as in torch. Nothing was changed.",
    "Give all parameters that will be trained to the optimizer before initialize",
    "`optimizer.add_param_group` after `initialize`, and a parameter moved",
)
SAVED_BETWEEN = Refusal(
    "save in the middle of an accumulation",
    zero_core.UsageError,
    "save_checkpoint was called after 1 of 2 micro-batches of an accumulation, whose gradients a checkpoint does not "
    "hold: a resumed run would continue without them. Save after the step that ends the accumulation, or end it "
    "before: after engine.set_gradient_accumulation_boundary(True) the next step acts",
    "Save after the step that ends the accumulation",
    "`save_checkpoint` between the micro-batches of an accumulation is refused on every rank",
)
WRITTEN_ALONE = Refusal(
    "write on one rank",
    EditRefusedError,
    "parameter '{name}' was changed outside the optimizer, and only rank {word} wrote it. It has its former value on "
    "every rank. Write the same values on every rank, or write inside `engine.gathered([parameter], modifier_rank=0)`, "
    "which gives rank 0's to all; keep the dtype and the shape.",
    "Write the same values on every rank",
    "All ranks have to write the same",
)
WRITTEN_ALONE_AT_STEP = replace(
    WRITTEN_ALONE,
    text=WRITTEN_ALONE.text
    + " The gradients of this step are kept: call engine.zero_grad() on every rank and continue "
    "with the next batch, or, without gradient accumulation, engine.step() again.",
)
GROUPS_APART = Refusal(
    "hyperparameter on one rank",
    PartitionError,
    "param_groups[0]['lr']: expected the same on every rank, got {word} on rank 0 and {word} on rank {word}. Set it "
    f"alike: give a schedule that follows the loss the mean over the ranks (torch.distributed.all_reduce). {DROPPED}",
    "Set it alike",
    "The step refuses that and names the group, the key and the ranks.",
)
ZEROED_ALONE = Refusal(
    "zero_grad on one rank",
    PartitionError,
    "rank {word} discarded gradients that were averaged already (zero_grad) and rank {word} did not: each rank would "
    f"be left with a part. Call zero_grad on every rank at the same point. {DROPPED}",
    "Call zero_grad on every rank at the same point",
    "`zero_grad` and `p.grad = value` are for all ranks or none",
)
GRADIENT_ALONE = Refusal(
    ".grad written on one rank",
    PartitionError,
    "the gradient of parameter '{name}' was written on rank {word}, but rank {word} has one from backward: the average "
    f"of both is no gradient of either. Write p.grad on every rank or on none. {DROPPED}",
    "Write p.grad on every rank or on none",
    "`zero_grad` and `p.grad = value` are for all ranks or none",
)
ZEROED_APART = replace(
    ZEROED_ALONE, text=ZEROED_ALONE.text.replace("did not:", "discarded others, or at another point:")
)
ALONE = (ZEROED_APART, WRITTEN_ALONE, WRITTEN_ALONE_AT_STEP, GROUPS_APART, ZEROED_ALONE, GRADIENT_ALONE)
REFUSALS = (*ALONE, SAVED_BETWEEN, CLIPPED, CLIPPED_ALONE, GRADIENT_READ, WRITTEN_RELEASED, GROUP_ADDED)


def refusal_of(failure: Exception, names: Collection[str]) -> Refusal | None:
    """Return the refusal that ``failure`` is, in a model whose parameters have ``names``; None if it is none."""
    return next((refusal for refusal in REFUSALS if refusal.matches(failure, names)), None)


def undocumented() -> list[str]:
    """Return the kinds of refusals that lack advice, or that docs/things-that-bite.md does not mention."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    return [r.kind for r in REFUSALS if not r.told or r.told not in r.text or r.documented not in page]
