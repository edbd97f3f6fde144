"""The engine's state as named intervals of logical tensors, and back, at any world size and stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_ckpt import Checkpoint, Interval, MismatchError, SoloCoordinator, restore, save_sharded
from zero_ckpt.torch import DistCoordinator, RngState, Stager, dtype_name, tensor_buffer, torch_dtype
from zero_comm import Tag
from zero_partition import DeviceResidency, Fragment, OwnedFragment, Residency, StateTier, Unit, start_in_reduced

from .schedules import load_plain_state, plain_state

if TYPE_CHECKING:
    from zero_ckpt import Coordinator

    from .engine import Engine

logger = logging.getLogger("zero_core")

_WEIGHT_KINDS = frozenset(["param", "master", "buffer"])


@dataclass(frozen=True)
class Wanted:
    """What to load; ``strict``: the model's tensors and the checkpoint's must be the same set."""

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool


def save(
    engine: Engine, root: Path, tag: str, client_state: dict[str, Any], save_latest: bool, exclude_frozen: bool
) -> None:
    """Write ``root/tag``; collective."""
    engine.partition.runtime.agree("save", f"{root}/{tag}", None)
    state = {
        "client": client_state,
        "counters": _counters(engine),
        "scheduler": None if engine.lr_scheduler is None else plain_state(engine.lr_scheduler),
        "loss_scale": None if engine.sharded_optimizer is None else engine.sharded_optimizer.loss_scale.state_dict(),
        "param_groups": _hyperparameters(engine),
        "data": None if engine.training_dataloader is None else engine.training_dataloader.state_dict(),
    }
    save_sharded(
        root,
        tag,
        _intervals(engine, exclude_frozen),
        step=engine.global_steps,
        aliases=_aliases(engine),
        client_state=state,
        config=engine.resolved_config.to_plain(),
        rank_state={"random": RngState().state_dict()},
        coordinator=_coordinator(engine),
        save_latest=save_latest,
    )


def load(engine: Engine, root: Path, tag: str | None, wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Read ``root/tag`` into the engine; collective."""
    engine.partition.runtime.agree("load", f"{root}/{tag or ''}", None)
    everybody = engine.model_part.coordinator or _coordinator(engine)
    checkpoint, _ = restore(root, lambda c: _fill(engine, c, wanted), tag, coordinator=everybody)
    _spread(engine)
    state = _engine_state(checkpoint)
    if wanted.counters:
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        engine.partition.runtime.step = engine.global_steps
        ranks = checkpoint.rank_state
        own = ranks[engine.partition.rank] if len(ranks) == engine.partition.world_size else None
        if isinstance(own, dict) and "random" in own:
            RngState().load_state_dict(own["random"])
    if wanted.scheduler and engine.lr_scheduler is not None and state["scheduler"] is not None:
        load_plain_state(engine.lr_scheduler, state["scheduler"])
    return str(checkpoint.path), state["client"]


