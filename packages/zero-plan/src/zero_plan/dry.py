"""`plan` and `plan_script`: a dry run of the engine itself, over tensors without memory, or of a script with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError, at_least_one
from .planned import Plan, RankPlan
from .ranks import chosen_ranks
from .scripts import Script, ScriptPlan, ScriptRank, run_rank

if TYPE_CHECKING:
    import torch
    from torch import nn


def plan(
    model_fn: Callable[[], nn.Module],
    config: Any,
    *,
    batch: Any,
    world_size: int,
    ranks: Iterable[int] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    checkpoint: bool = False,
    saved_by: int | None = None,
) -> Plan:
    """Return what a run needs, measured by a dry run: `zero_core.initialize`, forward, backward and step run in this
    process as one rank after the other, over tensors that have shapes and no memory.

    ``model_fn``: returns the model. ``config``: as for `zero_core.initialize`, with an optimizer. ``batch``: one
    micro-batch, of which only shapes and dtypes matter: a mapping of the model's keyword arguments, a tuple of its
    arguments, or its one argument. ``ranks``: by default the first and the last. ``loss``: returns the loss of the
    model's output; by default see `loss_of`. ``checkpoint``: plan a save after the steps too, and a load of a
    checkpoint that ``saved_by`` ranks saved (by default ``world_size``). A load also runs those of its savers dry whose
    files it reads. Needs `pip install zero-plan[dry-run]`.

    The compute device is the CPU; offload of activations is refused. One process calls it, alone, before
    torch.distributed is initialised. Raises `PlanError` for a run that cannot be planned, naming the line if code reads
    a tensor's values, and the errors of `zero_core.initialize`.
    """
    chosen = chosen_ranks(world_size, ranks)
    savers = world_size if saved_by is None else saved_by
    at_least_one(saved_by=savers)
    try:
        from .dry_run import DryRun, plan_ranks
    except ModuleNotFoundError as error:
        raise PlanError(f"a dry run needs {error.name}: pip install 'zero-plan[dry-run]'") from error
    run = DryRun(model_fn, config, batch, loss or loss_of)
    found = plan_ranks(run, chosen, world_size, checkpoint=checkpoint, saved_by=savers)
    return Plan(world_size, tuple(found))


def plan_script(
    script: Script,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    ranks: Iterable[int] | None = None,
    checkpoint: bool = False,
    saved_by: int | None = None,
) -> ScriptPlan:
    """Return what a training script needs, by running it dry until its engine has taken three steps.

    ``ranks_per_node``: by default that of the configuration, else all ranks. ``ranks``, ``checkpoint``, ``saved_by``:
    see `zero_plan.plan`; a load runs the script once more as each rank, and as each of the savers whose files the rank
    reads. Files that the script writes before its third step ends are written; its output is not shown.
    Raises `PlanError` for a script that cannot be planned, naming the line in the user's file.
    """
    if ranks_per_node is not None:
        at_least_one(ranks_per_node=ranks_per_node)
    if not script.module and not Path(script.target).is_file():
        raise PlanError(f"there is no script {script.target!r}; to run a module by name, say -m")
    asked = [ScriptRank(script, rank, world_size, ranks_per_node) for rank in chosen_ranks(world_size, ranks)]
    savers = world_size if saved_by is None else saved_by
    at_least_one(saved_by=savers)
    if checkpoint:
        try:
            from .dry_run.script_loading import plan_with_checkpoint
        except ModuleNotFoundError as error:
            raise PlanError(f"a dry run needs {error.name}: pip install 'zero-plan[dry-run]'") from error
        found = plan_with_checkpoint(asked, savers)
    else:
        found = [run_rank(rank) for rank in asked]
    lines = dict.fromkeys(line for answer in found for line in answer["lines"])
    return ScriptPlan(Plan(world_size, tuple(RankPlan.from_dict(answer["plan"]) for answer in found)), tuple(lines))


def loss_of(output: Any) -> Any:
    """Return the loss in the output of a model: its ``loss`` (key or attribute), else the first item of a tuple or
    list, else the output itself.
    """
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    found = getattr(output, "loss", None)
    if found is not None:
        return found
    return output[0] if isinstance(output, (tuple, list)) and output else output
