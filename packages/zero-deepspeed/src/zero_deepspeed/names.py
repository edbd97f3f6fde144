"""The table of DeepSpeed's names, by module: the object that answers each, or what to use instead.

An answer is "module:attribute"; "module:" for an attribute of the same name; "module" for a module. A name that is not
available is `Unavailable`. Submodules have rows of their own, and need no row in their parent. `answering.py` creates
the modules from this table, which alone defines the names that exist.
"""

from __future__ import annotations

from collections.abc import Mapping


class Unavailable(str):
    """The row of a name, or of a whole module, that is not available: the text says what to use instead. A class of its
    own tells it from an answer, a plain str.
    """

    __slots__ = ()


_ACCELERATOR = "set the variable DS_ACCELERATOR"
_ATTENTION = "use torch.nn.functional.scaled_dot_product_attention"
_EXPERTS = "train the experts as plain modules with ZeRO"
_LEAF = "ask z3_leaf_module of the module that owns the parameter"
_PIPELINE = "train the model with ZeRO stage 3, which needs no stages; its engine has train_batch too"
_SEQUENCE = "use deepspeed.runtime.sequence_parallel.ulysses_sp"
_SERVE = "call the model itself, or a serving engine on the exported weights"
_SHARD = "shard the parameters with ZeRO stage 3 instead"
_TILED = "use TiledLinear and add the bias"

_SEQUENCE_GROUPS: dict[str, str | Unavailable] = {
    "get_sequence_data_parallel_group": "zero_deepspeed.groups:",
    "get_sequence_data_parallel_rank": "zero_deepspeed.groups:",
    "get_sequence_data_parallel_world_size": "zero_deepspeed.groups:",
    "get_sequence_parallel_group": "zero_deepspeed.groups:",
    "get_sequence_parallel_rank": "zero_deepspeed.groups:",
    "get_sequence_parallel_world_size": "zero_deepspeed.groups:",
    "initialize_sequence_parallel": "zero_deepspeed.groups:",
}