def _engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an engine saved besides tensors; defaults where something else wrote the checkpoint."""
    state = checkpoint.client_state
    if isinstance(state, dict) and "counters" in state:
        return state
    counters = {"global_steps": checkpoint.step}
    empty = dict.fromkeys(("scheduler", "loss_scale", "param_groups", "data"))
    return {**empty, "counters": counters, "client": state if isinstance(state, dict) else {}}


def _intervals(engine: Engine, exclude_frozen: bool) -> Iterator[Interval]:
    stager, parts = Stager(), engine.partition
    for unit in parts.units:
        if exclude_frozen and not unit.plan.trainable:
            continue
        if isinstance(parts.residency, DeviceResidency):
            shard = parts.residency.acquire(unit.name)
            for fragment, piece in _pieces(unit, shard, parts.rank):
                yield from stager.intervals(
                    fragment.entry.name, "param", piece, shape=fragment.entry.shape, offset=fragment.param_offset
                )
        else:
            yield from _stored_weights(parts.residency, unit, parts.rank)
        if unit.master is not None and unit.master.dtype != unit.plan.dtype:
            for fragment, piece in _master_pieces(unit, range(parts.rank, parts.rank + 1)):
                entry = fragment.entry
                yield from stager.intervals(
                    entry.name, "master", piece, shape=entry.shape, offset=fragment.param_offset
                )
        if unit.states is not None:
            yield from _tier_intervals(unit.states, unit, parts.rank)
    if engine.sharded_optimizer is not None:
        for owned in engine.sharded_optimizer.fragments:
            if owned.fragment.rank == parts.rank:
                yield from _optimizer_intervals(stager, owned, engine.sharded_optimizer.state.get(owned.tensor, {}))
    if parts.rank == 0:
        for name, buffer in engine.module.named_buffers():
            yield from stager.intervals(name, "buffer", buffer.detach().contiguous())
        for name, parameter in engine.module.named_parameters():
            if name in parts.uncut and type(parameter.data) is torch.Tensor:
                yield from stager.intervals(name, "param", parameter.detach().contiguous())


def _stored_weights(store: Residency, unit: Unit, rank: int) -> Iterator[Interval]:
    """This rank's part of a unit's weights, read from its store when its turn comes to be written."""

    def read(fragment: Fragment) -> Any:
        shard = store.acquire(unit.name)
        copied = shard[fragment.shard_offset : fragment.shard_offset + fragment.length].to("cpu", copy=True)
        store.release(unit.name, dirty=False)
        return tensor_buffer(copied)

    for fragment in unit.layout.fragments(rank):
        entry = fragment.entry
        yield Interval(
            entry.name,
            "param",
            entry.shape,
            dtype_name(unit.plan.dtype),
            fragment.param_offset,
            partial(read, fragment),
            fragment.length,
        )


def _tier_intervals(tier: StateTier, unit: Unit, rank: int) -> Iterator[Interval]:
    """What a tier keeps for a unit, one parameter in memory at a time."""
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def read(name: str, kind: str) -> Any:
        if name not in kept:
            kept.clear()
            kept.update(tier.states([name]))
        return tensor_buffer(kept[name][kind])

    for fragment in unit.layout.fragments(rank):
        entry = fragment.entry
        for _, state in tier.states([entry.name]):
            for kind, value in state.items():
                if value.dim():
                    yield Interval(
                        entry.name,
                        kind,
                        entry.shape,
                        dtype_name(value.dtype),
                        fragment.param_offset,
                        partial(read, entry.name, kind),
                        fragment.length,
                    )
                elif fragment.param_offset == 0:
                    yield Interval(entry.name, f"{kind}.scalar", (), dtype_name(value.dtype), 0, tensor_buffer(value))


def _optimizer_intervals(stager: Stager, owned: OwnedFragment, state: dict[str, Any]) -> Iterator[Interval]:
    fragment, entry = owned.fragment, owned.fragment.entry
    for key, value in state.items():
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if tensor.dim() and tensor.numel() != fragment.length:
            yield from stager.intervals(entry.name, key, tensor.contiguous())
        elif tensor.dim():
            yield from stager.intervals(entry.name, key, tensor, shape=entry.shape, offset=fragment.param_offset)
        elif fragment.param_offset == 0:
            yield from stager.intervals(entry.name, f"{key}.scalar", tensor.reshape(()).cpu())


def _fill(engine: Engine, checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Read this rank's part; does not communicate."""
    parts = engine.partition
    if wanted.strict:
        _check_names(engine, checkpoint)
    if wanted.counters:
        _load_position(engine, checkpoint)
    if parts.states is not None:
        parts.states.reset()
    for unit in parts.units:
        shard = parts.residency.acquire(unit.name)
        for fragment, piece in _pieces(unit, shard, parts.rank):
            if (fragment.entry.name, "param") in checkpoint.tensors:
                _read_weights(checkpoint, fragment.entry.name, fragment.param_offset, piece)
        parts.residency.release(unit.name, dirty=True)
        for fragment, piece in _master_pieces(unit, parts.owned_ranks()):
            if (fragment.entry.name, "param") in checkpoint.tensors:
                _read_weights(checkpoint, fragment.entry.name, fragment.param_offset, piece)
        if unit.states is not None:
            unit.states.write(_tier_states(unit, unit.states, checkpoint, parts.rank, wanted))
    if engine.sharded_optimizer is not None:
        if wanted.optimizer:
            _load_hyperparameters(engine, checkpoint)
        for owned in engine.sharded_optimizer.fragments:
            if (
                wanted.optimizer
                and owned.unit.states is None
                and (owned.fragment.entry.name, "param") in checkpoint.tensors
            ):
                _read_state(engine, checkpoint, owned)
        scale = _engine_state(checkpoint)["loss_scale"]
        if wanted.optimizer and scale is not None:
            engine.sharded_optimizer.loss_scale.load_state_dict(scale)
    _fill_whole(engine, checkpoint)


