"""Keys that are refused because their feature is not available, and keys that are accepted without effect.

Both are tables: a feature becomes available when its rows are removed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zero_settings._base import Section
from zero_settings.errors import Problem, show

Predicate = Callable[[Any], bool]


def is_on(value: Any) -> bool:
    """Return whether a value is exactly true; other values that Python takes for true do not count."""
    return value is True


def is_given(value: Any) -> bool:
    """Return whether a value is anything but null, false or an empty object."""
    return value is not None and value is not False and value != {}


def is_above(limit: float) -> Predicate:
    """Return a predicate: whether a value is a number above ``limit``."""
    return lambda value: isinstance(value, (int, float)) and value > limit


def is_not(*inert: Any) -> Predicate:
    """Return a predicate: whether a value is none of ``inert``, the values that switch nothing on."""
    return lambda value: value not in inert


class Refusal(NamedTuple):
    """A key of a feature that is not available: refused where `when(value)` is true, without effect otherwise.

    `feature`: its name for the error; `instead`: what the error tells the user to do.
    """

    path: str
    when: Predicate
    feature: str
    instead: str


_OFF = "set it to false"

REFUSED: tuple[Refusal, ...] = (
    Refusal("autotuning.enabled", is_on, "autotuning", _OFF),
    Refusal("compile.autoep_non_moe", is_on, "DeepCompile", _OFF),
    Refusal("compile.deepcompile", is_on, "DeepCompile", 'set it to false; "engine.compile" uses torch.compile'),
    Refusal("compile.passes", is_given, "DeepCompile", "remove it"),
    Refusal("data_efficiency.enabled", is_on, "data efficiency", _OFF),
    Refusal("datastates_ckpt", is_given, "DataStates checkpointing", "remove it"),
    Refusal("expert_parallel.enabled", is_on, "expert parallelism", "train experts with plain ZeRO: set it to false"),
    Refusal("hybrid_engine.enabled", is_on, "the hybrid engine", _OFF),
    Refusal("managed_gradient_accumulation", is_not(True), "accumulation by hand", 'set it to true, or use "no_sync"'),
    Refusal("optimizer.legacy_fusion", is_on, "legacy fusion", _OFF),
    Refusal("optimizer.type", lambda name: name in ("muadam", "muadamw", "musgd"), "mup optimizers", "use adamw"),
    Refusal("pipeline.stages", is_not("auto", 1), "pipeline parallelism", 'remove it, or set it to "auto"'),
    Refusal("tensor_parallel.autotp_size", is_above(1), "tensor parallelism", "set it to 1, or remove it"),
    Refusal("tensor_parallel.tp.tp_size", is_above(1), "tensor parallelism", "set it to 1, or remove it"),
    Refusal("use_data_before_expert_parallelism", is_on, "expert parallelism", _OFF),
    Refusal("weight_quantization", is_given, "quantised inference weights", "remove it"),
    Refusal("zero_optimization.legacy_stage1", is_on, "the old stage 1", "set it to false: results are the same"),
    Refusal("zero_optimization.load_from_fp32_weights", is_not(True), "masters from 16-bit weights", "set it to true"),
    Refusal("zero_optimization.mics_hierarchical_params_gather", is_on, "gathers in two hops", _OFF),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        is_on,
        "SuperOffload",
        'set it to false; "overlap": "exact" beside it hides the update',
    ),
    Refusal("zero_optimization.zenflow", is_given, "ZenFlow", "remove it"),
)

_WRITER = "the writer is chosen for the disk"
_UNITS = "units are chosen from the module tree"
_ALWAYS = "always on"
_MEAN = "the mean is the same: gradients are summed in the accumulate dtype and divided once"
_LAYOUT = "gradients and parameters are flat buffers always"

NO_EFFECT: dict[str, str] = {
    "bf16.immediate_grad_update": "gradients are always reduced as soon as they are complete",
    "checkpoint.checkpoint_serialization": "checkpoints hold tensors and plain data, never pickles",
    "checkpoint.load_universal": "every checkpoint loads at any world size and stage",
    "checkpoint.parallel_write": "all ranks always write in parallel",
    "checkpoint.writer.data_parallel": "all ranks always write in parallel",
    "checkpoint.writer.io_buffer_double": _WRITER,
    "checkpoint.writer.io_buffer_size": _WRITER,
    "checkpoint.writer.io_multiplier": _WRITER,
    "checkpoint.writer.show_statistics": "`zero-ckpt inspect` has the sizes",
    "checkpoint.writer.type": _WRITER,
    "checkpoint.tag_validation": "all ranks have one tag; under DeepSpeed's names Fail refuses different ones",
    "comms_logger.debug": "every line names its unit or parameter",
    "compile": "DeepCompile is switched off",
    "disable_allgather": "parameters are always gathered by all-gather",
    "disable_python_gc": "the garbage collector is left alone",
    "flops_profiler.recompute_fwd_factor": "backward is counted as it runs, recomputation included",
    "gradient_predivide_factor": _MEAN,
    "log_level": 'set the level of the logger "zero_core"',
    "optimizer.params.comm_backend_name": "torch.distributed's backend is used",
    "optimizer.params.cuda_aware": "everything goes through torch.distributed",
    "optimizer.params.ns_method": "torch.optim.Muon iterates on the matrix itself, in bfloat16",
    "pipeline": "one stage",
    "prescale_gradients": _MEAN,
    "seq_parallel_communication_data_type": "gradients of all ranks are averaged alike, in communication_data_type",
    "tensor_parallel": "there is no tensor parallelism",
    "timers.throughput.synchronized": "a step's norm is known on the host, so its work is done",
    "vocabulary_size": "only ever a warning",
    "zero_allow_untested_optimizer": "every optimizer is checked for what it needs instead",
    "zero_force_ds_cpu_optimizer": "the optimizer that was passed is used",
    "zero_optimization.allgather_bucket_size": _UNITS,
    "zero_optimization.allgather_partitions": _ALWAYS,
    "zero_optimization.compute_grad_norm": "the norm costs nothing extra and is always known",
    "zero_optimization.contiguous_gradients": _LAYOUT,
    "zero_optimization.elastic_checkpoint": "every checkpoint loads at any world size and stage",
    "zero_optimization.enable_sanity_checks": _ALWAYS,
    "zero_optimization.ignore_unused_parameters": "unused parameters are skipped as torch skips them",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache: ranks agree on an order",
    "zero_optimization.memory_efficient_linear": "a gathered weight is never saved by autograd as a copy",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the kernels use torch's number of threads",
    "zero_optimization.offload_optimizer.fast_init": "nothing is ever written at the start",
    "zero_optimization.overlap_comm": "communication always overlaps with computation",
    "zero_optimization.override_module_apply": "nothing in torch is replaced",
    "zero_optimization.parameter_alignment": _LAYOUT,
    "zero_optimization.pipeline_loading_checkpoint": "checkpoints are always read shard by shard",
    "zero_optimization.reduce_scatter": "each backend has one reduction",
    "zero_optimization.round_robin_gradients": _UNITS,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "states live where their shards live",
    "zero_optimization.stage3_allgather_sequential": _UNITS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "full weights can always be gathered for saving",
    "zero_optimization.stage3_max_reuse_distance": _UNITS,
    "zero_optimization.stage3_model_persistence_threshold": "stage3_param_persistence_threshold alone decides",
    "zero_optimization.stage3_module_granularity_threshold": _UNITS,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _UNITS,
    "zero_optimization.use_multi_rank_bucket_allreduce": _UNITS,
}
"""Keys, or whole sections, that change no result here: accepted, and listed in the report with the reason."""


_OF_FILES = (
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.max_in_cpu",
)
_OVERLAP = "zero_optimization.offload_optimizer.overlap"
_GATHERS = (
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_weights",
)
_CODECS = {
    "comm.gradient_codec": ("zero_optimization.zero_quantized_gradients",),
    "comm.weight_codec": (
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_nontrainable_weights",
    ),
}


def leaves(section: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every key whose value is no section, in ``section`` and the sections inside it, in the
    order of the keys.

    `path`: that of the section, with a dot at the end; empty at the top."""
    for name, value in section:
        if isinstance(value, Section):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def lookup(section: Section, path: str) -> Any:
    """Return the value at ``path``, keys with dots between, below ``section``; None if a key on the way is absent or
    null."""
    value: Any = section
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def refusals(config: Section) -> list[Problem]:
    """Return one problem for every key whose value asks for a feature that is not available."""
    return [
        Problem(row.path, f"{row.feature}: not available in this version", show(value), action=row.instead)
        for row in REFUSED
        if row.when(value := lookup(config, row.path))
    ]


