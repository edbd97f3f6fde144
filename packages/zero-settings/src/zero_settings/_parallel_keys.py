"""Keys of determinism, other kinds of parallelism, compilation, data efficiency and tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from zero_settings._base import ALL_KEYS, Flag, Float, FreeForm, NaturalInt, PositiveInt, Section, Text, no_keys


class Deterministic(Section):
    """Bitwise equal training at every number of ranks that divides the number of virtual ranks."""

    across_world_sizes: PositiveInt = Field(
        description="Virtual ranks, a power of two: micro-batches of a step at any number of ranks that divides it."
    )
    seed: NaturalInt | None = Field(
        default=None, description="Seed of the virtual ranks' random numbers; by default rank 0's torch.initial_seed()."
    )


class Compile(Section):
    """Keys of DeepCompile, which is not available: refused where they switch it on, else without effect."""

    auto_keys = ALL_KEYS

    deepcompile: Flag = False
    autoep_non_moe: Flag = False
    free_activation: Flag = False
    free_activation_threshold: NaturalInt = Field(default=10 * 1024 * 1024, description="Bytes.")
    offload_activation: Flag = False
    offload_activation_pin_memory: Flag = True
    offload_opt_states: Flag = False
    double_buffer: Flag = True
    symmetric_memory: Flag = False
    debug_log: Flag = False
    offload_parameters: Flag = False
    sync_before_reduce: Flag = False
    sync_after_reduce: Flag = False
    sync_before_allgather: Flag = False
    sync_after_allgather: Flag = False
    keep_int_input_tensors: Flag = True
    keep_all_input_tensors: Flag = False
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = None


class Pipeline(Section):
    """Keys of pipeline parallelism, which is not available: refused for more than one stage, else without effect."""

    stages: Literal["auto"] | PositiveInt = "auto"
    partition: Text = "best"
    seed_layers: Flag = False
    activation_checkpoint_interval: NaturalInt = 0
    pipe_partitioned: Flag = True
    grad_partitioned: Flag = True


class HybridEngine(Section):
    """Keys of DeepSpeed's hybrid engine, which is not available: refused if enabled, else without effect."""

    auto_keys = ALL_KEYS

    enabled: Flag = False
    max_out_tokens: PositiveInt = 512
    inference_tp_size: PositiveInt = 1
    release_inference_cache: Flag = False
    pin_parameters: Flag = True
    tp_gather_partition_size: PositiveInt = 8
    enable_cuda_graph: Flag = False


class TensorParallelSize(Section):
    """Sizes of tensor parallelism, which is not available: refused if `tp_size` is above 1, else without effect."""

    auto_keys = ALL_KEYS

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = 1


class TensorParallel(Section):
    """Keys of tensor parallelism, which is not available: refused for sizes above 1, else without effect."""

    auto_keys = ALL_KEYS
    aliases: ClassVar[dict[str, str]] = {
        "tensor_parallel": "tp",
        "kernel_inject": "replace_with_kernel_inject",
    }

    autotp_size: NaturalInt = 0
    dtype: Text = "fp16"
    tp_overlap_comm: Flag = False
    tp: TensorParallelSize = TensorParallelSize()
    partition_config: FreeForm | None = None
    preset_model: Text | None = None
    vocab_parallel_lm_head: Flag | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    injection_policy_tuple: tuple[Text, ...] | None = None
    keep_module_on_host: Flag = False
    replace_with_kernel_inject: Flag = False


class ExpertParallel(Section):
    """Keys of expert parallelism, which is not available: refused if enabled, else without effect."""

    enabled: Flag = False
    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    validate_folding_routing: Flag = False
    async_split_plan: Flag = False
    preset_model: Text | None = None
    moe_layer_pattern: Text | None = None
    expert_pattern: Text | None = None
    router_pattern: Text | None = None
    use_grouped_mm: Flag = True
    disable_triton_grouped_mm: Flag = False
    route_norm: Flag | None = None
    route_scale: Float = 1.0
    score_apply: Text = "auto"
    combine_impl: Text = "auto"
    row_weighting_impl: Text = "auto"
    gate_up_impl: Text = "separate"
    comm_backend: Text = "comm"
    comm_num_sm: PositiveInt = 12
    comm_qp_margin: NaturalInt = 4
    comm_max_tokens_per_rank: NaturalInt = 0
    num_expert_groups: PositiveInt | None = None
    num_limited_groups: PositiveInt | None = None
    score_func: Text = "auto"
    top_k: Literal["auto"] | PositiveInt = "auto"
    load_balance_coeff: Float | None = None
    routed_scaling_factor: Literal["auto"] | Float = "auto"
    expert_w1: Text | None = None
    expert_w2: Text | None = None
    expert_w3: Text | None = None
    num_experts_attr: Text | None = None
    top_k_attr: Text | None = None
    has_shared_experts: Flag | None = None
    shared_experts_pattern: Text | None = None
    shared_experts_gate_pattern: Text | None = None
    expert_activation: Text | None = None


class DataSampling(Section):
    """Keys of curriculum learning and dynamic batches, a part of `data_efficiency`, which is not available."""

    enabled: Flag = False
    num_epochs: PositiveInt = 1000
    num_workers: NaturalInt = 0
    pin_memory: Flag = False
    curriculum_learning: FreeForm = Field(default_factory=no_keys)
    dynamic_batching: FreeForm = Field(default_factory=no_keys)


class DataRouting(Section):
    """Keys of random layer-token dropping, a part of `data_efficiency`, which is not available."""

    enabled: Flag = False
    random_ltd: FreeForm = Field(default_factory=no_keys)


class DataEfficiency(Section):
    """Keys of data efficiency, which is not available: refused if enabled, else without effect."""

    enabled: Flag = False
    seed: NaturalInt = 1234
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class Autotuning(Section):
    """Keys of DeepSpeed's autotuner, which is not available: refused if enabled, else without effect."""

    enabled: Flag = False
    fast: Flag = True
    results_dir: Text = "autotuning_results"
    exps_dir: Text = "autotuning_exps"
    overwrite: Flag = True
    start_profile_step: NaturalInt = 3
    end_profile_step: NaturalInt = 5
    metric_path: Text | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: PositiveInt = 5
    tuner_num_trials: PositiveInt = 50
    arg_mappings: FreeForm | None = None
    max_train_batch_size: PositiveInt | None = None
    min_train_batch_size: PositiveInt = 1
    max_train_micro_batch_size_per_gpu: PositiveInt = 1024
    min_train_micro_batch_size_per_gpu: PositiveInt = 1
    num_tuning_micro_batch_sizes: PositiveInt = 3
    mp_size: PositiveInt = 1
    metric: Literal["latency", "throughput", "flops", "forward", "step"] = "throughput"
    model_info: FreeForm | None = None
    model_info_path: Text | None = None


class WeightQuantization(Section):
    """Keys of quantized weights for inference, which are not available: refused wherever the section is written."""

    enabled: Flag = True
    num_bits: PositiveInt = 8
    q_type: Literal["asymmetric", "symmetric"] = "symmetric"
    q_groups: PositiveInt = 1
    quantized_initialization: FreeForm = Field(default_factory=no_keys)
    post_init_quant: FreeForm = Field(default_factory=no_keys)