def _tier_states(
    unit: Unit, tier: StateTier, checkpoint: Checkpoint, rank: int, wanted: Wanted
) -> dict[str, dict[str, Any]]:
    """What a checkpoint has of a unit for its tier."""
    found: dict[str, dict[str, Any]] = {}
    for fragment in unit.layout.fragments(rank):
        name = fragment.entry.name
        if (name, "param") not in checkpoint.tensors:
            continue
        state: dict[str, Any] = {}
        for kind in tier.kinds(name):
            wide = torch.promote_types(unit.plan.dtype, torch.float32)
            values = torch.empty(fragment.length, dtype=wide)
            if kind == "master":
                _read_weights(checkpoint, name, fragment.param_offset, values)
            elif wanted.optimizer and (name, kind) in checkpoint.tensors:
                values = values.to(torch_dtype(checkpoint.tensors[name, kind].dtype))
                _read(checkpoint, name, kind, fragment.param_offset, values)
            else:
                continue
            state[kind] = values
        if wanted.optimizer and (name, "step.scalar") in checkpoint.tensors:
            step = torch.empty(1, dtype=torch_dtype(checkpoint.tensors[name, "step.scalar"].dtype))
            _read(checkpoint, name, "step.scalar", 0, step)
            state["step"] = int(step)
        found[name] = state
    return found


def _pieces(unit: Unit, shard: torch.Tensor, rank: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield the fragments of this rank's shard with their part of it."""
    for fragment in unit.layout.fragments(rank):
        yield fragment, shard[fragment.shard_offset : fragment.shard_offset + fragment.length]


def _master_pieces(unit: Unit, ranks: range) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield the fragments of ``ranks`` with their part of the unit's master, where this rank has one."""
    if unit.master is not None:
        for rank in ranks:
            for fragment in unit.layout.fragments(rank):
                start = start_in_reduced(unit, fragment)
                yield fragment, unit.master[start : start + fragment.length]


def _fill_whole(engine: Engine, checkpoint: Checkpoint) -> None:
    """Buffers and the parameters that no unit holds."""
    whole = [(name, "buffer", b) for name, b in engine.module.named_buffers()]
    whole += [(n, "param", p.data) for n, p in engine.module.named_parameters() if n in engine.partition.uncut]
    for name, kind, tensor in whole:
        if (name, kind) in checkpoint.tensors and type(tensor) is torch.Tensor:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
            _read(checkpoint, name, kind, 0, flat)
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))


def _read_weights(checkpoint: Checkpoint, name: str, offset: int, out: torch.Tensor) -> None:
    """Read a parameter's elements in the stored precision that is nearest to ``out``'s."""
    kinds = [kind for kind in ("param", "master") if (name, kind) in checkpoint.tensors]
    dtypes = {kind: torch_dtype(checkpoint.tensors[name, kind].dtype) for kind in kinds}
    exact = [kind for kind in kinds if dtypes[kind] == out.dtype]
    _read(checkpoint, name, (exact or sorted(kinds, key=lambda kind: -dtypes[kind].itemsize))[0], offset, out)


def _read_state(engine: Engine, checkpoint: Checkpoint, owned: OwnedFragment) -> None:
    fragment, name = owned.fragment, owned.fragment.entry.name
    state: dict[str, Any] = {}
    for tensor_name, kind in checkpoint.tensors:
        if tensor_name != name or kind in _WEIGHT_KINDS:
            continue
        entry = checkpoint.tensors[name, kind]
        if kind.endswith(".scalar"):
            value = torch.empty(1, dtype=torch_dtype(entry.dtype))
            _read(checkpoint, name, kind, 0, value)
            state[kind.removesuffix(".scalar")] = value.reshape(())
        else:
            same = tuple(entry.shape) == fragment.entry.shape
            shape = owned.tensor.shape if same else entry.shape
            values = torch.empty(tuple(shape), dtype=torch_dtype(entry.dtype), device=owned.tensor.device)
            _read(checkpoint, name, kind, fragment.param_offset if same else 0, values)
            state[kind] = values
    optimizer = engine.sharded_optimizer
    if optimizer is not None:
        optimizer.state.pop(owned.tensor, None)
        if state:
            optimizer.state[owned.tensor] = state