def no_effect(config: Section, path: str) -> str:
    """Return why the value at ``path`` has no effect, or a different one than written, as a remark for the report;
    empty if it has its effect. That depends on the key, by the table `NO_EFFECT`, and on the other values of
    ``config``."""
    if path.startswith("zero_optimization.offload_param.") and lookup(config, "zero_optimization.stage") != 3:
        return "accepted, no effect: below stage 3 parameters stay on the device"
    if path in _GATHERS and lookup(config, "zero_optimization.stage") != 3:
        return "accepted, no effect: below stage 3 passes gather no parameters"
    if path in _CODECS and not any(lookup(config, switch) for switch in _CODECS[path]):
        return f"accepted, no effect: {_CODECS[path][0]} is false"
    if path == f"{_OVERLAP}_journal" and lookup(config, _OVERLAP) == "off":
        return f"accepted, no effect: {_OVERLAP} is off"
    if path == "offload.trace_steps" and lookup(config, "offload.trace") is None:
        return "accepted, no effect: offload.trace is null"
    if path in _OF_FILES and lookup(config, f"{path.rpartition('.')[0]}.device") == "cpu":
        return "accepted, no effect: it is for files, and the device is cpu"
    if path == "comms_logger.prof_all" and not lookup(config, "comms_logger.prof_ops"):
        return "accepted, no effect: comms_logger.prof_ops is empty, so all are printed"
    if path == "comms_logger.prof_ops" and lookup(config, "comms_logger.prof_all"):
        return "accepted, no effect: comms_logger.prof_all is true"
    if path == "zero_optimization.sub_group_size":
        return _group_size_note(config)
    if path == "bf16.bf16_optimizer_states" and _has_bf16_moments_on_device(config):
        return "accepted, no effect: moments on the device have the dtype of the weights, bfloat16, in any case"
    if path.startswith("aio.") and "nvme" not in _offload_devices(config):
        return "accepted, no effect: nothing is offloaded to NVMe"
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if path != f"{prefix}.enabled" and lookup(config, f"{prefix}.enabled") is False:
            return f"accepted, no effect: {prefix}.enabled is false"
        if path != f"{prefix}.device" and lookup(config, f"{prefix}.device") == "none":
            return f"accepted, no effect: {prefix}.device is none"
        if prefix in NO_EFFECT:
            return f"accepted, no effect: {NO_EFFECT[prefix]}"
    return ""


def _group_size_note(config: Section) -> str:
    """Return the report's remark on `sub_group_size`: that it has no effect without an offloaded optimizer, or how many
    elements are used because the value is out of bounds; empty if the value is used as it is."""
    given, used = (lookup(config, f"zero_optimization.{name}") for name in ("sub_group_size", "group_size"))
    if lookup(config, "zero_optimization.offload_optimizer.device") == "none":
        return "accepted, no effect: zero_optimization.offload_optimizer.device is none"
    return (
        ""
        if given == used
        else f"{used} elements are in force: smaller groups cost time, larger ones memory, and save no time"
    )


def _has_bf16_moments_on_device(config: Section) -> bool:
    """Return whether the optimizer's moments have the weights' dtype even without `bf16_optimizer_states`: there is no
    float32 master and the optimizer is not offloaded."""
    device = lookup(config, "zero_optimization.offload_optimizer.device")
    return bool(lookup(config, "bf16.bf16_master_weights_and_grads")) and device == "none"


def _offload_devices(config: Section) -> set[Any]:
    """Return the values of `device` ("none", "cpu" or "nvme") in the three offload sections."""
    paths = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "offload.activations")
    return {lookup(config, f"{path}.device") for path in paths}
