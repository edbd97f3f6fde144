"""Rules between keys, and values that follow from other values.

A function `_..._problems` returns a `Problem` for each rule that the configuration breaks, and an empty list if it
breaks none."""

from __future__ import annotations

from typing import Any, TypeVar

from zero_precision import PrecisionError
from zero_settings._optimizer_params import AdamParams, OneBitParams
from zero_settings._parallel_keys import Deterministic
from zero_settings._rank_rules import group_problems, virtual_ranks
from zero_settings.errors import Problem
from zero_settings.keys import ConfigFile
from zero_settings.precision import build_policy, changes_default_dtypes, loss_scale

_NOT_ELEMENTWISE = frozenset({"adafactor", "lamb", "muon", "shampoo"})
_File = TypeVar("_File", bound=ConfigFile)


def contradictions(config: ConfigFile, world_size: int) -> list[Problem]:
    """Return one problem for every combination of keys that is contradictory, or impossible at ``world_size`` ranks.

    Empty for a sound configuration. Features that are not available (`features.refusals`) and virtual ranks
    (`_rank_rules.rank_problems`) are checked elsewhere.
    """
    return [
        *_precision_mode_problems(config),
        *_stage_problems(config),
        *group_problems(config, world_size),
        *_offload_problems(config),
        *_one_bit_problems(config),
        *_sum_problems(config),
        *_dtype_problems(config),
        *_loss_scale_problems(config),
        *_recomputation_problems(config),
        *_in_memory_problems(config),
        *_interval_problems(config),
        *_format_problems(config),
        *_audit_problems(config),
    ]


def _precision_mode_problems(config: ConfigFile) -> list[Problem]:
    """Return a problem if more than one of fp16, bf16 and torch_autocast is enabled."""
    modes = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(modes) < 2:
        return []
    got = " and ".join(f"{mode}.enabled: true" for mode in modes)
    action = "keep one: bf16 needs no loss scale, fp16 runs on older GPUs, torch_autocast keeps float32 parameters"
    return [Problem(f"{modes[1]}.enabled", "expected one precision mode", got, action=action)]


def _stage_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of 16-bit master weights, which need a stage above 0, and of `bf16_optimizer_states`, which
    needs 16-bit master weights."""
    problems = []
    zero = config.zero_optimization
    for section, key in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads")):
        if getattr(getattr(config, section), key) and zero.stage == 0:
            problems.append(Problem(f"{section}.{key}", "expected stage 1, 2 or 3 with it", "stage 0"))
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        expected = "expected bf16_master_weights_and_grads: true with it"
        problems.append(Problem("bf16.bf16_optimizer_states", expected, "false"))
    return problems


def _offload_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of offloading: of keys in the section `offload` that need an offloaded optimizer, of
    `overlap` (see `_overlap_problems`) and of folders (see `_folder_problems`)."""
    problems = []
    section, device = config.offload, config.zero_optimization.offload_optimizer.device
    for key in ("delayed_update", "state_dtype"):
        value = getattr(section, key)
        if value not in (False, None) and device == "none":
            action = "it is about what an optimizer keeps on a tier"
            expected = 'expected zero_optimization.offload_optimizer.device "cpu" or "nvme" with it'
            problems.append(Problem(f"offload.{key}", expected, '"none"', action=action))
    return problems + _overlap_problems(config) + _folder_problems(config)


def _folder_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of the folders that tiers keep their files in: none given where `device` is "nvme", or
    another number of weights than of folders."""
    zero, problems = config.zero_optimization, []
    for section, used in (
        (zero.offload_param, zero.stage >= 3),
        (zero.offload_optimizer, True),
        (config.offload.activations, True),
    ):
        folders, weights, key = section.paths
        if section.device == "nvme" and not folders and used:
            problems.append(Problem(key, 'expected a directory with device "nvme"', "null"))
        if weights is not None and len(weights) != len(folders):
            expected, got = f"expected {len(folders)} numbers, one for each directory", f"{len(weights)} numbers"
            problems.append(Problem(f"{key}_weights", expected, got))
    return problems


def _overlap_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of `offload_optimizer.overlap`, which updates during the backward pass. Unless it is "off" it
    needs optimizer states in host memory, weights in memory and no delayed update."""
    zero = config.zero_optimization
    if zero.offload_optimizer.overlap == "off":
        return []
    path, problems = "zero_optimization.offload_optimizer.overlap", []
    wrong = {
        f'zero_optimization.offload_optimizer.device: "{zero.offload_optimizer.device}"': (
            zero.offload_optimizer.device != "cpu",
            "states have to be in host memory",
        ),
        'zero_optimization.offload_param.device: "nvme"': (
            zero.stage == 3 and zero.offload_param.device == "nvme",
            "weights have to be in memory",
        ),
        "offload.delayed_update: true": (config.offload.delayed_update, "that is the other way to hide the update"),
    }
    for found, (is_wrong, action) in wrong.items():
        if is_wrong:
            problems.append(Problem(path, f'expected "off" with {found}', '"exact"', action=action))
    return problems