def _read(checkpoint: Checkpoint, name: str, kind: str, offset: int, out: torch.Tensor) -> None:
    dtype = torch_dtype(checkpoint.tensors[name, kind].dtype)
    direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
    target = out if direct else torch.empty(out.numel(), dtype=dtype)
    checkpoint.read_into(name, kind, offset, tensor_buffer(target))
    if not direct:
        out.copy_(target)


def _check_names(engine: Engine, checkpoint: Checkpoint) -> None:
    """Every parameter and buffer is there with its shape, and nothing else is."""
    ours = {(e.name, "param"): e.shape for unit in engine.partition.layout.units for e in unit.entries}
    ours |= {(name, "buffer"): tuple(b.shape) for name, b in engine.module.named_buffers()}
    ours |= {
        (name, "param"): tuple(p.shape)
        for name, p in engine.module.named_parameters()
        if name in engine.partition.uncut and type(p.data) is torch.Tensor
    }
    theirs = {key: tuple(entry.shape) for key, entry in checkpoint.tensors.items() if key[1] in ("param", "buffer")}
    problems = [
        f"'{n}' ({k}) of shape {s} is not in the checkpoint" for (n, k), s in ours.items() if (n, k) not in theirs
    ]
    problems += [f"'{n}' ({k}) is only in the checkpoint" for (n, k) in theirs if (n, k) not in ours]
    problems += [
        f"'{n}' ({k}) has shape {ours[n, k]} here and {s} in the checkpoint"
        for (n, k), s in theirs.items()
        if (n, k) in ours and ours[n, k] != s
    ]
    if problems:
        shown = "\n  ".join(problems[:10])
        raise MismatchError(
            f"{checkpoint.path} does not fit the model ({len(problems)} differences):\n  {shown}\n"
            "Pass load_module_strict=False to load what fits by name."
        )


def _spread(engine: Engine) -> None:
    """Every rank has read its shard; where parameters are whole on every rank, gather them."""
    parts = engine.partition
    works = []
    for unit in parts.units:
        if not unit.releasable:
            start, end = unit.layout.shard_range(parts.rank)
            shard = parts.residency.acquire(unit.name)
            unit.flat[start:end].copy_(shard)
            parts.residency.release(unit.name, dirty=False)
            tag = Tag("checkpoint", unit.name, parts.runtime.step)
            works.append(parts.groups.gather.all_gather(unit.flat, unit.flat[start:end], tag))
    for work in works:
        work.wait()


def _hyperparameters(engine: Engine) -> list[dict[str, Any]]:
    if engine.sharded_optimizer is None:
        return []
    return [
        _plain({k: v for k, v in group.items() if k != "params"}) for group in engine.sharded_optimizer.param_groups
    ]


def _load_hyperparameters(engine: Engine, checkpoint: Checkpoint) -> None:
    stored = _engine_state(checkpoint)["param_groups"]
    if stored is None:
        return
    groups = engine.sharded_optimizer.param_groups if engine.sharded_optimizer is not None else []
    if len(stored) != len(groups):
        raise MismatchError(
            f"{checkpoint.path} has {len(stored)} param groups, the optimizer has {len(groups)}; "
            "build the optimizer as it was, or pass load_optimizer_states=False"
        )
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value


def _load_position(engine: Engine, checkpoint: Checkpoint) -> None:
    """The loader goes on with the batch that would have followed, or says that it cannot."""
    loader, position = engine.training_dataloader, _engine_state(checkpoint)["data"]
    if loader is None:
        return
    if position is not None:
        loader.load_state_dict(position)
    elif engine.partition.rank == 0:
        logger.warning(
            "%s holds no position in the training data: the loader starts at the beginning of an epoch", checkpoint.path
        )


def _counters(engine: Engine) -> dict[str, int]:
    return {name: getattr(engine, name) for name in ("global_steps", "micro_steps", "skipped_steps", "global_samples")}


def _plain(value: Any) -> Any:
    """Numbers that are tensors become numbers; containers are copied."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _aliases(engine: Engine) -> dict[str, str]:
    """Names of tied parameters -> the name under which they are stored."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return aliases


def _coordinator(engine: Engine) -> Coordinator:
    group = engine.partition.groups.control.process_group
    return SoloCoordinator() if group is None else DistCoordinator(group)
