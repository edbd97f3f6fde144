"""The small methods of DeepSpeed's engine: those that return a key of its configuration, and those that are not
available. A getter is a function that returns such a method's result, given the resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from zero_precision import parse_dtype
from zero_settings import Config

from .errors import UnsupportedError

Getter = Callable[[Config], Any]


def _zero_getters(*names: str) -> dict[str, Getter]:
    """Return name -> getter for methods ``zero_NAME`` that return the key ``NAME`` of section `zero_optimization`."""
    return {f"zero_{name}": attrgetter(f"zero_optimization.{name}") for name in names}


def _stage3_getters(*names: str) -> dict[str, Getter]:
    """Return name -> getter for methods ``zero_NAME`` that return the key ``stage3_NAME`` of section
    `zero_optimization`."""
    return {f"zero_{name}": attrgetter(f"zero_optimization.stage3_{name}") for name in names}


def _off_getters(*names: str) -> dict[str, Getter]:
    """Return name -> getter for methods that return False, about features that the configuration refuses."""
    return {name: lambda _: False for name in names}


def _autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the key `dtype` of section `torch_autocast`; None if it is not set, even if autocast is enabled."""
    name = config.torch_autocast.dtype
    return None if name is None else parse_dtype(name)


def _optimizer_device(config: Config) -> str:
    """Return the device of offloaded masters and optimizer states: "none", "cpu" or "nvme"."""
    return str(config.zero_optimization.offload_optimizer.device)


def _section_type(config: Config, section: str) -> str | None:
    """Return the key `type` of the section (`optimizer` or `scheduler`); None without the section."""
    chosen = getattr(config, section)
    return None if chosen is None else str(chosen.type)


def _given_params(config: Config, section: str) -> Any:
    """Return the key `params` of the section as the user wrote it; None if they did not."""
    return (config.raw.get(section) or {}).get("params")