def _format_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of `checkpoint.format` "deepspeed", one for each key whose value its files cannot represent
    or its way of saving does not support."""
    if config.checkpoint.format == "native":
        return []
    zero, optimizer = config.zero_optimization, config.optimizer
    wrong = {
        "zero_optimization.stage": (zero.stage == 0, "0", "its stage 0 keeps no names of what states belong to"),
        "zero_optimization.mics_shard_size": (
            zero.mics_shard_size > 0,
            str(zero.mics_shard_size),
            "its files say nothing about groups of ranks",
        ),
        "offload.state_dtype": (
            config.offload.state_dtype not in (None, "fp32"),
            f'"{config.offload.state_dtype}"',
            "its files have states in one dtype, without scales",
        ),
        "deterministic.across_world_sizes": (
            isinstance(config.deterministic, Deterministic),
            "given",
            "its files have no virtual ranks",
        ),
        "optimizer.type": (
            optimizer is not None and optimizer.type in _NOT_ELEMENTWISE,
            f'"{getattr(optimizer, "type", None)}"',
            "its files have elementwise states of one optimizer",
        ),
        "checkpoint.writer.decoupled": (config.checkpoint.writer.decoupled, "true", "a save is complete on return"),
        "checkpoint.use_node_local_storage": (
            config.checkpoint.use_node_local_storage,
            "true",
            "every rank reads what the others have written",
        ),
        "checkpoint.keep_last": (
            config.checkpoint.keep_last is not None,
            str(config.checkpoint.keep_last),
            "only checkpoints of this project's format are counted",
        ),
    }
    return [
        Problem(path, 'expected another value with checkpoint.format "deepspeed"', got, action=why)
        for path, (is_wrong, got, why) in wrong.items()
        if is_wrong
    ]


def _audit_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of `audit_every`. Audits compare the states of ranks, and weights with their masters; these
    differ during a delayed update and under a 1-bit optimizer."""
    if config.audit_every is None:
        return []
    problems, got = [], str(config.audit_every)
    if config.offload.delayed_update:
        action = "weights are not what masters round to while an update is under way"
        problems.append(Problem("audit_every", "expected null with offload.delayed_update", got, action=action))
    if config.optimizer is not None and isinstance(config.optimizer.params, OneBitParams):
        action = "its ranks differ between their averages"
        problems.append(Problem("audit_every", f'expected null with "{config.optimizer.type}"', got, action=action))
    return problems


def _one_bit_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of a 1-bit optimizer, which needs stage 0 and an optimizer that is not offloaded."""
    if config.optimizer is None or not isinstance(config.optimizer.params, OneBitParams):
        return []
    name, problems, zero = config.optimizer.type, [], config.zero_optimization
    if zero.stage:
        expected = f'expected stage 0 with the optimizer "{name}", which averages over the ranks by itself'
        action = "set the stage to 0, or use adamw"
        problems.append(Problem("zero_optimization.stage", expected, str(zero.stage), action=action))
    if zero.offload_optimizer.device != "none":
        expected = f'expected "none" with the optimizer "{name}"'
        got = f'"{zero.offload_optimizer.device}"'
        problems.append(Problem("zero_optimization.offload_optimizer.device", expected, got, action="use adamw"))
    return problems


def _sum_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of `gradient_allreduce_op` "sum". It cannot be combined with features that average gradients
    themselves: quantized gradients, a 1-bit optimizer, `deterministic.across_world_sizes`."""
    if config.gradient_allreduce_op == "mean":
        return []
    one_bit = config.optimizer is not None and isinstance(config.optimizer.params, OneBitParams)
    averaging = {
        "zero_optimization.zero_quantized_gradients": config.zero_optimization.zero_quantized_gradients,
        "a 1-bit optimizer": one_bit,
        "deterministic.across_world_sizes": virtual_ranks(config) > 0,
    }
    action = 'set it to "mean", and multiply the learning rate or the loss by the number of ranks'
    return [
        Problem("gradient_allreduce_op", f'expected "mean" with {what}, which averages', '"sum"', action=action)
        for what, asked in averaging.items()
        if asked
    ]


def _dtype_problems(config: ConfigFile) -> list[Problem]:
    """Return at most one problem: the first dtype that does not fit the others. It is that of `data_types.param_dtype`
    beside fp16, bf16 or autocast, or the one for which `build_policy` raises."""
    declared = config.data_types.param_dtype
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else None
    if mode is not None and declared not in (None, mode):
        action = f"remove it, or switch {mode} off"
        return [
            Problem("data_types.param_dtype", f"expected {mode}, as {mode}.enabled says", declared or "", None, action)
        ]
    if mode is None and declared in ("fp16", "bf16"):
        action = f'set "{declared}": {{"enabled": true}} instead'
        return [
            Problem(
                "data_types.param_dtype", "expected fp32 or fp64 without fp16 or bf16", declared or "", None, action
            )
        ]
    if config.torch_autocast.enabled and declared == "fp64":
        action = "autocast never touches float64"
        return [Problem("data_types.param_dtype", "expected fp32 under torch_autocast", "fp64", None, action)]
    if not changes_default_dtypes(config):
        return []
    try:
        build_policy(config)
    except PrecisionError as error:
        action = "see data_types.grad_accum_dtype, data_types.buffer_dtype and communication_data_type"
        return [Problem("data_types", str(error), "", None, action)]
    return []


