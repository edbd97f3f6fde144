"""Configurations as users and frameworks write them; every one of them loads."""

from __future__ import annotations

from typing import Any

INF = float("inf")

HF_SCHEDULED: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

HF_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}

TRANSFORMERS_STAGE_2 = {
    **HF_SCHEDULED,
    "fp16": HF_FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}

TRANSFORMERS_STAGE_3 = {
    **HF_SCHEDULED,
    "fp16": HF_FP16,
    "bf16": {"enabled": "auto"},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "last_batch_iteration": -1,
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

ACCELERATE_PLUGIN = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "cpu", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": INF,
    "fp16": {"enabled": True, "auto_cast": True},
    "bf16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}

ACCELERATE_ROCM = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "communication_data_type": "fp32",
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": INF,
}

LIGHTNING = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
        "ignore_unused_parameters": True,
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
}

TUTORIAL_CIFAR = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}

TUTORIAL_GPT = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 5e8,
    },
    "optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "max_coeff": 0.3, "min_coeff": 0.01}},
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_first_step_size": 1000, "decay_step_size": 10},
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 24},
    "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "train"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3, "output_file": None},
    "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
    "checkpoint": {"tag_validation": "FAIL", "parallel_write": {"pipeline_stage": True}},
    "data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": False, "any": [1, {}]}}},
    "autotuning": {"enabled": False, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}},
    "torch_autocast": {"enabled": False},
    "pipeline": {"stages": "auto"},
}

TORCH_NAMES = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "scheduler": {"type": "MultiStepLR", "params": {"milestones": [10, 20], "gamma": 0.5}},
    "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
}

ORACLE = {
    "train_micro_batch_size_per_gpu": 2,
    "data_types": {"param_dtype": "fp64"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "deterministic": True,
    "reduce_each_micro_batch": True,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}

LEGACY = {"train_batch_size": 4, "zero_optimization": True, "bfloat16": {"enabled": True}}

SAMPLES: dict[str, dict[str, Any]] = {
    "transformers_stage_2": TRANSFORMERS_STAGE_2,
    "transformers_stage_3": TRANSFORMERS_STAGE_3,
    "accelerate_plugin": ACCELERATE_PLUGIN,
    "accelerate_rocm": ACCELERATE_ROCM,
    "lightning": LIGHTNING,
    "tutorial_cifar": TUTORIAL_CIFAR,
    "tutorial_gpt": TUTORIAL_GPT,
    "torch_names": TORCH_NAMES,
    "oracle": ORACLE,
    "legacy": LEGACY,
}