GETTERS: Mapping[str, Getter] = MappingProxyType(
    {
        **_zero_getters("reduce_scatter", "overlap_comm", "offload_optimizer", "offload_param", "sub_group_size"),
        **_zero_getters("reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "compute_grad_norm"),
        **_zero_getters("contiguous_gradients", "load_from_fp32_weights", "elastic_checkpoint", "legacy_stage1"),
        **_zero_getters("ignore_unused_parameters", "round_robin_gradients", "parameter_alignment"),
        **_zero_getters("log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory"),
        **_stage3_getters("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "allgather_sequential"),
        **_stage3_getters("gather_16bit_weights_on_model_save"),
        **_stage3_getters("module_granularity_threshold", "param_persistence_threshold", "model_persistence_threshold"),
        **{
            name: attrgetter(f"zero_optimization.{name}")
            for name in (
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
            )
        },
        **{
            name: attrgetter(name)
            for name in (
                "zero_allow_untested_optimizer",
                "zero_force_ds_cpu_optimizer",
                "managed_gradient_accumulation",
                "gradient_predivide_factor",
                "dataloader_drop_last",
                "log_level",
                "steps_per_print",
                "wall_clock_breakdown",
                "memory_breakdown",
                "dump_state",
            )
        },
        **{
            f"flops_profiler_{name}": attrgetter(f"flops_profiler.{name}")
            for name in (
                "enabled",
                "recompute_fwd_factor",
                "profile_step",
                "module_depth",
                "top_modules",
                "detailed",
                "output_file",
            )
        },
        **_off_getters(
            "autotuning_enabled", "data_efficiency_enabled", "data_sampling_enabled", "curriculum_learning_enabled"
        ),
        **_off_getters("random_ltd_enabled", "compile_zero_optimization_stage", "compile_autosp", "compile_autotp"),
        **_off_getters("uses_parallelization_pass_only", "is_deepcompile_enabled", "is_deepcompile_active"),
        **_off_getters("super_offload", "optimizer_legacy_fusion"),
        "zero_multi_rank_bucket_allreduce": attrgetter("zero_optimization.use_multi_rank_bucket_allreduce"),
        "is_sanity_checks_enabled": attrgetter("zero_optimization.enable_sanity_checks"),
        "zenflow_config": attrgetter("zero_optimization.zenflow"),
        "is_first_weights_partition_group": lambda config: config.zero_optimization.stage == 3,
        "zero_use_cpu_optimizer": lambda config: _optimizer_device(config) in ("cpu", "nvme"),
        "zero_cpu_offload": lambda config: _optimizer_device(config) == "cpu",
        "zero_nvme_offload_optimizer": lambda config: _optimizer_device(config) == "nvme",
        "zero_partial_offload": attrgetter("zero_optimization.offload_optimizer.ratio"),
        "cpuadam_cores_perc": attrgetter("zero_optimization.offload_optimizer.cpuadam_cores_perc"),
        "fp16_auto_cast": attrgetter("fp16.auto_cast"),
        "fp16_master_weights_and_gradients": attrgetter("fp16.fp16_master_weights_and_grads"),
        "bf16_master_weights_and_gradients": attrgetter("bf16.bf16_master_weights_and_grads"),
        "bf16_optimizer_states": attrgetter("bf16.bf16_optimizer_states"),
        "initial_dynamic_scale": lambda config: 2**config.fp16.initial_scale_power,
        "torch_autocast_enabled": attrgetter("torch_autocast.enabled"),
        "torch_autocast_lower_precision_safe_modules": attrgetter("torch_autocast.lower_precision_safe_modules"),
        "postscale_gradients": lambda config: not config.prescale_gradients,
        "use_node_local_storage": attrgetter("checkpoint.use_node_local_storage"),
        "load_universal_checkpoint": attrgetter("checkpoint.load_universal"),
        "checkpoint_tag_validation_enabled": lambda config: config.checkpoint.tag_validation != "Ignore",
        "checkpoint_tag_validation_fail": lambda config: config.checkpoint.tag_validation == "Fail",
        "aio_config": attrgetter("aio"),
        "torch_autocast_dtype": _autocast_dtype,
        "autotp_size": attrgetter("tensor_parallel.autotp_size"),
        "tensor_parallel_config": attrgetter("tensor_parallel"),
        "optimizer_name": lambda config: _section_type(config, "optimizer"),
        "scheduler_name": lambda config: _section_type(config, "scheduler"),
        "gradient_clipping": attrgetter("gradient_clipping"),
        "zero_optimization": lambda config: config.zero_optimization.stage > 0,
        "zero_optimization_partition_gradients": lambda config: config.zero_optimization.stage >= 2,
        "zero_optimization_partition_weights": lambda config: config.zero_optimization.stage >= 3,
        "fp16_enabled": attrgetter("fp16.enabled"),
        "bfloat16_enabled": attrgetter("bf16.enabled"),
        "optimizer_params": lambda config: _given_params(config, "optimizer"),
        "scheduler_params": lambda config: _given_params(config, "scheduler"),
    }
)
"""Name of a method of DeepSpeed's engine -> function that returns its result for a configuration."""


REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("allreduce_gradients", "buffered_allreduce_fallback", "allreduce_bucket", "allreduce_and_copy"),
            "gradients are reduced inside backward; no_sync() or gradient_accumulation_steps puts that off",
        ),
        "allreduce_no_retain": "gradients are reduced inside backward",
        **dict.fromkeys(
            ("sparse_allreduce", "sparse_allreduce_bucket", "sparse_allreduce_no_retain", "sparse_all_gather"),
            "sparse gradients are made dense where they arise",
        ),
        "all_gather_scalar": "torch.distributed.all_gather_object does that",
        "clip_fp32_gradients": "set gradient_clipping, or call clip_grad_norm_(max_norm)",
        "module_state_dict": "inside deepspeed.zero.GatheredParameters(list(engine.parameters())), module.state_dict()",
        "print_forward_breakdown": "wall_clock_breakdown prints the times of every part",
        "load_module_state_dict": "engine.load_checkpoint(..., load_module_only=True), or module.load_state_dict "
        "before initialize",
        "load_moe_state_dict": "expert parallelism is not available",
        "get_wall_clock_timers": "with wall_clock_breakdown the times are printed; engine.instruments holds them",
        "get_optimizer_configuration": "engine.basic_optimizer is the optimizer that was made",
        **dict.fromkeys(
            (
                "data_efficiency_config",
                "data_sampling_config",
                "curriculum_learning_config",
                "random_ltd_config",
                "random_ltd_initialize",
                "set_data_post_process_func",
                "set_custom_curriculum_learning_schedule",
            ),
            "curriculum learning and data routing are not available",
        ),
        **dict.fromkeys(
            (
                "autotuning_start_profile_step",
                "autotuning_end_profile_step",
                "autotuning_metric",
                "autotuning_metric_path",
                "autotuning_model_info_path",
                "autotuning_profile_model_info",
            ),
            "autotuning is not available",
        ),
        **dict.fromkeys(
            ("checkpoint_serialization_enabled", "checkpoint_writer_enabled"),
            "checkpoints are written by zero-ckpt (docs: checkpoint format)",
        ),
        "collect_python_gc": "gc.collect() does that",
        "dynamic_loss_scale_args": "the fp16 section of engine.resolved_config holds them",
        "swap_tensor_config": "engine.aio_config() holds the settings of NVMe I/O",
        "get_compile_time": "torch._dynamo.utils.compile_times() tells",
        **dict.fromkeys(
            (
                "get_autosp_backend",
                "get_autotp_backend",
                "get_deepcompile_backend",
                "get_deepspeed_compile_backend",
                "register_compile_pass",
            ),
            "engine.compile() uses torch.compile's own backends",
        ),
    }
)
"""Name of a method of DeepSpeed's engine that is not available -> what to use instead."""


def refuse(name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for a method of `REFUSED`, whose call raises `UnsupportedError`."""

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError`, which names what to use instead of the method."""
        raise UnsupportedError(f"DeepSpeedEngine.{name} is not available in zero-deepspeed: {REFUSED[name]}")

    return refused