def _recomputation_problems(config: ConfigFile) -> list[Problem]:
    """Return a problem if `activation_checkpointing.contiguous_memory_optimization` is on and its `number_checkpoints`
    is missing."""
    section = config.activation_checkpointing
    if not section.contiguous_memory_optimization or section.number_checkpoints is not None:
        return []
    expected = "expected the number of segments that wait for backward at once, with contiguous_memory_optimization"
    return [Problem("activation_checkpointing.number_checkpoints", expected, "null")]


def _in_memory_problems(config: ConfigFile) -> list[Problem]:
    """Return a problem if `checkpoint.in_memory.path` is an empty string."""
    if config.checkpoint.in_memory.path != "":
        return []
    expected = "expected a folder in each node's memory, such as /dev/shm/my-run, or null"
    return [Problem("checkpoint.in_memory.path", expected, '""')]


def _interval_problems(config: ConfigFile) -> list[Problem]:
    """Return the problems of keys in the section `checkpoint` that save by interval: `mean_time_between_failures` needs
    the interval "auto", and `path` needs an interval and must not be empty."""
    section = config.checkpoint
    problems = []
    if section.mean_time_between_failures is not None and section.interval != "auto":
        expected = 'expected checkpoint.interval "auto" with it'
        got = "null" if section.interval is None else str(section.interval)
        problems.append(Problem("checkpoint.mean_time_between_failures", expected, got, action="nothing else uses it"))
    if section.path == "" or (section.path is not None and section.interval is None):
        expected = "expected a folder, and checkpoint.interval with it"
        action = "without an interval the script says where to save: engine.save_checkpoint(folder)"
        problems.append(Problem("checkpoint.path", expected, f'"{section.path}"', action=action))
    return problems


def _loss_scale_problems(config: ConfigFile) -> list[Problem]:
    """Return a problem if the keys of the loss scale in the section `fp16` do not fit together."""
    try:
        loss_scale(config)
    except PrecisionError as error:
        return [Problem("fp16", str(error), "")]
    return []


def derived(config: ConfigFile, auto: set[str], model_hint: Any) -> dict[str, Any]:
    """Return the values that follow from other keys or from the model's hidden size, by their paths in the names of
    `ConfigFile`.

    ``auto``: the paths that were written as "auto"; a bucket size is derived only if it is one of them. ``model_hint``:
    the model, its config or its hidden size (see `hidden_size`)."""
    zero = config.zero_optimization
    values: dict[str, Any] = {}
    if zero.overlap_comm is None:
        values["zero_optimization.overlap_comm"] = zero.stage == 3
    if config.torch_autocast.enabled and config.torch_autocast.dtype is None:
        values["torch_autocast.dtype"] = "bf16"
    if config.optimizer is not None and isinstance(config.optimizer.params, AdamParams):
        params = config.optimizer.params
        torch_default = params.torch_adam and config.optimizer.decoupled_weight_decay
        if torch_default and "weight_decay" not in params.model_fields_set:
            values["optimizer.params.weight_decay"] = 1e-2
    hidden = hidden_size(model_hint)
    if hidden is not None:
        values.update({path: size for path, size in _sizes_from_hidden(hidden).items() if path in auto})
    return values


def _sizes_from_hidden(hidden: int) -> dict[str, int]:
    """Return the two bucket sizes and the persistence threshold, in elements, that Accelerate and Transformers derive
    from a hidden size, by the paths of their keys."""
    return {
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }


def hidden_size(hint: Any) -> int | None:
    """Return the hidden size of ``hint``, a model or its Hugging Face config; of several sizes the largest; None if it
    has none. A number is the hidden size itself and is returned as it is."""
    if isinstance(hint, int):
        return hint
    for holder in (getattr(hint, "config", None), hint):
        for described in (holder, getattr(holder, "text_config", None)):
            size = getattr(described, "hidden_size", None)
            sizes = getattr(described, "hidden_sizes", None)
            if isinstance(size, int):
                return size
            if isinstance(sizes, (list, tuple)) and sizes:
                return max(map(int, sizes))
    return None


def with_values(config: _File, values: dict[str, Any]) -> _File:
    """Return a copy of the configuration with the values at these paths replaced, not validated again. ``config`` is
    not changed.

    ``values``: by path, in the names of `ConfigFile` with a dot between sections."""
    for path, value in values.items():
        config = _with_value(config, path.split("."), value)
    return config


def _with_value(section: Any, names: list[str], value: Any) -> Any:
    """Return a copy of ``section`` in which the value at the path ``names``, one key per section, is replaced."""
    head, *rest = names
    new = _with_value(getattr(section, head), rest, value) if rest else value
    return section.model_copy(update={head: new})