_COMMUNICATION: dict[str, str | Unavailable] = {
    "all_gather": "torch.distributed:",
    "all_gather_coalesced": Unavailable("call all_gather_into_tensor"),
    "all_gather_into_tensor": "torch.distributed:",
    "all_gather_object": "torch.distributed:",
    "all_reduce": "torch.distributed:",
    "all_reduce_coalesced": Unavailable("call all_reduce"),
    "all_to_all": "torch.distributed:",
    "all_to_all_single": "torch.distributed:",
    "allgather_fn": "torch.distributed:all_gather_into_tensor",
    "barrier": "torch.distributed:",
    "batch_isend_irecv": "torch.distributed:",
    "broadcast": "torch.distributed:",
    "broadcast_object_list": "torch.distributed:",
    "configure": Unavailable("the section comms_logger of the configuration decides"),
    "destroy_process_group": "torch.distributed:",
    "gather": "torch.distributed:",
    "get_all_ranks_from_group": "zero_deepspeed.communication:",
    "get_global_rank": "zero_deepspeed.communication:",
    "get_local_rank": "zero_deepspeed.communication:",
    "get_rank": "torch.distributed:",
    "get_world_group": "zero_deepspeed.communication:",
    "get_world_size": "torch.distributed:",
    "has_all_gather_into_tensor": "zero_deepspeed.communication:",
    "has_reduce_scatter_tensor": "zero_deepspeed.communication:",
    "inference_all_reduce": "torch.distributed:all_reduce",
    "init_distributed": "zero_deepspeed.communication:",
    "initialize_mesh_device": Unavailable("use torch.distributed.device_mesh"),
    "irecv": "torch.distributed:",
    "is_available": "torch.distributed:",
    "is_initialized": "torch.distributed:",
    "isend": "torch.distributed:",
    "log_summary": Unavailable("use engine.communication_table()"),
    "monitored_barrier": "torch.distributed:",
    "mpi_discovery": Unavailable("export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
    "new_group": "torch.distributed:",
    "P2POp": "torch.distributed:",
    "recv": "torch.distributed:",
    "reduce": "torch.distributed:",
    "reduce_scatter": "torch.distributed:",
    "reduce_scatter_fn": "torch.distributed:reduce_scatter_tensor",
    "reduce_scatter_tensor": "torch.distributed:",
    "ReduceOp": "torch.distributed:",
    "scatter": "torch.distributed:",
    "send": "torch.distributed:",
}

_ON_DEVICE: dict[str, str | Unavailable] = {
    "OnDevice": "zero_deepspeed.helpers:",
}

_LOGGING: dict[str, str | Unavailable] = {
    "log_dist": "zero_deepspeed.logging_names:",
    "log_dist_once": "zero_deepspeed.logging_names:",
    "logger": "zero_deepspeed.logging_names:",
    "set_log_level_from_string": "zero_deepspeed.logging_names:",
    "warning_once": "zero_deepspeed.logging_names:",
}

_PIPELINES: dict[str, str | Unavailable] = {
    "LayerSpec": Unavailable(_PIPELINE),
    "PipelineModule": Unavailable(_PIPELINE),
    "TiedLayerSpec": Unavailable(_PIPELINE),
}

_FRAGMENTS: dict[str, str | Unavailable] = {
    "safe_get_full_fp32_param": "zero_deepspeed.fragments:",
    "safe_get_full_grad": "zero_deepspeed.fragments:",
    "safe_get_full_optimizer_state": "zero_deepspeed.fragments:",
    "safe_get_local_fp32_param": "zero_deepspeed.fragments:",
    "safe_get_local_grad": "zero_deepspeed.fragments:",
    "safe_get_local_optimizer_state": "zero_deepspeed.fragments:",
    "safe_set_full_fp32_param": "zero_deepspeed.fragments:",
    "safe_set_full_grad": "zero_deepspeed.fragments:",
    "safe_set_full_optimizer_state": "zero_deepspeed.fragments:",
    "safe_set_local_fp32_param": "zero_deepspeed.fragments:",
    "safe_set_local_grad": "zero_deepspeed.fragments:",
    "safe_set_local_optimizer_state": "zero_deepspeed.fragments:",
    "safe_update_full_grad_vectorized": "zero_deepspeed.fragments:",
}

_LEAVES: dict[str, str | Unavailable] = {
    "get_z3_leaf_modules": "zero_deepspeed.leaf_modules:",
    "set_z3_leaf_module": "zero_deepspeed.leaf_modules:",
    "set_z3_leaf_modules": "zero_deepspeed.leaf_modules:",
    "set_z3_leaf_modules_by_name": "zero_deepspeed.leaf_modules:",
    "set_z3_leaf_modules_by_suffix": "zero_deepspeed.leaf_modules:",
    "unset_z3_leaf_modules": "zero_deepspeed.leaf_modules:",
    "z3_leaf_module": "zero_deepspeed.leaf_modules:",
    "z3_leaf_parameter": Unavailable(_LEAF),
}

NAMES: Mapping[str, Unavailable | Mapping[str, str | Unavailable]] = {
    "deepspeed": {
        "add_config_arguments": "zero_deepspeed.initialization:",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "DeepSpeedConfig": "zero_deepspeed.configuration:",
        "DeepSpeedConfigError": "zero_settings:ConfigError",
        "DeepSpeedDataLoader": "zero_core.data_loader:RankLoader",
        "DeepSpeedEngine": "zero_deepspeed.engine:",
        "DeepSpeedHybridEngine": Unavailable("use the engine of initialize, unwrap_model_for_generation to generate"),
        "DeepSpeedInferenceConfig": Unavailable(_SERVE),
        "DeepSpeedOptimizer": "zero_deepspeed.optimizer:",
        "DeepSpeedTransformerConfig": Unavailable(_ATTENTION),
        "DeepSpeedTransformerLayer": Unavailable(_ATTENTION),
        "default_inference_config": Unavailable(_SERVE),
        "dist": "deepspeed.comm",
        "get_accelerator": "zero_deepspeed.accelerator:",
        "InferenceEngine": Unavailable(_SERVE),
        "init_distributed": "zero_deepspeed.communication:",
        "init_inference": Unavailable(_SERVE),
        "initialize": "zero_deepspeed.initialization:",
        "log_dist": "zero_deepspeed.logging_names:",
        "logger": "zero_deepspeed.logging_names:",
        "OnDevice": "zero_deepspeed.helpers:",
        "PipelineEngine": Unavailable(_PIPELINE),
        "PipelineModule": Unavailable(_PIPELINE),
        "replace_transformer_layer": Unavailable(_SERVE),
        "set_autotp_mode": Unavailable(_SHARD),
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "zero_deepspeed.communication:DEFAULT_PORT",
        "tp_model_init": Unavailable(_SHARD),
        "zero": "deepspeed.runtime.zero",
    },
    "deepspeed.accelerator": {
        "DeepSpeedAccelerator": "zero_deepspeed.accelerator:Accelerator",
        "get_accelerator": "zero_deepspeed.accelerator:",
        "is_current_accelerator_supported": "zero_deepspeed.accelerator:",
        "set_accelerator": Unavailable(_ACCELERATOR),
    },
    "deepspeed.accelerator.real_accelerator": {
        "get_accelerator": "zero_deepspeed.accelerator:",
        "is_current_accelerator_supported": "zero_deepspeed.accelerator:",
        "set_accelerator": Unavailable(_ACCELERATOR),
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint": Unavailable("use zero_ckpt.open_checkpoint, or zero-ckpt inspect"),
    },
    "deepspeed.checkpoint.ds_to_universal": {
        "main": "zero_deepspeed.universal:",
        "parse_arguments": "zero_deepspeed.universal:",
    },
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "zero_deepspeed.helpers:",
    },
    "deepspeed.comm": _COMMUNICATION,
    "deepspeed.comm.comm": _COMMUNICATION,
    "deepspeed.compression": Unavailable("compress the exported weights with torchao"),
    "deepspeed.constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "zero_deepspeed.communication:DEFAULT_PORT",
    },
    "deepspeed.env_report": {
        "main": "zero_deepspeed.report:",
    },
    "deepspeed.git_version_info": {
        "accelerator_name": "zero_deepspeed.report:ACCELERATOR_NAME",
        "git_branch": "zero_deepspeed.report:GIT_BRANCH",
        "git_hash": "zero_deepspeed.report:GIT_HASH",
        "installed_ops": "zero_deepspeed.report:INSTALLED",
        "torch_info": "zero_deepspeed.report:TORCH_INFO",
        "version": "zero_deepspeed:VERSION",
    },
    "deepspeed.inference": Unavailable(_SERVE),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        "_parse_hostfile": "zero_deepspeed.hostfiles:parse_hostfile",
        "DEEPSPEED_ENVIRONMENT_NAME": "zero_deepspeed.command:",
        "fetch_hostfile": "zero_deepspeed.hostfiles:",
        "main": "zero_deepspeed.command:",
        "parse_inclusion_exclusion": "zero_deepspeed.hostfiles:",
        "parse_resource_filter": "zero_deepspeed.hostfiles:",
    },
    "deepspeed.module_inject": Unavailable(_SHARD),
    "deepspeed.moe": {},
    "deepspeed.moe.experts": Unavailable(_EXPERTS),
    "deepspeed.moe.layer": Unavailable(_EXPERTS),
    "deepspeed.moe.sharded_moe": Unavailable(_EXPERTS),
    "deepspeed.moe.utils": {
        "has_moe_layers": "zero_deepspeed.expert_words:",
        "is_moe_param": "zero_deepspeed.expert_words:",
        "split_params_into_different_moe_groups_for_optimizer": "zero_deepspeed.expert_words:",
    },
    "deepspeed.monitor": {},
    "deepspeed.monitor.comet": {
        "CometMonitor": "zero_deepspeed.monitor:",
    },
    "deepspeed.monitor.config": {
        "DeepSpeedMonitorConfig": "zero_deepspeed.monitor:MonitorConfig",
        "get_monitor_config": "zero_deepspeed.monitor:",
    },
    "deepspeed.monitor.csv_monitor": {
        "csvMonitor": "zero_deepspeed.monitor:",
    },
    "deepspeed.monitor.monitor": {
        "CometMonitor": "zero_deepspeed.monitor:",
        "csvMonitor": "zero_deepspeed.monitor:",
        "MonitorMaster": "zero_deepspeed.monitor:",
        "TensorBoardMonitor": "zero_deepspeed.monitor:",
        "WandbMonitor": "zero_deepspeed.monitor:",
    },
    "deepspeed.monitor.tensorboard": {
        "TensorBoardMonitor": "zero_deepspeed.monitor:",
    },
    "deepspeed.monitor.wandb": {
        "WandbMonitor": "zero_deepspeed.monitor:",
    },
    "deepspeed.ops": {
        "__compatible_ops__": "zero_deepspeed.report:COMPATIBLE",
        "DeepSpeedTransformerConfig": Unavailable(_ATTENTION),
        "DeepSpeedTransformerLayer": Unavailable(_ATTENTION),
    },
    "deepspeed.ops.adagrad": {
        "DeepSpeedCPUAdagrad": "zero_deepspeed.cpu_optimizers:",
    },
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam": "zero_deepspeed.cpu_optimizers:",
        "FusedAdam": "zero_deepspeed.cpu_optimizers:",
    },
    "deepspeed.ops.adam.cpu_adam": {
        "DeepSpeedCPUAdam": "zero_deepspeed.cpu_optimizers:",
    },
    "deepspeed.ops.adam.fused_adam": {
        "FusedAdam": "zero_deepspeed.cpu_optimizers:",
    },
    "deepspeed.ops.aio": {
        "aio_handle": "zero_deepspeed.aio:",
        "AsyncIOBuilder": "zero_deepspeed.aio:",
    },
    "deepspeed.ops.lamb": {
        "FusedLamb": "zero_optim:Lamb",
    },
    "deepspeed.ops.lion": {
        "DeepSpeedCPULion": "zero_deepspeed.cpu_optimizers:",
        "FusedLion": "zero_deepspeed.cpu_optimizers:",
    },
    "deepspeed.ops.op_builder": {
        "AsyncIOBuilder": "zero_deepspeed.aio:",
        "CPUAdagradBuilder": "zero_deepspeed.op_builders:",
        "CPUAdamBuilder": "zero_deepspeed.op_builders:",
        "CPULionBuilder": "zero_deepspeed.op_builders:",
        "FusedAdamBuilder": "zero_deepspeed.op_builders:",
        "FusedLambBuilder": "zero_deepspeed.op_builders:",
        "FusedLionBuilder": "zero_deepspeed.op_builders:",
        "InferenceBuilder": "zero_deepspeed.op_builders:",
        "NotImplementedBuilder": "zero_deepspeed.op_builders:",
        "OpBuilder": "zero_deepspeed.op_builders:",
        "QuantizerBuilder": "zero_deepspeed.op_builders:",
        "TransformerBuilder": "zero_deepspeed.op_builders:",
        "UtilsBuilder": "zero_deepspeed.op_builders:",
    },
    "deepspeed.pipe": _PIPELINES,
    "deepspeed.profiling": Unavailable("use the configuration's section flops_profiler, or torch.utils.flop_counter"),
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "checkpoint": "zero_core.checkpointing:",
        "configure": "zero_deepspeed.helpers:",
        "is_configured": "zero_core.checkpointing:",
        "non_reentrant_checkpoint": "zero_core.checkpointing:",
        "reset": "zero_core.checkpointing:",
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "zero_deepspeed.optimizer:",
        "ZeROOptimizer": "zero_deepspeed.optimizer:",
    },
    "deepspeed.runtime.config": {
        "ADAGRAD_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "ADAM_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "ADAMW_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "LAMB_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "LION_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "MUON_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "ONEBIT_ADAM_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "ONEBIT_LAMB_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "ZERO_ONE_ADAM_OPTIMIZER": "zero_deepspeed.optimizer_words:",
        "DeepSpeedConfig": "zero_deepspeed.configuration:",
        "DeepSpeedConfigError": "zero_settings:ConfigError",
    },
    "deepspeed.runtime.config_utils": {
        "DeepSpeedConfigModel": Unavailable("use zero_core.Config"),
    },
    "deepspeed.runtime.dataloader": {
        "DeepSpeedDataLoader": "zero_core.data_loader:RankLoader",
        "RepeatingLoader": "zero_core.data_loader:",
    },
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine": "zero_deepspeed.engine:",
    },
    "deepspeed.runtime.lr_schedules": {
        "COS_MIN_RATIO": "zero_deepspeed.schedule_words:",
        "CYCLE_FIRST_STAIR_COUNT": "zero_deepspeed.schedule_words:",
        "CYCLE_FIRST_STEP_SIZE": "zero_deepspeed.schedule_words:",
        "CYCLE_MAX_LR": "zero_deepspeed.schedule_words:",
        "CYCLE_MAX_MOM": "zero_deepspeed.schedule_words:",
        "CYCLE_MIN_LR": "zero_deepspeed.schedule_words:",
        "CYCLE_MIN_MOM": "zero_deepspeed.schedule_words:",
        "CYCLE_SECOND_STAIR_COUNT": "zero_deepspeed.schedule_words:",
        "CYCLE_SECOND_STEP_SIZE": "zero_deepspeed.schedule_words:",
        "DECAY_LR_RATE": "zero_deepspeed.schedule_words:",
        "DECAY_MOM_RATE": "zero_deepspeed.schedule_words:",
        "DECAY_STEP_SIZE": "zero_deepspeed.schedule_words:",
        "LR_RANGE_TEST": "zero_deepspeed.schedule_words:",
        "LR_RANGE_TEST_MIN_LR": "zero_deepspeed.schedule_words:",
        "LR_RANGE_TEST_STAIRCASE": "zero_deepspeed.schedule_words:",
        "LR_RANGE_TEST_STEP_RATE": "zero_deepspeed.schedule_words:",
        "LR_RANGE_TEST_STEP_SIZE": "zero_deepspeed.schedule_words:",
        "LR_SCHEDULE": "zero_deepspeed.schedule_words:",
        "LRRangeTest": "zero_optim:",
        "ONE_CYCLE": "zero_deepspeed.schedule_words:",
        "OneCycle": "zero_optim:",
        "TOTAL_NUM_STEPS": "zero_deepspeed.schedule_words:",
        "VALID_LR_SCHEDULES": "zero_optim.schedules:",
        "WARMUP_COSINE_LR": "zero_deepspeed.schedule_words:",
        "WARMUP_DECAY_LR": "zero_deepspeed.schedule_words:",
        "WARMUP_LINEAR_RATE": "zero_deepspeed.schedule_words:",
        "WARMUP_LOG_RATE": "zero_deepspeed.schedule_words:",
        "WARMUP_LR": "zero_deepspeed.schedule_words:",
        "WARMUP_MAX_LR": "zero_deepspeed.schedule_words:",
        "WARMUP_MIN_LR": "zero_deepspeed.schedule_words:",
        "WARMUP_MIN_RATIO": "zero_deepspeed.schedule_words:",
        "WARMUP_NUM_STEPS": "zero_deepspeed.schedule_words:",
        "WARMUP_TYPE": "zero_deepspeed.schedule_words:",
        "WarmupCosineLR": "zero_optim:",
        "WarmupDecayLR": "zero_optim:",
        "WarmupLR": "zero_optim:",
    },
    "deepspeed.runtime.pipe": {**_PIPELINES, "ProcessTopology": Unavailable(_PIPELINE)},
    "deepspeed.runtime.pipe.engine": {
        "PipelineEngine": Unavailable(_PIPELINE),
    },
    "deepspeed.runtime.pipe.module": _PIPELINES,
    "deepspeed.runtime.pipe.topology": {
        "PipeDataParallelTopology": Unavailable(_PIPELINE),
        "PipelineParallelGrid": Unavailable(_PIPELINE),
        "PipeModelDataParallelTopology": Unavailable(_PIPELINE),
        "ProcessTopology": Unavailable(_PIPELINE),
    },
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": _SEQUENCE_GROUPS,
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "sequence_tiled_compute": "zero_deepspeed.sequence_tiles:",
        "SequenceTiledCompute": "zero_deepspeed.sequence_tiles:",
        "TiledFusedLogitsLoss": "zero_deepspeed.sequence_tiles:",
        "TiledMLP": "zero_deepspeed.sequence_tiles:",
        "UlyssesSPAttentionHF": "zero_deepspeed.sequence:",
        "UlyssesSPDataLoaderAdapter": "zero_deepspeed.sequence:",
    },
    "deepspeed.runtime.utils": {
        "clip_grad_norm_": Unavailable("use engine.clip_grad_norm_"),
        "DummyOptim": "zero_deepspeed.helpers:",
        "get_global_norm": Unavailable("use engine.get_global_grad_norm()"),
        "move_to_device": "zero_deepspeed.helpers:",
        "see_memory_usage": "zero_deepspeed.helpers:",
        "set_random_seed": "zero_deepspeed.helpers:",
    },
    "deepspeed.runtime.zero": {
        "DeepSpeedTensorOverride": Unavailable("nothing in torch is replaced, so there is nothing to choose"),
        "DeepSpeedZeRoOffload": "zero_deepspeed.offload:ParameterOffload",
        "GatheredParameters": "zero_deepspeed.construction:",
        "Init": "zero_deepspeed.construction:",
        "MiCS_Init": "zero_deepspeed.construction:Init",
        "register_external_parameter": "zero_deepspeed.construction:",
        "TiledLinear": "zero_deepspeed.tiling:",
        "TiledLinearReturnBias": Unavailable(_TILED),
        "unregister_external_parameter": "zero_partition:",
        "unwrap_model_for_generation": "zero_deepspeed.construction:",
        "ZeroParamStatus": "zero_deepspeed.parameters:",
        "ZeroParamType": "zero_deepspeed.parameters:",
    },
    "deepspeed.runtime.zero.config": {
        "DeepSpeedZeroConfig": "zero_deepspeed.configuration:",
        "DeepSpeedZeroOffloadOptimizerConfig": "zero_settings:OffloadOptimizer",
        "DeepSpeedZeroOffloadParamConfig": "zero_settings:OffloadParam",
        "OffloadDeviceEnum": "zero_deepspeed.words:",
        "ZeroStageEnum": "zero_deepspeed.words:",
    },
    "deepspeed.runtime.zero.mics": {
        "MiCS_Init": "zero_deepspeed.construction:Init",
    },
    "deepspeed.runtime.zero.offload_config": {
        "DeepSpeedZeroOffloadOptimizerConfig": "zero_settings:OffloadOptimizer",
        "DeepSpeedZeroOffloadParamConfig": "zero_settings:OffloadParam",
        "OffloadDeviceEnum": "zero_deepspeed.words:",
        "OffloadStateTypeEnum": "zero_deepspeed.words:",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "DeepSpeedZeRoOffload": "zero_deepspeed.offload:ParameterOffload",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "_orig_torch_arange": "torch:arange",
        "GatheredParameters": "zero_deepspeed.construction:",
        "get_accelerator": "zero_deepspeed.accelerator:",
        "Init": "zero_deepspeed.construction:",
        "is_zero_param": "zero_deepspeed.helpers:",
        "register_external_parameter": "zero_deepspeed.construction:",
        "unregister_external_parameter": "zero_partition:",
        "zero_wrapper_for_fp_tensor_constructor": "zero_deepspeed.helpers:unchanged",
        "ZeroParamStatus": "zero_deepspeed.parameters:",
        "ZeroParamType": "zero_deepspeed.parameters:",
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "zero_deepspeed.optimizer:ZeROOptimizer",
        "estimate_zero3_model_states_mem_needs_all_cold": "zero_deepspeed.estimators:zero3_cold",
        "estimate_zero3_model_states_mem_needs_all_live": "zero_deepspeed.estimators:zero3_live",
        "unwrap_model_for_generation": "zero_deepspeed.construction:",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "zero_deepspeed.optimizer:ZeROOptimizer",
        "estimate_zero2_model_states_mem_needs_all_cold": "zero_deepspeed.estimators:zero2_cold",
        "estimate_zero2_model_states_mem_needs_all_live": "zero_deepspeed.estimators:zero2_live",
    },
    "deepspeed.runtime.zero.tiling": {
        "TiledLinear": "zero_deepspeed.tiling:",
        "TiledLinearReturnBias": Unavailable(_TILED),
    },
    "deepspeed.runtime.zero.utils": {
        "is_zero_param": "zero_deepspeed.helpers:",
        "is_zero_supported_optimizer": "zero_deepspeed.helpers:",
        "ZeRORuntimeException": "zero_partition:PartitionError",
    },
    "deepspeed.sequence": Unavailable(_SEQUENCE),
    "deepspeed.utils": {
        **_ON_DEVICE,
        **_LOGGING,
        **_FRAGMENTS,
        **_LEAVES,
        "instrument_w_nvtx": "zero_deepspeed.helpers:unchanged",
        "is_initialized": "torch.distributed:",
        "RepeatingLoader": "zero_core.data_loader:",
    },
    "deepspeed.utils.groups": {
        "_get_data_parallel_group": "zero_deepspeed.groups:get_data_parallel_group",
        "_get_data_parallel_rank": "zero_deepspeed.groups:get_data_parallel_rank",
        "_get_data_parallel_world_size": "zero_deepspeed.groups:get_data_parallel_world_size",
        "_get_expert_data_parallel_group": "zero_deepspeed.groups:no_group",
        "_get_expert_parallel_group": "zero_deepspeed.groups:no_group",
        "_get_model_parallel_world_size": "zero_deepspeed.groups:model_parallel_world_size",
        "_get_sequence_data_parallel_group": "zero_deepspeed.groups:get_sequence_data_parallel_group",
        "_get_sequence_data_parallel_rank": "zero_deepspeed.groups:get_sequence_data_parallel_rank",
        "_get_sequence_data_parallel_world_size": "zero_deepspeed.groups:get_sequence_data_parallel_world_size",
        "_get_sequence_parallel_group": "zero_deepspeed.groups:get_sequence_parallel_group",
        "_get_sequence_parallel_rank": "zero_deepspeed.groups:get_sequence_parallel_rank",
        "_get_sequence_parallel_world_size": "zero_deepspeed.groups:get_sequence_parallel_world_size",
        "get_data_parallel_group": "zero_deepspeed.groups:",
        "get_data_parallel_rank": "zero_deepspeed.groups:",
        "get_data_parallel_world_size": "zero_deepspeed.groups:",
        "get_model_parallel_group": "zero_deepspeed.groups:model_parallel_group",
        "get_model_parallel_rank": "zero_deepspeed.groups:model_parallel_rank",
        "get_model_parallel_world_size": "zero_deepspeed.groups:model_parallel_world_size",
        "get_tensor_model_parallel_group": "zero_deepspeed.groups:model_parallel_group",
        "get_tensor_model_parallel_rank": "zero_deepspeed.groups:model_parallel_rank",
        "get_tensor_model_parallel_world_size": "zero_deepspeed.groups:model_parallel_world_size",
        "initialize": Unavailable("there are no expert groups to set up"),
    },
    "deepspeed.utils.init_on_device": _ON_DEVICE,
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.numa": {
        "parse_range_list": "zero_deepspeed.hostfiles:",
    },
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.torch": {
        "register_grad_hook": "zero_deepspeed.helpers:",
        "required_torch_version": "zero_deepspeed.compat:",
    },
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": {
        "convert_zero_checkpoint_to_fp32_state_dict": "zero_ckpt.zero_to_fp32:",
        "convert_zero_checkpoint_to_state_dict": "zero_ckpt.zero_to_fp32:",
        "get_fp32_state_dict_from_zero_checkpoint": "zero_ckpt.zero_to_fp32:",
        "get_model_state_file": "zero_deepspeed.state_files:",
        "get_model_state_files": "zero_deepspeed.state_files:",
        "get_optim_files": "zero_deepspeed.state_files:",
        "load_state_dict_from_zero_checkpoint": "zero_ckpt.zero_to_fp32:",
        "main": "zero_ckpt.zero_to_fp32:",
    },
}
"""Module of DeepSpeed -> its names, each with its answer; `Unavailable` for a module that is not available."""
